"""Trace context of attempts: which attempt code runs for, how requests carry it, and the export of spans."""
