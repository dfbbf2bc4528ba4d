"""Block speculative decoding with a Domino drafter, on top of domino_kernels."""
