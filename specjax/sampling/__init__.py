"""Turns logits into the distribution that tokens are drawn from, and draws from it.

Plain code is in `distributions` and `draws`; `draw_kernels` computes the same by Pallas on TPUs,
where that gains by the compiler's own simulation of its instructions.
"""

from specjax.sampling.distributions import (
    confidence,
    distribution,
    drawn,
    log_confidence,
    log_distribution,
)
from specjax.sampling.draws import (
    TINY,
    draw,
    normalise,
    num_uniforms,
    residual,
    residual_mass,
    residual_weights,
    total,
)
from specjax.types import Sampling

__all__ = [
    "TINY",
    "Sampling",
    "confidence",
    "distribution",
    "draw",
    "drawn",
    "log_confidence",
    "log_distribution",
    "normalise",
    "num_uniforms",
    "residual",
    "residual_mass",
    "residual_weights",
    "total",
]
