"""`superadam doctor`: what this machine offers to superadam, and the one command that fixes what is missing.

One module for each noun: `finding` (a line of the report), the probes `software`, `processor`, `memory`, `accelerator`
and `partition`, `diagnosis` (all of them), `report` and `command`.
"""
