"""Measurements of specjax's parts, for its developers: `python -m benchmarks.NAME`, in a checkout.

Measurements of one's own pair of models are `specjax bench`.
"""
