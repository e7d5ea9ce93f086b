"""`superadam bench`: speed of the passes against this machine's memory, and of steps against torch, in one run.

One module for each noun: `pairs` (paired timing), `arrays` (memory of a pass), `floor` (the same traffic without
arithmetic), `passes`, `contests` (ours against torch), `overlap`, `report` and `command`. The microbenchmarks in
`bench/` use the same code.
"""
