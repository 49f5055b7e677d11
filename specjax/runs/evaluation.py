"""Reads files of predictions, scores them, and compares methods on the same inputs.

Files in the output directory, if given:

    evaluate_config.json   the configuration
    scores.json            all figures with their intervals

The command adds `config.gin` and `runs.jsonl` (see `RunDirectory.record`).

Axes: n rows.
"""

import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64

from specjax.checks import PathLike, check_part, check_path, join_names, tuple_of_names, tuple_text
from specjax.data.examples import (
    SourceRecord,
    check_no_fields,
    field_of,
    guess_format,
    read_objects,
    read_records,
)
from specjax.errors import UserError
from specjax.evaluation.bootstrap import Bootstrap, Interval, Sums, divided, pooled
from specjax.evaluation.efficiency import (
    RowCounts,
    check_costs,
    divergence,
    efficiency,
    impossible_share,
)
from specjax.evaluation.metrics import METRICS, Metric, check_metrics, check_references, figure
from specjax.evaluation.sandbox import PassAt1, Sandbox, check_problems, read_problems
from specjax.runs import predictions as rows_lib
from specjax.runs.run_directory import RunDirectory, fingerprint_of, read_config

CONFIG_NAME = "evaluate_config.json"
SCORES_NAME = "scores.json"
# Not in `METRICS`, because it runs the outputs.
PASS_AT_1 = "pass_at_1"
_PLAIN = Bootstrap()


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Predictions:
    """The content of a file of predictions of n rows.

    Attributes:
      path: the file.
      outputs: n texts; "" for a missing prediction.
      inputs: n texts, None if unknown.
      targets: for each row its references, or None.
      missing: the rows without a prediction.
      counts: the counts of decoding, or None if unknown.
      log_target: log π of the rows, NaN if unknown; None if `counts` is None.
      log_p: log p of the rows, -inf if the verifier could not emit them.
    """

    path: str
    outputs: list[str]
    inputs: list[str | None]
    targets: list[tuple[str, ...] | None]
    missing: tuple[int, ...]
    counts: RowCounts | None
    log_target: Float64[np.ndarray, " n"] | None
    log_p: Float64[np.ndarray, " n"] | None

    def __len__(self) -> int:
        return len(self.outputs)


def read_predictions(path: PathLike, *, prediction_field: str = "prediction") -> list[Predictions]:
    """Reads a file of predictions.

    Args:
      path: a JSONL file, plain or `.gz`; or the directory of a run of `specjax infer`. Rows
        of `specjax infer` are sorted by id; other rows keep the order of the file.
      prediction_field: the key of the output, a text or null. A row's reference, a text or a list
        of texts, may be in `targets`.

    Returns:
      The predictions of each sample of a run of `specjax infer`, or those of the file.
    """
    name = os.path.expanduser(path)
    if os.path.isdir(name):
        name = os.path.join(name, rows_lib.PREDICTIONS_NAME)
    run, records = None, []
    directory, base = os.path.split(name)
    if base == rows_lib.PREDICTIONS_NAME:
        configuration = read_config(Path(directory, rows_lib.CONFIG_NAME))
        run = None if configuration is None else fingerprint_of(configuration)
    if os.path.exists(name) and not os.path.isfile(name):  # opening a pipe would block
        raise UserError(f"{name} is not a regular file: restore the predictions")
    for number, line, record in read_objects(name):
        if rows_lib.CHECKSUM in record or run is not None:
            remedy = "restore it, or remove `run` and `checksum` from all lines of a copy"
            rows_lib.record_of(line.encode(), run, name, number, remedy)
            run = record.get(rows_lib.RUN) if run is None else run  # all rows are of one run
        if not isinstance(record.get(prediction_field, 0), str | None):
            raise UserError(
                f"{name}:{number}: {prediction_field!r} must be a text or null; the line has "
                f"{join_names(f'{key}={value!r:.40}' for key, value in record.items())}"
            )
        records.append(record)
    if all(rows_lib.CHECKSUM in record for record in records):
        samples = _by_sample(name, records)
        return [predictions_of(sample, name, prediction_field) for sample in samples]
    # `info` of other programs may have another form.
    plain = [{key: value for key, value in record.items() if key != "info"} for record in records]
    return [predictions_of(plain, name, prediction_field)]


