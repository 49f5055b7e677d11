"""Decodes a file of prompts to a file of outputs, row by row; a stopped run can be resumed.

Files in the output directory:

    infer_config.json   everything that determines the outputs, and its fingerprint
    predictions.jsonl   one object per input, appended as rows finish, sorted at the end
    metrics.json        totals over all rows, written at the end
    costs.json          what passes cost, if that was measured at the start of the run

The command adds `config.gin` and `runs.jsonl` (see `RunDirectory.record`).
"""

import contextlib
import hashlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specjax.checks import check_path
from specjax.data import Example, FewShot
from specjax.data.examples import SEQIO_PREFIX
from specjax.drafting import read_costs
from specjax.runs.compilation_cache import count_compilations
from specjax.runs.inputs import read_inputs
from specjax.runs.lines import FIRST_KEY, Record, about, line_of, record_of, record_of_row
from specjax.runs.run_directory import RunDirectory
from specjax.text import Decoder
from specjax.text.costs import costs_file
from specjax.text.prompts import encode, shortened
from specjax.text.results import COUNTS

CONFIG_NAME = "infer_config.json"
PREDICTIONS_NAME = "predictions.jsonl"
METRICS_NAME = "metrics.json"
COSTS_NAME = "costs.json"
_MADE = (PREDICTIONS_NAME, METRICS_NAME, COSTS_NAME)

_COUNTED = frozenset((*COUNTS, "rounds"))


def infer(
    make_decoder: Callable[..., Decoder],
    *,
    source: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    format: str | None = None,
    inputs_field: str | int | None = None,
    targets_field: str | int | None = None,
    split: str = "test",
    task: FewShot | None = None,
    truncate: str | None = None,
    chat: bool = False,
    seed: int = 0,
    allow_other_environment: bool = False,
    progress: bool | None = None,
    on_start: Callable[..., None] | None = None,
) -> dict[str, Any]:
    """Decodes every input of a source, and continues an earlier run that was stopped.

    A line of `predictions.jsonl` has these keys:
      `id`: the place of the input, from 0.
      `inputs`, the prompt, and `targets`, the reference or a list of them, if there are any.
      `prediction`, and `tokens` (without the end-of-sequence token).
      `log_prob`: the natural logarithm of the probability of the emitted tokens under the verifier;
        null if it is minus infinity, left out where the verifier has not read them all.
      `log_prob_target`: the same under the rule's distribution.
      `ended_by`: "eos", "stop" (a stop string), "length" or "nan". For "nan" the key `nan` names
        the model and the step.
      `info`: the counts of `specjax.text.RowInfo`.
      `checksum`: of the rest of the line. A line that has been changed is refused when the run is
        continued.

    An input that cannot be decoded (it is empty, or longer than the decoder's last bucket) does not
    stop the others: a message on stderr names it before decoding starts, and its line has a null
    `prediction` and the key `error`.

    The random stream of a row depends on its `id`. Batches are formed from the whole input, also if
    a part of it is done, so that a run that is stopped and continued gives the same lines. With
    drafts of a fixed length, or none, only what is missing is decoded, so that each start gets
    further that lasts for one row. Else up to 4 times the batch size of rows share a plan, and one
    of which a row is missing is decoded from its start (see `Decoder.rows`).

    Args:
      make_decoder: is called after the input and the output directory have been checked; with
        `costs=` if an earlier start of the run has measured them, such as `Decoder` does.
      source: see `specjax.data.read_examples`.
      output_dir: a new directory, or that of a run with the same configuration and input.
      format: see `read_examples`.
      inputs_field: see `read_examples`.
      targets_field: see `read_examples`; a reference is copied into the predictions and not used.
      split: see `read_examples`.
      task: makes the prompts of the source's records; `inputs_field` and `targets_field` are then
        left out, for its templates name the fields.
      truncate: "end" or "beginning", where prompts that are too long are cut; None refuses them.
      chat: whether each prompt is a user's message for the model's chat template.
      seed: the seed of the run.
      allow_other_environment: continue a run that was begun on another device, with other versions
        or with other flags of XLA; its remaining rows may then be rounded in another way.
      progress: see `Decoder.__call__`.
      on_start: is called as `on_start(run, paths={"source": ...})` with the `RunDirectory` before
        decoding, after all checks and when the run has claimed its directory.

    Returns:
      The content of `metrics.json`: totals over all rows and, as `this_process`, the rows that this
      call decoded, its seconds, the seconds of compilation, and the tokens per second with and
      without compilation.

    Raises:
      FileNotFoundError: there is no such source.
      OSError: the output directory cannot be written, another process is working in it, or it
        has a file of one of these names that no run made.
      TypeError: `source` or `output_dir` is not a path, or another argument has a wrong type.
      ValueError: the source is empty, unreadable or invalid, none of its inputs can be decoded, or
        the output directory has another run.
    """
    check_path(source, "source=")
    for name, value in (("chat", chat), ("allow_other_environment", allow_other_environment)):
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")
    if truncate not in (None, "end", "beginning"):
        raise ValueError(f"truncate must be None, 'end' or 'beginning', got {truncate!r}")
    if not os.fspath(source):
        raise ValueError("source is empty: give a file, or seqio:TASK")
    source = os.path.expanduser(source)
    run = RunDirectory(output_dir, config_name=CONFIG_NAME, makes=_MADE)
    fields: dict[str, Any] = {"inputs_field": inputs_field, "targets_field": targets_field}
    examples, names = read_inputs(source, format=format, split=split, task=task, **fields)
    path = run.path / PREDICTIONS_NAME
    with run:
        decoder = _decoder(make_decoder, run)
        prompts, failed = _encode(decoder, examples, names, chat, truncate)
        # This checks the arguments before the directory is claimed.
        decoder.rows(list(prompts.values()), seed=seed, ids=list(prompts))
        settings = {"seed": seed, "chat": chat}
        _claim(run, decoder, examples, prompts, settings, allow_other_environment)
        done = _resume(path, examples, failed)
        if decoder.costs is not None and not (run.path / COSTS_NAME).exists():
            run.write(COSTS_NAME, costs_file(decoder.costs))
        if on_start is not None:
            named = source if source.startswith(SEQIO_PREFIX) else os.path.abspath(source)
            on_start(run, paths={"source": named})
        _tell_failed(failed, len(examples), path)
        _tell_unknown(decoder, prompts, names)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*: look at the weights")
            fresh = _decode(decoder, examples, prompts, failed, done, run, seed, progress)
        records = sorted({**done, **fresh.pop("records")}.values(), key=lambda record: record["id"])
        assert len(records) == len(examples)
        run.write(PREDICTIONS_NAME, b"".join(map(line_of, records)))
        metrics = {**_metrics(records), "this_process": fresh}
        totals = run.write(METRICS_NAME, (json.dumps(metrics, indent=1) + "\n").encode())
    _tell_nan(records)
    print(
        f"specjax: {len(records)} predictions are in {path}, totals in {totals}",
        file=sys.stderr,
    )
    return metrics


