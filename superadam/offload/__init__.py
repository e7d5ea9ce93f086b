"""The optimizer's work during backward: buckets, transfers, placement."""
