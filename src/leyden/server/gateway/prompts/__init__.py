"""Prompts: their tokens, and the earlier answers in them."""
