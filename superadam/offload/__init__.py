"""The scheduler that runs the optimizer during backward."""
