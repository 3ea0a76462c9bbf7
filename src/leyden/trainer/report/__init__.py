"""What a run tells its user: console, metrics, plots, external loggers."""
