"""Tensors that are distributed over ranks, and what ranks tell each other about a step."""
