"""Gradients that were taken, and what stands for them in `.grad`."""
