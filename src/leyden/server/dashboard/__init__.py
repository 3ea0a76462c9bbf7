"""The dashboard: pages that show runs, rollouts and workers in a browser. It only reads."""
