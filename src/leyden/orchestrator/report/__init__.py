"""Reports of a run: console, files and trackers."""
