"""A file of prompts to a file of outputs, row by row and resumable.

In the output directory:

    infer_config.json   what determines the outputs, and its fingerprint
    predictions.jsonl   one object per input, appended as rows finish, put in order at the end
    metrics.json        totals over all rows, at the end

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
    """Decodes every input of a source, and continues where an earlier run was stopped.

    A line of `predictions.jsonl` has `id` (the input's place, from 0), `inputs`, `targets` (if
    `targets_field` is given), `prediction`, `tokens` (without the end-of-sequence token),
    `log_prob` (natural logarithm of the emitted tokens' probability under the verifier) and
    `log_prob_target` (under the rule's distribution), both null where minus infinity, `ended_by`
    ("eos", "length" or "nan", and then `nan` says which model gave it in which step), and `info`
    (the counts of `specjax.text.RowInfo`). An input that cannot be decoded (it is empty, or longer
    than the decoder's last bucket) does not stop the others: a message on stderr names it before
    they are decoded, and its line has a null `prediction`, and `error`.

    A row's random stream is its `id`'s. Batches are formed from the whole input, whatever is done
    already, so that a run stopped at any moment and continued gives the same lines.

    Args:
      make_decoder: called once the input and the output directory have been checked.
      source: see `specjax.data.read_examples`.
      output_dir: a directory, new or of a run of the same configuration and input.
      format: see `read_examples`.
      inputs_field: see `read_examples`.
      targets_field: see `read_examples`; a reference is copied into the predictions, not used.
      split: see `read_examples`.
      chat: whether each input is a user's message, for the model's chat template.
      seed: of the run.
      progress: see `Decoder.__call__`.
      on_start: called as `on_start(directory, paths={"source": ...})` when everything has been
        checked and the directory is this run's, before decoding; `record_run` fits.

    Returns:
      What is in `metrics.json`: totals over all rows and, in `this_process`, the rows that this
      call decoded, its seconds, those of them spent on compilation, and tokens per second with and
      without these.

    Raises:
      FileNotFoundError: there is no such source.
      OSError: the output directory cannot be written, or another process works in it.
      TypeError: `source` or `output_dir` is not a path, or another argument has a wrong type.
      ValueError: the source is empty, unreadable or faulty, or none of its inputs can be decoded,
        or the output directory holds another run.
    """
    check_path(source, "source=")
    if not isinstance(chat, bool):
        raise TypeError(f"chat={chat!r} must be True or False")
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
        # Its checks, before anything is claimed.
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
    """Makes the directory this run's, or checks that it is."""
    path = directory / PREDICTIONS_NAME
    if path.exists() and not (directory / CONFIG_NAME).exists():
        raise ValueError(
            f"{path} exists, but no {CONFIG_NAME} that says which run wrote it; choose another "
            "output_dir, or move the file away"
        )
    # The tokens as well as the texts: vocabularies that are alike may cut texts differently.
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
    """Tokens of the inputs that can be decoded, and what is wrong with the others, by id."""
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
        alike = f" (none of the {len(failed)} inputs can be decoded)" if len(failed) > 1 else ""
        raise ValueError(f"{next(iter(failed.values()))}{alike}")
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
    """Decodes what is missing, each row written when it is finished."""
    records: dict[int, Record] = {}
    ids = list(prompts)
    start = time.perf_counter()
    tokens = 0
    # Unbuffered: a line goes to the system in one piece, and survives the death of this process.
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
    """Totals over all rows; they depend on the rows alone."""
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
    """Writes one line in one piece; a short one would tear the next line too."""
    try:
        if file.write(line) == len(line):
            return
        reason = "no space left"
    except OSError as error:
        reason = error.strerror or str(error)
    raise OSError(
        f"{path} cannot be written any further ({reason}); the finished rows stay: make room, and "
        "run the same command again"
    )


def _resume(path: Path, examples: list[Example], failed: Mapping[int, str]) -> dict[int, Record]:
    """The rows that an earlier run has written; drops a torn last line from the file."""
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
                f"{path}:{number}: the line is not a row of this run, or is a second one of the "
                "same input; delete it, and run the same command again"
            )
        records[i] = record
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    return records


def _hash(values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def _line(record: Record) -> bytes:
    text = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
    # Half a surrogate pair, which JSON can spell and UTF-8 cannot, becomes JSON's spelling again.
    return text.encode(errors="backslashreplace")


def _first_line(
    source: str | os.PathLike[str],
    format: str | None,
    inputs_field: str | int | None,
    targets_field: str | int | None,
) -> int:
    """The line on which the first example stands, for messages; 0 where there are no lines."""
    source = os.fspath(source)
    if source.startswith(SEQIO_PREFIX):
        return 0
    named = isinstance(inputs_field, str) or isinstance(targets_field, str)
    return 2 if named and (format or guess_format(source)) == "tsv" else 1
