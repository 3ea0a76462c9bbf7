"""Everything on one machine: what `leyden train`, `eval` and `dev` do, from a configuration to a report."""
