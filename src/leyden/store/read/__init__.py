"""What reads the record: queries, search, totals, views."""
