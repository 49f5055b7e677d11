"""`specjax sweep --gin.NAME=value`: measures many ways to decode, and compares them."""

import argparse
import ast
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from specjax.cli import gin_config, hosts, infer
from specjax.cli.failures import SOME_FAILED

if TYPE_CHECKING:
    from specjax.data import FewShot
    from specjax.runs.run_directory import RunDirectory
    from specjax.sweeping import Grid, Measuring, Point, Texts
    from specjax.text import Decoder, Pair

DEFAULT_FILE = "runs/sweep.gin"
GROUPS = {
    "sweeps": f"sweeps, each chosen by --gin_file={DEFAULT_FILE} --gin_file=sweeps/SWEEP.gin",
    "methods": "methods, policies (adaptive_*) and drafters that a sweep may name",
    "papers/*/sweep.gin": "sweeps of papers, beside a pair and a task: "
    "--gin_file=papers/PAPER/sweep.gin",
    **{key: infer.GROUPS[key] for key in ("papers/*/task_*.gin", "papers/*/pair_*.gin")},
}
_INFER = "runs/infer.gin"
_FOLDER = "methods"
_DRAFTERS_SIZE = ("load_pair.drafter", "drafter/sized.directory", "drafter/sized.size")
_NOTES = (
    "latency_reduction: the verifier's latency over that of the method where it has the verifier's",
    "quality; best_*: the method's best quality within the verifier's latency. Both by straight",
    "lines between neighbouring strengths. In brackets intervals; matched and within: in which",
    "share of the resamples there is such a place. measured_reduction: of the fastest measured",
    "strength whose quality is not shown to be below the verifier's; its interval is of that",
    "strength's latency.",
)


class Plan(NamedTuple):
    """What a sweep is made of; see `specjax.sweeping.sweep`.

    Attributes:
      grid: its points.
      measuring: how they are measured.
      texts: on what.
      output_dir: where the results go.
      models: names of `runs/infer.gin` and their values, for all points.
      infer: further ones.
      chat: whether each text is a user's message.
      truncate: where texts that are too long are cut.
      task: what makes the texts of records, or None.
      allow_other_environment: whether a sweep may be continued elsewhere.
    """

    grid: "Grid"
    measuring: "Measuring"
    texts: "Texts"
    output_dir: str
    models: dict[str, Any]
    infer: dict[str, Any]
    chat: bool = False
    truncate: str | None = None
    task: "FewShot | None" = None
    allow_other_environment: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    gin_config.add_arguments(parser, DEFAULT_FILE, GROUPS)
    hosts.add_arguments(parser, joins=False)


def run(args: argparse.Namespace) -> int:
    """Measures as the gin files say; prints table 2 and one line of JSON."""
    # Imported here so that `specjax --help` stays quick.
    from specjax import evaluation, sweeping
    from specjax.tuning.gin_file import prompt_names, referring

    infer.register()
    gin_config.register(
        evaluation.AnswerAfter,
        evaluation.AnswerPattern,
        evaluation.Bootstrap,
        evaluation.Sandbox,
        sweeping.Grid,
        sweeping.Measuring,
        sweeping.read_texts,
        sweep_plan,
    )
    gin_config.configure_from(args)
    sizes = sizes_of_pair()
    plan: Plan = gin_config.call(sweep_plan)
    config = gin_config.operative_config()

    def record(run: "RunDirectory", paths: dict[str, str] | None = None) -> None:
        run.record(command=args.command_line, config=config, paths=paths)

    names = {**plan.models, **sizes, **referring(plan.infer)}
    asked = prompt_names(plan.chat, plan.truncate, plan.task)
    files = PointFiles(names, args.gin_search_paths, asked=asked)
    points = plan.grid.points(files)
    files.check(points)
    results = sweeping.sweep(
        files,
        points,
        examples=plan.texts.examples,
        references=plan.texts.references,
        problems=plan.texts.problems,
        measuring=plan.measuring,
        output_dir=plan.output_dir,
        chat=plan.chat,
        truncate=plan.truncate,
        allow_other_environment=plan.allow_other_environment,
        on_start=record,
        part=args.part,
    )
    print(table(results))
    print(json.dumps(results))
    if not results["failed"]:
        return 0
    name, why = next(iter(results["failures"].items()))
    more = f", and {results['failed'] - 1} more" if results["failed"] > 1 else ""
    print(
        f"specjax sweep: {results['failed']} points failed, the others are done: {name}: {why}"
        f"{more}; points.jsonl gives the reason for each, and the same command tries them again",
        file=sys.stderr,
    )
    return SOME_FAILED


