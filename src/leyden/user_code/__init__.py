"""The user's own code: how a run finds, loads, ships, calls and recognises it."""
