"""Kernels in Pallas for TPUs; each computes what plain code elsewhere does.

Kept are those that gain by the compiler's own simulation of their instructions. Attention to short
caches, single entries and residual masses did not: XLA's loops are as short.
"""