def sweep_plan(
    grid: "Grid",
    measuring: "Measuring",
    texts: "Texts",
    output_dir: str,
    models: dict[str, Any],
    infer: dict[str, Any],
    **others: Any,
) -> Plan:
    """What the gin files say of a sweep."""
    from specjax.runs.inputs import check_truncate

    if not isinstance(infer, Mapping) or not all(isinstance(name, str) for name in infer):
        raise TypeError(
            "infer must be a dict of names of `specjax infer` and their values, such as "
            f"{{'Decoder.buckets': (64,)}}, got {infer!r}"
        )
    measuring.check_texts(texts.references, texts.problems)
    check_truncate(others.get("truncate"))
    return Plan(grid, measuring, texts, output_dir, models, dict(infer), **others)


def sizes_of_pair() -> dict[str, Any]:
    """Parameters by which `load_pair` checks the sizes that a pair's file says; none without."""
    from specjax.tuning.gin_file import Reference

    found: dict[str, Any] = {}
    for model in ("verifier", "drafter"):
        checked = Reference(f"@{model}/sized()")
        if gin_config.binding_of(f"load_pair.{model}") == checked:
            found[f"load_pair.{model}"] = checked
            found[f"{model}/sized.directory"] = Reference(f"%{model.upper()}")
            found[f"{model}/sized.size"] = gin_config.value_of(f"{model}/sized.size")
    return found


def table(results: dict[str, Any]) -> str:
    """Table 2 as text."""
    from specjax.cli.bench.report import Report
    from specjax.sweeping import Point

    rows = []
    for row in results["table_2"]:
        curve = Point.of(row["curve"])
        rows.append(
            {
                "method": curve.described(without=("temperature",)),
                "T": f"{curve.temperature:g}",
                "latency_reduction": _shown(row["latency_reduction"]),
                "matched": row["matched"],
                f"best_{results['quality']}": _shown(row["best_quality"]),
                "within": row["within"],
                "measured_reduction": _shown(row["measured_reduction"]),
            }
        )
    if not rows:
        return "no method has a point to compare with the verifier alone"
    return Report(rows, tuple(rows[0]), _NOTES).table()


def _shown(values: dict[str, float | None]) -> str | None:
    value, low, high = values["value"], values["low"], values["high"]
    if low is None or high is None:
        return None if value is None else f"{value:.4g}"
    return f"{'-' if value is None else f'{value:.4g}'} [{low:.4g}, {high:.4g}]"


