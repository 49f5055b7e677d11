"""Scores files of predictions, and compares methods on the same inputs.

Files in the output directory, if given:

    evaluate_config.json   the configuration
    scores.json            all figures with their intervals

The command adds `config.gin` and `runs.jsonl` (see `RunDirectory.record`).
"""

import itertools
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.checks import check_part, tuple_text
from specjax.errors import UserError
from specjax.evaluation.bootstrap import Bootstrap, Interval, Sums, divided, pooled
from specjax.evaluation.efficiency import (
    check_costs,
    divergence,
    efficiency,
    impossible_share,
)
from specjax.evaluation.metrics import METRICS, Metric, check_metrics, check_references, figure
from specjax.evaluation.programs import PassAt1, check_problems, read_problems
from specjax.evaluation.sandbox import Sandbox
from specjax.runs.run_directory import RunDirectory
from specjax.runs.scored import Predictions, named, read_predictions, read_references

CONFIG_NAME = "evaluate_config.json"
SCORES_NAME = "scores.json"
# Not in `METRICS`, because it runs the outputs.
PASS_AT_1 = "pass_at_1"
Path = str | os.PathLike[str]
_PLAIN = Bootstrap()


class Likelihood:
    """Scores predictions by their probability under a model, at temperature 1.

    `runs` are the predictions to score: their inputs are checked before the model is loaded.
    """

    def __init__(self, model: Any, chat: Any, runs: Sequence[Predictions]) -> None:
        # Imported here, because other scores need no models.
        from specjax.text import TextModel, load_text_model
        from specjax.text.directories import check_model_path, real_path
        from specjax.text.requests import checked_chat

        self._options = checked_chat("chat", chat)
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
        from specjax.text.teacher_forcing import checked_outputs, score

        cut = np.zeros(len(run), bool) if run.counts is None else run.counts.cut
        rows = [row for row in range(len(run)) if row not in run.missing]
        texts = checked_outputs(self.model, [run.outputs[row] for row in rows], len(rows))
        texts = [text[: len(text) - cut[row]] for text, row in zip(texts, rows, strict=True)]
        rows = [row for row, text in zip(rows, texts, strict=True) if text.size]
        texts = [text for text in texts if text.size]
        sums = np.zeros((len(run), 3))
        if rows:
            prompts = [self._prompt(run, row) for row in rows]
            scored = score(self.model, prompts, texts, None, False, None)
            for row, logs in zip(rows, scored.log_probs, strict=True):
                total = np.sum(logs, dtype=np.float64)
                is_possible = np.isfinite(total)
                sums[row] = -total if is_possible else 0.0, len(logs), not is_possible
        return Sums(sums, _perplexity_of)

    def _prompt(self, run: Predictions, row: int) -> np.ndarray:
        from specjax.text.requests import encode

        text: Any = run.inputs[row]
        prompt = text if self._options is None else [{"role": "user", "content": text}]
        name, model = f"{run.path}: the input of row {row}", self.model
        return encode(prompt, name, model.model.vocab_size, model.tokenizer, self._options)


def _perplexity_of(sums: np.ndarray) -> np.ndarray:
    return np.where(sums[:, 2] > 0, np.inf, np.exp(divided(sums[:, 0], sums[:, 1])))


class Scoring(NamedTuple):
    """A metric, its references, and the function that extracts an output's answer (None: all)."""

    metric: Metric
    references: Sequence[Sequence[str]]
    answer: Callable[[str], str] | None = None

    def figure(self, outputs: Sequence[str]) -> Sums:
        """Returns the metric of outputs."""
        texts = outputs if self.answer is None else list(map(self.answer, outputs))
        return figure(self.metric, texts, self.references)


def figures_of(metrics: Any, sandbox: Sandbox | None) -> tuple[str, ...]:
    """The checked names of metrics; with a sandbox "pass_at_1" is added if it is absent."""
    if isinstance(metrics, str):
        raise UserError(
            f"metrics must be a tuple of names, got {metrics!r}; write {tuple_text(metrics)}"
        )
    if not isinstance(metrics, list | tuple) or not all(isinstance(m, str) for m in metrics):
        raise UserError(f"metrics must be a tuple of names, got {metrics!r}")
    check_metrics(name for name in metrics if name != PASS_AT_1)
    if sandbox is None:
        if PASS_AT_1 in metrics:
            raise UserError(
                "the metric 'pass_at_1' runs the outputs as programs: give problems, and a "
                "sandbox, such as SANDBOX=@Sandbox()"
            )
        return tuple(metrics)
    check_part("sandbox", sandbox, ("run", "check"), "Sandbox()")
    sandbox.check()
    return tuple(dict.fromkeys((*metrics, PASS_AT_1)))


def check_answers(answer: Any, reference_answer: Any) -> None:
    """Raises TypeError unless both are callable or None."""
    for name, extract in (("answer", answer), ("reference_answer", reference_answer)):
        if extract is not None and not callable(extract):
            raise UserError(f"{name} must be like AnswerAfter('####'), got {extract!r}")


