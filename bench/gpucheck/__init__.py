"""What `make gpu-check` does on a machine with a GPU, stage by stage.

One module for each noun: `findings` (what a stage says), `programs` (other processes, within a time limit), `checks`
(what must be right), `rates` (how fast data moves), `throughput` (how fast models train), `sides` (with which
optimizer), `report` and `picture`. `bench/gpu_check.py` puts the stages in order.
"""
