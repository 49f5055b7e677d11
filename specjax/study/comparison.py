"""Compares settings with the verifier alone, and writes a directory; see `points`.

A stopped run can be resumed.
"""

import dataclasses
import functools
import gc
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specjax.checks import PathLike, require
from specjax.decoding.blocks import powers_of_two
from specjax.drafting import CostAware, Costs
from specjax.errors import UserError, tell
from specjax.runs.evaluation import shown
from specjax.runs.inference import tokens_of
from specjax.runs.predictions import hash_of
from specjax.runs.run_directory import RunDirectory
from specjax.study.choose import Judge, Parts, Search, answer, promising
from specjax.study.expect import cannot_estimate, estimate, frontier_of, sampling_key
from specjax.study.grid import Grid
from specjax.study.measure import (
    NATS,
    RELATIVE,
    Bench,
    Measuring,
    MeasuringError,
    Scores,
    measure,
    over,
    score,
)
from specjax.study.points import COMPARED, CONFIG_NAME, MADE, Points
from specjax.study.tables import by_sampling
from specjax.study.texts import Prompting, Texts
from specjax.text import Pair, TextModel
from specjax.text.decoder import Decoder
from specjax.text.draft_length import DraftLength, draft_length, round_costs
from specjax.text.drafts import catches_up
from specjax.text.passes import measure_costs
from specjax.text.requests import common_of
from specjax.text.setting import DRAFTER_ALONE, VERIFIER_ALONE, Setting, check_single

# The settings to measure: those selected by estimates, all, or none.
FRONT, ALL, NONE = "front", "all", "none"
# Of models with more numbers than this, programs are dropped when the next setting needs others.
_LARGE = 2**28