def evaluate(
    predictions: Path | Sequence[Path] | Mapping[str, Any],
    *,
    references: Path | Sequence[Path] | None = None,
    references_field: str | int | None = None,
    metrics: Sequence[str] = ("bleu", "chrf"),
    prediction_field: str = "prediction",
    targets_field: str = "targets",
    answer: Callable[[str], str] | None = None,
    reference_answer: Callable[[str], str] | None = None,
    costs: Mapping[str, float] | None = None,
    bootstrap: Bootstrap = _PLAIN,
    problems: Path | None = None,
    sandbox: Sandbox | None = None,
    score: Any = None,
    chat: bool | Mapping[str, Any] = False,
    output_dir: Path | None = None,
    compared: Callable[[Path], Mapping[str, Sequence[Predictions]] | None] = lambda _: None,
    on_start: Callable[..., None] | None = None,
) -> dict[str, Any]:
    """Scores predictions, and compares each two methods on the same inputs.

    All figures have percentile bootstrap intervals. All methods share the resampled inputs, so
    differences are paired. Several files of one method, such as runs with other seeds, are pooled;
    so are the samples of each input in a run with `num_samples`.

    Args:
      predictions: files (see `read_predictions`): a path, several paths, or method -> a path or
        several. All must have the same inputs.
      references: files of references (see `read_references`); None: those in the predictions.
      references_field: see `read_references`.
      metrics: names in `METRICS`, and "pass_at_1" with `problems`; empty for only the figures of
        decoding.
      prediction_field: see `read_predictions`.
      targets_field: see `read_predictions`.
      answer: extracts the scored part of an output, such as `AnswerAfter("####")`; None: all. It is
        not applied to programs.
      reference_answer: likewise, for references.
      costs: see `specjax.evaluation.efficiency`.
      bootstrap: the resampling.
      problems: a file of problems (see `read_problems`), a line for each row: the outputs are run
        as programs, for the figure `pass_at_1`.
      sandbox: runs the programs; required with `problems`.
      score: a model or its directory, for the figure `perplexity`; see `perplexities`.
      chat: whether each input is a user's message for this model's chat template; or options of
        the template.
      output_dir: a new directory, or that of an earlier evaluation, which is replaced; None writes
        nothing.
      compared: maps a directory of compared settings to setting -> the predictions of its seeds;
        returns None for any other path.
      on_start: called as `on_start(run, paths={...})` with the `RunDirectory`, if there is one,
        after all checks and before scoring.

    Returns:
      The content of `scores.json`: `methods`: name -> `files`, `failed` (rows without a prediction,
      which count as empty texts) and `figures`: name -> `value`, `low`, `high`, `error` (null for
      missing and infinite values: see `impossible_share`); `differences`: for each two methods
      `method` minus `other`, figure by figure.

    Raises:
      OSError: a file is missing, or the output directory cannot be written.
      ValueError: a metric is unknown or its library is not installed, a file is unreadable, the
        files have different rows, there are no references, or programs cannot be contained.
    """
    if problems is not None and sandbox is None:
        raise UserError(
            f"problems={os.fspath(problems)} needs a sandbox to run the predictions as programs: "
            "give a sandbox, such as SANDBOX=@Sandbox()"
        )
    names = figures_of(metrics, None if problems is None else sandbox)
    metrics = [name for name in names if name != PASS_AT_1]
    check_answers(answer, reference_answer)
    check_part("bootstrap", bootstrap, ("interval", "difference"), "Bootstrap()")
    prices = None if costs is None else check_costs(costs)
    files = named(predictions)
    fields = {"prediction_field": prediction_field, "targets_field": targets_field}
    methods = _methods(files, compared, fields)
    runs = [run for several in methods.values() for run in several]
    _check_rows(runs)
    texts = _references(runs, references, references_field, metrics, targets_field)
    if reference_answer is not None:
        texts = [tuple(map(reference_answer, several)) for several in texts]
    scorers: dict[str, Scoring] = {m: Scoring(METRICS[m], texts, answer) for m in metrics}
    if problems is not None and sandbox is not None:
        scorers[PASS_AT_1] = _programs(runs, problems, sandbox)
    for scorer in scorers.values():
        check_references(scorer.metric, scorer.references)

    took = {
        name: [(run, decoding_figures(run, prices)) for run in several]
        for name, several in methods.items()
    }
    likelihood = None if score is None else Likelihood(score, chat, runs)

    def scores_of() -> dict[str, Any]:
        figures = {name: pooled_figures(runs, scorers, likelihood) for name, runs in took.items()}
        return {
            "rows": len(runs[0]),
            **{name: getattr(bootstrap, name) for name in ("resamples", "level", "seed")},
            **_scores(methods, figures, bootstrap),
        }

    if output_dir is None:
        return scores_of()
    with RunDirectory(output_dir, config_name=CONFIG_NAME, makes=(SCORES_NAME,)) as run:
        configuration = {
            "predictions": {name: list(map(os.fspath, paths)) for name, paths in files.items()},
            "references": None if references is None else str(references),
            "metrics": list(scorers),
            "answer": None if answer is None else repr(answer),
            "reference_answer": None if reference_answer is None else repr(reference_answer),
            "problems": None if problems is None else os.fspath(problems),
            "sandbox": None if problems is None else repr(sandbox),
            "costs": prices,
            "score": None if likelihood is None else [likelihood.model.name, chat],
        }
        run.claim(configuration, replace=True)
        if on_start is not None:
            paths = map(os.fspath, itertools.chain.from_iterable(files.values()))
            on_start(run, paths={x: os.path.abspath(os.path.expanduser(x)) for x in paths})
        scores = scores_of()
        run.write(SCORES_NAME, (json.dumps(scores, indent=1, allow_nan=False) + "\n").encode())
    return scores


