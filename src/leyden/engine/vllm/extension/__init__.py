"""What runs inside vLLM's processes: its folder is on their PYTHONPATH, and names a plugin of vLLM."""
