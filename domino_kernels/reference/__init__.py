"""Slow, readable references in NumPy float64. They decide what is right; kernels follow."""
