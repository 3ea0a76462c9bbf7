"""Credit: samples of calls and their advantages."""
