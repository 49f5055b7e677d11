"""Data: examples from files and seqio tasks, prompts of templates, and batches for training."""
