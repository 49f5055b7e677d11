"""Methods without rounds: every model reads each committed token itself.

Autoregressive decoding has one model. The cascades have two, and each adds a step.

Axes: B rows, V vocabulary.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from specjax.decoding.guards import check_model, check_vocabularies
from specjax.decoding.loop import Method, MethodParams, check_pair, per_row
from specjax.decoding.state import Step, step_uniforms
from specjax.errors import UserError
from specjax.partitioning import Partitioner
from specjax.platforms import entry
from specjax.processing import distributions, draws, logs_along
from specjax.rules import Lossless
from specjax.rules.sequential import check_deferral
from specjax.rules.target import check_is_rule
from specjax.sampling import confidence, draw, num_uniforms
from specjax.types import (
    Axes,
    Cache,
    DecodeState,
    LanguageModel,
    Params,
    Prompts,
    Sampling,
    row_axes,
)

VERIFIER, DRAFTER = range(2)  # in `model_names`
_LATER: Any = None  # a model that is bound later


class HasRead(NamedTuple):
    """The part of each row that a model has read.

    Attributes:
      positions: the position of the last committed token in its cache.
      cache: its cache, without that token.
    """

    positions: Int32[Array, " B"]
    cache: Cache

    @property
    def cached(self) -> Array:
        return self.positions


class SequentialState(NamedTuple):
    """The state of a row between two steps.

    Attributes:
      tokens: the last committed token; in no cache yet.
      verifier: the verifier's.
      drafter: the drafter's; None without a drafter.
      extra: other values of a method; the batch is the first axis of its arrays.
    """

    tokens: Int32[Array, " B"]
    verifier: HasRead
    drafter: HasRead | None = None
    extra: Any = ()

    def read_on(
        self, last: Array, counts: dict[str, Array], caches: dict[str, Cache]
    ) -> "SequentialState":
        """The state after `counts` `[B]` more tokens by model, the last of them `last [B]`."""
        moved = functools.reduce(jnp.maximum, counts.values()) > 0
        read = {
            name: HasRead(getattr(self, name).positions + counts[name], caches[name])
            for name in counts
        }
        return self._replace(tokens=jnp.where(moved, last, self.tokens), **read)


class SequentialMethod(Method):
    """Prefills, axes and checks of methods without rounds. Parameters: `MethodParams`."""

    @property
    @abc.abstractmethod
    def models(self) -> dict[str, LanguageModel]:
        """The models by name; their passes are counted under it."""

    def __post_init__(self) -> None:
        for name, model in self.models.items():
            check_model(name, model)
        super().__post_init__()

    @property
    def vocab_size(self) -> int:
        return self.models["verifier"].vocab_size

    @property
    def model_names(self) -> tuple[str, ...]:
        return tuple(self.models)

    def prompt_positions(self, input_lengths: Any, prefix_lengths: Any) -> Any:
        each = (x.prompt_positions(input_lengths, prefix_lengths) for x in self.models.values())
        return functools.reduce(np.maximum, each)

    def prefill(self, params: MethodParams, prompts: Prompts, max_length: int) -> SequentialState:
        filled = {
            name: model.prefill(getattr(params, name), prompts, max_length)
            for name, model in self.models.items()
        }
        read = {name: HasRead(x.positions, x.cache) for name, x in filled.items()}
        return SequentialState(filled["verifier"].tokens, **read)

    def check_params(self, params: Params, rows: int) -> None:
        check_pair(self, params, rows)

    def committed(self, state: DecodeState) -> SequentialState:
        return state.inner

    def inner_axes(self, inner: SequentialState) -> Axes:
        read = {}
        for name, model in self.models.items():
            one: HasRead = getattr(inner, name)
            read[name] = HasRead(row_axes(one.positions), model.cache_axes(one.cache))
        return inner._replace(tokens=row_axes(inner.tokens), extra=row_axes(inner.extra), **read)


@dataclasses.dataclass(frozen=True)
class Autoregressive(SequentialMethod):
    """Decodes with one model, a token per pass.

    Its parameters: `MethodParams` with only a verifier. A rule shapes the target distribution; it
    must not read a drafter.

    Attributes:
      model: the language model; it counts as the verifier.
    """

    model: LanguageModel

    @property
    def models(self) -> dict[str, LanguageModel]:
        return {"verifier": self.model}

    @property
    def independent_rows(self) -> bool:
        return True

    def check_rule(self, rule: Any) -> None:
        check_is_rule("rule", rule)
        if rule.reads_draft or rule.reads_draft_confidence:
            raise UserError(
                f"{type(rule).__name__} reads the drafter, but there is none: give a drafter, or a "
                "rule that reads only the verifier"
            )

    def step(self, params: MethodParams, state: DecodeState) -> Step:
        inner: SequentialState = state.inner
        last, read = inner.tokens[:, None], inner.verifier
        with jax.named_scope("verifier_pass"):
            logits, _, cache = self.model.extend(params.verifier, read.cache, last, read.positions)
        with jax.named_scope("draw"):
            uniforms = step_uniforms(state, num_uniforms(self.vocab_size))
            probs, target, tokens = self._drawn(params.rule, logits[:, 0], state.sampling, uniforms)
        nan = jnp.isnan(target[:, 0])
        counts = (~state.finished & ~nan).astype(jnp.int32)
        logs = logs_along(
            probs[:, None],
            logits if state.wants_log_conf else None,
            state.sampling,
            tokens[:, None],
            counts[:, None] > 0,
            with_conf=state.wants_log_conf,
        )
        return Step(
            tokens=tokens[:, None],
            counts=counts,
            inner=inner.read_on(tokens, {"verifier": counts}, {"verifier": cache}),
            calls={"verifier": 1},
            log_conf=logs.conf,
            log_p=logs.p,
            log_target=jnp.log(jax.vmap(entry)(target, tokens))[:, None],
            deferrals=1,
            nan_in=jnp.where(nan, VERIFIER, -1),
            sources=jnp.full_like(last, VERIFIER) if state.wants_sources else None,
        )

    def _drawn(
        self, rule: Any, logits: Array, sampling: Sampling, uniforms: Array
    ) -> tuple[Array, Array, Array]:
        """The verifier's distributions, the rule's, both `[B, V]`, and tokens of the latter."""
        if isinstance(rule, Lossless):
            probs, tokens = draws(logits, sampling, uniforms)
            return probs, probs, tokens
        probs = distributions(logits, sampling)
        p_conf = jax.vmap(confidence)(logits) if rule.reads_verifier_confidence else None
        target = jax.vmap(lambda rule, *of: rule(*of))(
            per_row(rule, uniforms[:, 0]), probs, probs, None, p_conf
        )
        return probs, target, jax.vmap(draw)(target, uniforms)


@dataclasses.dataclass(frozen=True)
class PairMethod(SequentialMethod):
    """Decodes with two models, step by step. Its parameters: `MethodParams`.

    `DecodeInfo.calls` are a row's own: passes that read a token of this row. Without models, the
    method is for `Decoder(pair, method=...)`, which adds them by `bound`.

    Attributes:
      verifier: the large model; None, as for the drafter, if it is bound later.
      drafter: the small model.
    """

    verifier: LanguageModel = dataclasses.field(default=_LATER, kw_only=True)
    drafter: LanguageModel = dataclasses.field(default=_LATER, kw_only=True)

    def __post_init__(self) -> None:
        if self.verifier is _LATER and self.drafter is _LATER:
            return
        super().__post_init__()
        check_vocabularies(self.verifier, self.drafter)

    def bound(
        self,
        verifier: LanguageModel,
        drafter: LanguageModel,
        eos_ids: tuple[int, ...],
        partitioner: Partitioner | None,
    ) -> Self:
        """The same method over these models."""
        return dataclasses.replace(
            self, verifier=verifier, drafter=drafter, eos_ids=eos_ids, partitioner=partitioner
        )

    @property
    def models(self) -> dict[str, LanguageModel]:
        return {"verifier": self.verifier, "drafter": self.drafter}

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "drafter": self.drafter.describe()}


def log_at(probs: Array, tokens: Array) -> Array:
    """Natural logarithms of the probabilities `[..., V]` of `tokens [...]`."""
    return jnp.log(jnp.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0])


def models_of(state: DecodeState, drafter: Callable[[], Array]) -> Array | None:
    """`Step.sources`; `drafter` makes `[B, T]` bool, whether a token is the drafter's."""
    return jnp.where(drafter(), DRAFTER, VERIFIER) if state.wants_sources else None


