"""Shared by rules: the checks at a position, a strength, and quantities of distributions.

Notation, for a position: q and p are the distributions from which the drafter and the verifier
draw tokens. q_conf and p_conf are their confidence distributions (softmax at temperature 1 without
top-k and top-p). pi is the target distribution. All are `[V]` float32. Logarithms are natural.
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

from specjax.checks import check_part, check_scalars, checked
from specjax.errors import UserError
from specjax.sampling import residual_mass, total
from specjax.types import Array, Rule, traced_dataclass

_FLAGS = ("reads_draft", "reads_draft_confidence", "reads_verifier_confidence")


class TargetRule(abc.ABC):
    """A rule that gives pi by `_target`; it reads only p and q unless it declares more."""

    reads_draft: ClassVar[bool] = True
    reads_draft_confidence: ClassVar[bool] = False
    reads_verifier_confidence: ClassVar[bool] = False

    def __call__(
        self, q: Array, p: Array, q_conf: Array | None = None, p_conf: Array | None = None
    ) -> Array:
        _check_position(self, q, p, q_conf, p_conf)
        return self._target(q, p, q_conf, p_conf)

    @abc.abstractmethod
    def _target(self, q: Array, p: Array, q_conf: Any, p_conf: Any) -> Array:
        """pi, for arguments with checked shapes; a confidence that is not read may be None."""


# No probability of float32 is below exp(-104).
NATS = 100.0


class Span(NamedTuple):
    """A range, as `checks.checked` takes it."""

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
            value = checked(name, getattr(self, name), **span.valid._asdict())
            object.__setattr__(self, name, value)
            if span.useful is not None and isinstance(value, np.ndarray):
                finite = np.where(np.isinf(value), np.float32(span.useful.high), value)
                try:
                    checked(f"{type(self).__name__}: {name}", finite, **span.useful._asdict())
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
    """Raises TypeError unless `rule` is a pytree like `Rule`; `name` is the argument's name."""
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


def _check_position(
    rule: Rule, q: Array, p: Array, q_conf: Array | None, p_conf: Array | None
) -> None:
    """Checks shapes and dtypes at trace time; see `Rule`."""
    check_scalars(rule)
    name = type(rule).__name__
    arguments = {"q": q, "p": p}
    needed = {"q_conf": rule.reads_draft_confidence, "p_conf": rule.reads_verifier_confidence}
    for key, value in (("q_conf", q_conf), ("p_conf", p_conf)):
        if needed[key]:
            if value is None:
                raise UserError(
                    f"{name} reads {key}, which is None: pass sampling.confidence(logits)"
                )
            arguments[key] = value
    for key, value in arguments.items():
        dtype = getattr(value, "dtype", None)
        if dtype != jnp.float32:
            found = dtype or type(value).__name__
            raise UserError(f"{name}: {key} must be a float32 array, got {found}")
        if jnp.ndim(value) != 1 or jnp.shape(value) != jnp.shape(q):
            shapes = ", ".join(f"{k} {jnp.shape(v)}" for k, v in arguments.items())
            raise UserError(
                f"{name}: {key} must be a distribution [V] over the vocabulary of q, got {shapes}"
                ": vmap over other axes, and use models with the same vocabulary"
            )


def entropy(x: Array) -> Array:
    """H(x) = -sum x log x, in nats, with 0 log 0 = 0; `[V]` -> scalar."""
    # x + x == x only at zero. It needs no constant, which XLA on CPUs would write as an array.
    is_zero = (x + x == x).astype(x.dtype)
    return -total(x * jnp.log(x + is_zero))


def cross_entropy(x: Array, y: Array) -> Array:
    """-sum x log y, in nats; infinite if y = 0 < x anywhere; `[V]`, `[V]` -> scalar."""
    return -total(jnp.where(x > 0.0, x * jnp.log(y), 0.0))


def kl_divergence(x: Array, y: Array) -> Array:
    """KL(x || y), in nats; infinite if y = 0 < x anywhere; `[V]`, `[V]` -> scalar."""
    both = (x > 0.0) & (y > 0.0)
    ratio = jnp.where(both, x, 1.0) / jnp.where(both, y, 1.0)
    # x log r - y (r - 1) is never negative, and its derivative at r = 1 is zero: so if the two are
    # close, nothing cancels, and the rounding of r hardly matters.
    terms = jnp.where(both, x * jnp.log(ratio) - y * (ratio - 1.0), y - x)
    return jnp.where(jnp.any((x > 0.0) & (y <= 0.0)), jnp.inf, total(terms))


def total_variation(p: Array, q: Array) -> Array:
    """D_TV(p, q) = sum_v max(0, p(v) - q(v)); `[V]`, `[V]` -> scalar."""
    return residual_mass(p, q)


def accept_probability(q: Array, target: Array) -> Array:
    """The probability that token verification accepts a drafted token: sum min(q, pi).

    It is 1 - D_TV(pi, q) for every rule.
    """
    return total(jnp.minimum(q, target))
