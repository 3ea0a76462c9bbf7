"""The Lightning Server: it owns the record and the model behind an API, and knows nothing of the agent or of torch."""
