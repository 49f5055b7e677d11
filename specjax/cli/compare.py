"""`specjax compare --gin.NAME=value`: estimates and measures settings, and compares them."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from specjax.cli import SOME_FAILED, gin_config, infer, print_data
from specjax.errors import tell

if TYPE_CHECKING:
    from specjax.study import Setting
    from specjax.text import TextModel

DEFAULT_FILE = "runs/compare.gin"
GROUPS = {
    "comparisons": f"grids, chosen by --gin_file={DEFAULT_FILE} --gin_file=comparisons/NAME.gin",
    "papers/*/compare.gin": "grids of papers, to add to a pair and a task: "
    "--gin_file=papers/PAPER/compare.gin",
    **{key: infer.GROUPS[key] for key in ("papers/*/task_*.gin", "papers/*/pair_*.gin")},
}
# Defaults of `--quick`; the command line overrides them.
_QUICK = {
    "LIMIT": 32,
    "ESTIMATE_LIMIT": 16,
    "CANDIDATES": 4,
    "NUM_SAMPLES": 1,
    "REPEATS": 1,
    "LATENCY_LIMIT": 16,
    "ONE_BUCKET": True,
}
_NOTES = (
    "Brackets: bootstrap intervals over the texts. front: no other setting is shown to be faster",
    "and as good, or better and as fast. speedup: over the verifier alone, timed alternately; the",
    "verdict's is that of tokens per second.",
)
_ESTIMATE_NOTES = (
    "Estimated from the verifier's outputs, without decoding. Estimates of Lossless are unbiased.",
    "Those of other rules are approximate, because these rules write other texts. front: of the",
    "settings with the same drafts none has more tokens per call and fewer nats.",
)
_LIMIT_NOTES = (
    "loss, nats, latency: what MAX_LOSS, MAX_NATS and MAX_LATENCY limit. within: yes if the",
    "intervals are within the limits.",
)
_TABLE_2_NOTES = (
    "latency_reduction: the verifier's latency over the method's, at equal quality. best_*: the",
    "method's best quality at the verifier's latency. Both interpolate linearly between strengths.",
    "matched, within: the share of bootstrap resamples in which these values exist.",
    "measured_reduction: at the fastest measured strength with a quality not shown to be lower.",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    gin_config.add_arguments(parser, DEFAULT_FILE, GROUPS)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--estimate", action="store_true", help="estimate all settings; measure none"
    )
    chosen.add_argument("--full", action="store_true", help="measure all settings; estimate none")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a quick test: " + ", ".join(f"{name}={value}" for name, value in _QUICK.items()),
    )


def run(args: argparse.Namespace) -> int:
    """Compares as the gin files configure; prints tables and, for programs, a line of JSON."""
    # Imported here so that `specjax --help` stays quick.
    from specjax import study, text

    register()
    flags = {"MEASURED": "none"} if args.estimate else {"MEASURED": "all"} if args.full else {}
    first = flags | (_QUICK if args.quick else {})
    args.gin_binding[:0] = [f"{name}={value}" for name, value in first.items()]
    gin_config.configure_from(args)
    infer.check_paths()
    infer.check_needed(("verifier", "drafter"), "; specjax infer decodes with a single model")
    parts: dict[Callable[..., Any], Sequence[str]] = {
        infer.load_models: (),
        text.load_text_model: ("path", "mesh", "weights", "verifier"),
    }
    results = gin_config.call(
        study.compare, models_of, parts=parts, on_start=gin_config.recorder(args)
    )
    print(tables(results))
    print_data(json.dumps(results))
    tell(_next(results))
    if not results["failed"]:
        return 0
    name, why = next(iter(results["failures"].items()))
    more = f", and {results['failed'] - 1} more" if results["failed"] > 1 else ""
    print(
        f"specjax compare: {results['failed']} of {results['done'] + results['failed']} settings "
        f"failed: {name}: {why}{more}; see points.jsonl; run the same command to try again",
        file=sys.stderr,
    )
    return SOME_FAILED


def register() -> None:
    """Imports the parts of a comparison and makes them configurable."""
    from specjax import checkpoints, evaluation, study, text
    from specjax.data.few_shot import FewShot
    from specjax.study.choose import Search
    from specjax.study.texts import Prompting

    gin_config.register(
        infer.load_models,
        infer.mesh_of,
        text.load_text_model,
        checkpoints.loading.sized,
        FewShot,
        evaluation.AnswerAfter,
        evaluation.AnswerPattern,
        evaluation.Bootstrap,
        evaluation.Sandbox,
        study.Grid,
        study.Measuring,
        study.read_texts,
        study.compare,
        Prompting,
        Search,
        decoding,
    )


def decoding(
    max_new_tokens: int = 128,
    stop: Sequence[str] = (),
    buckets: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Returns the checked options that all decoders share; see `Decoder`."""
    from specjax.text.requests import check_decoding

    values = {"max_new_tokens": max_new_tokens, "stop": stop, "buckets": buckets}
    options = {name: value for name, value in values.items() if value is not None}
    check_decoding(options)
    return options


