"""Short ways to start a method, and a stopping policy."""

import dataclasses
import types
from typing import ClassVar

import jax.numpy as jnp

from specjax import decoding, drafting, rules
from specjax.text.requests import bind_processors
from specjax.types import PromptBatch, Stopping, traced_dataclass


def begin(method, params, inputs, input_lengths, *, max_new, max_length=None, **prompts):
    """`method.init` with the fields of its prompts as arguments."""
    batch = PromptBatch(inputs, input_lengths, **prompts)
    return method.init(params, batch, max_new=max_new, max_length=max_length)


def pair(verifier, drafter, rule=None, stopping=()):
    """Parameters of a pair with a neural drafter."""
    small = drafting.chain.ChainParams(drafter, stopping)
    return decoding.MethodParams(verifier, small, rules.Lossless() if rule is None else rule)


def alone(params):
    """Parameters of one model."""
    return decoding.MethodParams(params)


def bound_to(vocab_size, *processors):
    """Processors bound to a vocabulary, and their arrays."""
    sizes = types.SimpleNamespace(vocab_size=vocab_size)
    return bind_processors(processors, types.SimpleNamespace(model=sizes, partitioner=None))


@dataclasses.dataclass(frozen=True)
class AfterTokenOne(Stopping):
    """Stops a draft after token 1."""

    def step(self, params, state, drawn):
        return drawn.token == 1, state


@traced_dataclass
class Sharper:
    """pi is proportional to a power of p: a target that reads no drafter."""

    strength: object

    reads_draft: ClassVar[bool] = False
    reads_draft_confidence: ClassVar[bool] = False
    reads_verifier_confidence: ClassVar[bool] = False

    def __call__(self, q, p, q_conf=None, p_conf=None):
        powers = (p / jnp.max(p)) ** self.strength  # a high power of p alone underflows
        return powers / jnp.sum(powers)
