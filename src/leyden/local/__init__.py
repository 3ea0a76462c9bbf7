"""Runs everything on one machine: `leyden train`, `eval`, `dev` and `export`, from a configuration to a report."""
