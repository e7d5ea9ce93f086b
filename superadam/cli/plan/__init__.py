"""`superadam plan`."""
