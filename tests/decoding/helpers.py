"""Short ways to start a method."""

from specjax import decoding, drafting, rules
from specjax.types import PromptBatch


def begin(method, params, inputs, input_lengths, *, max_new, max_length=None, **prompts):
    """`method.init` with the fields of its prompts as arguments."""
    batch = PromptBatch(inputs, input_lengths, **prompts)
    return method.init(params, batch, max_new=max_new, max_length=max_length)


def pair(verifier, drafter, rule=None, stopping=()):
    """Parameters of a pair with a neural drafter."""
    small = drafting.NeuralDrafterParams(drafter, stopping)
    return decoding.MethodParams(verifier, small, rules.Lossless() if rule is None else rule)


def alone(params):
    """Parameters of one model."""
    return decoding.MethodParams(params)