class PointFiles:
    """The gin files of points: what is in them, and the decoders that they make.

    Args:
      names: names of `runs/infer.gin`, or parameters, and their values, for all points.
      search_paths: folders in which gin files are looked up.
      asked: further names, of how the prompts are made, which no decoder reads.
    """

    def __init__(
        self,
        names: Mapping[str, Any],
        search_paths: Sequence[str],
        *,
        asked: Mapping[str, Any] | None = None,
    ):
        self._names, self._search_paths = dict(names), list(search_paths)
        self._asked = dict(asked or {})
        self._pairs: dict[str | None, Pair] = {}

    def main_name(self, kind: str, key: str) -> str | None:
        """See `specjax.sweeping.Files`: the first name with a number, but MAX_DRAFT."""
        from specjax.text.built_in import real_path

        path = self._find(key)
        if path is None:
            if kind == "drafters" and os.path.isdir(os.path.expanduser(real_path(key))):
                return None
            what = f"no file {_file(key)}" + " and no such directory" * (kind == "drafters")
            raise ValueError(
                f"{kind}: {key}: there is {what} here, in the search paths or among specjax's own: "
                "see specjax sweep --help"
            )
        for name, value in gin_config.definitions(path).items():
            if name != "MAX_DRAFT" and _is_number(value):
                return name
        return None

    def is_plan(self, drafter: str) -> bool:
        """See `specjax.sweeping.Files`."""
        return self._find(drafter) is not None

    def takes(self, method: str, drafter: str | None) -> frozenset[str]:
        """See `specjax.sweeping.Files`: the parameters of `Decoder` that the files leave open."""
        plan = [drafter] if drafter is not None and self.is_plan(drafter) else []
        self._configure([method, *plan], {})
        found = {
            name
            for name in ("max_draft", "verification", "stopping")
            if gin_config.binding_of(f"Decoder.{name}") == f"%{name.upper()}"
        }
        if gin_config.binding_of("MAX_DRAFT/macro.value") == "None":
            found.discard("max_draft")  # the plan says how long drafts are
        return frozenset(found)

    def __call__(self, point: "Point", batch_size: int) -> "Decoder":
        """See `specjax.sweeping.Maker`."""
        from specjax import text

        self._configure(self._keys(point), self._values(point) | {"BATCH_SIZE": batch_size})
        pair = self._pair(point.drafter)
        alone = {"verifier_alone": pair.verifier, "drafter_alone": pair.drafter}
        return gin_config.call(text.Decoder, alone.get(point.method, pair))

    def command(self, point: "Point") -> list[str]:
        """See `specjax.sweeping.Maker`."""
        values = {name: x for name, x in self._names.items() if x is not None} | self._asked
        values |= self._values(point)
        if self._other_model(point) is not None:  # of which the pair's file says no size
            values = {k: x for k, x in values.items() if k not in _DRAFTERS_SIZE}
        return [
            *(f"--gin_file={file}" for file in (_INFER, *map(_file, self._keys(point)))),
            *(f"--gin.{name}={_written(value)}" for name, value in values.items()),
        ]

    def check(self, points: Sequence["Point"]) -> None:
        """Raises TypeError or ValueError if the files lack a name that a point gives a value.

        Likewise if a value is wrong that can be checked without a model.
        """
        for point in points:
            self._configure(self._keys(point), self._values(point))
            infer.check_values()

    def _keys(self, point: "Point") -> list[str]:
        """The methods, policies and plans of which a point is made."""
        plan = point.drafter if self._other_model(point) is None else None
        return [key for key in (point.method, point.stopping, plan) if key is not None]

    def _other_model(self, point: "Point") -> str | None:
        """The directory of a drafter that is not the pair's."""
        other = point.drafter
        return None if other is None or self.is_plan(other) else other

    def _values(self, point: "Point") -> dict[str, Any]:
        """The names that a point gives values."""
        from specjax.tuning.gin_file import Reference, referring

        values: dict[str, Any] = {"TEMPERATURE": point.temperature}
        if point.max_draft is not None:
            values["MAX_DRAFT"] = point.max_draft
        if point.verification is not None:
            values["VERIFICATION"] = Reference(f"@{point.verification}()")
        if (other := self._other_model(point)) is not None:
            values["DRAFTER"] = other
        for kind, key, number in (
            ("methods", point.method, point.strength),
            ("stopping", point.stopping, point.threshold),
        ):
            if key is not None and number is not None:
                name = self.main_name(kind, key)
                assert name is not None
                values[name] = number
        return values | referring(dict(point.names))

    def _configure(self, keys: Sequence[str], values: Mapping[str, Any]) -> None:
        # A decoder reads nothing and writes nothing.
        given = {**self._names, **values, "INPUT": "-", "OUTPUT_DIR": "-"}
        given.pop("DRAFTER", None)  # models are loaded once, see _pair
        given |= {"DRAFTER": self._names.get("DRAFTER")}
        bindings = [f"{name}={_written(value)}" for name, value in given.items()]
        files = [_INFER, *map(_file, keys)]
        gin_config.configure(files, bindings, self._search_paths)

    def _pair(self, drafter: str | None) -> "Pair":
        """The pair with a drafter, each model loaded once; as the names say that are configured."""
        from specjax import text

        if None not in self._pairs:
            self._pairs[None] = gin_config.call_part(text.load_pair)
        own = self._pairs[None]
        if drafter is None or self.is_plan(drafter):
            return own
        if drafter not in self._pairs:
            small = text.load_text_model(
                os.path.expanduser(drafter),
                mesh=own.verifier.mesh,
                dtype=self._names.get("DTYPE"),
                tokenizer=self._names.get("TOKENIZER"),
            )
            self._pairs[drafter] = text.Pair(small, own.verifier)
        return self._pairs[drafter]

    def _find(self, key: str) -> Path | None:
        return gin_config.find(_file(key), self._search_paths)


def _file(key: str) -> str:
    return key if key.endswith(".gin") else f"{_FOLDER}/{key}.gin"


def _written(value: Any) -> str:
    from specjax.tuning.gin_file import written

    return written(value)


def _is_number(text: str) -> bool:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return False
    return isinstance(value, int | float) and not isinstance(value, bool)
