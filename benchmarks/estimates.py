"""Compares the estimates of settings with decoding."""

import argparse
import dataclasses
import itertools
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

import specjax
from benchmarks import command
from benchmarks.spare_maps import spare_maps
from specjax.cli.report import Report
from specjax.evaluation import divergence
from specjax.study.expect import Expected, check_settings, expect, sampling_key
from specjax.study.measure import time_call
from specjax.text import Decoder
from specjax.text.parts import Part
from specjax.text.results import finite
from specjax.text.setting import VERIFIER_ALONE, Setting
from specjax.text.teacher_forcing import decode_texts

HELP = "estimates of settings against decoding: tokens per call and nats per token"

# Two strengths of each rule: the second keeps more of the drafter.
RULES: dict[str, tuple[float, ...]] = {
    "Lossless": (),
    "Chow": (0.3, 0.6),
    "ChowLog": (0.5, 2.0),
    "Diff": (0.0, 0.3),
    "DiffLog": (0.0, 0.5),
    "OPT": (0.0, 0.5),
    "OPTLog": (0.0, 1.0),
    "TokenV1": (0.3, 0.7),
    "TokenV2": (0.3, 0.7),
    "TokenV3": (0.5, 0.9),
    "BiLD": (1.0, 3.0),
    "Lossy": (0.3, 0.7),
    "LossyTuned": (0.3, 0.7),
    "Mentored": (0.05, 0.3),
}
# The longest draft with Confidence.
_LONGEST = 12
_COLUMNS = (
    *("setting", "expected", "expected_error", "decoded", "ratio"),
    *("expected_nats", "decoded_nats", "seconds"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the pair, its prompts and the settings."""
    command.add_pair(parser)
    parser.add_argument(
        "--screened", type=int, default=128, help="number of prompts for the estimates"
    )
    parser.add_argument(
        "--prompts", type=int, default=128, help="number of other prompts to decode"
    )
    parser.add_argument("--rows", type=int, default=16, help="batch size")
    parser.add_argument("--max-new", type=int, default=64, help="longest output, in tokens")
    parser.add_argument(
        "--rules", nargs="+", choices=RULES, default=list(RULES), help="rules, two strengths each"
    )
    parser.add_argument("--drafts", type=int, nargs="*", default=[5], help="draft lengths G")
    parser.add_argument(
        "--confidence", type=float, nargs="*", default=[], help="thresholds of Confidence"
    )


def run(args: argparse.Namespace) -> Report:
    """Estimates all settings on some prompts, then decodes others with each.

    `expected` and `decoded` are tokens per call of the verifier, `expected_error` the standard
    error from the first texts. `rank_correlation_of_rules` is the smallest among settings that
    differ only in rule and strength. Seconds of decoding are per setting, with compilation; seconds
    of estimating are for all settings, with the decoding of the texts.
    """
    command.check_positive(args, "screened", "prompts", "rows", "max_new", "drafts")
    settings = _settings(args)
    wanted = args.screened + args.prompts
    args.prompts, count = wanted, args.prompts
    texts = command.read_texts(args)
    if len(texts) < wanted:
        raise ValueError(
            f"--inputs {args.inputs} has {len(texts)} prompts, but --screened and --prompts need "
            f"{args.screened} + {count}: lower these numbers"
        )
    pair = specjax.load_pair(drafter=args.drafter, verifier=args.verifier)
    check_settings(settings, pair.named)
    tokens = command.encode_texts(args, texts, pair.verifier.tokenizer)
    shape: dict[str, Any] = {"max_new_tokens": args.max_new, "batch_size": args.rows}
    print(f"estimating {len(settings)} settings ...", flush=True)
    alone = Setting(method=VERIFIER_ALONE)

    def estimate() -> list[Expected]:
        decoder = Decoder(pair.named, alone, **shape)
        known = {sampling_key(alone): decode_texts(decoder, tokens[: args.screened], seed=0)}
        return expect(pair.named, known, settings)

    spent, found = time_call(estimate)
    rows = _decode(found, pair.named, tokens[args.screened :], shape)
    return Report(rows, _COLUMNS, summary=_summary(rows, spent))


def _settings(args: argparse.Namespace) -> list[Setting]:
    drafts: list[dict[str, Any]] = [{"max_draft": length} for length in args.drafts]
    drafts += [{"max_draft": _LONGEST, "stopping": f"Confidence({x})"} for x in args.confidence]
    rules = [f"{name}({x})" for name in args.rules for x in RULES[name] or ("",)]
    combined = itertools.product(rules, drafts, ("Token", "Block"))
    return [
        Setting(rule=rule, verification=algorithm, **draft) for rule, draft, algorithm in combined
    ]


def _decode(
    found: list[Expected],
    models: dict[str, specjax.TextModel],
    prompts: list[Any],
    shape: dict[str, Any],
) -> list[dict[str, Any]]:
    """A line of the table for each setting; limits shorten drafts without compilation."""
    rows: list[dict[str, Any]] = []
    longest: dict[Any, int] = {}
    for one in found:
        kind = _kind(one.setting)
        longest[kind] = max(longest.get(kind, 0), one.setting.longest or 0)
    for one in found:
        print(f"decoding: {one.setting.described()} ...", flush=True)
        spare_maps()
        full = dataclasses.replace(one.setting, max_draft=longest[_kind(one.setting)])
        limit = one.setting.longest

        def decode(full: Setting = full, limit: int | None = limit) -> specjax.Result:
            decoder = Decoder(models, full, **shape)
            return decoder(prompts, seed=1, draft_limit=limit, progress=False)

        spent, result = time_call(decode)
        rows.append(_row(one, result, spent))
    return rows


def _kind(setting: Setting) -> tuple[str, str, str | None]:
    """The part of a setting that determines its program."""
    return Part.parse(setting.rule).name, str(setting.verification), setting.stopping


def _row(one: Expected, result: specjax.Result, seconds: float) -> dict[str, Any]:
    info, decoded = result.info.per_row, result.info.tokens_per_verifier_call
    nats = divergence(info.log_prob_target, info.log_prob_processed, info.emitted).value
    return {
        **one.setting.to_dict(),
        "setting": one.setting.described(),
        "expected": one.tokens_per_call,
        "expected_error": finite(one.error),
        "decoded": decoded,
        "ratio": one.tokens_per_call / decoded,
        "expected_nats": finite(one.nats_per_token),
        "decoded_nats": finite(nats),
        "seconds": seconds,
    }


def _summary(rows: list[dict[str, Any]], estimating: float) -> dict[str, Any]:
    both = [
        (row["expected_nats"], row["decoded_nats"])
        for row in rows
        if None not in (row["expected_nats"], row["decoded_nats"])
    ]
    return {
        "settings": len(rows),
        "rank_correlation": rank_correlation(
            [row["expected"] for row in rows], [row["decoded"] for row in rows]
        ),
        "rank_correlation_of_rules": _within(rows),
        "rank_correlation_nats": rank_correlation(*zip(*both, strict=True)) if both else None,
        "median_error": float(np.median([abs(row["ratio"] - 1.0) for row in rows])),
        "largest_error": float(max(abs(row["ratio"] - 1.0) for row in rows)),
        "seconds_of_estimating": estimating,
        "seconds_of_decoding": sum(row["seconds"] for row in rows),
    }


def _within(rows: list[dict[str, Any]]) -> float | None:
    """The smallest correlation among settings that differ only in rule and strength."""
    groups: dict[Any, list[tuple[float, float]]] = {}
    for row in rows:
        kind = row["max_draft"], row["verification"], row["stopping"]
        groups.setdefault(kind, []).append((row["expected"], row["decoded"]))
    found = [rank_correlation(*zip(*group, strict=True)) for group in groups.values()]
    return min((one for one in found if one is not None), default=None)


def rank_correlation(expected: Sequence[float], measured: Sequence[float]) -> float | None:
    """Spearman's correlation; None with fewer than three values, or if a side is constant."""
    # Imported late: it takes a while.
    from scipy.stats import spearmanr

    if len(expected) < 3 or len(set(expected)) < 2 or len(set(measured)) < 2:
        return None
    found = float(spearmanr(expected, measured).statistic)
    return None if math.isnan(found) else found


main = command.program(__file__, HELP, add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
