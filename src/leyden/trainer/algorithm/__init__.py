"""Resolves the algorithm that a configuration names into functions, built-in ones or the user's."""
