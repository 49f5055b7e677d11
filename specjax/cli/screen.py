"""`specjax screen --gin.NAME=value`: what hundreds of settings should bring, without decoding."""

import argparse
from typing import Any

from specjax.cli import gin_config

DEFAULT_FILE = "runs/screen.gin"
_COLUMNS = (
    *("rule", "strength", "drafter", "draft", "verification", "temperature", "acceptance"),
    *("defers", "tokens_per_call", "deferral_rate", "nats_per_token", "latency", "speedup"),
)
_NOTES = (
    "From one pass over the verifier's own texts: no setting was decoded. The rounds of Lossless",
    "are unbiased; other rules write other texts, whose contexts this pass has not seen.",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    gin_config.add_arguments(parser, DEFAULT_FILE)


def run(args: argparse.Namespace) -> int:
    """Screens as the gin files say; prints the best settings."""
    # Imported here so that `specjax --help` stays quick.
    from specjax import checkpoints, data, partitioning, text, tuning
    from specjax.cli.bench.report import Report
    from specjax.runs.inputs import read_prompts
    from specjax.runs.run_directory import RunDirectory

    gin_config.register(
        checkpoints.sized,
        data.FewShot,
        read_prompts,
        partitioning.make_mesh,
        text.load_pair,
        text.load_text_model,
        tuning.ScreenGrid,
        tuning.screen_settings,
        shown,
    )
    gin_config.configure_from(args)
    most = gin_config.call(shown)

    def record(run: RunDirectory) -> None:
        run.record(command=args.command_line, config=gin_config.operative_config())

    rows = gin_config.call(tuning.screen_settings, on_start=record)
    told = {"settings": len(rows), "shown": min(most, len(rows))}
    lines = [{**row, "draft": _draft(row)} for row in rows[:most]]
    columns = [name for name in _COLUMNS if any(row[name] is not None for row in lines)]
    print(Report(lines, columns, _NOTES, summary=told).table())
    return 0


def shown(count: int = 40) -> int:
    """How many settings the table has."""
    from specjax.checks import whole_number

    return whole_number("SHOWN", count, low=1)


def _draft(row: dict[str, Any]) -> str:
    """How long its drafts are, in words."""
    if not row["max_draft"]:
        return "verifier alone"
    if row["stopping"] is None:
        return str(row["max_draft"])
    return f"{row['max_draft']}, {row['stopping']}({row['threshold']:g})"
