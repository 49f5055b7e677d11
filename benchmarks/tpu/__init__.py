"""What a TPU's compiler says of decoding, on a machine without one: `python -m benchmarks.tpu`."""
