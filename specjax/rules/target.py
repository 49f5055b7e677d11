"""Shared by rules: the class of a target, the ranges of strengths, and quantities of distributions.

Notation, for a position: q and p are the distributions from which the drafter and the verifier
draw tokens. q_conf and p_conf are their confidence distributions (softmax at temperature 1 without
top-k and top-p). pi is the target distribution. Logarithms are natural. Axis: V vocabulary.
"""

import abc
import functools
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from specjax.checks import check_number, check_part
from specjax.compilation import jit
from specjax.errors import UserError
from specjax.sampling.draws import Weights, total
from specjax.types import Rule, traced_dataclass

_FLAGS = ("reads_draft", "reads_draft_confidence", "reads_verifier_confidence")
_TOLERANCE = 1e-4


class TargetRule(abc.ABC):
    """A rule that gives pi by `_target`; it reads only p and q unless it declares more."""

    reads_draft: ClassVar[bool] = True
    reads_draft_confidence: ClassVar[bool] = False
    reads_verifier_confidence: ClassVar[bool] = False

    def __call__(
        self,
        q: Float32[Array, " V"],
        p: Float32[Array, " V"],
        q_conf: Float32[Array, " V"] | None = None,
        p_conf: Float32[Array, " V"] | None = None,
    ) -> Float32[Array, " V"]:
        name = type(self).__name__
        assert q_conf is not None or not self.reads_draft_confidence, f"{name} reads q_conf"
        assert p_conf is not None or not self.reads_verifier_confidence, f"{name} reads p_conf"
        check_position(self, q, p)
        return self._target(q, p, q_conf, p_conf)

    @abc.abstractmethod
    def _target(self, q: Array, p: Array, q_conf: Any, p_conf: Any) -> Array:
        """pi; a confidence that is not read may be None."""


def has_carry(rule: Any) -> bool:
    """Whether a rule's targets depend on earlier ones: it has `init_carry` and `targets`."""
    return hasattr(rule, "init_carry")


def init_carry(rule: Any) -> Any:
    """The carry of a rule at the start of a row; () if it has none."""
    return rule.init_carry() if has_carry(rule) else ()


def check_position(rule: Any, q: Array, p: Array) -> None:
    """Asserts one position's float32 distributions, and a single strength."""
    name = type(rule).__name__
    assert q.ndim == 1 and q.shape == p.shape, f"{name} takes one position: vmap over the others"
    assert q.dtype == p.dtype == jnp.float32, f"{name} takes float32 distributions"
    strengths = jax.tree.leaves(rule)
    assert not any(map(jnp.ndim, strengths)), f"{name} has a strength per row: vmap over the rows"


# No probability of float32 is below exp(-104).
NATS = 100.0


class Span(NamedTuple):
    """A range, as `check_number` takes it."""

    low: float = -np.inf
    high: float = np.inf
    open_low: bool = False
    open_high: bool = False


class Strengths(NamedTuple):
    """The numbers that a field of a rule may have.

    Attributes:
      valid: other numbers are errors.
      useful: other valid numbers are warnings, except infinity; None: all that are valid.
    """

    valid: Span = Span()
    useful: Span | None = None


# The ranges of most strengths.
SHARE = Strengths(Span(0.0, 1.0))
PROPER_SHARE = Strengths(Span(0.0, 1.0, open_high=True))
MARGIN = Strengths(useful=Span(-1.0, 1.0, open_low=True))
NATS_APART = Strengths(useful=Span(-NATS, NATS))
ALLOWANCE = Strengths(Span(0.0), Span(0.0, NATS))


class Spans:
    """Checks the fields of a rule that are named in `spans`; a warning is given once.

    Traced values are not checked.
    """

    spans: ClassVar[Mapping[str, Strengths]] = MappingProxyType({})

    def __post_init__(self) -> None:
        for name, span in self.spans.items():
            value = check_number(name, getattr(self, name), **span.valid._asdict())
            object.__setattr__(self, name, value)
            if span.useful is not None and isinstance(value, np.ndarray):
                finite = np.where(np.isinf(value), np.float32(span.useful.high), value)
                try:
                    check_number(f"{type(self).__name__}: {name}", finite, **span.useful._asdict())
                except ValueError as error:
                    _warn_once(str(error).replace(" must ", " should "))


@functools.lru_cache(maxsize=1024)
def _warn_once(text: str) -> None:
    warnings.warn(
        f"{text}: beyond this range the rule decides alike at almost every position", stacklevel=4
    )


