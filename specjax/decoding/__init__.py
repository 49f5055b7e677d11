"""Decoding: methods that turn prompts into tokens, each one jitted program."""

from specjax.decoding.loop import Method, MethodParams
from specjax.decoding.round import Round
from specjax.decoding.roundless import Autoregressive, OracleCascade
from specjax.decoding.sequence_cascade import SequenceCascade
from specjax.decoding.speculative import Speculative
from specjax.decoding.state import Step, step_uniforms
from specjax.decoding.token_cascade import BiLDCascade, TokenCascade

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
