"""`superadam bench`: how near the passes of this machine come to the rate at which its memory moves the same bytes."""
