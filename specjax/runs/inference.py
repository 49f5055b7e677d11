"""Decodes a file of prompts to a file of outputs, row by row; a stopped run can be resumed.

Files in the output directory:

    infer_config.json   everything that determines the outputs, and its fingerprint
    predictions.jsonl   one object per input, appended as rows finish, sorted at the end
    metrics.json        totals over all rows, written at the end
    costs.json          what passes cost, if that was measured at the start of the run

The command adds `config.gin` and `runs.jsonl` (see `RunDirectory.record`). Of several processes
each has a directory with these files, `part-I-of-N`, and the rows of all become one (`runs.parts`).
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specjax.checks import check_path
from specjax.data import Example, FewShot
from specjax.data.examples import SEQIO_PREFIX
from specjax.drafting import read_costs
from specjax.runs import messages, processes, shares
from specjax.runs import parts as parts_lib
from specjax.runs.compilation_cache import count_compilations
from specjax.runs.inputs import check_truncate, read_inputs, tokens_of
from specjax.runs.lines import Record, about, line_of, record_of_row
from specjax.runs.processes import Part
from specjax.runs.rows_file import COSTS_NAME, METRICS_NAME, PREDICTIONS_NAME, resume, totals
from specjax.runs.run_directory import RunDirectory
from specjax.text import Decoder
from specjax.text.costs import costs_file


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
    part: Part | None = None,
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

    With `part` this process decodes a part of the rows, into a directory of its own in
    `output_dir`, and continues what it began there. The rows are those of a single process, and
    where all parts are on one file system, the last one to end writes them as that would have.
    Replicas decode whole plans, without knowing of each other; a program of several processes
    (`processes.join`) decodes each plan together, and each process writes what lies on its devices.

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
      part: which of several processes this is; None for one alone.

    Returns:
      The content of `metrics.json`: totals over all rows (with `part` over its own) and, as
      `this_process`, the rows that this call decoded, its seconds, the seconds of compilation, and
      the tokens per second with and without compilation.

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
    check_truncate(truncate)
    if not os.fspath(source):
        raise ValueError("source is empty: give a file, or seqio:TASK")
    source = os.path.expanduser(source)
    run = parts_lib.directory_of(output_dir, part)
    fields: dict[str, Any] = {"inputs_field": inputs_field, "targets_field": targets_field}
    examples, names = read_inputs(source, format=format, split=split, task=task, **fields)
    path = run.path / PREDICTIONS_NAME
    with processes.naming_lost_processes(part), run:
        if part is not None and part.together:
            # First of all, so that a process that refuses its input is missed soon.
            processes.check_same("an input", _hash([(e.inputs, e.targets) for e in examples]))
        decoder = _decoder(make_decoder, run, part)
        prompts, failed = _encode(decoder, examples, names, chat, truncate)
        # This checks the arguments before the directory is claimed.
        decoder.rows(list(prompts.values()), seed=seed, ids=list(prompts))
        settings = {"seed": seed, "chat": chat}
        _claim(run, decoder, examples, prompts, settings, allow_other_environment, part)
        own = shares.own_ids(decoder, prompts, failed, part)
        done = resume(path, examples, failed, own)
        if decoder.costs is not None and not (run.path / COSTS_NAME).exists():
            run.write(COSTS_NAME, costs_file(decoder.costs))
        if on_start is not None:
            named = source if source.startswith(SEQIO_PREFIX) else os.path.abspath(source)
            on_start(run, paths={"source": named})
        messages.tell_failed(failed, len(examples), path)
        messages.tell_unknown(decoder, prompts, names)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*: look at the weights")
            errors = {i: told for i, told in failed.items() if i in own}
            rounds = shares.known_rounds(prompts, own, done, part)
            fresh = _decode(decoder, examples, prompts, errors, done, rounds, run, seed, progress)
        records = sorted({**done, **fresh.pop("records")}.values(), key=lambda record: record["id"])
        assert len(records) == len(own) or (part is not None and part.together)
        run.write(PREDICTIONS_NAME, b"".join(map(line_of, records)))
        metrics = {**totals(records), "this_process": fresh}
        written = run.write(METRICS_NAME, (json.dumps(metrics, indent=1) + "\n").encode())
    messages.tell_nan(records)
    print(
        f"specjax: {len(records)} predictions are in {path}, totals in {written}",
        file=sys.stderr,
    )
    if part is not None:
        parts_lib.finish(run, part, on_start)
    return metrics


def _decoder(make: Callable[..., Decoder], run: RunDirectory, part: Part | None) -> Decoder:
    """The decoder, with the costs that an earlier start has measured: others, other drafts."""
    made = _made_decoder(make, run)
    if part is not None and made.measured:
        raise ValueError(
            "costs cannot be measured by each of several processes, which must agree on them: "
            "measure them on one, with specjax bench cost --output FILE, and give COSTS=FILE"
        )
    multiple = made.method.partitioner.row_multiple if made.method.partitioner else 1
    if made.batch_size % multiple:
        raise ValueError(
            f"batch_size={made.batch_size} must be a multiple of {multiple}, over which the mesh "
            f"spreads rows: choose {made.batch_size + -made.batch_size % multiple}"
        )
    return made


def _made_decoder(make: Callable[..., Decoder], run: RunDirectory) -> Decoder:
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
    part: Part | None,
) -> None:
    """Claims the directory for this run, or checks that it belongs to this run."""
    # The tokens and the texts: similar tokenizers may split a text differently.
    texts = [(e.inputs, e.targets) for e in examples]
    tokens = [prompt.tolist() for prompt in prompts.values()]
    configuration = {
        **decoder.describe(),
        **settings,
        "rows": len(examples),
        "input": _hash(texts),
        "tokens": _hash(tokens),
    }
    if part is not None:
        parts_lib.check_whole(run, configuration)
        if part.together:
            told = _hash({**configuration, "environment": None})
            processes.check_same("models or settings", told)
        configuration[parts_lib.PART] = dataclasses.asdict(part)
    run.claim(configuration, allow_other_environment=allow_other_environment)


def _encode(
    decoder: Decoder, examples: list[Example], names: list[str], chat: bool, truncate: str | None
) -> tuple[dict[int, Any], dict[int, str]]:
    """The tokens of the inputs that can be decoded, and the errors of the others, by id."""
    prompts: dict[int, Any] = {}
    failed: dict[int, str] = {}
    for name, example in zip(names, examples, strict=True):
        try:
            prompts[example.id] = tokens_of(
                decoder, example.inputs, name, chat=chat, truncate=truncate
            )
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
    rounds: Mapping[int, int],
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
            done=rounds,
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


def _hash(values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]
