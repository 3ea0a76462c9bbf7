"""A model call: admission, scheduling, recording."""
