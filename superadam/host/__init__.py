"""The host machine: its CPUs, memory and control groups, and the signals of the process."""
