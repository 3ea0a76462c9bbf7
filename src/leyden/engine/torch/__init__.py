"""The embedded engine: continuous batching over a KV cache, on the parameters that the trainer updates."""
