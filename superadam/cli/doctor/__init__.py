"""`superadam doctor`: what this machine gives to superadam, and the one command that mends what is missing.

One module for each noun: `finding` (a line of the report), `host` (what is asked about), then the probes: `software`,
`processor`, `memory`, `accelerator`, `partition`; and `diagnosis` (all of them), `report` and `command`.
"""
