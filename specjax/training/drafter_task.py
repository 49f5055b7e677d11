"""The task of a draft head: what it learns from a verifier's pass over the verifier's own texts.

Places count from 0. After the token at a place a (the anchor) a head drafts the tokens at a + 1,
a + 2, .. a + G; draft i is the one at a + i + 1. p is the verifier's distribution, q the head's.

Axes: B rows, L tokens of a text, A anchors, G drafts, V vocabulary, W draft vocabulary.

Sources: EAGLE-3 (arXiv 2503.01840), training-time test; DFlash (2602.06036), blocks at random
anchors; the code of DeepSpec for the contiguous supervision and the loss of the confidence.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, Key

from specjax.compilation import jit
from specjax.models import ModelConfig, model_from_config
from specjax.models.heads import Drafted, DraftHead, HeadConfig, ReadText, draft_head
from specjax.sampling.distributions import distribution
from specjax.theory import expected_calls
from specjax.training.losses import Objective, Total, masked_total
from specjax.training.step import root_key
from specjax.training.trainer import Batches
from specjax.types import Params, Sampling

FIGURE = "tokens_per_call_"
# Anchors whose distributions are in memory at a time, where all are measured.
_AT_ONCE = 16
_TINY = 1e-30


class Frozen(NamedTuple):
    """What a head reads and does not learn.

    Attributes:
      verifier: the verifier's parameters.
      drafted: the tokens that are drafted, in increasing order; None: all.
      places: of each token among these; see `models.heads.places_of`.
      output: the verifier's output projection for these tokens; None: the whole.
    """

    verifier: Params
    drafted: Int32[Array, " W"] | None = None
    places: Int32[Array, " V"] | None = None
    output: Params | None = None


class KnownText(NamedTuple):
    """A batch of texts that the verifier has read.

    Attributes:
      learnt: whether a token may be drafted: the verifier has written it, and the head has it.
      logits: of the verifier; entry t predicts token t + 1.
    """

    read: ReadText
    written: Bool[Array, "B L"]
    learnt: Bool[Array, "B L"]
    logits: Float32[Array, "B L V"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftTask:
    """Trains a draft head on texts of its verifier; a `Task` whose `constants` are `Frozen`.

    An encoder-decoder reads `PairBatch`es, a decoder-only verifier `JoinedBatch`es. A draft counts
    if the verifier has written it and all drafts before it, and the head can draft them: a later
    one cannot be accepted.

    Attributes:
      head: the head's configuration.
      verifier: the verifier's.
      tokens: V, see `Model.tokens`.
      objective: the loss of a draft; the teacher is the verifier, over the draft vocabulary.
      max_draft: G.
      decay: draft i has the weight `decay ** i`.
      anchors: A, the places of a text that are learnt at a time, drawn anew for each batch.
      pad_id: see `TextTask`.
    """

    head: HeadConfig
    verifier: ModelConfig
    tokens: int
    objective: Objective
    max_draft: int
    decay: float
    anchors: int
    pad_id: int = 0

    item_name: ClassVar[str] = "drafted tokens"

    @property
    def model(self) -> DraftHead:
        # Its parameters are learnt, so those of its cross-attention are float32 too.
        network = model_from_config(self.verifier.replace(param_dtype=jnp.float32))
        verifier = dataclasses.replace(network, tokens=self.tokens)
        return draft_head(self.head, verifier)

    def init(self, key: Key[Array, ""]) -> Params:
        network = self.model.init(key)["network"]
        return {name: x for name, x in network.items() if name != "logits_dense"}

    def whole(self, params: Params, frozen: Frozen) -> Params:
        """All parameters of the head of its own."""
        if frozen.drafted is None:
            return {"network": params}
        return {"network": {**params, "logits_dense": frozen.output}, "places": frozen.places}

    def loss(self, params: Params, constants: Frozen, batch: Any, key: Key[Array, ""]) -> Total:
        return self._totals(params, constants, batch, key)["loss"]

    def evaluate(self, params: Params, constants: Frozen, batch: Any) -> dict[str, Total]:
        return self._totals(params, constants, batch, root_key(0))

    def _totals(
        self, params: Params, frozen: Frozen, batch: Any, key: Key[Array, ""]
    ) -> dict[str, Total]:
        own = self.whole(params, frozen)
        text = self.read(frozen, batch)
        anchors = self._anchors(text, key)
        counts = reachable(text, anchors, self.max_draft)
        log_p = jax.nn.log_softmax(text.logits)
        if frozen.drafted is not None:
            log_p = jnp.take(log_p, frozen.drafted, axis=-1)

        def judge(i: Array, said: Drafted) -> tuple[Array, Array]:
            tokens = _at(anchors + i + 1, text.read.tokens)
            if frozen.places is not None:
                tokens = jnp.take(frozen.places, tokens)
            each, accepted = per_draft(self.objective, said, tokens, _at(anchors + i, log_p))
            each = self.decay ** i.astype(jnp.float32) * each
            return masked_total(each, counts[i]).sum, masked_total(accepted, counts[i]).sum

        joined = self.model.joined(own, frozen.verifier)
        judged = self.model.drafts_along(joined, text.read, anchors, self.max_draft, judge)
        items = jnp.sum(counts.astype(jnp.int32))
        names = "loss", "acceptance"
        return {name: Total(jnp.sum(x), items) for name, x in zip(names, judged, strict=True)}

    def written(self, batch: Any) -> Bool[Array, "B L"]:
        """Which tokens of a batch the verifier has written."""
        if self.verifier.encoder_style is None:
            return batch.is_target
        return jnp.pad(batch.targets != self.pad_id, ((0, 0), (1, 0)))

    def read(self, frozen: Frozen, batch: Any) -> KnownText:
        """The verifier's pass over a batch."""
        written = self.written(batch)
        if self.verifier.encoder_style is None:
            tokens, _ = batch
            prompt = jnp.cumsum(written, axis=1) == 0
            read, logits = self.model.read_text(frozen.verifier, tokens, mask=prompt)
        else:
            inputs, targets = batch
            first = self.verifier.decoder_start_token  # type: ignore[attr-defined]
            tokens = jnp.pad(targets, ((0, 0), (1, 0)), constant_values=first)
            mask = inputs != self.pad_id
            read, logits = self.model.read_text(frozen.verifier, tokens, inputs, mask)
        learnt = written
        if frozen.places is not None:
            learnt = written & (jnp.take(frozen.places, tokens) < self.head.rows)
        return KnownText(read, written, learnt, logits)

    def _anchors(self, text: KnownText, key: Key[Array, ""]) -> Int32[Array, "B A"]:
        rows, length = text.learnt.shape
        every = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (rows, length))
        if self.anchors >= length:
            return every
        first = _at(every + 1, text.learnt)
        order = jnp.where(first, jax.random.uniform(key, first.shape), 2.0)
        return jnp.argsort(order, axis=1)[:, : self.anchors].astype(jnp.int32)


