"""State of parameters: fp32 masters and moments, where they live, and the gradients that are pending on them."""
