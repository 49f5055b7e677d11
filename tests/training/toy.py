"""A tiny copy task and a tiny network, for the tests of training."""

import jax
import numpy as np

from specjax.data.batching import Batching, TokenPairs, tokenize_pairs
from specjax.data.examples import Example
from specjax.models import LlamaConfig, T5Config
from specjax.tokenizers import Tokenizer
from specjax.training import (
    AdamW,
    Objective,
    TrainerConfig,
    TrainingData,
    train,
)
from specjax.training.tasks import TextTask

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
LLAMA = LlamaConfig.of(12, 32, 2, 1, 16, 32, 1)
OPTIMIZER = AdamW(learning_rate=0.05, warmup_steps=30, relative=True)
OBJECTIVE = Objective(label_smoothing=0.0)
BATCHING = Batching(tokens_per_batch=256, bucket_lengths=(8,))


def encode(text: str) -> list[int]:
    return [int(word) for word in text.split()]


class Numbers(Tokenizer):
    """Each word is the number of its id."""

    eos_ids, pad_id, add_eos, vocab_size, _own_eos = (EOS,), 0, True, 12, EOS

    def token(self, token_id):
        return str(token_id)

    def _encode(self, text):
        return encode(text)

    def _decode(self, ids, skip_special_tokens):
        return " ".join(map(str, ids))


def copies(count: int, seed: int = 0, longest: int = 5) -> list[Example]:
    """Sentences of numbers to be copied."""
    rng = np.random.default_rng(seed)
    texts = [
        " ".join(str(w) for w in rng.choice(WORDS, rng.integers(1, longest + 1)))
        for _ in range(count)
    ]
    return [Example(i, text, text) for i, text in enumerate(texts)]


def encode_and_end(text: str) -> list[int]:
    return [*encode(text), EOS]


def copy_pairs(count: int, seed: int = 0, longest: int = 5) -> TokenPairs:
    return tokenize_pairs(copies(count, seed, longest), encode_and_end, encode_and_end)


def trainer_config(**changes) -> TrainerConfig:
    settings = {
        "num_steps": 30,
        "optimizer": OPTIMIZER,
        "ema_decay": 0.9,
        "seed": 7,
        "checkpoint_every": 10,
        "log_every": 5,
        "num_devices": 1,
        "progress": False,
    }
    return TrainerConfig(**(settings | changes))


def train_copies(
    output_dir,
    *,
    task=None,
    training_pairs=None,
    validation_pairs=None,
    batching=BATCHING,
    grow=None,
    phases=None,
    constants=None,
    init_params=None,
    evaluate=None,
    notes=None,
    **changes,
):
    """Trains on the copy task; `changes` are of the trainer's configuration."""
    task = task or TextTask(model=CONFIG, objective=OBJECTIVE)
    config = trainer_config(**changes)

    def batches(pairs, seed):
        multiple = len(config.devices())
        return task.batches(pairs, batching, seed=seed, row_multiple=multiple)

    data = TrainingData(
        training=batches(training_pairs or copy_pairs(300), config.seed),
        validation=batches(validation_pairs or copy_pairs(40, seed=1), None),
        grow=grow,
        phases=phases,
    )
    return train(
        config,
        task,
        data,
        output_dir=output_dir,
        constants=constants,
        init_params=init_params,
        evaluate=evaluate,
        notes=notes,
    )


def assert_equal_trees(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)