def compare(
    make_models: Callable[[Sequence[Setting]], Mapping[str, TextModel]],
    settings: Grid | Sequence[Setting],
    texts: Texts,
    *,
    measuring: Measuring,
    output_dir: PathLike,
    measured: str = FRONT,
    search: Search | None = None,
    options: Mapping[str, Any] | None = None,
    prompts: Prompting | None = None,
    one_bucket: bool = False,
    allow_other_environment: bool = False,
    on_start: Callable[[RunDirectory], None] | None = None,
) -> dict[str, Any]:
    """Estimates settings, measures the promising settings, and writes tables and plots.

    Settings that cannot be estimated are measured. With limits the chosen setting is measured again
    on held-out texts (see `choose`). Estimates and measurements in the directory are not repeated,
    and a kill loses only the setting that was being measured. Programs of large models are dropped
    (`jax.clear_caches`) before a setting that needs others. A setting that fails gets a line with
    the reason; the next start tries it again. Tables and plots include settings of earlier grids.

    Args:
      make_models: returns the models of settings by name, "verifier" and the drafters; called after
        the arguments have been checked.
      settings: a grid, or settings; the verifier alone of each sampling is added.
      output_dir: a new directory, or that of a comparison with the same texts and measuring.
      measured: the settings to measure: "front", selected by estimates; "all", without estimates;
        or "none".
      options: more options of every decoder, such as `max_new_tokens`.
      one_bucket: whether to pad all prompts to the same bucket, for fewer programs.
      allow_other_environment: continue a run that began on another device or with other versions.
      on_start: called with the `RunDirectory` after all checks and before the long work.

    Returns:
      The content of `results.json`.

    Raises:
      OSError: the directory cannot be written, or another process works there.
      UserError: a value is wrong, a text cannot be decoded, a library is missing, or the directory
        has another run.
    """
    require("matplotlib.figure", "eval")
    measuring = measuring.fitted(texts, quiet=measured == NONE)
    prompts, search = prompts or Prompting(), search or Search()
    chooses = bool(search.limits)
    chooses_lengths = isinstance(settings, Grid) and settings.max_drafts is None
    if measured not in (FRONT, ALL, NONE):
        raise UserError(f"measured must be 'front', 'all' or 'none', got {measured!r}")
    if chooses and measured == NONE:
        raise UserError("limits need measurements: leave out --estimate, or the limits")
    if chooses_lengths and measured == ALL:
        raise UserError("max_drafts=None needs estimates: leave out --full, or give the lengths")
    parts = {COMPARED: (0, len(texts.examples), measuring.latency_limit)}
    if chooses:
        order = np.random.default_rng(search.seed).permutation(len(texts.examples))
        texts = texts.in_order(order.tolist())
        parts = search.parts(len(texts.examples), measuring)
    grid = settings.settings() if isinstance(settings, Grid) else list(settings)
    if not grid or not all(isinstance(setting, Setting) for setting in grid):
        raise UserError(f"settings must be a Grid or a list of Settings, got {grid!r:.60}")
    for setting in grid:
        check_single(setting)
    # Each sampling is compared with its verifier alone.
    with_baselines = ((setting.verifier_alone, setting) for setting in grid)
    settings = search.with_balls([*dict.fromkeys(itertools.chain(*with_baselines))])
    if chooses:
        lossy = [setting for setting in settings if not (setting.is_lossless or setting.is_alone)]
        needs_quality = search.wants_quality or (search.max_loss is not None and lossy)
        if measuring.quality is None and needs_quality:
            raise UserError(
                "these limits need a measured quality: give references and METRICS, or MAX_NATS"
            )
        # One verifier alone is the baseline.
        ways = [*dict.fromkeys(map(sampling_key, settings))]
        if len(ways) > 1:
            raise UserError(
                "limits need one (temperature, top_k, top_p, processors) for all settings, got "
                f"{', '.join(map(str, ways))}: use one output_dir for each"
            )
    with RunDirectory(output_dir, config_name=CONFIG_NAME, makes=MADE) as run:
        bench = _bench(make_models(settings), texts, measuring, options or {}, prompts, one_bucket)
        if chooses_lengths:  # of what has no estimate the usual length is measured
            usual = Setting().longest
            settings = [
                x
                for x in settings
                if x.longest in (None, usual) or cannot_estimate(x, bench.models) is None
            ]
        settings = _possible(settings, grid, bench)
        configuration = _configuration(bench, prompts)
        if chooses:
            configuration["held_out"] = search.held_out
        run.claim(configuration, allow_other_environment=allow_other_environment)
        points = Points(run, measuring.quality, measuring.bootstrap)
        points.read(bench.models)
        if on_start is not None:
            on_start(run)
        look = functools.partial(_look, bench, points, parts)
        taken = settings
        more: dict[str, Any] = {}
        if measured != ALL:
            why_not = {setting: cannot_estimate(setting, bench.models) for setting in settings}
            known = [setting for setting in settings if why_not[setting] is None]
            if left := [setting for setting in settings if why_not[setting] is not None]:
                tell(
                    f"{len(left)} of {len(settings)} settings cannot be estimated, only measured; "
                    f"the first is {left[0].described()}: {why_not[left[0]]}"
                )
            # By the first texts.
            limit = search.estimate_limit
            read = bench.prompts[: min(parts[COMPARED][1], limit)]
            if len(read) < limit:
                tell(f"ESTIMATE_LIMIT={limit}: estimating from all {len(read)} texts")
            how: dict[str, Any] = {
                "batch_size": measuring.batch_size,
                "draws": search.draws,
                "seed": search.seed,
            }
            line = [setting for setting in frontier_of(known) if setting not in known]
            about = {
                **how,
                "settings": [setting.to_dict() for setting in known],
                "frontier": [setting.to_dict() for setting in line],
                "texts": len(read),
                "models": {name: model.fingerprint for name, model in bench.models.items()},
            }
            how["options"] = bench.options
            both = [*known, *line]
            points.estimate(about, lambda: estimate(bench.models, both, read, **how), line)
            if chooses_lengths:
                known, more["lengths"] = _with_lengths(bench, points, known)
            picked = {setting for setting in settings if setting.is_alone} | set(left)
            for group in by_sampling(known):
                estimates = [points.estimates[setting] for setting in group]
                picked |= set(promising(estimates, search.candidates, search.max_nats))
            taken = [setting for setting in settings if setting in picked]
            if measured != NONE and len(taken) < len(settings):
                tell(
                    f"measuring {len(taken)} of {len(settings)} settings, the best by the "
                    "estimates; --full measures all"
                )
        if measured != NONE:
            scored = points.scored()
            missing = [setting for setting in taken if setting not in scored]
            if done := len(taken) - len(missing):
                tell(f"{done} of {len(taken)} settings were measured before")
            begin = time.perf_counter()
            is_large = sum(model.size for model in bench.models.values()) > _LARGE
            for i, setting in enumerate(missing):
                left_min = (time.perf_counter() - begin) / max(i, 1) * (len(missing) - i) / 60
                eta = f" (about {left_min:.0f} min left)" if i and left_min >= 1 else ""
                tell(f"setting {i + 1} of {len(missing)}: {setting.described()} ...{eta}")
                try:
                    look(setting, COMPARED)
                except MeasuringError as error:  # it does not stop the others
                    tell(f"  failed: {error}")
                if is_large and setting.curve != missing[(i + 1) % len(missing)].curve:
                    jax.clear_caches()  # these programs may be more than 1 GB
                    gc.collect()
        if chooses:
            judge = Judge(search, settings[0].verifier_alone, points.quality, points.bootstrap)
            scored = points.scored()
            others = (x for x in settings if x.method != DRAFTER_ALONE and x in scored)
            found = {setting: scored[setting] for setting in others}
            more |= answer(look, found, judge, parts)
        return points.finish(settings, more)


