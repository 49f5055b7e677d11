"""Estimates of chains from the verifier's outputs, without decoding.

Each drafter and the verifier read the texts once. Every rule is applied at every position, and the
rounds of every setting are walked along the texts.

Given the emitted text y_1, y_2, ..., which follows pi, drafted tokens are accepted independently:
token verification accepts y_i with probability min(1, q / pi), block verification with
min(1, q / (P pi)), where P is P_{i-1} of the text itself. So the rounds are a Markov chain along
the text. (For block verification: a draft begins with y_1 .. y_i and is accepted so far with
probability q(y_1) .. q(y_i) P_i; the next emitted token is then drawn from pi, for
min(q, P pi) + (P pi - q)_+ = P pi.)

If the verifier has drawn the texts with the setting's own temperature, top-k and top-p, the numbers
of rounds with `Lossless` are unbiased, for token and block verification and for stopping policies
that read only the draft. For other rules they are approximate: their outputs follow pi, but here
the contexts are the verifier's.

Axes: S draws, n texts, B rows, N longest text, G longest draft, M positions of all texts, V
vocabulary.

Source: Leviathan et al. (arXiv 2211.17192); Sun et al., Block Verification (ICLR 2025).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int32, Key

from specjax.compilation import jit
from specjax.drafting import FixedLength
from specjax.errors import UserError, tell
from specjax.rules import Deferral, KLPrice, Lossless, accept_probability
from specjax.rules.target import has_carry
from specjax.sampling.draws import draw, num_uniforms, residual_weights, total
from specjax.text import TextModel
from specjax.text.decoder import Decoder
from specjax.text.results import finite
from specjax.text.setting import VERIFIER_ALONE, Setting, check_single
from specjax.text.teacher_forcing import (
    KnownRows,
    KnownTexts,
    batches,
    check_read,
    decode_texts,
    read,
    rows_at_once,
)
from specjax.types import Drawn, LanguageModel, Params, Rule, Sampling, Stopping

VERIFIER = "verifier"
# The number of arrays over the vocabulary that a batch needs.
_ARRAYS = 8
# Rounding may make a probability of 0 this large.
_ROUNDING = 1e-6
# A rule that always keeps the drafter, for the figures of the drafter alone.
_KEEPS = Setting(rule="Diff(1.0)")
# The strengths of `KLPrice` on the frontier.
PRICES = (0.0, 0.1, 0.3, 0.6, 1.0, 1.5, 2.5, 4.0, 8.0, 20.0)

# Temperature, top-k, top-p and processors: settings that agree in them share the verifier's texts.
SamplingKey = tuple[float, int | None, float | None, tuple[str, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expected:
    """The estimate of a setting; NaN if unknown.

    Attributes:
      acceptance: the mean over positions of sum_v min(pi, q), the probability that token
        verification accepts a drafted token.
      tokens_per_call: emitted tokens per pass of the verifier; infinite for the drafter alone.
      error: the standard error of `tokens_per_call`, over texts.
      drafted_per_call: drafted tokens per pass of the verifier.
      nats_per_token: KL(pi || p), infinite if pi has tokens that p cannot draw.
      overshoot: the largest pi(v) / p(v) of any token at any position; infinite likewise.
    """

    setting: Setting
    acceptance: float = math.nan
    tokens_per_call: float = 1.0
    error: float = math.nan
    drafted_per_call: float = 0.0
    nats_per_token: float = 0.0
    overshoot: float = 1.0

    def to_dict(self) -> dict[str, Any]:
        """Returns the figures as JSON values, None for numbers that are not finite."""
        names = [field.name for field in dataclasses.fields(self)[1:]]
        values = {name: getattr(self, name) for name in names}
        return {name: finite(x) for name, x in values.items()}

    @classmethod
    def of(cls, setting: Setting, values: Mapping[str, Any]) -> "Expected":
        """Returns the estimate of a `to_dict`."""
        infinite = ("nats_per_token", "tokens_per_call", "overshoot")
        absent = {name: math.inf if name in infinite else math.nan for name in values}
        figures = {name: absent[name] if x is None else x for name, x in values.items()}
        return cls(setting=setting, **figures)


def estimate(
    models: Mapping[str, TextModel],
    settings: Sequence[Setting],
    prompts: Sequence[np.ndarray],
    *,
    options: Mapping[str, Any] | None = None,
    batch_size: int = 1,
    draws: int = 4,
    seed: int = 0,
) -> list[Expected]:
    """Decodes prompts with the verifier alone, and estimates settings on its outputs.

    Args:
      models: "verifier" and the drafters, by name.
      prompts: the tokens of at least one prompt.
      options: more options of the decoder, such as `max_new_tokens`.
      draws: see `expect`.

    Raises:
      UserError: a setting cannot be estimated, a prompt cannot be decoded, or a model gives NaN.
    """
    check_settings(settings, models)
    texts: dict[SamplingKey, KnownTexts] = {}
    for key, setting in {sampling_key(setting): setting for setting in settings}.items():
        decoder_options = {**(options or {}), "batch_size": batch_size}
        decoder = Decoder(models, setting.verifier_alone, **decoder_options)
        tell(f"the verifier decodes {len(prompts)} prompts at temperature {key[0]:g} ...")
        texts[key] = decode_texts(decoder, prompts, seed=seed)
    return expect(models, texts, settings, draws=draws, seed=seed, tell=tell)


def expect(
    models: Mapping[str, TextModel],
    texts: Mapping[SamplingKey, KnownTexts],
    settings: Sequence[Setting],
    *,
    draws: int = 4,
    seed: int = 0,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Expected]:
    """Estimates settings on known texts; rules, strengths, lengths and policies share a pass.

    Args:
      models: "verifier" and the drafters, by name.
      texts: the verifier's outputs, by `sampling_key`.
      draws: S, the number of tokens to draw at each position for rules whose pi is not p or q.
      seed: the seed of these draws.
      tell: called with messages about the progress.

    Raises:
      UserError: a setting cannot be estimated (see `cannot_estimate`), or a model gives NaN.
    """
    check_settings(settings, models)
    estimates: dict[Setting, Expected] = {}
    groups: dict[tuple[SamplingKey, str], list[Setting]] = {}
    for setting in settings:
        if setting.method == VERIFIER_ALONE:
            estimates[setting] = Expected(setting=setting, error=0.0)
        else:
            groups.setdefault((sampling_key(setting), setting.drafter), []).append(setting)
    for (key, drafter), group in groups.items():
        tell(f"estimating {len(group)} settings with {drafter} at temperature {key[0]:g} ...")
        for expected in _of_drafter(models, texts[key], group, draws, seed):
            estimates[expected.setting] = expected
    return [estimates[setting] for setting in settings]


def sampling_key(setting: Setting) -> SamplingKey:
    """Returns a key shared by settings with the same sampling."""
    return setting.temperature, setting.top_k, setting.top_p, setting.processors


def check_settings(settings: Iterable[Setting], models: Mapping[str, TextModel]) -> None:
    """Raises UserError for a setting that cannot be estimated with these models."""
    for setting in settings:
        check_single(setting)
        if reason := cannot_estimate(setting, models):
            raise UserError(f"{setting.described()} cannot be estimated: {reason}")


def cannot_estimate(setting: Setting, models: Mapping[str, TextModel]) -> str | None:
    """Returns why a setting cannot be estimated, or None."""
    if setting.method == VERIFIER_ALONE:
        return None
    if setting.processors:
        return "processors depend on the tokens so far"
    if setting.drafting is not None:
        return f"drafting={setting.drafting} is not a chain of one drafter"
    for name in (VERIFIER, setting.drafter):
        if name not in models:
            return f"there is no model {name!r}; the models are {', '.join(models)}"
    if models[setting.drafter].is_head:
        return "the drafts of a head depend on where their round began"
    if setting.is_alone:
        return None
    if setting.method is not None:
        return "the choice of the model depends on the text so far"
    if setting.longest is None:
        return "costs choose the length of its drafts"
    if has_carry(setting.part("rule")):
        return f"the decisions of {setting.rule} depend on earlier tokens"
    if setting.part("verification").has_carry:
        return f"{setting.verification} carries its targets from round to round"
    policy = setting.part("stopping") or FixedLength()
    if policy.reads_past:
        return f"stopping={setting.stopping} uses earlier rounds"
    try:
        policy.bind(models[setting.drafter].head)
    except ValueError as error:
        return str(error)
    return None


def is_chain(setting: Setting) -> bool:
    """Whether one drafter drafts chains."""
    return setting.method is None and setting.drafting is None


def frontier_of(settings: Iterable[Setting]) -> list[Setting]:
    """Returns settings on the frontier of acceptance, for each sampling and drafter.

    At each position a target pi accepts sum min(pi, q) of the drafted tokens, and is KL(pi || p)
    from the verifier. Of the means of both over positions `KLPrice` gives the frontier: no rule
    accepts more at the same nats per token. A sampling without lossy settings, or at temperature 0,
    where no divergence is finite, has none.
    """
    first: dict[tuple[SamplingKey, str], Setting] = {}
    for setting in settings:
        if is_chain(setting) and not setting.is_lossless and setting.temperature > 0.0:
            first.setdefault((sampling_key(setting), setting.drafter), setting)
    return [
        dataclasses.replace(setting, rule=f"{KLPrice.__name__}({price})")
        for setting in first.values()
        for price in PRICES
    ]


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
      nats: sum_v pi log(pi / p) over the tokens that p can draw.
      impossible: the probability under pi of tokens that p cannot draw.
      overshoot: max_v pi(v) / p(v); infinite if pi has tokens that p cannot draw.
      ratios: pi(y) / q(y) of tokens y that follow pi; see `positions`. S is 1 without draws.
    """

    acceptance: Any  # [M]
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
        if isinstance(rule, Lossless):
            ratios = _ratio(p, q, token)[None]
        elif isinstance(rule, Deferral):
            ratios = jnp.where(rule.defers(q, p, q_conf, p_conf), _ratio(p, q, token), 1.0)[None]
        else:
            ratios = _ratio(pi, q, coupled(pi, p, token, uniform))
        return (
            accept_probability(q, pi),
            total(jnp.where(possible, pi * logs, 0.0)),
            total(jnp.where(possible, 0.0, pi)),
            jnp.max(jnp.where(pi > 0.0, pi / p, 0.0)),
            ratios,
        )

    q_conf = drafter.confidences if rule.reads_draft_confidence else None
    p_conf = verifier.confidences if rule.reads_verifier_confidence else None
    arguments = (drafter.probs, verifier.probs, q_conf, p_conf, tokens, uniforms)
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