def reachable(text: KnownText, anchors: Int32[Array, "B A"], count: int) -> Bool[Array, "_ B A"]:
    """For each draft, from the first, whether it may be accepted after each anchor."""
    each = jnp.stack([_at(anchors + i, text.learnt) for i in range(1, count + 1)])
    return jnp.cumprod(each.astype(jnp.int32), axis=0) > 0


def per_draft(
    objective: Objective,
    said: Drafted,
    tokens: Int32[Array, "B A"],
    log_p: Float32[Array, "B A W"],
) -> tuple[Float32[Array, "B A"], Float32[Array, "B A"]]:
    """The loss of drafts, and the chance that each is accepted: Σ min(p, q).

    A confidence head also learns this chance, by its cross entropy. A divergence is from p given
    that the token can be drafted; the chance is from p itself. A head that chooses among candidates
    learns those by its objective, and its choice by cross entropy (as in speculators): a token that
    is none of them stands in for the last.
    """
    # A token that is not drafted has no place; its draft does not count.
    places = jnp.minimum(tokens, said.logits.shape[-1] - 1)
    of_all = said.reranked
    loss = objective.per_token(said.logits if of_all is None else of_all.base, places, log_p)
    if of_all is not None:
        base, logits = of_all
        among, this = jnp.isfinite(said.logits), jax.nn.one_hot(places, base.shape[-1], dtype=bool)
        least = jnp.min(base, axis=-1, where=among, initial=jnp.inf, keepdims=True)
        known = jnp.any(among & this, axis=-1, keepdims=True)
        beaten = this | (among & (known | (base > least)))
        loss += jax.nn.logsumexp(logits, axis=-1, where=beaten)
        loss -= jnp.sum(logits, axis=-1, where=this)
    both = jnp.minimum(jnp.exp(log_p), jax.nn.softmax(said.logits))
    accepted = jax.lax.stop_gradient(jnp.sum(both, axis=-1))
    if said.odds is not None:
        loss += jax.nn.softplus(said.odds) - accepted * said.odds
    return loss, accepted


