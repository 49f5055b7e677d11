"""What settings of a pair should bring, from one pass over known texts and without decoding.

Axes: n texts, N longest text, S samples, G longest draft.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checks import whole_number
from specjax.decoding.scoring import powers_of_two
from specjax.text import TextModel
from specjax.tuning.positions import Laws, Positions, draft_lengths, laws_along, positions
from specjax.tuning.reading import Rows, batches
from specjax.tuning.settings import Drawn, Setting
from specjax.tuning.texts import Texts
from specjax.tuning.times import Times
from specjax.tuning.walking import Walk, walk

# Arrays over the vocabulary that one batch needs at once.
_ARRAYS = 8
# What rounding may leave of a probability that is 0.
_ROUNDING = 1e-6
_Rule = tuple[str, float | None]
_Ends = tuple[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Screened:
    """What is expected of a setting.

    Attributes:
      setting: it.
      acceptance: the mean over positions of sum_v min(pi, q): how likely token verification accepts
        one drafted token. NaN of the verifier alone.
      defers: the share of positions at which a deferral rule defers to the verifier; NaN of others.
      tokens_per_call: emitted tokens per pass of the verifier.
      error: the standard error of that, over texts; NaN for one text.
      drafted_per_call: drafted tokens per pass of the verifier.
      nats_per_token: KL(pi || p), infinite where p cannot draw what pi may.
      latency: seconds of a text in a batch, prompt included; NaN without times.
      speedup: over the verifier alone, likewise.
    """

    setting: Setting
    acceptance: float
    defers: float
    tokens_per_call: float
    error: float
    drafted_per_call: float
    nats_per_token: float
    latency: float = math.nan
    speedup: float = math.nan

    @property
    def deferral_rate(self) -> float:
        """Passes of the verifier per emitted token, as of `evaluation.efficiency`."""
        return 1.0 / self.tokens_per_call

    def to_dict(self) -> dict[str, Any]:
        """JSON values: those of the setting and the figures; None for what is no finite number."""
        names = [field.name for field in dataclasses.fields(self)[1:]]
        found = {name: getattr(self, name) for name in (*names[:3], "deferral_rate", *names[3:])}
        shown = {name: x if math.isfinite(x) else None for name, x in found.items()}
        return {**self.setting.to_dict(), **shown}


@dataclasses.dataclass(frozen=True, eq=False)
class _Read:
    """What one drafter's settings need of the texts, of M tokens in all.

    Attributes:
      real: `[n, N]` bool, which positions are of a text.
      rules: fields `[M]` and `[S, M]`, those positions row by row.
      lengths: of drafts under each policy.
    """

    real: np.ndarray  # [n, N]
    rules: Mapping[_Rule, Positions]
    lengths: Mapping[_Ends, np.ndarray]  # [n, N]


def screen(
    models: Mapping[str, TextModel],
    texts: Texts | Mapping[Drawn, Texts],
    settings: Sequence[Setting],
    *,
    times: Times | None = None,
    samples: int = 4,
    seed: int = 0,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Screened]:
    """What settings should bring, with no decoding.

    Each drafter and the verifier read the texts once at each temperature. For texts that the
    verifier has drawn at a setting's own temperature, top-k and top-p, the rounds of each text
    under `Lossless` are unbiased, by token and by block verification and with any stopping policy
    that reads the draft alone. For other rules they are approximate: their texts follow pi, and
    here contexts are the verifier's.

    Args:
      models: by name: "verifier", and the drafters of the settings.
      texts: what the verifier has written: for all settings, or by `Setting.drawn`.
      settings: whatever is to be compared; rules, strengths, lengths and policies share the pass.
      times: with the models in the same order, for latencies.
      samples: S, how many tokens are drawn at each position where a rule's own law is not p.
      seed: of these.
      tell: is told how far it is.

    Returns:
      One `Screened` for each setting, in order.

    Raises:
      ValueError: for a setting that cannot be screened (see `check_settings`), texts that are
        missing or empty, or a model that gives NaN.
    """
    check_settings(settings, models)
    samples, seed = whole_number("samples", samples, low=1), whole_number("seed", seed, low=0)
    found: dict[Setting, Screened] = {}
    groups: dict[tuple[str, Drawn], list[Setting]] = {}
    for setting in settings:
        groups.setdefault((setting.drafter, setting.drawn), []).append(setting)
    for (name, drawn), group in groups.items():
        own = _checked_texts(texts if isinstance(texts, Texts) else texts.get(drawn), drawn)
        drafted = [setting for setting in group if setting.max_draft]
        tell(f"screening {len(group)} settings: {name}, T={drawn[0]:g} ...")
        read = _read(models, own, drafted, samples, seed) if drafted else None
        for setting in group:
            if setting.max_draft and read is not None:
                found[setting] = _screened(setting, read, times, list(models))
            else:
                found[setting] = _alone(setting, own, times)
    return [found[setting] for setting in settings]


def check_settings(settings: Sequence[Setting], models: Mapping[str, TextModel]) -> None:
    """Raises unless settings can be screened with these models.

    Args:
      settings: at least one.
      models: by name.

    Raises:
      TypeError: one is no `Setting`.
      ValueError: there is none; a model is missing; a policy needs an acceptance head that the
        drafter lacks, or learns from earlier rounds; the verification carries something over.
    """
    if not settings:
        raise ValueError("there are no settings to screen: give at least one")
    for setting in settings:
        if not isinstance(setting, Setting):
            raise TypeError(f"settings must be of tuning.Setting, got {setting!r}")
        for name in ("verifier", setting.drafter):
            if name not in models:
                raise ValueError(f"there is no model {name!r}, only {', '.join(models)}")
        if setting.make_verification().has_carry:
            raise ValueError(
                f"{setting.verification} carries its targets from round to round, which no pass "
                "over texts tells: screen Token or Block"
            )
        policy = setting.make_stopping()
        if policy.reads_past or policy.is_random:
            raise ValueError(
                f"stopping={setting.stopping} learns from earlier rounds, which no pass over texts "
                "tells: screen confidence, entropy, chance or head, and measure it by decoding"
            )
        policy.bind(models[setting.drafter].head)


def _checked_texts(texts: Texts | None, drawn: Drawn) -> Texts:
    if texts is None:
        raise ValueError(f"there are no texts for temperature, top_k, top_p = {drawn}")
    if not len(texts.outputs) or len(texts.prompts) != len(texts.outputs):
        raise ValueError(
            f"texts must have one output for each prompt, and one at least, got "
            f"{len(texts.prompts)} prompts and {len(texts.outputs)} outputs"
        )
    if not all(len(row) for rows in texts for row in rows):
        raise ValueError("texts must have at least one token in each prompt and output")
    return texts


def _read(
    models: Mapping[str, TextModel],
    texts: Texts,
    settings: Sequence[Setting],
    samples: int,
    seed: int,
) -> _Read:
    """One pass of both models over the texts, and all that the settings need of it."""
    first = settings[0]
    pair = models[first.drafter], models["verifier"]
    rules = {(one.rule, one.strength): one.make_rule() for one in settings}
    bound = {
        ends: one.make_stopping().bind(pair[0].head)
        for one in settings
        if (ends := _ends_of(one)) is not None
    }
    longest = max((one.max_draft for one in settings), default=0)
    reads = (
        any(rule.reads_draft_confidence for rule in rules.values())
        or any(policy.reads_confidence for policy, _ in bound.values()),
        any(rule.reads_verifier_confidence for rule in rules.values()),
    )
    parts: dict[_Rule, list[Positions]] = {key: [] for key in rules}
    lengths: dict[_Ends, list[np.ndarray]] = {key: [] for key in bound}
    key = jax.random.key(seed)
    known = list(batches(*texts, pair[0].model.vocab_size, _ARRAYS))
    size = _rounded(max(int(rows.ends.sum()) for _, rows in known))
    for i, (part, rows) in enumerate(known):
        laws = list(_laws(pair, rows, first, reads))
        tokens, own = jnp.asarray(rows.texts), jax.random.fold_in(key, i)
        # Rules read real positions alone, in so many places for all batches.
        count, at = int(rows.ends.sum()), np.resize(np.flatnonzero(_real(rows)), size)
        places = np.unravel_index(at, rows.texts.shape)
        drafter, verifier = (_picked(one, places) for one in laws)
        for name, rule in rules.items():
            found = positions(rule, drafter, verifier, tokens[places], own, samples=samples)
            parts[name].append(Positions._make(np.asarray(x)[..., :count] for x in found))
        for ends, (policy, params) in bound.items():
            drafts = draft_lengths(policy, params, laws[0], tokens, longest=longest)
            lengths[ends].append(np.asarray(drafts)[: part.stop - part.start])
    width = known[0][1].texts.shape[1]
    ends_of = np.asarray([len(text) for text in texts.outputs])
    return _Read(
        real=np.arange(width)[None] < ends_of[:, None],
        rules={
            name: Positions._make(np.concatenate(x, axis=-1) for x in zip(*found, strict=True))
            for name, found in parts.items()
        },
        lengths={key: np.concatenate(found) for key, found in lengths.items()},
    )


def _real(rows: Rows) -> np.ndarray:
    return np.arange(rows.texts.shape[1])[None] < rows.ends[:, None]


def _picked(laws: Laws, places: tuple[Any, ...]) -> Laws:
    plain = laws.confidences
    return Laws(laws.probs[places], None if plain is None else plain[places], laws.hidden[places])


def _rounded(count: int) -> int:
    return -(-count // 128) * 128


def _laws(
    pair: Sequence[TextModel], rows: Rows, setting: Setting, reads: Sequence[bool]
) -> Iterator[Laws]:
    for one, with_confidence in zip(pair, reads, strict=True):
        laws = laws_along(
            one.model, one.prepared, *rows[:3], setting.sampling, with_confidence=with_confidence
        )
        if not np.isfinite(np.asarray(jnp.sum(laws.probs, axis=-1))[_real(rows)]).all():
            raise ValueError(f"{one.name} gives NaN: look at the weights")
        yield laws


def _ends_of(setting: Setting) -> _Ends | None:
    if setting.stopping is None or setting.threshold is None:
        return None
    return setting.stopping, setting.threshold


def _screened(setting: Setting, read: _Read, times: Times | None, names: Sequence[str]) -> Screened:
    found, real = read.rules[setting.rule, setting.strength], read.real
    of_texts = real.sum(axis=1)
    emitted = int(of_texts.sum())
    ends = _ends_of(setting)
    if ends is None:
        lengths = np.full(real.shape, setting.max_draft)
    else:
        # Such a draft ends with its end-of-sequence token.
        left = np.maximum(of_texts[:, None] - np.arange(real.shape[1])[None], 0)
        lengths = np.minimum(np.minimum(read.lengths[ends], setting.max_draft), left)
    ratios = np.ones((len(found.ratios), *real.shape))
    ratios[:, real] = found.ratios
    block = setting.make_verification().keeps_last_pass
    walked = walk(ratios, of_texts, lengths, block=block)
    tokens = emitted / float(walked.rounds.sum())
    drafted = float(np.arange(len(walked.drafted)) @ walked.drafted)
    nats = float(found.nats.mean(dtype=np.float64))
    if float(found.impossible.mean(dtype=np.float64)) > _ROUNDING:
        nats = math.inf
    screened = Screened(
        setting=setting,
        acceptance=min(float(found.acceptance.mean(dtype=np.float64)), 1.0),
        defers=float(found.defers.mean(dtype=np.float64)),
        tokens_per_call=tokens,
        error=_error(of_texts, walked.rounds),
        drafted_per_call=drafted,
        nats_per_token=max(nats, 0.0),
    )
    if times is None:
        return screened
    where = list(names).index(setting.drafter)
    length = emitted / len(of_texts)
    spent = _round(setting, walked, times, where) * length / tokens
    latency = times.start([where]) + spent
    before = times.start() + times.alone[0] * length
    return dataclasses.replace(screened, latency=latency, speedup=before / latency)


def _round(setting: Setting, walked: Walk, times: Times, place: int) -> float:
    """The seconds of a round of the batch."""
    law = walked.drafted
    full = setting.max_draft + 1
    widths = (full,) if setting.stopping is None else powers_of_two(full)
    law = np.pad(law, (0, max(full - len(law), 0)))
    # After a whole block the drafter reads its last token in a pass of its own.
    passes = times.most(law) + times.any(walked.whole)
    return passes * times.alone[place] + times.longest_review(0, widths, law)


def _alone(setting: Setting, texts: Texts, times: Times | None) -> Screened:
    screened = Screened(
        setting=setting,
        acceptance=math.nan,
        defers=math.nan,
        tokens_per_call=1.0,
        error=0.0,
        drafted_per_call=0.0,
        nats_per_token=0.0,
    )
    if times is None:
        return screened
    length = sum(map(len, texts.outputs)) / len(texts.outputs)
    latency = times.start() + times.alone[0] * length
    return dataclasses.replace(screened, latency=latency, speedup=1.0)


def _error(emitted: np.ndarray, rounds: np.ndarray) -> float:
    """The standard error of a ratio of sums over texts, linearised."""
    if len(rounds) < 2:
        return math.nan
    parts = (emitted - emitted.sum() / rounds.sum() * rounds) / rounds.sum()
    return float(np.sqrt(len(parts) / (len(parts) - 1) * np.sum(parts**2)))