def _possible(settings: Sequence[Setting], asked: Sequence[Setting], bench: Bench) -> list[Setting]:
    """The settings without those that a draft head cannot do, such as the drafter alone.

    As in a `Grid`, a value that was asked for and fits no other setting is an error.
    """
    refused: dict[Setting, str] = {}
    for setting in settings:
        policy, trial = setting.part("stopping"), setting
        if isinstance(policy, CostAware):  # a decoder would measure its costs
            trial = dataclasses.replace(setting, stopping=None)
        if any(bench.models[name].is_head for name in setting.drafters if name in bench.models):
            try:
                bench.decoder(trial, 1)
            except UserError as error:
                refused[setting] = str(error)
    possible = [setting for setting in settings if setting not in refused]
    fitting = {value for setting in possible for value in setting.to_dict().items()}
    for setting, why in refused.items():
        if setting in asked and not setting.is_alone and not fitting >= setting.to_dict().items():
            raise UserError(f"{setting.described()}: {why}")
    if refused:
        first, why = next(iter(refused.items()))
        tell(
            f"left out {len(refused)} of {len(settings)} settings that a draft head cannot do; the "
            f"first is {first.described()}: {why}"
        )
    return possible


def _with_lengths(
    bench: Bench, points: Points, known: Sequence[Setting]
) -> tuple[list[Setting], list[dict[str, Any]]]:
    """Keeps of the lengths of drafts the best, by estimated tokens and measured passes.

    Returns:
      The settings, and the choices for `results.json`.
    """
    rows, verifier = bench.measuring.latency_batch_size, bench.models["verifier"]
    rows += -rows % verifier.row_multiple
    curves: dict[Setting, dict[int, float]] = {}
    curve_of: dict[Setting, Setting] = {}
    for setting in known:
        if setting.longest is not None and setting.stopping is None:
            curve_of[setting] = dataclasses.replace(setting, max_draft=1)
            tokens = curves.setdefault(curve_of[setting], {})
            tokens[setting.longest] = points.estimates[setting].tokens_per_call

    def choose() -> list[DraftLength]:
        costs: dict[str, Costs] = {}
        chosen = []
        for curve, tokens in curves.items():
            name, small = curve.drafter, bench.models[curve.drafter]
            if name not in costs:
                tell(f"measuring the passes of {small.name} and {verifier.name} ...")
                widths, longest = powers_of_two(max(tokens) + 1), max(map(len, bench.prompts))
                pair = Pair(small, verifier)
                costs[name] = measure_costs(
                    pair, (rows,), widths, prompt_length=longest, with_alone=True
                )
            rounds = round_costs(costs[name], rows, tokens, catches_up=catches_up(small))
            chosen.append(draft_length(rounds))
        return chosen

    about = [rows, *([curve.to_dict(), *tokens.items()] for curve, tokens in curves.items())]
    lengths = map(DraftLength._make, points.once("lengths", about, choose))
    of_curve = dict(zip(curves, lengths, strict=True))
    kept = []
    for setting in known:
        length = of_curve.get(curve_of.get(setting, setting))
        if length is None or length.max_draft == setting.longest:
            kept.append(setting)
        else:
            del points.estimates[setting]
    told = [
        {
            "setting": curve.described(without=("max_draft",)),
            "lossless": curve.is_lossless,
            **length._asdict(),
        }
        for curve, length in of_curve.items()
    ]
    return kept, told