def _at(places: Int32[Array, "B A"], x: Array) -> Array:
    """The entries of each row at these places; zero or false past its end."""
    places = places.reshape(*places.shape, *(1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, places, axis=1, mode="fill", fill_value=0)


class TokensPerCall:
    """The expected tokens per call of the verifier, exactly, along texts that it has written.

    A text x is given that the verifier wrote at a temperature. If all drafts of a round before it
    are accepted, draft i after anchor a is accepted with the chance min(1, q(x) / p(x)) of its
    token x = x_{a+i+1}: the verification accepts x with min(p(x), q(x)), and emits it with p(x). So
    the places where rounds begin are a Markov chain, and `theory.expected_calls` sums over all of
    its ways. The figure is the number of tokens over the expected number of calls, of all texts: at
    temperature 0 what greedy decoding does, above it the mean of lossless decoding with `Token`
    verification over its draws.

    Args:
      task: the head.
      frozen: see `Frozen`.
      texts: the name of each temperature's texts, the temperature, and the batches.
      mesh: whose axis `data` shares the rows of a batch; None for one device.
    """

    def __init__(
        self,
        task: DraftTask,
        frozen: Callable[[], Frozen],
        texts: Mapping[str, tuple[float, Batches]],
        mesh: jax.sharding.Mesh | None = None,
    ):
        self._task, self._frozen, self._texts = task, frozen, texts
        self._by_row = None if mesh is None else jax.NamedSharding(mesh, jax.P("data"))

    def __call__(self, params: Params) -> dict[str, float]:
        found = {}
        for name, (temperature, batches) in self._texts.items():
            tokens, calls = 0, 0.0
            for batch in map(batches.batch, range(batches.batches_per_epoch)):
                counts = np.asarray(self._task.written(batch)).sum(axis=1)
                # Powers of two: few programs.
                longest = max(_AT_ONCE, 1 << (int(counts.max()) - 1).bit_length())
                batch = jax.device_put(batch, self._by_row)
                given = params, self._frozen(), batch, jnp.float32(temperature)
                chances = jax.device_get(_acceptances(self._task, longest, *given))
                for row, count in zip(chances, counts.tolist(), strict=True):
                    tokens += count
                    calls += expected_calls(row[:count])
            found[f"validation_{FIGURE}{name}"] = tokens / calls
        return found


@functools.partial(jit, static_argnums=(0, 1))
def _acceptances(
    task: DraftTask,
    longest: int,
    params: Params,
    frozen: Frozen,
    batch: Any,
    temperature: Float32[Array, ""],
) -> Float32[Array, "B _ G"]:
    """The chances of acceptance after the token before a text, and after its first tokens.

    `longest` tokens are measured, a multiple of `_AT_ONCE`; more than a text has are of no use.
    """
    own = task.whole(params, frozen)
    text = task.read(frozen, batch)
    joined = task.model.joined(own, frozen.verifier)
    tokens, sampling = text.read.tokens, Sampling(temperature)
    following = _at(jnp.arange(1, tokens.shape[1] + 1, dtype=jnp.int32)[None], tokens)
    p = _chance(text.logits, following, sampling)
    rows, length = tokens.shape
    first = jnp.argmax(text.written, axis=1).astype(jnp.int32)[:, None] - 1

    def of(after: Int32[Array, " A"]) -> Float32[Array, "_ B A"]:
        anchors = jnp.clip(first + after[None], 0, length - 1)

        def judge(i: Array, said: Drafted) -> Float32[Array, "B A"]:
            drafted = _at(anchors + i, following)
            if frozen.places is not None:
                drafted = jnp.take(frozen.places, drafted)
            q = _chance(said.logits, drafted, sampling)
            return jnp.minimum(q / jnp.maximum(_at(anchors + i, p), _TINY), 1.0)

        return task.model.drafts_along(joined, text.read, anchors, task.max_draft, judge)

    every = jnp.arange(longest, dtype=jnp.int32).reshape(-1, _AT_ONCE)
    chances = jax.lax.map(of, every)  # [groups, G, B, A]
    return chances.transpose(2, 0, 3, 1).reshape(rows, longest, task.max_draft)


def _chance(
    logits: Float32[Array, "B A _"], tokens: Int32[Array, "B A"], sampling: Sampling
) -> Float32[Array, "B A"]:
    """The probabilities of tokens; 0 of one that has no logit."""
    probs = jax.vmap(jax.vmap(lambda x: distribution(x, sampling)))(logits)
    picked = jnp.take_along_axis(probs, tokens[..., None], axis=-1, mode="fill", fill_value=0.0)
    return picked[..., 0]