def _methods(
    files: Mapping[str, Sequence[Path]],
    compared: Callable[[Path], Mapping[str, Sequence[Predictions]] | None],
    fields: Mapping[str, Any],
) -> dict[str, Sequence[Predictions]]:
    """Method -> the predictions of each seed; in a directory of settings each is a method."""
    methods: dict[str, Sequence[Predictions]] = {}
    for name, paths in files.items():
        settings = compared(paths[0]) if len(paths) == 1 else None
        if settings is None:
            read = (read_predictions(path, **fields) for path in paths)
            methods[name] = list(itertools.chain(*read))
            continue
        before = "" if len(files) == 1 else f"{name}: "
        methods |= {f"{before}{setting}": runs for setting, runs in settings.items()}
    return methods


def _check_rows(runs: Sequence[Predictions]) -> None:
    first = runs[0]
    for other in runs[1:]:
        if len(other) != len(first):
            raise UserError(
                f"{other.path} has {len(other)} rows, but {first.path} has {len(first)}: compare "
                "predictions of the same inputs"
            )
        for i, (ours, theirs) in enumerate(zip(first.inputs, other.inputs, strict=True)):
            if ours is not None and theirs is not None and ours != theirs:
                raise UserError(
                    f"the inputs of {other.path} and {first.path} differ in row {i}: compare "
                    "predictions of the same inputs"
                )


def _references(
    runs: Sequence[Predictions],
    sources: Any,
    field: Any,
    metrics: Sequence[str],
    targets_field: str,
) -> list[tuple[str, ...]]:
    """The references of all rows; empty if there are no metrics."""
    if sources is None and field is not None:
        raise UserError(f"references_field={field!r} needs references: give their file")
    if not metrics:
        return []
    rows, path = len(runs[0]), runs[0].path
    if sources is not None:
        texts = read_references(sources, field=field)
        if len(texts) != rows:
            raise UserError(
                f"the references have {len(texts)} rows, but {path} has {rows}: give references "
                "for each prediction"
            )
        return texts
    for run in runs:
        if not any(run.targets):
            continue
        texts = [targets for targets in run.targets if targets is not None]
        if len(texts) < rows:
            raise UserError(
                f"{run.path} has no {targets_field!r} in row {run.targets.index(None)}: give "
                "a file of references"
            )
        return texts
    raise UserError(
        f"{path} has no references ({targets_field!r}): give a file of references, or no metrics"
    )


def _programs(runs: Sequence[Predictions], path: Path, sandbox: Sandbox) -> Scoring:
    """pass@1 of the problems of a file."""
    problems = read_problems(path)
    if len(problems) != len(runs[0]):
        raise UserError(
            f"{os.fspath(path)} has {len(problems)} problems, but {runs[0].path} has "
            f"{len(runs[0])} rows: give one problem for each prediction"
        )
    for run in runs:
        check_problems(problems, run.inputs, os.fspath(path), run.path)
    return Scoring(PassAt1(sandbox), problems)


def decoding_figures(run: Predictions, costs: Mapping[str, float] | None = None) -> dict[str, Sums]:
    """Returns the figures of decoding; empty if the file has no counts.

    Args:
      run: the rows of a file.
      costs: see `specjax.evaluation.efficiency`.

    Raises:
      ValueError: costs are given, but the file has no counts.
    """
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
    """The figures of one method that all its runs have, pooled over the runs.

    `runs` has the outputs of each seed and the figures of decoding; `likelihood` adds the
    perplexity.
    """
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
    scores: dict[str, Any] = {}
    for name, runs in methods.items():
        scores[name] = {
            "files": [run.path for run in runs],
            "failed": sum(len(run.missing) for run in runs),
            "figures": {
                key: as_json(bootstrap.summary(sums.value, resampled[name][key]))
                for key, sums in figures[name].items()
            },
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
