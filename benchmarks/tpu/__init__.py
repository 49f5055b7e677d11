"""Estimates of a TPU's compiler for decoding, without a TPU: `python -m benchmarks.tpu`."""
