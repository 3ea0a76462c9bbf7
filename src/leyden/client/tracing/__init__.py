"""Which attempt a piece of code runs for: trace context, its propagation, and the spans that are exported."""
