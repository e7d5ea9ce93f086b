"""Gradients that the optimizer has taken from `.grad`, and the tensors that replace them there."""
