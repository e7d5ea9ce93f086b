"""The optimizer as a `torch.optim.Optimizer`."""
