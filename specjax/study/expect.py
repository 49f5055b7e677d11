"""Estimates settings from the verifier's outputs, without decoding.

Settings of a single drafter are walked along the texts, rule by rule and position by position;
plans of several drafters and of copies are estimated from acceptance rates (see `plan_rounds`).

Axes: n texts, N longest text, S draws, G longest draft.
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
from specjax.drafting import FixedLength
from specjax.drafting.neural import catches_up_on
from specjax.errors import UserError
from specjax.rules import Budgeted
from specjax.study.clock import VERIFIER, Clock
from specjax.study.drafting_plans import Plan, cannot_plan
from specjax.study.known_rates import KnownRates, known_rates
from specjax.study.measure import tell as _say
from specjax.study.plan_rounds import plan_round, tree_seconds
from specjax.study.positions import Laws, Positions, draft_lengths, laws_of_models, positions
from specjax.study.tree_walks import TreeLaw, TreeWalks, tree_of
from specjax.study.walking import Walked, follow, walk
from specjax.text import TextModel
from specjax.text.passes import PassTimes, measure_times
from specjax.text.setting import VERIFIER_ALONE, Setting
from specjax.text.teacher_forcing import (
    KnownTexts,
    batches,
    rows_at_once,
    written,
)
from specjax.types import Stopping

# The number of arrays over the vocabulary that a batch needs.
_ARRAYS = 8
# Rounding may make a probability of 0 this large.
_ROUNDING = 1e-6
# A rule that always keeps the drafter, for the figures of the drafter alone.
_KEEPS = Setting(rule="Diff(1.0)")
# Temperature, top-k and top-p: settings with the same sampling share a pass over the texts.
SamplingKey = tuple[float, int | None, float | None, tuple[str, ...]]
_Ends = tuple[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expected:
    """The estimate of a setting; NaN if unknown.

    Attributes:
      setting: the setting.
      acceptance: the mean over positions of sum_v min(pi, q), the probability that token
        verification accepts a drafted token.
      defers: the share of positions at which a deferral rule defers to the verifier.
      tokens_per_call: emitted tokens per pass of the verifier; infinite for the drafter alone.
      error: the standard error of `tokens_per_call`, over texts.
      drafted_per_call: drafted tokens per pass of the verifier.
      nats_per_token: KL(pi || p), infinite if pi has tokens that p cannot draw.
      overshoot: the largest pi(v) / p(v) of any token at any position; infinite likewise.
      latency: seconds of a text in a batch, prompt included.
      speedup: over the verifier alone, prompt included.
    """

    setting: Setting
    acceptance: float = math.nan
    defers: float = math.nan
    tokens_per_call: float = 1.0
    error: float = math.nan
    drafted_per_call: float = 0.0
    nats_per_token: float = 0.0
    overshoot: float = 1.0
    latency: float = math.nan
    speedup: float = math.nan

    @property
    def speed(self) -> float:
        """The speed-up; without times, the tokens per pass of the verifier."""
        return self.tokens_per_call if math.isnan(self.speedup) else self.speedup

    def to_dict(self) -> dict[str, Any]:
        """Returns the figures as JSON values, None for numbers that are not finite."""
        names = [field.name for field in dataclasses.fields(self)[1:]]
        found = {name: getattr(self, name) for name in names}
        return {name: x if math.isfinite(x) else None for name, x in found.items()}

    @classmethod
    def of(cls, setting: Setting, values: Mapping[str, Any]) -> "Expected":
        """Returns the estimate of a `to_dict`."""
        infinite = ("nats_per_token", "tokens_per_call", "overshoot")
        absent = {name: math.inf if name in infinite else math.nan for name in values}
        found = {name: absent[name] if x is None else x for name, x in values.items()}
        return cls(setting=setting, **found)


def estimate(
    models: Mapping[str, TextModel],
    settings: Sequence[Setting],
    prompts: Sequence[np.ndarray],
    *,
    options: Mapping[str, Any] | None = None,
    shared: np.ndarray | None = None,
    batch_size: int = 1,
    draws: int = 4,
    seed: int = 0,
    with_times: bool = True,
    tell: Callable[[str], None] | None = None,
) -> tuple[list[Expected], dict[str, Any] | None]:
    """Estimates settings on the verifier's outputs for some prompts.

    Args:
      models: by name, "verifier" and the drafters.
      settings: the settings to estimate.
      prompts: the tokens of each prompt, at least one prompt.
      options: more options of every decoder, such as `max_new_tokens`.
      shared: `[L]` tokens with which most prompts begin and which every decoder has read before, as
        in `Bench`; None for whole prompts.
      batch_size: B, for measuring passes.
      draws: see `expect`.
      seed: the seed of all draws.
      with_times: whether to measure passes, for latencies.
      tell: called with messages about the progress; by default they are printed on stderr.

    Returns:
      An estimate for each setting, in order; and the times of passes as JSON values, or None.

    Raises:
      ValueError: a setting cannot be estimated, a prompt cannot be decoded, or a model gives NaN.
    """
    check_settings(settings, models)
    say = tell or _say
    texts: dict[SamplingKey, KnownTexts] = {}
    times = None
    for key in dict.fromkeys(map(sampling_key, settings)):
        temperature, top_k, top_p, processors = key
        alone = Setting(
            method=VERIFIER_ALONE,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            processors=processors,
        )
        decoder = alone.decoder(models, **{**(options or {}), "batch_size": batch_size})
        say(f"the verifier decodes {len(prompts)} prompts at temperature {temperature:g} ...")
        texts[key] = written(decoder, prompts, seed=seed)
        if times is None and with_times:
            say("measuring the time of each pass ...")
            times = _measured_times(models, settings, decoder, prompts, shared)
    found = expect(models, texts, settings, times=times, draws=draws, seed=seed, tell=say)
    return found, None if times is None else times.to_dict()


def _measured_times(
    models: Mapping[str, TextModel],
    settings: Sequence[Setting],
    decoder: Any,
    prompts: Sequence[np.ndarray],
    shared: np.ndarray | None,
) -> PassTimes:
    plans = [Plan.of(setting) for setting in settings if setting.method is None]
    tables = sorted({table for plan in plans for table in plan.tables}, key=str)
    longest = max((plan.longest for plan in plans), default=1)
    given: list[Any] = list(prompts[: decoder.batch_size])
    prefix = decoder._whole_prefix(shared) if shared is not None and shared.size else None
    tokens = sum(map(len, prompts))
    left = tokens if prefix is None else tokens - sum(map(prefix.common, prompts))
    return measure_times(
        models,
        tables,
        powers_of_two(longest + 1),
        rows=decoder.batch_size,
        prompt_length=max(1, round(float(np.mean([len(prompt) for prompt in prompts])))),
        call=lambda: decoder(given, max_new_tokens=1, progress=False, prefix=prefix),
        read=left / tokens,
    )


def expect(
    models: Mapping[str, TextModel],
    texts: Mapping[SamplingKey, KnownTexts],
    settings: Sequence[Setting],
    *,
    times: PassTimes | None = None,
    draws: int = 4,
    seed: int = 0,
    tell: Callable[[str], None] = lambda _: None,
    catches_up: bool | None = None,
) -> list[Expected]:
    """Estimates settings on known texts.

    Each drafter and the verifier read the texts once at each temperature. If the verifier has drawn
    the texts with the setting's own temperature, top-k and top-p, the numbers of rounds with
    `Lossless` are unbiased, for token and block verification and for stopping policies that read
    only the draft. For other rules they are approximate: their outputs follow pi, but here the
    contexts are the verifier's.

    Args:
      models: by name: "verifier", and the drafters of the settings.
      texts: the verifier's outputs, by `sampling_key`.
      settings: the settings; rules, strengths, lengths and policies share the pass.
      times: the times of passes, for latencies.
      draws: S, the number of tokens to draw at each position for rules whose pi is not p or q.
      seed: the seed of these draws.
      tell: called with messages about the progress.
      catches_up: whether a drafter of chains reads the last token of an accepted draft together
        with the next; None: as on the verifier's device.

    Returns:
      An estimate for each setting, in order.

    Raises:
      ValueError: a setting cannot be estimated (see `cannot_estimate`), or a model gives NaN.
    """
    check_settings(settings, models)
    draws, seed = whole_number("draws", draws, low=1), whole_number("seed", seed, low=0)
    if catches_up is None:
        catches_up = catches_up_on(models[VERIFIER].platform)
    clock = Clock(times, owes=not catches_up)
    found: dict[Setting, Expected] = {}
    groups: dict[tuple[SamplingKey, str | None], list[Setting]] = {}
    for setting in settings:
        drafter = setting.drafter if setting.drafting is None or tree_of(setting) else None
        groups.setdefault((sampling_key(setting), drafter), []).append(setting)
    for (key, drafter), group in groups.items():
        own = texts[key]
        length = sum(map(len, own.outputs)) / len(own.outputs)
        before = clock.start() + clock.step(VERIFIER) * length
        tell(
            f"estimating {len(group)} settings with {drafter or 'drafting plans'} at "
            f"temperature {key[0]:g} ..."
        )
        for expected, latency in _of_group(models, own, group, clock, length, draws, seed):
            if times is not None:
                speedup = before / latency
                expected = dataclasses.replace(expected, latency=latency, speedup=speedup)
            found[expected.setting] = expected
    return [found[setting] for setting in settings]


def sampling_key(setting: Setting) -> SamplingKey:
    """Returns a key shared by settings with the same sampling."""
    return setting.temperature, setting.top_k, setting.top_p, setting.processors


def check_settings(settings: Sequence[Setting], models: Mapping[str, TextModel]) -> None:
    """Raises ValueError for a setting that cannot be estimated with these models."""
    for setting in settings:
        if reason := cannot_estimate(setting, models):
            raise UserError(f"{setting.described()} cannot be estimated: {reason}")


def cannot_estimate(setting: Setting, models: Mapping[str, TextModel]) -> str | None:
    """Returns why a setting cannot be estimated, or None."""
    if setting.method == VERIFIER_ALONE:
        return None
    if setting.processors:
        return "processors depend on the tokens so far"
    needed: tuple[str, ...] = (setting.drafter,)
    if setting.drafting is not None:
        if reason := cannot_plan(setting):
            return reason
        needed = Plan.of(setting).models
    for name in (VERIFIER, *needed):
        if name not in models:
            return f"there is no model {name!r}; the models are {', '.join(models)}"
    if setting.is_alone:
        return None
    if setting.method is not None:
        return "the choice of the model depends on the text so far"
    if isinstance(setting.made("rule"), Budgeted):
        return "the decisions of Budgeted depend on earlier tokens"
    if setting.made("verification").has_carry:
        return f"{setting.verification} carries its targets from round to round"
    policy = _policy(setting)
    if policy.reads_past or policy.is_random:
        return f"stopping={setting.stopping} uses earlier rounds or random draws"
    try:
        policy.bind(None if setting.drafting else models[setting.drafter].head)
    except ValueError as error:
        return str(error)
    return None


def _policy(setting: Setting) -> Stopping:
    found: Stopping | None = setting.made("stopping")
    return FixedLength() if found is None else found


def _of_group(
    models: Mapping[str, TextModel],
    texts: KnownTexts,
    settings: Sequence[Setting],
    clock: Clock,
    length: float,
    draws: int,
    seed: int,
) -> Iterator[tuple[Expected, float]]:
    """Yields estimates for settings of one drafter, or for plans, with the seconds of a text."""
    if settings[0].drafting is not None and tree_of(settings[0]) is None:
        plans = {setting: Plan.of(setting) for setting in settings}
        sampling = settings[0].sampling
        known = known_rates(models, texts, sampling, list(plans.values()))
        for setting, plan in plans.items():
            yield _planned(setting, plan, known, clock, length)
        return
    others = [setting for setting in settings if setting.method != VERIFIER_ALONE]
    read = _read(models, texts, others, draws, seed) if others else None
    for setting in settings:
        if setting.method == VERIFIER_ALONE:
            spent = clock.start() + clock.step(VERIFIER) * length
            yield Expected(setting=setting, error=0.0), spent
        elif setting.is_alone and read is not None:
            figures = _apart(read.rules[_KEEPS.rule])
            spent = clock.start_alone(setting.drafter) + clock.step(setting.drafter) * length
            yield Expected(setting=setting, tokens_per_call=math.inf, **figures), spent
        elif read is not None:
            yield _walked(setting, read, clock, length)


def _planned(
    setting: Setting, plan: Plan, known: KnownRates, clock: Clock, length: float
) -> tuple[Expected, float]:
    found = plan_round(plan, known, clock)
    spent = clock.start(plan.read_by()) + found.seconds * length / found.tokens
    expected = Expected(
        setting=setting, tokens_per_call=found.tokens, drafted_per_call=found.drafted, defers=1.0
    )
    return expected, spent


@dataclasses.dataclass(frozen=True, eq=False)
class _Read:
    """The models' outputs along the texts, for the settings of a drafter; M tokens in total.

    Attributes:
      real: `[n, N]` bool, which positions belong to a text.
      rules: rule -> fields `[M]` and `[S, M]`, these positions row by row.
      lengths: policy -> lengths of drafts.
      trees: the rounds of each setting with trees.
    """

    real: np.ndarray  # [n, N]
    rules: Mapping[str, Positions]
    lengths: Mapping[_Ends, np.ndarray]  # [n, N]
    trees: Mapping[Setting, TreeLaw]


def _read(
    models: Mapping[str, TextModel],
    texts: KnownTexts,
    settings: Sequence[Setting],
    draws: int,
    seed: int,
) -> _Read:
    """Reads the texts with both models, in a single pass for all settings."""
    pair = models[settings[0].drafter], models[VERIFIER]
    ruled = [_KEEPS if setting.is_alone else setting for setting in settings]
    rules = {setting.rule: setting.made("rule") for setting in ruled}
    stopped = [setting for setting in settings if setting.stopping is not None]
    bound = {_ends(setting): _policy(setting).bind(pair[0].head) for setting in stopped}
    longest = max((setting.max_draft or 0 for setting in stopped), default=0)
    walks = TreeWalks(settings, draws)
    reads = (
        walks.read_confidence
        or any(rule.reads_draft_confidence for rule in rules.values())
        or any(policy.reads_confidence for policy, _ in bound.values()),
        any(rule.reads_verifier_confidence for rule in rules.values()),
    )
    parts: dict[str, list[Positions]] = {key: [] for key in rules}
    lengths: dict[_Ends, list[np.ndarray]] = {key: [] for key in bound}
    key = jax.random.key(seed)
    known = list(batches(texts, rows_at_once(texts, pair[0].model.vocab_size, _ARRAYS)))
    size = _rounded(max(int(rows.ends.sum()) for _, rows in known))
    for i, (of_texts, rows) in enumerate(known):
        laws = list(laws_of_models(pair, rows, settings[0].sampling, reads))
        tokens, own = jnp.asarray(rows.outputs), jax.random.fold_in(key, i)
        # Rules read only real positions, with the same size for all batches.
        count, at = int(rows.ends.sum()), np.resize(np.flatnonzero(rows.real), size)
        places = np.unravel_index(at, rows.outputs.shape)
        drafter, verifier = (_picked(law, places) for law in laws)
        for name, rule in rules.items():
            found = positions(rule, drafter, verifier, tokens[places], own, samples=draws)
            parts[name].append(Positions._make(np.asarray(x)[..., :count] for x in found))
        for ends, (policy, params) in bound.items():
            drafts = draft_lengths(policy, params, laws[0], tokens, longest=longest, least=ends[1])
            lengths[ends].append(np.asarray(drafts)[: len(of_texts)])
        walks.read(laws, tokens, len(of_texts), jax.random.fold_in(own, 1))
    width = known[0][1].outputs.shape[1]
    ends_of = np.asarray([len(text) for text in texts.outputs])
    return _Read(
        real=np.arange(width)[None] < ends_of[:, None],
        rules={
            name: Positions._make(np.concatenate(x, axis=-1) for x in zip(*found, strict=True))
            for name, found in parts.items()
        },
        lengths={key: np.concatenate(found) for key, found in lengths.items()},
        trees=walks.laws(),
    )


def _picked(laws: Laws, places: tuple[Any, ...]) -> Laws:
    plain = laws.confidences
    return Laws(laws.probs[places], None if plain is None else plain[places], laws.hidden[places])


def _rounded(count: int) -> int:
    return -(-count // 128) * 128


def _ends(setting: Setting) -> _Ends:
    return str(setting.stopping), setting.min_draft


def _walked(setting: Setting, read: _Read, clock: Clock, length: float) -> tuple[Expected, float]:
    found, real, most = read.rules[setting.rule], read.real, setting.max_draft or 0
    of_texts = real.sum(axis=1)
    emitted = int(of_texts.sum())
    lengths = np.full(real.shape, most)
    if setting.stopping is not None:
        # With a policy a draft ends after an end-of-sequence token.
        left = np.maximum(of_texts[:, None] - np.arange(real.shape[1])[None], 0)
        lengths = np.minimum(np.minimum(read.lengths[_ends(setting)], most), left)
    if setting in read.trees:
        law = read.trees[setting]
        lengths[:] = Plan.of(setting).longest
        walked = follow(law.accepted, of_texts, lengths, law.whole)
    else:
        ratios = np.ones((len(found.ratios), *real.shape))
        ratios[:, real] = found.ratios
        block = setting.made("verification").keeps_last_pass
        walked = walk(ratios, of_texts, lengths, block=block)
    tokens = emitted / float(walked.rounds.sum())
    expected = Expected(
        setting=setting,
        acceptance=min(float(found.acceptance.mean(dtype=np.float64)), 1.0),
        defers=float(found.defers.mean(dtype=np.float64)),
        tokens_per_call=tokens,
        error=_error(of_texts, walked.rounds),
        drafted_per_call=float(np.arange(len(walked.drafted)) @ walked.drafted),
        **_apart(found),
    )
    spent = clock.start([setting.drafter]) + _round(setting, walked, clock) * length / tokens
    return expected, spent


def _apart(found: Positions) -> dict[str, float]:
    """How far a rule is from the verifier: `nats_per_token` and `overshoot`."""
    if float(found.impossible.mean(dtype=np.float64)) > _ROUNDING:
        return {"nats_per_token": math.inf, "overshoot": math.inf}
    finite = found.overshoot[np.isfinite(found.overshoot)]  # infinite by rounding alone
    return {
        "nats_per_token": max(float(found.nats.mean(dtype=np.float64)), 0.0),
        "overshoot": max(float(finite.max(initial=1.0)), 1.0),
    }


def _round(setting: Setting, walked: Walked, clock: Clock) -> float:
    """The seconds of a batch's round."""
    if tree := tree_of(setting):
        return tree_seconds(tree, setting.drafter, walked.whole, clock)
    law, full, drafter = walked.drafted, (setting.max_draft or 0) + 1, setting.drafter
    widths = (full,) if setting.stopping is None else powers_of_two(full)
    law = np.pad(law, (0, max(full - len(law), 0)))
    passes = clock.most(law) + clock.last_token(walked.whole)
    return clock.draft(drafter, passes) + clock.longest_review(VERIFIER, widths, law, drafter)


def _error(emitted: np.ndarray, rounds: np.ndarray) -> float:
    """The linearised standard error of a ratio of sums over texts."""
    if len(rounds) < 2:
        return math.nan
    parts = (emitted - emitted.sum() / rounds.sum() * rounds) / rounds.sum()
    return float(np.sqrt(len(parts) / (len(parts) - 1) * np.sum(parts**2)))
