"""`superadam bench`: how near the passes of this machine come to the rate at which its memory moves the same bytes.

One module for each noun: `pairs` (paired timing), `arrays` (memory of a pass), `floor` (the same traffic without
arithmetic), `passes`, `report` and `command`. The benchmarks in the repository's `bench/` use the same code.
"""