def _bench(
    models: Mapping[str, TextModel],
    texts: Texts,
    measuring: Measuring,
    options: Mapping[str, Any],
    prompts: Prompting,
    one_bucket: bool,
) -> Bench:
    decoder = Decoder(models, Setting(method=VERIFIER_ALONE), batch_size=1, **options)
    tokens = [
        tokens_of(decoder, x.inputs, f"text {x.id}", chat=prompts.chat, truncate=prompts.truncate)
        for x in texts.examples
    ]
    if one_bucket:
        longest = max(map(len, tokens))
        bucket = next(length for length in decoder.buckets if length >= longest)
        options = {**options, "buckets": (bucket,)}
    # Alike for all settings, because a model that reads whole prompts would seem slower.
    alike = prompts.task is not None and decoder.can_share_prefix
    shared = {"shared": common_of(tokens)} if alike else {}
    return Bench(models, texts, tokens, measuring, options, **shared)


def _configuration(bench: Bench, prompts: Prompting) -> dict[str, Any]:
    """The values that determine every point, except its setting."""
    alone = Setting(method=VERIFIER_ALONE)
    described = bench.decoder(alone, bench.measuring.batch_size).describe()
    written = [(e.id, e.inputs) for e in bench.texts.examples], list(bench.texts.references)
    names = [name for name in ("verifier", "drafter") if name in bench.models]
    configuration = {
        "models": {name: bench.models[name].fingerprint for name in names},
        "options": {name: described[name] for name in ("max_new_tokens", "buckets", "mesh")},
        "stop": list(bench.options.get("stop", ())),
        "environment": described["environment"],
        "measuring": bench.measuring.describe(),
        "texts": hash_of(written),
        "tokens": hash_of([prompt.tolist() for prompt in bench.prompts]),
        "rows": len(bench.prompts),
        **({"shared": len(bench.shared)} if len(bench.shared) else {}),
        "chat": prompts.chat,
    }
    if bench.texts.problems is not None:
        configuration["problems"] = hash_of(bench.texts.problems)
    return configuration


def _look(bench: Bench, points: Points, parts: Parts, setting: Setting, part: str) -> Scores:
    """Measures a setting on a part of the texts, once; returns its figures.

    Raises:
      MeasuringError: the setting could not be measured; the point says why.
    """
    if (known := points.scored(part).get(setting)) is not None:
        return known
    begin, how, models = time.perf_counter(), bench.measuring, bench.models
    try:
        alone = points.scored(part).get(setting.verifier_alone)
        if setting.method != VERIFIER_ALONE and alone is None:
            raise UserError("the verifier alone failed, so there is no baseline")
        here = bench.part(*parts[part])
        measured = measure(setting, here)
        scores = score(setting, measured, here)
    except Exception as error:
        points.put_failed(setting, part, error)
        error.__traceback__ = None  # frees the objects in its frames
        gc.collect()
        raise MeasuringError(error) from None
    used = [name for name in ("verifier", *setting.drafters) if name in models]
    about = {
        "over_verifier": {
            name: over(scores, alone or scores, name, how.bootstrap) for name in how.metrics
        },
        "latency_of": {
            "texts": measured.times.seconds.shape[2] * how.latency_batch_size,
            "batch_size": how.latency_batch_size,
            "repeats": how.repeats,
        },
        "models": {name: models[name].fingerprint for name in used},
        "process": {"compiled": measured.compiled, "seconds": time.perf_counter() - begin},
    }
    points.put(setting, part, measured, scores, about)
    names_shown = [name for name in (how.quality, RELATIVE, NATS) if name and scores.has(name)]
    tell("  " + ", ".join(f"{name} {shown(scores.figures[name])}" for name in names_shown))
    return scores
