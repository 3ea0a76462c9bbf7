"""The gateway through which agents call models.

Dialects translate APIs to one internal request. Every call is in the record, with its exact tokens, before its answer
ends.
"""
