"""A tiny copy task and a tiny network, for the tests of training."""

import numpy as np

from specjax.data import Batching, Example, TokenPairs, tokenize_pairs
from specjax.models import T5Config
from specjax.training import AdamW, InverseSqrt, Objective

EOS = 1
WORDS = range(3, 12)

CONFIG = T5Config(
    vocab_size=12,
    embed_dim=32,
    num_heads=2,
    head_dim=16,
    mlp_dim=32,
    num_encoder_layers=1,
    num_decoder_layers=1,
    dropout_rate=0.1,
)
OPTIMIZER = AdamW(schedule=InverseSqrt(peak=0.05, warmup_steps=30), relative=True)
OBJECTIVE = Objective(label_smoothing=0.0, ema_decay=0.9)
BATCHING = Batching(tokens_per_batch=256, bucket_lengths=(8,))


def encode(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def copies(count: int, seed: int = 0, longest: int = 5) -> list[Example]:
    """Sentences of numbers to be copied."""
    rng = np.random.default_rng(seed)
    texts = [
        " ".join(str(w) for w in rng.choice(WORDS, rng.integers(1, longest + 1)))
        for _ in range(count)
    ]
    return [Example(i, text, text) for i, text in enumerate(texts)]


def copy_pairs(count: int, seed: int = 0, longest: int = 5) -> TokenPairs:
    return tokenize_pairs(copies(count, seed, longest), encode, EOS)


def train_arguments(output_dir, **changes):
    """Arguments of `specjax.training.train` for a run of the copy task."""
    return {
        "output_dir": output_dir,
        "config": CONFIG,
        "training_pairs": copy_pairs(300),
        "validation_pairs": copy_pairs(40, seed=1),
        "optimizer": OPTIMIZER,
        "objective": OBJECTIVE,
        "batching": BATCHING,
        "num_steps": 30,
        "checkpoint_every": 10,
        "log_every": 5,
        "seed": 7,
        "num_devices": 1,
        "progress": False,
        **changes,
    }
