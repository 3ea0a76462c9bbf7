"""Models that are served elsewhere: calls are relayed and recorded without tokens."""
