"""Relays calls to models of another service and records them without tokens."""
