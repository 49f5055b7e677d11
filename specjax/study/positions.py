"""The figures of a rule, for a drafter and a verifier, at each position of known texts.

Axes: B rows, N longest text, M positions, V vocabulary, S samples, G longest draft.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, Key

from specjax.compilation import jit
from specjax.rules import Deferral, Lossless, accept_probability
from specjax.sampling import draw, num_uniforms, residual_weights, total
from specjax.text.teacher_forcing import KnownRows, check_read, read
from specjax.text.text_models import TextModel
from specjax.types import Drawn, LanguageModel, Params, Rule, Sampling, Stopping


class Laws(NamedTuple):
    """A model's distributions along texts; or `M` positions in place of `B N`.

    Attributes:
      probs: the distribution of the token at each position.
      hidden: the last hidden states of the previous tokens.
    """

    probs: Float32[Array, "B N V"]
    confidences: Float32[Array, "B N V"] | None
    hidden: Float[Array, "B N D"]


class Positions(NamedTuple):
    """The figures of a rule at M positions.

    Attributes:
      acceptance: sum_v min(pi, q).
      defers: delta of a deferral rule; NaN for other rules.
      nats: sum_v pi log(pi / p) over the tokens that p can draw.
      impossible: the probability under pi of tokens that p cannot draw.
      overshoot: max_v pi(v) / p(v); infinite if pi has tokens that p cannot draw.
      ratios: pi(y) / q(y) of tokens y that follow pi; see `positions`. S is 1 without draws.
    """

    acceptance: Any  # [M]
    defers: Any  # [M]
    nats: Any  # [M]
    impossible: Any  # [M]
    overshoot: Any  # [M]
    ratios: Any  # [S, M]


@functools.partial(jit, static_argnums=0, static_argnames="with_confidence")
def laws_along(
    model: LanguageModel,
    params: Params,
    rows: KnownRows,
    sampling: Sampling,
    *,
    with_confidence: bool,
) -> Laws:
    """Returns a model's distributions at all positions of texts."""
    reading = read(model, params, rows)
    confidences = reading.confidences() if with_confidence else None
    return Laws(reading.probs(sampling), confidences, reading.hidden)


def laws_of_models(
    models: Sequence[TextModel],
    rows: KnownRows,
    sampling: Sampling,
    with_confidence: Sequence[bool],
) -> Iterator[Laws]:
    """Yields `laws_along` of each model; raises UserError if one gives NaN."""
    for model, reads in zip(models, with_confidence, strict=True):
        laws = laws_along(model.model, model.prepared, rows, sampling, with_confidence=reads)
        check_read(np.isfinite(np.asarray(jnp.sum(laws.probs, axis=-1))[rows.real]), model)
        yield laws


@functools.partial(jit, static_argnames="samples")
def positions(
    rule: Rule,
    drafter: Laws,
    verifier: Laws,
    tokens: Int32[Array, " M"],
    key: Key[Array, ""],
    *,
    samples: int,
) -> Positions:
    """Returns the figures of a rule at each position; its strength is traced.

    The text's token x was drawn from p. A token y is coupled to it such that y follows pi: y = x
    with probability min(1, pi(x) / p(x)), otherwise y is drawn from norm((pi - p)_+). For
    `Lossless` y is x, and if a deferral rule keeps the drafter, all ratios are 1. The same key
    gives every rule the same uniforms, which reduces the noise of comparisons.

    Args:
      rule: with scalar strengths.
      drafter: at M positions; confidences are needed only if the rule reads them.
      verifier: likewise.
      tokens: the text's.
      samples: S.
    """
    count, vocab = drafter.probs.shape
    # The target is p or q: y is x, or the ratio is 1.
    decides = isinstance(rule, Lossless | Deferral)
    size = (count, 0 if decides else samples, 1 + num_uniforms(vocab))
    uniforms = jax.random.uniform(key, size, jnp.float32)

    def at(q: Any, p: Any, q_conf: Any, p_conf: Any, token: Any, uniform: Any) -> tuple[Any, ...]:
        pi = rule(q, p, q_conf, p_conf)
        possible = p > 0.0
        logs = jnp.log(jnp.where(pi > 0.0, pi, 1.0)) - jnp.log(jnp.where(possible, p, 1.0))
        defers = _defers(rule, q, p, q_conf, p_conf)
        if decides:
            ratios = jnp.where(defers > 0.0, _ratio(p, q, token), 1.0)[None]
        else:
            ratios = _ratio(pi, q, coupled(pi, p, token, uniform))
        return (
            accept_probability(q, pi),
            defers,
            total(jnp.where(possible, pi * logs, 0.0)),
            total(jnp.where(possible, 0.0, pi)),
            jnp.max(jnp.where(pi > 0.0, pi / p, 0.0)),
            ratios,
        )

    reads = (rule.reads_draft_confidence, rule.reads_verifier_confidence)
    arguments = (
        drafter.probs,
        verifier.probs,
        drafter.confidences if reads[0] else None,
        verifier.confidences if reads[1] else None,
        tokens,
        uniforms,
    )
    axes = tuple(None if x is None else 0 for x in arguments)
    *figures, ratios = jax.vmap(at, in_axes=axes)(*arguments)
    return Positions._make((*figures, ratios.T))


