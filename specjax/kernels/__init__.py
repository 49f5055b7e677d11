"""Kernels in Pallas for TPUs; each computes what plain code elsewhere does.

Only those are kept that gain by the compiler's simulation of their final instructions. Attention, single
entries and residual masses of the vocabulary did not: XLA's own loops are as short.
"""
