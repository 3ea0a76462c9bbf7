"""Pools of costly resources that agents and reward functions acquire: databases, browsers, emulators, graders."""
