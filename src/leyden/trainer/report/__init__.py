"""Reports of a run: console, metrics, plots, external trackers."""
