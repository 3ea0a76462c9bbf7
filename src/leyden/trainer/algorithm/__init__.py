"""From the configuration to the functions of an algorithm, the user's own among them."""
