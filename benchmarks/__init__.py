"""Measurements of specjax's parts, for its developers: `python -m benchmarks.NAME`, in a checkout.

To measure your own pair of models, use `specjax bench`.
"""
