"""From episodes to micro-batches: samples, their advantages, and how they share tokens."""