def models_of(settings: "Sequence[Setting]") -> "dict[str, TextModel]":
    """Loads the pair of the gin files and the other drafters of the settings."""
    from specjax import text
    from specjax.models.quantised import form_of

    models = gin_config.call_part(infer.load_models)
    verifier = models["verifier"]
    form = form_of(gin_config.value_of("load_models.weights"), "drafter")
    for setting in settings:
        for name in setting.drafters:
            if name not in models:
                place, mesh = os.path.expanduser(name), verifier.mesh
                loading: Any = {"mesh": mesh, "weights": form, "verifier": verifier}
                models[name] = gin_config.call_part(text.load_text_model, place, **loading)
                # Checks the vocabulary.
                text.Pair(**{name: models[name], "verifier": verifier})
    return models


def tables(results: dict[str, Any]) -> str:
    """Returns the tables as text: the best settings, then table 2 or the limits and the answer."""
    from specjax.cli.report import Report
    from specjax.study.tables import table_2_rows

    best, parts = results["best"], []
    if not best:
        return "no setting was estimated or measured"
    columns = [name for name in best[0] if any(row.get(name) is not None for row in best)]
    notes = _NOTES if results["done"] else _ESTIMATE_NOTES
    counts = {"estimated": results["estimated"], "measured": results["done"]}
    counts = {name: count for name, count in counts.items() if count}
    parts.append(Report(best, columns, notes, summary=counts).table())
    lengths = [one for one in results.get("lengths", ()) if one["lossless"]]
    if lengths:
        parts.append("\n".join(f"{one['setting']}: {one['why']}" for one in lengths))
    if "answer" in results:
        parts += [_limits_table(results)] if results["considered"] else []
        parts.append(_answer(results))
    elif results["table_2"]:
        rows = table_2_rows(results["table_2"], results["quality"])
        parts.append(Report(rows, tuple(rows[0]), _TABLE_2_NOTES).table())
    if "answer" not in results:
        parts += [verdict["text"] for verdict in results["verdicts"]]
    return "\n\n".join(parts)


def _next(results: dict[str, Any]) -> str:
    """Says where the files are, and the next command."""
    place = os.path.expanduser(str(gin_config.value_of("compare.output_dir")))
    if not results["done"]:
        then = "the same command without --estimate measures the best settings"
    elif results.get("answer") == "cannot be met":
        then = "change the limits or METHODS; what was measured is kept"
    else:
        where = "`values` of a line of points.jsonl"
        if "answer" in results or results["verdicts"]:
            key = "setting" if "answer" in results else "verdicts[0].setting"
            where = f"`{key}` in results.json"
        then = f"specjax infer with {where}, its names in capitals, as in --gin.MAX_DRAFT=5"
    return f"the tables are in {place}; next: {then}"


def _limits_table(results: dict[str, Any]) -> str:
    from specjax.cli.report import Report
    from specjax.runs.evaluation import shown

    quality, rows = results["quality"], []
    for setting in results["considered"]:
        figures, limits = setting["figures"], setting["limits"]
        relative = figures["relative_latency"]["value"]
        row = {"setting": setting["setting"]}
        if quality is not None:
            row[quality] = figures[quality]["value"]
        row["speedup"] = None if relative is None else 1.0 / relative
        row |= {name.removeprefix("max_"): shown(limit) for name, limit in limits.items()}
        within = [limit["within"] for limit in limits.values()]
        row["within"] = "no" if False in within else "yes" if all(within) else "not shown"
        rows.append(row)
    return Report(rows, tuple(rows[0]), _LIMIT_NOTES, summary={"texts": results["texts"]}).table()


def _answer(results: dict[str, Any]) -> str:
    """The choice within the limits."""
    from specjax.runs.evaluation import shown

    described, held_out = results["described"], results["held_out"]
    limits = " ".join(f"{name.upper()}={limit:g}" for name, limit in results["limits"].items())
    lines = [
        f"limits: {limits}",
        f"answer: {results['answer']}" + (f": {described}" if described else ""),
        f"why: {results['why']}",
    ]
    if results["answer"] == "do not draft":
        lines += [verdict["text"] for verdict in results["verdicts"]]
    if held_out is not None:
        lines.append(f"on {held_out['texts']} held-out texts:")
        figures = held_out["figures"]
        lines += [f"  {name}: {shown(figure) or '-'}" for name, figure in figures.items()]
        for name, limit in held_out["limits"].items():
            met = "met (lossless)" if limit["by_law"] else "met" if limit["met"] else "not met"
            lines.append(f"  {name.upper()}={limit['limit']:g}: {met}, {shown(limit) or '-'}")
    return "\n".join(lines)
