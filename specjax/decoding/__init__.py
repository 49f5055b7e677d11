"""Decoding: methods that turn prompts into tokens, each one jitted program."""

from specjax.decoding.cascades import (
    Autoregressive,
    BiLDCascade,
    OracleCascade,
    SequenceCascade,
    TokenCascade,
)
from specjax.decoding.method import Method, MethodParams, Step, step_uniforms
from specjax.decoding.speculative import Round, Speculative

__all__ = [
    "Autoregressive",
    "BiLDCascade",
    "Method",
    "MethodParams",
    "OracleCascade",
    "Round",
    "SequenceCascade",
    "Speculative",
    "Step",
    "TokenCascade",
    "step_uniforms",
]
