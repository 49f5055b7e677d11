"""Decodes a file of prompts to a file of outputs, row by row; a stopped run can be resumed.

Files in the output directory:

    infer_config.json   everything that determines the outputs, and its fingerprint
    predictions.jsonl   one object per input, appended as rows finish, sorted at the end
    metrics.json        totals over all rows, written at the end

The command adds `config.gin` and `runs.jsonl` (see `specjax.runs.record`).
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specjax.checks import check_path
from specjax.data import Example, read_examples
from specjax.data.examples import SEQIO_PREFIX, guess_format
from specjax.runs.compilation_cache import count_compilations
from specjax.runs.output_directory import claim, locked, make_writable, write_atomically
from specjax.text import Decoder
from specjax.text.results import COUNTS, Row, finite

CONFIG_NAME = "infer_config.json"
PREDICTIONS_NAME = "predictions.jsonl"
METRICS_NAME = "metrics.json"

Record = dict[str, Any]
_COUNTED = frozenset(COUNTS)


def infer(
    make_decoder: Callable[[], Decoder],
    *,
    source: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    format: str | None = None,
    inputs_field: str | int | None = None,
    targets_field: str | int | None = None,
    split: str = "test",
    chat: bool = False,
    seed: int = 0,
    progress: bool | None = None,
    on_start: Callable[..., None] | None = None,
) -> dict[str, Any]:
    """Decodes every input of a source, and continues an earlier run that was stopped.

    A line of `predictions.jsonl` has these keys:
      `id`: the place of the input, from 0.
      `inputs`, and `targets` if `targets_field` is given.
      `prediction`, and `tokens` (without the end-of-sequence token).
      `log_prob`: the natural logarithm of the probability of the emitted tokens under the verifier;
        null if it is minus infinity.
      `log_prob_target`: the same under the rule's distribution.
      `ended_by`: "eos", "length" or "nan". For "nan" the key `nan` names the model and the step.
      `info`: the counts of `specjax.text.RowInfo`.

    An input that cannot be decoded (it is empty, or longer than the decoder's last bucket) does not
    stop the others: a message on stderr names it before decoding starts, and its line has a null
    `prediction` and the key `error`.

    The random stream of a row depends on its `id`. Batches are formed from the whole input, also if
    a part of it is done, so that a run that is stopped and continued gives the same lines.

    Args:
      make_decoder: is called after the input and the output directory have been checked.
      source: see `specjax.data.read_examples`.
      output_dir: a new directory, or that of a run with the same configuration and input.
      format: see `read_examples`.
      inputs_field: see `read_examples`.
      targets_field: see `read_examples`; a reference is copied into the predictions and not used.
      split: see `read_examples`.
      chat: whether each input is a user's message for the model's chat template.
      seed: the seed of the run.
      progress: see `Decoder.__call__`.
      on_start: is called as `on_start(directory, paths={"source": ...})` before decoding, after all
        checks and when the run has claimed its directory; such as `record_run`.

    Returns:
      The content of `metrics.json`: totals over all rows and, as `this_process`, the rows that this
      call decoded, its seconds, the seconds of compilation, and the tokens per second with and
      without compilation.

    Raises:
      FileNotFoundError: there is no such source.
      OSError: the output directory cannot be written, or another process is working in it.
      TypeError: `source` or `output_dir` is not a path, or another argument has a wrong type.
      ValueError: the source is empty, unreadable or invalid, none of its inputs can be decoded, or
        the output directory has another run.
    """
    check_path(source, "source=")
    if not isinstance(chat, bool):
        raise TypeError(f"chat must be True or False, got {chat!r}")
    source = os.path.expanduser(source)
    directory = make_writable(output_dir)
    fields: dict[str, Any] = {"inputs_field": inputs_field, "targets_field": targets_field}
    examples = list(read_examples(source, format=format, split=split, **fields))
    first_line = _first_line(source, format, **fields)
    names = [f"{source}:{first_line + example.id}" for example in examples]
    path = directory / PREDICTIONS_NAME
    with locked(directory):
        decoder = make_decoder()
        prompts, failed = _encode(decoder, examples, names, chat)
        # This checks the arguments before the directory is claimed.
        decoder.rows(list(prompts.values()), seed=seed, ids=list(prompts))
        _claim(directory, decoder, examples, prompts, {"seed": seed, "chat": chat})
        done = _resume(path, examples, failed)
        if on_start is not None:
            named = source if source.startswith(SEQIO_PREFIX) else os.path.abspath(source)
            on_start(directory, paths={"source": named})
        _tell_failed(failed, len(examples), path)
        fresh = _decode(decoder, examples, prompts, failed, done, path, seed, progress)
        records = sorted({**done, **fresh.pop("records")}.values(), key=lambda record: record["id"])
        assert len(records) == len(examples)
        write_atomically(path, b"".join(map(_line, records)))
        metrics = {**_metrics(records), "this_process": fresh}
        write_atomically(directory / METRICS_NAME, (json.dumps(metrics, indent=1) + "\n").encode())
    print(
        f"specjax: {len(records)} predictions are in {path}, totals in {directory / METRICS_NAME}",
        file=sys.stderr,
    )
    return metrics


def _claim(
    directory: Path,
    decoder: Decoder,
    examples: list[Example],
    prompts: Mapping[int, Any],
    settings: Mapping[str, Any],
) -> None:
    """Claims the directory for this run, or checks that it belongs to this run."""
    path = directory / PREDICTIONS_NAME
    if path.exists() and not (directory / CONFIG_NAME).exists():
        raise ValueError(
            f"{path} exists, but there is no {CONFIG_NAME} that says which run wrote it: choose "
            "another output_dir, or move the file"
        )
    # The tokens and the texts: similar tokenizers may split a text differently.
    texts = [(e.inputs, e.targets) for e in examples]
    tokens = [prompt.tolist() for prompt in prompts.values()]
    claim(
        directory / CONFIG_NAME,
        {
            **decoder.describe(),
            **settings,
            "rows": len(examples),
            "input": _hash(texts),
            "tokens": _hash(tokens),
        },
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


def _encode(
    decoder: Decoder, examples: list[Example], names: list[str], chat: bool
) -> tuple[dict[int, Any], dict[int, str]]:
    """The tokens of the inputs that can be decoded, and the errors of the others, by id."""
    prompts: dict[int, Any] = {}
    failed: dict[int, str] = {}
    for name, example in zip(names, examples, strict=True):
        prompt: Any = example.inputs
        if chat and prompt.strip():
            prompt = [{"role": "user", "content": prompt}]
        try:
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
    path: Path,
    seed: int,
    progress: bool | None,
) -> dict[str, Any]:
    """Decodes the missing rows, and writes each row when it is finished."""
    records: dict[int, Record] = {}
    ids = list(prompts)
    start = time.perf_counter()
    tokens = 0
    # Unbuffered: a line is written in one piece, and stays if this process is killed.
    with path.open("ab", buffering=0) as file, count_compilations() as compilations:

        def put(record: Record) -> None:
            records[record["id"]] = record
            _write(file, _line(record), path)

        for i, error in failed.items():
            if i not in done:
                put({**_about(examples[i]), "prediction": None, "error": error})
        for row in decoder.rows(
            list(prompts.values()),
            seed=seed,
            ids=ids,
            done={place for place, i in enumerate(ids) if i in done},
            progress=progress,
        ):
            tokens += int(row.info.emitted)
            put(_record(examples[ids[row.index]], row))
    seconds = time.perf_counter() - start
    return {
        "records": records,
        "rows": len(records),
        "seconds": seconds,
        "compile_seconds": compilations.seconds,
        "tokens_per_second": tokens / seconds,
        "tokens_per_second_without_compilation": tokens / (seconds - compilations.seconds),
    }


def _record(example: Example, row: Row) -> Record:
    record = {
        **_about(example),
        "prediction": row.text,
        "tokens": row.tokens.tolist(),
        "log_prob": finite(row.info.log_p),
        "log_prob_target": finite(row.info.log_target),
        "ended_by": row.ended_by,
        "info": row.info.to_dict(),
    }
    return record if row.error is None else {**record, "nan": row.error}


def _about(example: Example) -> Record:
    about: Record = {"id": example.id, "inputs": example.inputs}
    return about if example.targets is None else {**about, "targets": example.targets}


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
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    records: dict[int, Record] = {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            record = json.loads(line)
            i = record["id"]
            ours = record["inputs"] == examples[i].inputs and i not in records and i >= 0
            ours &= "error" in record if i in failed else record["info"].keys() >= _COUNTED
        except (ValueError, LookupError, TypeError, AttributeError):
            ours = False
        if not ours:
            raise ValueError(
                f"{path}:{number}: the line is not a row of this run, or it repeats an input: "
                "delete it and run the same command again"
            )
        records[i] = record
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    return records


def _hash(values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def _line(record: Record) -> bytes:
    text = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
    # JSON can write half a surrogate pair and UTF-8 cannot, so it is written as JSON's escape.
    return text.encode(errors="backslashreplace")


def _first_line(
    source: str | os.PathLike[str],
    format: str | None,
    inputs_field: str | int | None,
    targets_field: str | int | None,
) -> int:
    """The line number of the first example, for messages; 0 if the source has no lines."""
    source = os.fspath(source)
    if source.startswith(SEQIO_PREFIX):
        return 0
    named = isinstance(inputs_field, str) or isinstance(targets_field, str)
    return 2 if named and (format or guess_format(source)) == "tsv" else 1
