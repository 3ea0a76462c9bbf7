"""Child processes: their environment, how they are found, and how none outlives its worker."""
