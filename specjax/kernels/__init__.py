"""Kernels in Pallas for TPUs; each computes what plain code elsewhere does."""