def _decoder(make: Callable[..., Decoder], run: RunDirectory) -> Decoder:
    """The decoder, with the costs that an earlier start has measured: others, other drafts."""
    if run.kept and (run.path / COSTS_NAME).exists():
        # Where another decoder cannot take them, claim() says what is another.
        with contextlib.suppress(TypeError, ValueError):
            return make(costs=read_costs(run.path / COSTS_NAME))
    return make()


def _claim(
    run: RunDirectory,
    decoder: Decoder,
    examples: list[Example],
    prompts: Mapping[int, Any],
    settings: Mapping[str, Any],
    allow_other_environment: bool,
) -> None:
    """Claims the directory for this run, or checks that it belongs to this run."""
    # The tokens and the texts: similar tokenizers may split a text differently.
    texts = [(e.inputs, e.targets) for e in examples]
    tokens = [prompt.tolist() for prompt in prompts.values()]
    run.claim(
        {
            **decoder.describe(),
            **settings,
            "rows": len(examples),
            "input": _hash(texts),
            "tokens": _hash(tokens),
        },
        allow_other_environment=allow_other_environment,
    )


def _tell_failed(failed: Mapping[int, str], rows: int, path: Path) -> None:
    if failed:
        first = next(iter(failed.values()))
        more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
        print(
            f"specjax: {len(failed)} of {rows} inputs cannot be decoded: {first}{more}; {path} "
            "gives the reason for each",
            file=sys.stderr,
        )


def _tell_nan(records: list[Record]) -> None:
    found = [record for record in records if "nan" in record]
    if found:
        print(
            f"specjax: warning: {len(found)} of {len(records)} rows were ended by NaN, the first "
            f"is {found[0]['id']}: {found[0]['nan']}: look at the weights",
            file=sys.stderr,
        )


def _tell_unknown(decoder: Decoder, prompts: Mapping[int, np.ndarray], names: list[str]) -> None:
    """Warns of inputs of which the vocabulary knows nothing: they are perhaps another model's."""
    words = decoder.tokenizer
    special = (words.unk_id, words.bos_id, *words.eos_ids)

    def is_unknown(ids: list[int]) -> bool:
        # Of an unknown text, SentencePiece knows the space before it.
        known = [i for i in ids if i not in special]
        return words.unk_id in ids and not words.decode(known).strip()

    unknown = [i for i, ids in prompts.items() if is_unknown(ids.tolist())]
    if unknown:
        print(
            f"specjax: warning: {len(unknown)} of {len(prompts)} inputs have no token that the "
            f"vocabulary knows; the first is {names[unknown[0]]}: is it the model for this text?",
            file=sys.stderr,
        )


