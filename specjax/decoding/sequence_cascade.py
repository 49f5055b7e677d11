"""The sequence cascade: the drafter writes a whole response; an unsure one is written anew.

Source: Faster Cascades via Speculative Decoding (arXiv 2405.19261), section 2 and eq. 1.

Axes: B rows, S cache length, V vocabulary.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specjax.checks import check_part
from specjax.decoding.pair_method import (
    CascadeParams,
    CascadeState,
    PairMethod,
    Reader,
    log_at,
    per_row,
    source_of_nan,
    step_counts,
)
from specjax.decoding.state import add_log_probs, append, end_by_nan, put_tokens, step_uniforms
from specjax.sampling import confidence, distribution, draw, num_uniforms
from specjax.types import (
    RUNNING,
    Array,
    Cache,
    DecodeInfo,
    DecodeState,
    LanguageModel,
    Params,
    PromptBatch,
)


class Response(NamedTuple):
    """What a sequence cascade knows of a row's first response.

    Attributes:
      first: `[B]` int32, the token that the verifier begins with.
      deferred: `[B]` bool, whether the verifier writes.
      log_probs: `[B, S]` float32, the response's tokens under the drafter's confidences.
    """

    first: Array  # [B]
    deferred: Array  # [B]
    log_probs: Array  # [B, S]


@dataclasses.dataclass(frozen=True)
class SequenceCascade(PairMethod):
    """One token a step: of the drafter, and where its response is deferred, of the verifier.

    Once a response of the drafter has ended, by an end-of-sequence token, a stop
    string or the row's limit, the
    rule decides; if it defers, the verifier writes another one from the prompt, and the first one
    is dropped. In a batch each row does so in its own time. Its parameters: `CascadeParams` with
    `rules.SequenceChow` or `rules.SequenceChowLog`.

    Attributes:
      verifier: the large model.
      drafter: the small model.
      eos_ids: tokens that end a row.
      partitioner: where arrays lie on a mesh; None for one device.
    """

    @property
    def independent_rows(self) -> bool:
        """One token per row and step, whatever the others do."""
        return True

    def check_rule(self, rule: Any) -> None:
        """Raises TypeError unless the rule is one about responses."""
        check_part("rule", rule, ("defers_response",), "rules.SequenceChow(alpha=0.3)")

    def prefill(self, params: CascadeParams, prompts: PromptBatch, max_length: int) -> CascadeState:
        """See `LoopMethod`."""
        state = super().prefill(params, prompts, max_length)
        rows = state.tokens.shape[0]
        return state._replace(
            own=Response(
                first=state.tokens,
                deferred=jnp.zeros((rows,), bool),
                log_probs=jnp.zeros((rows, max_length), jnp.float32),
            )
        )

    def step(self, params: CascadeParams, state: DecodeState) -> DecodeState:
        """See `LoopMethod`."""
        inner: CascadeState = state.inner
        own: Response = inner.own
        active = ~state.finished
        writing = active & own.deferred
        drafting = active & ~own.deferred
        args = inner.tokens, self.vocab_size
        large, large_cache = _pass(self.verifier, params.verifier, inner.verifier, *args, writing)
        small, small_cache = _pass(self.drafter, params.drafter, inner.drafter, *args, drafting)
        logits = jnp.where(own.deferred[:, None], large, small)
        probs = jax.vmap(distribution)(logits, state.sampling)
        tokens = jax.vmap(draw)(probs, step_uniforms(state, num_uniforms(self.vocab_size)))
        nan = active & jnp.isnan(probs[:, 0])
        counts = (active & ~nan).astype(jnp.int32)
        new, kept = append(state, tokens[:, None], counts, self.eos_ids)
        log_probs = log_at(probs, tokens)[:, None]
        # The verifier does not read what the drafter has written.
        log_p = jnp.where(writing[:, None], log_probs, jnp.nan)
        info = add_log_probs(new.info, kept, log_p, log_probs, state.lengths)
        nothing = jnp.zeros_like(counts)
        calls = {"verifier": writing.astype(jnp.int32), "drafter": drafting.astype(jnp.int32)}
        info = info._replace(
            **step_counts(state, nothing, nothing),
            calls={name: info.calls[name] + calls[name] for name in info.calls},
            deferrals=info.deferrals + counts * calls["verifier"],
        )
        sure = log_at(jax.vmap(confidence)(logits), tokens)[:, None]
        own = own._replace(
            log_probs=put_tokens(own.log_probs, sure, kept & drafting[:, None], state.lengths)
        )
        inner = inner._replace(
            tokens=jnp.where(counts > 0, tokens, inner.tokens),
            verifier=Reader(inner.verifier.positions + counts * calls["verifier"], large_cache),
            drafter=Reader(inner.drafter.positions + counts * calls["drafter"], small_cache),
            own=own,
        )
        new = new._replace(inner=inner, info=info, steps=state.steps + active.astype(jnp.int32))
        done = drafting & new.finished
        rule = per_row(params.rule, state.steps)
        defers = lax.cond(
            jnp.any(done),
            jax.vmap(lambda rule, *of: rule.defers_response(*of)),
            lambda *_: jnp.zeros_like(done),
            rule, own.log_probs, new.lengths,
        )  # fmt: skip
        new = _begin_anew(new, defers & done)
        return end_by_nan(new, source_of_nan(nan & writing, nan & drafting))


def _pass(
    model: LanguageModel, params: Params, reader: Reader, tokens: Array, vocab: int, rows: Array
) -> tuple[Array, Cache]:
    """A pass over one token of each row, `[B, V]` float32 logits; none if no row needs it."""

    def run(cache: Cache) -> tuple[Array, Cache]:
        logits, _, cache = model.extend(params, cache, tokens[:, None], reader.positions)
        return logits[:, 0].astype(jnp.float32), cache

    def skip(cache: Cache) -> tuple[Array, Cache]:
        return jnp.zeros((tokens.size, vocab), jnp.float32), cache

    return lax.cond(jnp.any(rows), run, skip, reader.cache)


def _begin_anew(state: DecodeState, rows: Array) -> DecodeState:
    """Drops what is written in `rows [B]`, which the verifier writes from the prompt."""
    inner: CascadeState = state.inner
    own: Response = inner.own
    info: DecodeInfo = state.info

    def cleared(x: Any, value: float = 0) -> Any:
        if x is None:
            return None
        return jnp.where(rows.reshape(-1, *(1,) * (x.ndim - 1)), jnp.asarray(value, x.dtype), x)

    stop = state.stop
    return state._replace(
        stop=None if stop is None else stop._replace(states=cleared(stop.states)),
        tokens=cleared(state.tokens),
        lengths=cleared(state.lengths),
        ended_by=cleared(state.ended_by, RUNNING),
        inner=inner._replace(
            tokens=jnp.where(rows, own.first, inner.tokens),
            own=own._replace(deferred=own.deferred | rows),
        ),
        info=info._replace(
            log_p=cleared(info.log_p),
            log_target=cleared(info.log_target),
            token_log_p=cleared(info.token_log_p, jnp.nan),
            token_log_target=cleared(info.token_log_target, jnp.nan),
        ),
    )
