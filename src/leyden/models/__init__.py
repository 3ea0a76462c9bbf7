"""Models: the bundled one, and where the files of any other are."""
