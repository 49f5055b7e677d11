"""Speculative decoding and model cascades in JAX: exact, fast, and freely combined."""

from specjax import rules, sampling, verification
from specjax.sampling import Sampling

__all__ = ["Sampling", "rules", "sampling", "verification"]