def source_of_nan(in_verifier: Array, in_drafter: Array) -> Int32[Array, " B"]:
    """For `Step.nan_in`, from two `[B]` bool."""
    return jnp.where(in_verifier, VERIFIER, jnp.where(in_drafter, DRAFTER, -1))


@dataclasses.dataclass(frozen=True)
class OracleCascade(PairMethod):
    """One token a step: the verifier's if the rule defers, else the drafter's.

    Its parameters: `MethodParams` with any deferral rule, such as `rules.Diff` or `rules.DiffLog`.
    `DecodeInfo.deferrals` counts the verifier's tokens; both models make a pass for every token. So
    it shows the value of a deferral rule, whatever its cost.

    Source: Figure 1 of Faster Cascades via Speculative Decoding (arXiv 2405.19261), section 3.2 and
    Remark 1.
    """

    @property
    def independent_rows(self) -> bool:
        return True

    def check_rule(self, rule: Any) -> None:
        check_deferral("rule", rule, "rules.Diff(strength=0.1)")

    def step(self, params: MethodParams, state: DecodeState) -> Step:
        inner: SequentialState = state.inner
        rule = per_row(params.rule, state.steps)
        logits, caches = {}, {}
        for name, model in self.models.items():
            read, weights = getattr(inner, name), getattr(params, name)
            out = model.extend(weights, read.cache, inner.tokens[:, None], read.positions)
            logits[name], caches[name] = out.logits[:, 0], out.cache
        large, small = logits["verifier"], logits["drafter"]
        p, q = (distributions(x, state.sampling) for x in (large, small))
        p_conf = jax.vmap(confidence)(large) if rule.reads_verifier_confidence else None
        q_conf = jax.vmap(confidence)(small) if rule.reads_draft_confidence else None
        defers = jax.vmap(lambda rule, *of: rule.defers(*of))(rule, q, p, q_conf, p_conf)
        target = jnp.where(defers[:, None], p, q)
        tokens = jax.vmap(draw)(target, step_uniforms(state, num_uniforms(self.vocab_size)))
        nan = source_of_nan(jnp.isnan(p[:, 0]), jnp.isnan(q[:, 0]))
        counts = (~state.finished & (nan < 0)).astype(jnp.int32)
        logs = logs_along(
            p[:, None],
            large[:, None],
            state.sampling,
            tokens[:, None],
            counts[:, None] > 0,
            with_conf=state.wants_log_conf,
        )
        return Step(
            tokens=tokens[:, None],
            counts=counts,
            inner=inner.read_on(tokens, dict.fromkeys(caches, counts), caches),
            calls=dict.fromkeys(caches, 1),
            log_conf=logs.conf,
            log_p=logs.p,
            log_target=log_at(target, tokens)[:, None],
            deferrals=counts * defers.astype(jnp.int32),
            nan_in=nan,
            sources=models_of(state, lambda: ~defers[:, None]),
        )
