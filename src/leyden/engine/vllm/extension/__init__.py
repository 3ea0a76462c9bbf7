"""What runs inside vLLM's worker process: its folder is on the PYTHONPATH of vLLM."""