def _by_sample(name: str, records: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    ordered = sorted(records, key=rows_lib.key_of)
    samples = 1 + max(rows_lib.key_of(record)[1] for record in records)
    for place in range(len(ordered) + -len(ordered) % samples):
        i, sample = divmod(place, samples)
        if place == len(ordered) or rows_lib.key_of(ordered[place]) != (i, sample):
            which = f" and sample {sample}" if samples > 1 else ""
            raise UserError(
                f"{name}: there is no row with id {i}{which}: finish the run with the same command "
                "before you score it"
            )
    return [ordered[sample::samples] for sample in range(samples)]


def predictions_of(
    records: Sequence[dict[str, Any]], path: str, prediction_field: str = "prediction"
) -> Predictions:
    """Makes predictions from a record for each row, in order; `path` names them in messages."""
    texts = [record[prediction_field] for record in records]
    inputs = [record.get("inputs") for record in records]
    targets: list[tuple[str, ...] | None] = [None] * len(records)
    for row, record in enumerate(records):
        if record.get("targets") is not None:
            where = f"{path}: row {row} (from 0)"
            one = SourceRecord(where, record)
            targets[row] = _as_tuple(field_of(one, "targets", "references_field"))
    counts = target = p = None
    if any("info" in record for record in records):
        counts = RowCounts.from_records(records)
        target, p = np.full(len(records), np.nan), np.full(len(records), np.nan)
        for i, record in enumerate(records):
            ours, theirs = record.get("log_prob_target"), record.get("log_prob_processed")
            if ours is not None and record.get("ended_by") != "nan":
                target[i] = ours
                if "log_prob_processed" in record:
                    p[i] = -np.inf if theirs is None else theirs
    return Predictions(
        path=path,
        outputs=[text or "" for text in texts],
        inputs=[text if isinstance(text, str) else None for text in inputs],
        targets=targets,
        missing=tuple(row for row, text in enumerate(texts) if text is None),
        counts=counts,
        log_target=target,
        log_p=p,
    )


def _as_tuple(texts: str | Sequence[str]) -> tuple[str, ...]:
    """A text or several as a tuple; an empty list is the empty answer."""
    return (texts,) if isinstance(texts, str) else tuple(texts) or ("",)


def _paths(name: str, paths: Any) -> list[PathLike]:
    """A path or several, which the user gave as `name`."""
    several: list[Any] = list(paths) if isinstance(paths, list | tuple) else [paths]
    if not several:
        raise UserError(f"{name} is empty: give at least one file")
    for path in several:
        check_path(path, f"{name}=")
        if isinstance(path, str) and "," in path and not os.path.exists(os.path.expanduser(path)):
            raise UserError(f"{name}={path!r}: no such file; write several as {tuple_text(path)}")
    return several


def methods_of(paths: Any) -> dict[str, list[PathLike]]:
    """Name -> the files of each method, of a path, several, or name -> a path or several.

    Without names a method has the name of its directory, or of its file if that is not
    `predictions.jsonl`.
    """
    if isinstance(paths, Mapping) and paths:
        return {str(name): _paths("predictions", several) for name, several in paths.items()}
    files = _paths("predictions", paths)
    short = []
    for path in files:
        place = Path(os.path.expanduser(path)).absolute()
        name = place.name.removesuffix(".gz")
        is_run = name == rows_lib.PREDICTIONS_NAME
        short.append(place.parent.name if is_run else name.removesuffix(".jsonl"))
    names = (
        name if short.count(name) == 1 else os.fspath(path)
        for name, path in zip(short, files, strict=True)
    )
    return {name: [path] for name, path in zip(names, files, strict=True)}


def read_references(
    sources: PathLike | Sequence[PathLike], *, field: str | int | None = None
) -> list[tuple[str, ...]]:
    """Reads references, row by row.

    Args:
      sources: a file, plain or `.gz`, or several files, each with a reference for every row: text
        (a line each), TSV or JSONL.
      field: TSV: a column, counted from 0, or its name in the first line; optional for a single
        column. JSONL: a key, "targets" by default, of a text or a list of texts. An empty list is
        the empty answer, "".
    """
    names = _paths("references", sources)
    columns = [_column(os.path.expanduser(path), field) for path in names]
    if len({*map(len, columns)}) > 1:
        counts = ", ".join(f"{x}: {len(c)}" for x, c in zip(names, columns, strict=True))
        raise UserError(f"references have different numbers of rows: {counts}")
    return [tuple(text for part in row for text in part) for row in zip(*columns, strict=True)]


def _column(name: str, field: str | int | None) -> list[tuple[str, ...]]:
    kind = guess_format(name)
    header = None if field is None else isinstance(field, str)
    records = list(read_records(name, header=header, option="references_field"))
    if kind == "text":
        check_no_fields(name, {"references_field": field})
    if field is None:
        field = "targets" if kind == "jsonl" else 0
        if kind == "tsv" and (count := len(records[0].values)) > 1:
            raise UserError(
                f"{name} has {count} columns: choose the column of the references with "
                "references_field (0 is the first)"
            )
    return [_as_tuple(field_of(record, field, "references_field")) for record in records]


class Likelihood:
    """Scores the outputs of `runs` by their probability under a model, at temperature 1."""

    def __init__(self, model: Any, chat: Any, runs: Sequence[Predictions]) -> None:
        # Imported here, because other scores need no models.
        from specjax.text import TextModel, load_text_model
        from specjax.text.directories import check_model_path, real_path
        from specjax.text.requests import chat_options

        self._options = chat_options("chat", chat)
        for run in runs:
            if None in run.inputs:
                raise UserError(
                    f"score needs the input of each row, and {run.path} has none in row "
                    f"{run.inputs.index(None)}: leave out score"
                )
        if not isinstance(model, TextModel):
            check_model_path("score", real_path(model))
            model = load_text_model(model)
        self.model = model

    def perplexity(self, run: Predictions) -> Sums:
        """Returns exp(nats / tokens) of the outputs; infinite if an output is impossible.

        An output counts with its end-of-sequence token, unless the length limit ended it. Rows
        without a prediction are left out.
        """
        from specjax.text.requests import encode
        from specjax.text.teacher_forcing import checked_outputs, score

        cut = np.zeros(len(run), bool) if run.counts is None else run.counts.cut
        rows = [row for row in range(len(run)) if row not in run.missing]
        texts = checked_outputs(self.model, [run.outputs[row] for row in rows], len(rows))
        texts = [text[: len(text) - cut[row]] for text, row in zip(texts, rows, strict=True)]
        rows = [row for row, text in zip(rows, texts, strict=True) if text.size]
        texts = [text for text in texts if text.size]
        sums = np.zeros((len(run), 3))
        if rows:
            prompts = []
            for row in rows:
                text: Any = run.inputs[row]
                said = text if self._options is None else [{"role": "user", "content": text}]
                name = f"{run.path}: the input of row {row}"
                model, words = self.model.model, self.model.tokenizer
                prompts.append(encode(said, name, model.vocab_size, words, self._options))
            scored = score(self.model, prompts, texts, None, False, None)
            for row, logs in zip(rows, scored.log_probs, strict=True):
                total = np.sum(logs, dtype=np.float64)
                is_possible = np.isfinite(total)
                sums[row] = -total if is_possible else 0.0, len(logs), not is_possible

        def of_sums(sums: np.ndarray) -> np.ndarray:
            return np.where(sums[:, 2] > 0, np.inf, np.exp(divided(sums[:, 0], sums[:, 1])))

        return Sums(sums, of_sums)


class Scoring(NamedTuple):
    """A metric, its references, and the function that extracts an output's answer (None: all)."""

    metric: Metric
    references: Sequence[Sequence[str]]
    answer: Callable[[str], str] | None = None

    def figure(self, outputs: Sequence[str]) -> Sums:
        texts = outputs if self.answer is None else list(map(self.answer, outputs))
        return figure(self.metric, texts, self.references)


def figures_of(metrics: Any, sandbox: Sandbox | None) -> tuple[str, ...]:
    """The checked names of metrics; with a sandbox "pass_at_1" is added if it is absent."""
    metrics = tuple_of_names("metrics", metrics)
    check_metrics(name for name in metrics if name != PASS_AT_1)
    if sandbox is None:
        if PASS_AT_1 in metrics:
            raise UserError(
                "the metric 'pass_at_1' runs the outputs as programs: give problems, and a "
                "sandbox, such as SANDBOX=@Sandbox()"
            )
        return metrics
    check_part("sandbox", sandbox, ("run", "check"), "Sandbox()")
    sandbox.check()
    return tuple(dict.fromkeys((*metrics, PASS_AT_1)))


def check_answers(answer: Any, reference_answer: Any) -> None:
    """Raises UserError unless both are callable or None."""
    for name, extract in (("answer", answer), ("reference_answer", reference_answer)):
        if extract is not None:
            check_part(name, extract, ("__call__",), "AnswerAfter('####')")


def evaluate(
    predictions: PathLike | Sequence[PathLike] | Mapping[str, Any],
    *,
    references: PathLike | Sequence[PathLike] | None = None,
    references_field: str | int | None = None,
    metrics: Sequence[str] = ("bleu", "chrf"),
    prediction_field: str = "prediction",
    answer: Callable[[str], str] | None = None,
    reference_answer: Callable[[str], str] | None = None,
    costs: Mapping[str, float] | None = None,
    bootstrap: Bootstrap = _PLAIN,
    problems: PathLike | None = None,
    sandbox: Sandbox | None = None,
    score: Any = None,
    chat: bool | Mapping[str, Any] = False,
    output_dir: PathLike | None = None,
    compared: Callable[[PathLike], Mapping[str, Sequence[Predictions]] | None] = lambda _: None,
    on_start: Callable[..., None] | None = None,
) -> dict[str, Any]:
    """Scores predictions, and compares each two methods on the same inputs.

    All figures have percentile bootstrap intervals. All methods share the resampled inputs, so
    differences are paired. Several files of one method, such as runs with other seeds, are pooled;
    so are the samples of each input in a run with `num_samples`.

    Args:
      predictions: files (see `read_predictions`, which also has `prediction_field`): a path,
        several paths, or method -> a path or several. All must have the same inputs.
      references: files of references (see `read_references`, which also has `field`); None: those
        in the predictions.
      metrics: names in `METRICS`, and "pass_at_1" with `problems`; empty for only the figures of
        decoding.
      answer: extracts the scored part of an output, such as `AnswerAfter("####")`; None: all. It is
        not applied to programs.
      reference_answer: likewise, for references.
      costs: see `specjax.evaluation.efficiency`.
      problems: a file of problems (see `read_problems`), a line for each row: the outputs are run
        as programs, for the figure `pass_at_1`.
      sandbox: runs the programs; required with `problems`.
      score: a model or its directory, for the figure `perplexity`; see `Likelihood`.
      chat: whether each input is a user's message for this model's chat template; or options of
        the template.
      output_dir: a new directory, or that of an earlier evaluation, which is replaced; None writes
        nothing.
      compared: maps a directory of compared settings to setting -> the predictions of its seeds;
        returns None for any other path.
      on_start: called as `on_start(run, paths={...})` with the `RunDirectory`, if there is one,
        before scoring.

    Returns:
      The content of `scores.json`: `methods`: name -> `files`, `failed` (rows without a prediction,
      which count as empty texts) and `figures`: name -> `value`, `low`, `high`, `error` (null for
      missing and infinite values: see `impossible_share`); `differences`: for each two methods
      `method` minus `other`, figure by figure.

    Raises:
      OSError: a file is missing, or the output directory cannot be written.
      UserError: a metric is unknown or its library is not installed, a file is unreadable, the
        files have different rows, there are no references, or programs cannot be contained.
    """
    if problems is not None and sandbox is None:
        raise UserError("problems are run as programs: give a sandbox, such as SANDBOX=@Sandbox()")
    names = figures_of(metrics, None if problems is None else sandbox)
    metrics = [name for name in names if name != PASS_AT_1]
    check_answers(answer, reference_answer)
    prices = None if costs is None else check_costs(costs)
    files = methods_of(predictions)
    methods: dict[str, Sequence[Predictions]] = {}
    for name, paths in files.items():
        settings = compared(paths[0]) if len(paths) == 1 else None
        if settings is None:
            methods[name] = [
                x
                for path in paths
                for x in read_predictions(path, prediction_field=prediction_field)
            ]
        else:  # each setting is a method
            before = "" if len(files) == 1 else f"{name}: "
            methods |= {f"{before}{setting}": several for setting, several in settings.items()}
    runs = [run for several in methods.values() for run in several]
    for other in runs[1:]:
        pairs = enumerate(itertools.zip_longest(runs[0].inputs, other.inputs, fillvalue=...))
        for i, pair in pairs:
            if ... in pair or (None not in pair and len({*pair}) > 1):
                raise UserError(
                    f"{other.path} and {runs[0].path} differ in row {i}: compare predictions of "
                    "the same inputs"
                )
    if references is None and references_field is not None:
        raise UserError(f"references_field={references_field!r} needs references: give their file")
    texts: list[tuple[str, ...]] = []
    if metrics:
        found = next((run.targets for run in runs if any(run.targets)), runs[0].targets)
        if references is not None:
            found = list(read_references(references, field=references_field))
        texts = [several for several in found if several is not None]
        if len(texts) != len(runs[0]):
            raise UserError(
                f"there are {len(texts)} references for the {len(runs[0])} rows of {runs[0].path}: "
                f"give each row a reference, in its 'targets' or in a file"
            )
    if reference_answer is not None:
        texts = [tuple(map(reference_answer, several)) for several in texts]
    scorers: dict[str, Scoring] = {m: Scoring(METRICS[m], texts, answer) for m in metrics}
    if problems is not None and sandbox is not None:
        tests = read_problems(problems)
        for several in runs:
            check_problems(tests, several.inputs, os.fspath(problems), several.path)
        scorers[PASS_AT_1] = Scoring(PassAt1(sandbox), tests)
    for scorer in scorers.values():
        check_references(scorer.metric, scorer.references)

    took = {
        name: [(run, decoding_figures(run, prices)) for run in several]
        for name, several in methods.items()
    }
    likelihood = None if score is None else Likelihood(score, chat, runs)
    given = {
        "references": references,
        "answer": answer,
        "reference_answer": reference_answer,
        "problems": problems,
        "sandbox": None if problems is None else sandbox,
    }
    configuration = {
        "predictions": {name: list(map(str, paths)) for name, paths in files.items()},
        "metrics": list(scorers),
        "costs": prices,
        "score": None if likelihood is None else [likelihood.model.name, chat],
        **{name: None if value is None else str(value) for name, value in given.items()},
    }
    place: Any = contextlib.nullcontext()
    if output_dir is not None:
        place = RunDirectory(output_dir, config_name=CONFIG_NAME, makes=(SCORES_NAME,))
    with place as directory:
        if directory is not None:
            directory.claim(configuration, replace=True)
        if directory is not None and on_start is not None:
            read = map(str, itertools.chain.from_iterable(files.values()))
            on_start(directory, paths={x: os.path.abspath(os.path.expanduser(x)) for x in read})
        figures = {name: pooled_figures(runs, scorers, likelihood) for name, runs in took.items()}
        scores = {
            "rows": len(runs[0]),
            **{name: getattr(bootstrap, name) for name in ("resamples", "level", "seed")},
            **_scores(methods, figures, bootstrap),
        }
        if directory is not None:
            directory.write_json(SCORES_NAME, scores)
    return scores


def decoding_figures(run: Predictions, costs: Mapping[str, float] | None = None) -> dict[str, Sums]:
    """Returns the figures of decoding; empty if the file has no counts. See `efficiency`."""
    if run.counts is None or run.log_target is None or run.log_p is None:
        if costs is not None:
            raise UserError(f"{run.path} has no counts of passes (`info`): leave out costs")
        return {}
    return {
        **efficiency(run.counts, costs),
        "nats_per_token": divergence(run.log_target, run.log_p, run.counts.emitted),
        "impossible_share": impossible_share(run.log_target, run.log_p),
    }


def pooled_figures(
    runs: Sequence[tuple[Predictions, Mapping[str, Sums]]],
    scorers: Mapping[str, Scoring],
    likelihood: Likelihood | None = None,
) -> dict[str, Sums]:
    """The figures that all runs of a method have, pooled; `runs` has their figures of decoding."""
    by_run = [
        {
            **{name: scorer.figure(run.outputs) for name, scorer in scorers.items()},
            **({} if likelihood is None else {"perplexity": likelihood.perplexity(run)}),
            **took,
        }
        for run, took in runs
    ]
    common = [name for name in by_run[0] if all(name in figures for figures in by_run)]
    return {name: pooled([figures[name] for figures in by_run]) for name in common}


def _scores(
    methods: Mapping[str, Sequence[Predictions]],
    figures: Mapping[str, Mapping[str, Sums]],
    bootstrap: Bootstrap,
) -> dict[str, Any]:
    resampled = {
        name: {key: bootstrap.replicates(sums) for key, sums in of_method.items()}
        for name, of_method in figures.items()
    }
    scores = {
        name: {
            "files": [run.path for run in runs],
            "failed": sum(len(run.missing) for run in runs),
            "figures": {
                key: as_json(bootstrap.summary(sums.value, resampled[name][key]))
                for key, sums in figures[name].items()
            },
        }
        for name, runs in methods.items()
    }
    differences = []
    for other, name in itertools.combinations(methods, 2):
        between = {}
        for key in (key for key in figures[name] if key in figures[other]):
            value = figures[name][key].value - figures[other][key].value
            with np.errstate(invalid="ignore"):  # infinity minus infinity
                replicates = resampled[name][key] - resampled[other][key]
            between[key] = as_json(bootstrap.summary(value, replicates))
        differences.append({"method": name, "other": other, "figures": between})
    return {"methods": scores, "differences": differences}


def as_json(interval: Interval) -> dict[str, float | None]:
    """Returns an interval as JSON values, None for values that are not finite."""
    values = interval._asdict()
    return {key: value if math.isfinite(value) else None for key, value in values.items()}


def shown(figure: Mapping[str, float | None] | None) -> str | None:
    """Returns a figure with its interval as text, or None."""
    if figure is None:
        return None
    value, low, high = (figure[end] for end in ("value", "low", "high"))
    if low is None or high is None:
        return None if value is None else f"{value:.4g}"
    return f"{'-' if value is None else f'{value:.4g}'} [{low:.4g}, {high:.4g}]"
