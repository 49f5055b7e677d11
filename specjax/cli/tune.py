"""`specjax tune --gin.NAME=value`: finds the fastest way to decode that meets a demand."""

import argparse
import json
from typing import Any

from specjax.cli import gin_config

DEFAULT_FILE = "runs/tune.gin"
_NOTES = (
    "Each round looks at more texts and at half of the settings; chance: that a setting meets the",
    "demand by the margin in the last round; speedup: over the verifier alone, in turns with it.",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    gin_config.add_arguments(parser, DEFAULT_FILE)


def run(args: argparse.Namespace) -> int:
    """Tunes as the gin files say; prints the rounds, the answer and one line of JSON."""
    # Imported here so that `specjax --help` stays quick.
    from specjax import checkpoints, data, evaluation, partitioning, sweeping, text, tuning
    from specjax.runs.run_directory import RunDirectory

    gin_config.register(
        checkpoints.sized,
        data.FewShot,
        evaluation.AnswerAfter,
        evaluation.AnswerPattern,
        evaluation.Bootstrap,
        evaluation.Sandbox,
        partitioning.make_mesh,
        sweeping.Measuring,
        sweeping.read_texts,
        text.load_pair,
        text.load_text_model,
        tuning.ScreenGrid,
        tuning.Search,
        tuning.tune,
    )
    gin_config.configure_from(args)

    def record(run: RunDirectory) -> None:
        run.record(command=args.command_line, config=gin_config.operative_config())

    results = gin_config.call(tuning.tune, on_start=record)
    print(table(results))
    print(told(results))
    print(json.dumps(results, allow_nan=False))
    return 0


def table(results: dict[str, Any]) -> str:
    """The rounds as text."""
    from specjax.cli.bench.report import Report

    quality = results["quality"]
    rows = []
    for number, one in enumerate(results["rounds"], 1):
        for setting in one["settings"]:
            figures = setting["figures"]
            relative = figures["relative_latency"]["value"]
            rows.append(
                {
                    "round": number,
                    "texts": one["texts"],
                    "setting": setting["setting"],
                    quality: figures[quality]["value"],
                    "+-": figures[quality]["error"],
                    "speedup": None if relative is None else 1.0 / relative,
                    "nats_per_token": figures["nats_per_token"]["value"],
                    "chance": setting["chance"],
                }
            )
    return Report(rows, tuple(rows[0]), _NOTES).table()


def told(results: dict[str, Any]) -> str:
    """The answer in words."""
    lines = [f"demand: {results['demand']}"]
    setting = results["described"]
    lines.append(f"answer: {results['answer']}" + (f": {setting}" if setting else ""))
    lines.append(f"why: {results['why']}")
    for name, why in results["failed"].items():
        lines.append(f"failed: {name}: {why}")
    held_out = results["held_out"]
    if held_out is not None:
        lines.append(f"on {held_out['texts']} held-out texts, with intervals:")
        shown = {
            **held_out["figures"],
            f"{results['quality']} - verifier's": held_out["difference"],
        }
        lines += [f"  {name}: {_shown(figure)}" for name, figure in shown.items()]
        for part in held_out["demands"]:
            how = "holds by law" if part["by_law"] else "met" if part["met"] else "not met"
            lines.append(f"  {part['demand']}: {how}, by {_shown(part, 'slack')}")
    if results["gin_file"]:
        lines.append(f"written: {results['gin_file']}")
    return "\n".join(lines)


def _shown(figure: dict[str, Any], name: str = "value") -> str:
    if figure[name] is None:
        return "none"
    if figure["low"] is None or figure["high"] is None:
        return f"{figure[name]:.4g}"
    return f"{figure[name]:.4g} [{figure['low']:.4g}, {figure['high']:.4g}]"
