"""Child processes: their environment, how descendants are found, and how none outlives its worker."""
