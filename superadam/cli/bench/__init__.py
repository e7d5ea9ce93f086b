"""`superadam bench`: how fast the passes are, against the memory of this machine and against torch, in one run.

One module for each noun: `pairs` (how two things are timed against one another), `arrays` (what a pass runs over),
`floor` (the same traffic without arithmetic), `passes`, `contests` (ours against torch), `report` and `command`. The
microbenchmarks in `bench/` use the same code.
"""
