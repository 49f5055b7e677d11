"""`specjax evaluate --gin.NAME=value`: scores predictions and compares methods."""

import argparse
import functools
import json
from typing import Any

from specjax.cli import gin_config, print_data
from specjax.cli.report import Report
from specjax.errors import tell

DEFAULT_FILE = "runs/evaluate.gin"


add_arguments = functools.partial(gin_config.add_arguments, default=DEFAULT_FILE)


def run(args: argparse.Namespace) -> int:
    """Scores as the gin files configure; prints tables and, for programs, a line of JSON."""
    # Imported here so that `specjax --help` stays quick.
    from specjax.data.few_shot import FewShot
    from specjax.evaluation import AnswerAfter, AnswerPattern, Bootstrap, Sandbox
    from specjax.runs.evaluation import evaluate
    from specjax.study.points import predictions_in

    # A task's gin file also configures the prompts.
    gin_config.register(evaluate, AnswerAfter, AnswerPattern, Bootstrap, FewShot, Sandbox)
    gin_config.configure_from(args)
    recorder = gin_config.recorder(args)
    scores = gin_config.call(evaluate, on_start=recorder, compared=predictions_in)
    for name, method in scores["methods"].items():
        if method["failed"]:
            tell(f"{method['failed']} rows of {name} have no prediction and count as empty texts")
    print(tables(scores))
    print_data(json.dumps(scores))
    return 0


def tables(scores: dict[str, Any]) -> str:
    """Returns a table of all figures and a table of the differences of each two methods."""
    from specjax.runs.evaluation import shown

    methods = scores["methods"]
    rows = [
        {
            "figure": key,
            **{name: shown(method["figures"].get(key)) for name, method in methods.items()},
        }
        for key in dict.fromkeys(key for m in methods.values() for key in m["figures"])
    ]
    percent = f"{100 * scores['level']:g} %"
    notes = [
        f"Brackets: {percent} intervals over {scores['rows']} inputs, from {scores['resamples']} "
        "bootstrap resamples."
    ]
    parts = [Report(rows, ("figure", *methods), notes).table()]
    pairs = []
    for pair in scores["differences"]:
        for key, values in pair["figures"].items():
            low, high = values["low"], values["high"]
            apart = "-" if None in (low, high) else "yes" if low > 0 or high < 0 else "no"
            row = {"method": pair["method"], "minus": pair["other"], "figure": key}
            pairs.append({**row, "difference": shown(values), "told_apart": apart})
    if pairs:
        notes = ["Paired on the same inputs. told_apart: the interval does not contain 0."]
        parts.append(Report(pairs, tuple(pairs[0]), notes).table())
    return "\n\n".join(parts)
