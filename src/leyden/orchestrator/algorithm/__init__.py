"""The algorithm that a configuration names."""
