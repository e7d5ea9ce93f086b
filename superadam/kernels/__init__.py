"""The compiled kernels, the formula that they follow, and the scalars that they take."""
