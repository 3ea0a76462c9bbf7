"""Messages to token ids and back: tokenizers, chat templates and the ChatML renderer. No torch."""
