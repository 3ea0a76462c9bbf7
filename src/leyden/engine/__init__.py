"""Tokens in, tokens out. An engine knows nothing of messages, agents or training."""
