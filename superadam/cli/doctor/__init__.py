"""`superadam doctor`: what this machine offers to superadam, and the one command that fixes what is missing."""