@traced_dataclass
class Strength(Spans):
    """A single strength; its range is in `spans`."""

    strength: Array | float


def check_is_rule(name: str, rule: Any) -> None:
    """Raises UserError unless `rule` is a pytree like `Rule`; `name` is the argument's name."""
    missing = [flag for flag in _FLAGS if not hasattr(rule, flag)]
    if callable(rule) and missing and not isinstance(rule, type):
        kind = type(rule).__name__
        raise UserError(
            f"{name} must be a rule, but {kind} has no {', '.join(missing)}: set them to "
            f"True or False in the class {kind}"
        )
    check_part(name, rule, ("__call__", *_FLAGS), "rules.OPT(strength=0.2)")
    if any(leaf is rule for leaf in jax.tree.leaves(rule)):
        raise UserError(
            f"{name} must be a pytree, got {type(rule).__name__}: decorate the class with "
            "specjax.types.traced_dataclass"
        )


def check_rule(rule: Rule, *, vocab_size: int = 8, positions: int = 32) -> None:
    """Checks that a rule of your own returns distributions, on random inputs.

    Args:
      rule: if it has a strength per row, only the first is used.
      vocab_size: V of the distributions.
      positions: the number of random positions: flat or peaked, some with zeros.

    Raises:
      AssertionError: the target is of another shape or dtype, has a negative or NaN entry, or does
        not sum to 1.
    """
    check_is_rule("rule", rule)
    name = type(rule).__name__
    single: Any = jax.tree.map(lambda x: jnp.asarray(x).reshape(-1)[0], rule)
    rng = np.random.default_rng(0)
    scale = np.geomspace(0.1, 10.0, positions)[None, :, None]
    logits = rng.standard_normal((4, positions, vocab_size)) * scale
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    logits[..., 0] = 0.0
    weights = np.exp(logits)
    q, p, q_conf, p_conf = (weights / weights.sum(-1, keepdims=True)).astype(np.float32)
    # As in decoding: a confidence that a rule does not declare may be None.
    q_conf = q_conf if rule.reads_draft_confidence else None
    p_conf = p_conf if rule.reads_verifier_confidence else None
    target = np.asarray(_targets(single, q, p, q_conf, p_conf))
    assert target.shape == q.shape, f"{name} must return [V] per position, got {target.shape[1:]}"
    assert target.dtype == np.float32, f"{name} must return float32, got {target.dtype}"
    assert np.all(target >= 0.0), f"{name} returns a negative probability or NaN"
    sums = target.sum(axis=1)
    worst = float(sums[np.argmax(np.abs(sums - 1.0))])
    assert abs(worst - 1.0) <= _TOLERANCE, f"{name} must sum to 1, got a sum of {worst:.6g}"


@jit
def _targets(rule: Rule, *distributions: Any) -> Any:
    return jax.vmap(rule)(*distributions)


def entropy(x: Weights) -> Float32[Array, ""]:
    """H(x) = -sum x log x, in nats, with 0 log 0 = 0."""
    # x + x == x only at zero. It needs no constant, which XLA on CPUs would write as an array.
    is_zero = (x + x == x).astype(x.dtype)
    return -total(x * jnp.log(x + is_zero))


def cross_entropy(x: Weights, y: Weights) -> Float32[Array, ""]:
    """-sum x log y, in nats; infinite if y = 0 < x anywhere."""
    return -total(jnp.where(x > 0.0, x * jnp.log(y), 0.0))


def kl_divergence(x: Weights, y: Weights) -> Float32[Array, ""]:
    """KL(x || y), in nats; infinite if y = 0 < x anywhere."""
    both = (x > 0.0) & (y > 0.0)
    ratio = jnp.where(both, x, 1.0) / jnp.where(both, y, 1.0)
    # x log r - y (r - 1) is never negative, and its derivative at r = 1 is zero: so if the two are
    # close, nothing cancels, and the rounding of r hardly matters.
    terms = jnp.where(both, x * jnp.log(ratio) - y * (ratio - 1.0), y - x)
    return jnp.where(jnp.any((x > 0.0) & (y <= 0.0)), jnp.inf, total(terms))


def accept_probability(q: Weights, target: Weights) -> Float32[Array, ""]:
    """The probability that token verification accepts a drafted token: sum min(q, pi).

    It is 1 - D_TV(pi, q) for every rule.
    """
    return total(jnp.minimum(q, target))