def _encode(
    decoder: Decoder, examples: list[Example], names: list[str], chat: bool, truncate: str | None
) -> tuple[dict[int, Any], dict[int, str]]:
    """The tokens of the inputs that can be decoded, and the errors of the others, by id."""
    prompts: dict[int, Any] = {}
    failed: dict[int, str] = {}
    for name, example in zip(names, examples, strict=True):
        prompt: Any = example.inputs
        if chat and prompt.strip():
            prompt = [{"role": "user", "content": prompt}]
        try:
            if truncate is not None:
                tokens = encode(decoder.tokenizer, prompt, name)
                prompt = shortened(decoder.tokenizer, tokens, decoder.buckets[-1], truncate)
            prompts[example.id] = decoder.encode(prompt, name)
        except ValueError as error:
            failed[example.id] = str(error)
    if not prompts:
        rest = f" (none of the {len(failed)} inputs can be decoded)" if len(failed) > 1 else ""
        raise ValueError(f"{next(iter(failed.values()))}{rest}")
    return prompts, failed


def _decode(
    decoder: Decoder,
    examples: list[Example],
    prompts: dict[int, Any],
    failed: dict[int, str],
    done: Mapping[int, Record],
    run: RunDirectory,
    seed: int,
    progress: bool | None,
) -> dict[str, Any]:
    """Decodes the missing rows, and writes each row when it is finished."""
    path = run.own(PREDICTIONS_NAME)
    records: dict[int, Record] = {}
    ids, tokens, start = list(prompts), 0, time.perf_counter()
    # Unbuffered: a line is written in one piece, and stays if this process is killed.
    with path.open("ab", buffering=0) as file, count_compilations() as compilations:

        def put(record: Record) -> None:
            run.keep()
            records[record["id"]] = record
            _write(file, line_of(record), path)

        for i, error in failed.items():
            if i not in done:
                put({**about(examples[i]), "prediction": None, "error": error})
        for row in decoder.rows(
            list(prompts.values()),
            seed=seed,
            ids=ids,
            done={p: done[i]["info"]["rounds"] for p, i in enumerate(ids) if i in done},
            progress=progress,
        ):
            tokens += int(row.info.emitted)
            put(record_of_row(examples[ids[row.index]], row))
    seconds = time.perf_counter() - start
    return {
        "records": records,
        "rows": len(records),
        "seconds": seconds,
        "compile_seconds": compilations.seconds,
        "tokens_per_second": tokens / seconds,
        "tokens_per_second_without_compilation": tokens / (seconds - compilations.seconds),
    }


def _metrics(records: list[Record]) -> dict[str, Any]:
    """Totals over all rows; they depend only on the rows."""
    decoded = [record for record in records if "error" not in record]
    totals = {name: sum(record["info"][name] for record in decoded) for name in COUNTS}

    def ratio(above: str, below: str) -> float | None:
        return totals[above] / totals[below] if totals[below] else None

    return {
        "rows": len(records),
        "failed": len(records) - len(decoded),
        "ended": sum(record["ended_by"] == "eos" for record in decoded),
        "ended_by_stop": sum(record["ended_by"] == "stop" for record in decoded),
        "ended_by_nan": sum(record["ended_by"] == "nan" for record in decoded),
        **totals,
        "tokens_per_verifier_call": ratio("emitted", "verifier_calls"),
        "acceptance_rate": ratio("accepted", "drafted"),
    }


def _write(file: Any, line: bytes, path: Path) -> None:
    """Writes one line in one piece; an incomplete write is an error."""
    try:
        if file.write(line) == len(line):
            return
        reason = "no space left"
    except OSError as error:
        reason = error.strerror or str(error)
    raise OSError(
        f"{path} cannot be written any further ({reason}): free some space and run the same "
        "command again; the finished rows are kept"
    )


def _resume(path: Path, examples: list[Example], failed: Mapping[int, str]) -> dict[int, Record]:
    """The rows that an earlier run wrote; removes an incomplete last line from the file."""
    if not path.exists():
        return {}
    try:
        data = path.read_bytes()
    except OSError as error:
        raise OSError(
            f"{path} cannot be read ({error.strerror}): restore it, or choose another output_dir"
        ) from None
    whole = data[: data.rfind(b"\n") + 1]
    torn = data[len(whole) :]
    if torn[: len(FIRST_KEY)] != FIRST_KEY[: len(torn)]:
        raise ValueError(
            f"{path}: the end {torn[:40]!r} is no part of a row: delete it and run the same "
            "command again"
        )
    records: dict[int, Record] = {}
    for number, line in enumerate(whole.split(b"\n")[:-1], 1):
        try:
            record = record_of(line)
            i = record["id"]
            ours = record["inputs"] == examples[i].inputs and i not in records and i >= 0
            ours &= "error" in record if i in failed else record["info"].keys() >= _COUNTED
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            ours = False
        if not ours:
            raise ValueError(
                f"{path}:{number}: the line is not a row of this run, has been changed, or repeats "
                f"an input: delete line {number} and run the same command again"
            )
        records[i] = record
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    return records


def _hash(values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]