def walk(
    ratios: Float[np.ndarray, "S n N"],
    ends: Int[np.ndarray, " n"],
    lengths: Int[np.ndarray, "n N"],
    *,
    block: bool,
) -> tuple[Float[np.ndarray, " n"], float]:
    """Walks along texts; returns means over the draws.

    Args:
      ratios: pi(y) / q(y) of the emitted token at each position; infinite if q is 0.
      ends: the lengths of the texts, at most N.
      lengths: the length of a draft that begins at each position, at most G.
      block: whether to use block verification, otherwise token verification.

    Returns:
      The expected rounds of each text, and the expected tokens that a round drafts.
    """
    longest, width = int(lengths.max(initial=0)), ratios.shape[2]
    # Ratios past the end of a text have no effect.
    finite = np.clip(ratios.astype(np.float64), 1e-30, 1e30)
    padded = np.pad(finite, ((0, 0), (0, 0), (0, longest)), constant_values=1.0)
    law = np.zeros((*ratios.shape, longest + 1))
    stands, joint = np.ones(ratios.shape), np.ones(ratios.shape)
    for i in range(longest):
        scaled = padded[:, :, i : i + width]
        if block:
            scaled = joint * scaled
            joint = np.minimum(scaled, 1.0)
        longer = stands / np.maximum(scaled, 1.0) * (lengths > i)
        law[..., i] = stands - longer
        stands = longer
    law[..., longest] = stands
    starts = visits(law, ends)
    return starts.sum(axis=2).mean(axis=0), float((starts * lengths).sum() / starts.sum())


