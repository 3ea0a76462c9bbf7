"""Pools of costly resources that agents and reward functions borrow: databases, browsers, emulators, graders."""
