"""Pools of costly things that agents borrow: databases, browsers, emulators, graders."""