def visits(
    law: Float[np.ndarray, "S n N lengths"], ends: Int[np.ndarray, " n"]
) -> Float[np.ndarray, "S n N"]:
    """Returns the expected number of rounds that begin at each position.

    Args:
      law: the probabilities of 0, 1, ... accepted tokens in a round from each position.
      ends: the lengths of the texts, at most N.
    """
    draws, texts, width, longest = *law.shape[:3], law.shape[3] - 1
    starts = np.zeros((draws, texts, width + longest + 1))
    starts[:, :, 0] = 1.0
    inside = np.arange(width)[None] < ends[:, None]
    for t in range(width):
        starts[:, :, t] *= inside[:, t]
        starts[:, :, t + 1 : t + 2 + longest] += starts[:, :, t, None] * law[:, :, t]
    return starts[:, :, :width]


def _of_drafter(
    models: Mapping[str, TextModel],
    texts: KnownTexts,
    settings: Sequence[Setting],
    draws: int,
    seed: int,
) -> Iterator[Expected]:
    """Yields the estimates of settings of one drafter and one sampling.

    Both models read the texts in a single pass for all settings.
    """
    pair = models[settings[0].drafter], models[VERIFIER]
    ruled = [_KEEPS if setting.is_alone else setting for setting in settings]
    rules = {setting.rule: setting.part("rule") for setting in ruled}
    stopped = [setting for setting in settings if setting.stopping is not None]
    bound = {
        (setting.stopping, setting.min_draft): setting.part("stopping").bind(pair[0].head)
        for setting in stopped
    }
    longest = max((setting.longest or 0 for setting in stopped), default=0)
    reads = (
        any(rule.reads_draft_confidence for rule in rules.values())
        or any(policy.reads_confidence for policy, _ in bound.values()),
        any(rule.reads_verifier_confidence for rule in rules.values()),
    )
    # Figures at the positions of texts, row by row; lengths of drafts, by policy and least draft.
    parts: dict[str, list[Positions]] = {name: [] for name in rules}
    drafts: dict[Any, list[np.ndarray]] = {ends: [] for ends in bound}
    key = jax.random.key(seed)
    groups = list(batches(texts, rows_at_once(texts, pair[0].model.vocab_size, _ARRAYS)))
    most = max(int(rows.ends.sum()) for _, rows in groups)
    size = -(-most // 128) * 128
    for i, (of_texts, rows) in enumerate(groups):
        laws = list(laws_of_models(pair, rows, settings[0].sampling, reads))
        tokens, key_of_batch = jnp.asarray(rows.outputs), jax.random.fold_in(key, i)
        # Rules read only real positions, with the same size for all batches.
        count, at = int(rows.ends.sum()), np.resize(np.flatnonzero(rows.real), size)
        places = np.unravel_index(at, rows.outputs.shape)
        real_laws = [Laws._make(None if x is None else x[places] for x in law) for law in laws]
        for name, rule in rules.items():
            figures = positions(rule, *real_laws, tokens[places], key_of_batch, samples=draws)
            parts[name].append(Positions._make(np.asarray(x)[..., :count] for x in figures))
        for ends, (policy, params) in bound.items():
            found = draft_lengths(policy, params, laws[0], tokens, longest=longest, least=ends[1])
            drafts[ends].append(np.asarray(found)[: len(of_texts)])
    by_rule = {
        name: Positions._make(np.concatenate(x, axis=-1) for x in zip(*several, strict=True))
        for name, several in parts.items()
    }
    emitted = np.asarray([len(text) for text in texts.outputs])
    left = emitted[:, None] - np.arange(groups[0][1].outputs.shape[1])[None]
    real = left > 0
    for setting in settings:
        if setting.is_alone:
            distance = _distance(by_rule[_KEEPS.rule])
            yield Expected(setting=setting, tokens_per_call=math.inf, **distance)
            continue
        figures, lengths = by_rule[setting.rule], np.full(real.shape, setting.longest or 0)
        if setting.stopping is not None:
            # With a policy a draft ends after an end-of-sequence token.
            of_policy = np.concatenate(drafts[setting.stopping, setting.min_draft])
            lengths = np.minimum(np.minimum(of_policy, lengths), np.maximum(left, 0))
        ratios = np.ones((len(figures.ratios), *real.shape))
        ratios[:, real] = figures.ratios
        block = setting.part("verification").keeps_last_pass
        rounds, drafted = walk(ratios, emitted, lengths, block=block)
        yield Expected(
            setting=setting,
            acceptance=min(float(figures.acceptance.mean(dtype=np.float64)), 1.0),
            tokens_per_call=int(emitted.sum()) / float(rounds.sum()),
            error=ratio_error(emitted, rounds),
            drafted_per_call=drafted,
            **_distance(figures),
        )


def _distance(figures: Positions) -> dict[str, float]:
    """How far a rule is from the verifier: `nats_per_token` and `overshoot`."""
    if float(figures.impossible.mean(dtype=np.float64)) > _ROUNDING:
        return {"nats_per_token": math.inf, "overshoot": math.inf}
    finite = figures.overshoot[np.isfinite(figures.overshoot)]  # infinite by rounding alone
    return {
        "nats_per_token": max(float(figures.nats.mean(dtype=np.float64)), 0.0),
        "overshoot": max(float(finite.max(initial=1.0)), 1.0),
    }


def ratio_error(emitted: Int[np.ndarray, " n"], rounds: Float[np.ndarray, " n"]) -> float:
    """Returns the linearised standard error of tokens per round over texts."""
    if len(rounds) < 2:
        return math.nan
    parts = (emitted - emitted.sum() / rounds.sum() * rounds) / rounds.sum()
    return float(np.sqrt(len(parts) / (len(parts) - 1) * np.sum(parts**2)))
