"""What `bench/compare.py` and `bench/pace.py` measure, and how they show it."""
