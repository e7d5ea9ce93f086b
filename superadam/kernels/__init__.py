"""Compiled CPU kernels, the Adam formula that they implement, and the scalars that they take."""