def coupled(
    pi: Float32[Array, " V"],
    p: Float32[Array, " V"],
    token: Int32[Array, ""],
    uniforms: Float32[Array, "S U"],
) -> Int32[Array, " S"]:
    """Returns tokens that follow pi, coupled to the text's token."""
    kept = jnp.where(p[token] > 0.0, pi[token] / p[token], jnp.sign(pi[token]))
    others = jax.vmap(draw, in_axes=(None, 0))(residual_weights(pi, p), uniforms[:, 1:])
    return jnp.where(uniforms[:, 0] < kept, token, others)


def _ratio(pi: Array, q: Array, token: Array) -> Array:
    return jnp.where(q[token] > 0.0, pi[token] / q[token], jnp.inf)


def _defers(rule: Rule, q: Any, p: Any, q_conf: Any, p_conf: Any) -> Array:
    if isinstance(rule, Lossless):
        return jnp.float32(1.0)
    if isinstance(rule, Deferral):
        return rule.defers(q, p, q_conf, p_conf).astype(jnp.float32)
    return jnp.float32(jnp.nan)


@functools.partial(jit, static_argnames=("policy", "least", "longest"))
def draft_lengths(
    policy: Stopping,
    params: Params,
    drafter: Laws,
    texts: Int32[Array, "B N"],
    *,
    longest: int,
    least: int = 0,
) -> Int32[Array, "B N"]:
    """Returns the length of a draft from each position, if its tokens are those of the text.

    Past the end of a text a draft repeats the last position.

    Args:
      policy: the static part of a policy that does not read earlier rounds.
      params: its parameters, which are traced.
      longest: G.
      least: the fewest tokens of a draft, whatever the policy decides.
    """
    rows, width = texts.shape
    count = rows * width
    limits, state = policy.begin(params, (), jnp.full((count,), longest, jnp.int32), longest)

    def step(i: Array, carry: tuple[Array, Array, Any]) -> tuple[Array, Array, Any]:
        lengths, going, state = carry
        at = jnp.minimum(jnp.arange(width, dtype=jnp.int32) + i, width - 1)

        def ahead(x: Array) -> Array:
            return jnp.take(x, at, axis=1).reshape((count, *x.shape[2:]))

        confidences = None if drafter.confidences is None else ahead(drafter.confidences)
        token, probs, hidden = ahead(texts), ahead(drafter.probs), ahead(drafter.hidden)
        stops, state = policy.step(params, state, Drawn(token, probs, confidences, hidden, i))
        lengths = lengths + going.astype(jnp.int32)
        return lengths, going & ~(stops & (lengths >= least)) & (lengths < limits), state

    none = jnp.zeros((count,), jnp.int32)
    start = (none, limits > 0, state)
    lengths, _, _ = jax.lax.fori_loop(0, longest, step, start)
    return lengths.reshape(rows, width)
