"""Renders messages to token ids and parses completions: tokenizers, chat templates, renderers. No torch."""
