"""A file of prompts to a file of outputs, row by row and resumable.

In the output directory:

    infer_config.json   what determines the outputs, and its fingerprint
    predictions.jsonl   one object per input, appended as rows finish, put in order at the end
    metrics.json        totals over all rows, at the end
"""

import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from specjax import _batches
from specjax.api import Decoder, Row
from specjax.data import Example, read_examples
from specjax.data.examples import SEQIO_PREFIX, guess_format
from specjax.output_directory import claim, locked, make_writable, write_atomically

CONFIG_NAME = "infer_config.json"
PREDICTIONS_NAME = "predictions.jsonl"
METRICS_NAME = "metrics.json"

Record = dict[str, Any]


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
) -> dict[str, Any]:
    """Decodes every input of a source, and continues where an earlier run was stopped.

    A line of `predictions.jsonl` has `id` (the input's place, from 0), `inputs`, `targets` (if
    `targets_field` is given), `prediction`, `tokens` (without the end-of-sequence token),
    `log_prob` (natural logarithm of the emitted tokens' probability under the verifier) and
    `log_prob_target` (under the rule's distribution), both null where minus infinity, `ended_by`
    ("eos" or "length"), and `info` (the counts of `specjax.decoding.DecodeInfo`). An input longer
    than the decoder's last bucket is not decoded: its line has a null `prediction`, and `error`.

    A row's random stream is its `id`'s. Batches are formed from the whole input, whatever is done
    already, so that a run stopped at any moment and continued gives the same lines.

    Args:
      make_decoder: called once the input and the output directory are found good.
      source: see `specjax.data.read_examples`.
      output_dir: a directory, new or of a run of the same configuration and input.
      format: see `read_examples`.
      inputs_field: see `read_examples`.
      targets_field: see `read_examples`; a reference is carried over, not used.
      split: see `read_examples`.
      chat: whether each input is a user's message, for the model's chat template.
      seed: of the run.
      progress: see `Decoder.__call__`.

    Returns:
      What is in `metrics.json`.

    Raises:
      FileNotFoundError: there is no such source.
      OSError: the output directory cannot be written, or another process is at work in it.
      ValueError: an empty, unreadable or faulty source, an empty input, or an output directory of
        another run.
    """
    directory = make_writable(output_dir)
    examples = list(
        read_examples(
            source,
            format=format,
            inputs_field=inputs_field,
            targets_field=targets_field,
            split=split,
        )
    )
    first_line = _first_line(source, format, inputs_field, targets_field)
    names = [f"{os.fspath(source)}:{first_line + example.id}" for example in examples]
    for name, example in zip(names, examples, strict=True):
        if not example.inputs.strip():
            raise ValueError(f"{name}: the input is empty; give it some text, or drop the line")
    with locked(directory):
        try:
            decoder = make_decoder()
        except TypeError as error:  # a word where a number belongs
            raise ValueError(str(error)) from None
        prompts, failed = _encode(decoder, examples, names, chat)
        if prompts:
            # Its checks, before anything is claimed.
            decoder.rows(list(prompts.values()), seed=seed, ids=list(prompts))
        texts = json.dumps([[e.inputs, e.targets] for e in examples])
        claim(
            directory / CONFIG_NAME,
            {
                **decoder.describe(),
                "seed": seed,
                "chat": chat,
                "rows": len(examples),
                "input": hashlib.sha256(texts.encode()).hexdigest()[:16],
            },
        )
        path = directory / PREDICTIONS_NAME
        done = _resume(path, len(examples))
        fresh = _decode(decoder, examples, prompts, failed, done, path, seed, progress)
        records = sorted({**done, **fresh.pop("records")}.values(), key=lambda record: record["id"])
        assert len(records) == len(examples)
        write_atomically(path, b"".join(map(_line, records)))
        metrics = {**_metrics(records), "this_process": fresh}
        write_atomically(directory / METRICS_NAME, (json.dumps(metrics, indent=1) + "\n").encode())
    if failed:
        print(
            f"specjax: {len(failed)} of {len(examples)} inputs were not decoded; {path} says why "
            f"(id {', '.join(map(str, list(failed)[:5]))}{', ...' if len(failed) > 5 else ''})",
            file=sys.stderr,
        )
    return metrics


def _encode(
    decoder: Decoder, examples: list[Example], names: list[str], chat: bool
) -> tuple[dict[int, Any], dict[int, str]]:
    """Tokens of the inputs that fit, and what is wrong with those that do not, by id."""
    prompts: dict[int, Any] = {}
    failed: dict[int, str] = {}
    for name, example in zip(names, examples, strict=True):
        prompt: Any = example.inputs
        if chat:
            prompt = [{"role": "user", "content": prompt}]
        try:
            prompts[example.id] = decoder.encode(prompt, name)
        except _batches.PromptTooLongError as error:
            failed[example.id] = str(error)
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
    with path.open("ab", buffering=0) as file:

        def put(record: Record) -> None:
            records[record["id"]] = record
            file.write(_line(record))

        for i, error in failed.items():
            if i not in done:
                put({**_about(examples[i]), "prediction": None, "error": error})
        rows: Iterator[Row] = iter(())
        if prompts:
            rows = decoder.rows(
                list(prompts.values()),
                seed=seed,
                ids=ids,
                done={place for place, i in enumerate(ids) if i in done},
                progress=progress,
            )
        for row in rows:
            tokens += int(row.info.emitted)
            info: dict[str, Any] = row.info._asdict()
            put(
                {
                    **_about(examples[ids[row.index]]),
                    "prediction": row.text,
                    "tokens": row.tokens.tolist(),
                    "log_prob": _finite(info.pop("log_p")),
                    "log_prob_target": _finite(info.pop("log_target")),
                    "ended_by": "eos" if row.ended else "length",
                    "info": {name: value.tolist() for name, value in info.items()},
                }
            )
    seconds = time.perf_counter() - start
    return {
        "records": records,
        "rows": len(records),
        "seconds": seconds,  # with what was compiled
        "tokens_per_second": tokens / seconds,
    }


def _about(example: Example) -> Record:
    about: Record = {"id": example.id, "inputs": example.inputs}
    return about if example.targets is None else {**about, "targets": example.targets}


def _metrics(records: list[Record]) -> dict[str, Any]:
    """Totals over all rows; they depend on the rows alone."""
    decoded = [record for record in records if "error" not in record]
    names = ("emitted", "verifier_calls", "drafter_calls", "drafted", "accepted")
    totals = {name: sum(record["info"][name] for record in decoded) for name in names}

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


def _resume(path: Path, count: int) -> dict[int, Record]:
    """The rows that an earlier run has written; drops a torn last line from the file."""
    # A replacement that was cut short leaves its unfinished copy.
    for leftover in path.parent.glob(f".{path.name}.*"):
        leftover.unlink()
    if not path.exists():
        return {}
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    records: dict[int, Record] = {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            record = json.loads(line)
            i = int(record["id"])
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{path}:{number}: no row of this run; delete the line, and run again"
            ) from None
        if i in records or not 0 <= i < count:
            raise ValueError(f"{path}:{number}: id {i} is there twice or not of this input")
        records[i] = record
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    return records


def _line(record: Record) -> bytes:
    text = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
    # Half a surrogate pair, which JSON can spell and UTF-8 cannot, becomes JSON's spelling again.
    return text.encode(errors="backslashreplace")


def _finite(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


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
