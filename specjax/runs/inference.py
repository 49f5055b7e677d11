"""Decodes a file of prompts to a file of outputs, row by row; a stopped run can be resumed.

Files in the output directory:

    infer_config.json   everything that determines the outputs, and its fingerprint
    predictions.jsonl   one object per input, appended as rows finish, sorted at the end
    metrics.json        totals over all rows, written at the end
    costs.json          the costs of passes, if they were measured at the start of the run

The command adds `config.gin` and `runs.jsonl` (see `RunDirectory.record`). Of the processes of one
JAX program only the first one reads and writes the directory.
"""

import contextlib
import itertools
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from specjax.checks import PathLike, check_count, check_flag, whole_number
from specjax.compilation import compile_seconds
from specjax.data.examples import SEQIO_PREFIX
from specjax.data.few_shot import FewShot, read_inputs
from specjax.drafting import read_costs
from specjax.errors import UserError, tell
from specjax.runs import processes
from specjax.runs.predictions import (
    CONFIG_NAME,
    COSTS_NAME,
    MADE,
    METRICS_NAME,
    PREDICTIONS_NAME,
    SAMPLES,
    Key,
    Record,
    about,
    acceptance_of,
    hash_of,
    key_of,
    line_of,
    lines_of,
    record_of_row,
    resume,
    totals,
)
from specjax.runs.processes import Process
from specjax.runs.run_directory import MODEL_NAMES, RunDirectory
from specjax.text import Decoder, TextModel
from specjax.text.directories import shown_path
from specjax.text.passes import costs_file
from specjax.text.requests import chat_options, check_truncate
from specjax.text.results import NanWarning, Shown, has_colours, split
from specjax.text.setting import use_costs
from specjax.writing import append


def infer(
    make_decoder: Callable[..., Decoder],
    *,
    source: PathLike,
    output_dir: PathLike,
    format: str | None = None,
    inputs_field: str | int | None = None,
    targets_field: str | int | None = None,
    split: str = "test",
    task: FewShot | None = None,
    truncate: str | None = None,
    chat: bool | Mapping[str, Any] = False,
    seed: int = 0,
    num_samples: int = 1,
    sources: bool = False,
    show: int = 0,
    allow_other_environment: bool = False,
    progress: bool | None = None,
    on_start: Callable[..., None] | None = None,
    process: Process | None = None,
) -> dict[str, Any] | None:
    """Decodes every input of a source, and continues an earlier run that was stopped.

    A line of `predictions.jsonl` has these keys:
      `id`: the place of the input, from 0.
      `inputs`: the prompt; `targets`: the reference or a list of references, if given.
      `sample`: the number of the sample, if `num_samples` is larger than 1; lines of the same input
        are adjacent.
      `prediction`, and `tokens` (without the end-of-sequence token).
      `log_prob_processed`: the natural logarithm of the probability of the emitted tokens under the
        verifier after temperature, filters and processors; null if it is minus infinity, left out
        if the verifier has not read all of them.
      `log_prob_target`: the same under the rule's distribution, which the tokens were drawn from.
      `ended_by`: "eos", "stop" (a stop string), "length" or "nan". For "nan" the key `nan` names
        the model and the step.
      `info`: the counts of `specjax.text.results.RowInfo`.
      `sources`: with `sources=True` where each token came from; see `specjax.text.results.Row`.
      `run`, of the run's fingerprint, and `checksum`, of the rest of the line. A run with a changed
        line, or a line of another run, cannot be continued.

    An input that cannot be decoded (it is empty, or longer than the decoder's last bucket) does not
    stop the others: its line has a null `prediction` and the key `error`.

    A run that is stopped and continued gives the same lines (see `Decoder.rows`). With several
    processes (`process`) they are equal to those of a single process with the same mesh.

    Args:
      make_decoder: called after the input and the output directory have been checked.
      source: see `specjax.data.examples.read_examples`, which also has `format`, `inputs_field`,
        `targets_field` and `split`.
      output_dir: a new directory, or that of a run with the same configuration and input.
      task: makes prompts from the source's records; decoder-only models read their common beginning
        once. Its templates name the fields.
      truncate: "end" or "beginning", where long prompts are cut; None: long prompts are errors.
      chat: whether each prompt is a user's message for the model's chat template; or options of
        the template, such as `{"enable_thinking": False}`.
      num_samples: the number of outputs of each input; see `Decoder.__call__`.
      sources: whether to write where each token came from.
      show: the number of outputs to print to stderr, coloured by these sources, which are then
        written.
      allow_other_environment: continue a run that began on another device, with other versions or
        with other flags of XLA; rounding may then differ in the remaining rows.
      on_start: called as `on_start(run, paths={"source": ...})` with the `RunDirectory`, after all
        checks and before decoding.
      process: this process of a JAX program over several (`processes.join`), all of which make the
        same call; None if there is no other. Only the first one reads and writes `output_dir`.

    Returns:
      The content of `metrics.json`: totals over all rows and, as `this_process`, the rows and the
      speed of this call. None where another process writes them.

    Raises:
      OSError: a file cannot be read or written, another process is working in the output directory,
        or it has a file of one of these names that no run made.
      UserError: the source is unreadable, none of its inputs can be decoded, or the output
        directory has another run.
    """
    chat = (chosen := chat_options("chat", chat)) or chosen is not None
    check_flag("allow_other_environment", allow_other_environment)
    check_flag("sources", sources)
    sources = whole_number("show", show, low=0) > 0 or sources
    check_count("num_samples", num_samples, "give the number of outputs of each input")
    check_truncate(truncate)
    check_seed(seed)
    run = RunDirectory(output_dir, config_name=CONFIG_NAME, makes=MADE)
    writes = process is None or process.index == 0
    fields: dict[str, Any] = {"inputs_field": inputs_field, "targets_field": targets_field}
    examples = read_inputs(source, format=format, split=split, task=task, **fields)
    with processes.naming_lost_processes(process), run if writes else contextlib.nullcontext():
        input_hash = hash_of([(e.inputs, e.targets) for e in examples])
        if process is not None:
            # Early, so that a process that rejects its input does not keep the others waiting.
            processes.check_same("another input", input_hash)
        decoder = _decoder(make_decoder, run)
        if process is not None and (partitioner := decoder.method.partitioner) is not None:
            processes.connect(partitioner.mesh)
        prompts: dict[int, np.ndarray] = {}
        failed: dict[int, str] = {}
        for i, text, _, where in examples:
            try:
                prompts[i] = tokens_of(decoder, text, where, chat=chat, truncate=truncate)
            except UserError as error:
                failed[i] = str(error)
        if not prompts:
            rest = f" (all {len(failed)} inputs failed)" if len(failed) > 1 else ""
            raise UserError(f"{next(iter(failed.values()))}{rest}")
        tokens, ids = list(prompts.values()), list(prompts)
        # This checks the arguments before the directory is claimed.
        options: dict[str, Any] = {"seed": seed, "num_samples": num_samples, "sources": sources}
        # A task's prompts begin with the same examples, which the models may read once.
        options |= {"share_prefix": task is not None and decoder.can_share_prefix}
        decoder.rows(tokens, ids=ids, **options)
        configuration = {
            **decoder.describe(),
            "seed": seed,
            "chat": chat,
            "input": input_hash,
            "rows": len(examples),
            **({SAMPLES: num_samples} if num_samples > 1 else {}),
            **{name: True for name in ("sources", "share_prefix") if options[name]},
            # Besides the texts: similar tokenizers may split a text differently.
            "tokens": hash_of([prompt.tolist() for prompt in tokens]),
        }
        if process is not None:
            settings_hash = hash_of({**configuration, "environment": None})
            processes.check_same("other models or settings", settings_hash)
        models = decoder.models
        roles = {"verifier": models} if isinstance(models, TextModel) else models.named
        configuration[MODEL_NAMES] = {role: shown_path(x.name) for role, x in roles.items()}
        path = run.path / PREDICTIONS_NAME
        inputs = {(e.id, sample): e.inputs for e in examples for sample in range(num_samples)}
        done: dict[Key, Record] = {}
        if writes:
            run.claim(configuration, allow_other_environment=allow_other_environment)
            done = resume(path, run.fingerprint, inputs, failed)
            if decoder.costs is not None and not (run.path / COSTS_NAME).exists():
                run.write(COSTS_NAME, costs_file(decoder.costs))
            if on_start is not None:
                name = str(source)
                if not name.startswith(SEQIO_PREFIX):
                    name = os.path.abspath(os.path.expanduser(name))
                on_start(run, paths={"source": name})
            run.own(PREDICTIONS_NAME)
            if failed:
                first, more = next(iter(failed.values())), f", and {len(failed) - 1} more"
                tell(
                    f"{len(failed)} of {len(examples)} inputs cannot be decoded: {first}"
                    f"{more if len(failed) > 1 else ''}; see {path}"
                )
        rows = dict(done)

        def put(record: Record) -> None:
            if not writes:
                return
            run.keep()
            rows[key_of(record)] = record
            append(path, line_of(record, run.fingerprint))  # at once: this process may be killed

        for i, sample in itertools.product(failed, range(num_samples)):
            if (i, sample) not in done:
                record = about(examples[i], sample if num_samples > 1 else None)
                put({**record, "prediction": None, "error": failed[i]})
        # The place of each row that is known -> its rounds.
        keys = itertools.product(ids, range(num_samples))
        found = [done[key]["info"]["rounds"] if key in done else 0 for key in keys]
        rounds = np.array(found, np.int32)
        if process is not None:
            rounds = processes.gather(rounds).max(axis=0)  # the others have zeros
        known = {int(place): int(rounds[place]) for place in np.flatnonzero(rounds)}
        emitted, start, compiled = 0, time.perf_counter(), compile_seconds()
        with warnings.catch_warnings():
            # NaN is told for all rows below.
            warnings.simplefilter("ignore", NanWarning)
            for row in decoder.rows(tokens, ids=ids, done=known, progress=progress, **options):
                emitted += int(row.info.emitted)
                put(record_of_row(examples[ids[row.index]], row, num_samples))
        if not writes:
            return None
        seconds, compiling = time.perf_counter() - start, compile_seconds() - compiled
        records = sorted(rows.values(), key=key_of)
        assert len(records) == len(inputs)
        run.write(PREDICTIONS_NAME, lines_of(records, run.fingerprint))
        took = {
            "rows": len(rows) - len(done),
            "seconds": seconds,
            "compile_seconds": compiling,
            "tokens_per_second": emitted / seconds,
            "tokens_per_second_without_compilation": emitted / (seconds - compiling),
        }
        metrics = {**totals(records), "this_process": took}
        written = run.write_json(METRICS_NAME, metrics)
    if truncated := [record for record in records if "nan" in record]:
        nan = truncated[0]
        tell(
            f"warning: {len(truncated)} of {len(records)} outputs are truncated; the first is "
            f"{nan['id']} ({nan['nan']}): check the checkpoint"
        )
    tell(f"wrote {len(records)} predictions to {path}, totals to {written}")
    _say_outputs(records, show, decoder, prompts)
    return metrics


def check_seed(seed: Any) -> None:
    """Refuses what is no seed."""
    if not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise UserError(f"seed must be a whole number in 0 .. {2**32 - 1}, got {seed!r}")


def tokens_of(
    decoder: Decoder, text: str, name: str, *, chat: bool | Mapping[str, Any], truncate: str | None
) -> np.ndarray:
    """The tokens of an input, whose name is for messages; see `infer` for `chat`, `truncate`."""
    options = chat_options("chat", chat)
    said: Any = text if options is None or not text.strip() else [{"role": "user", "content": text}]
    return decoder.encode(said, name, truncate=truncate, chat_template_kwargs=options)


def _decoder(make: Callable[..., Decoder], run: RunDirectory) -> Decoder:
    """The decoder, with the costs of an earlier start, because other costs change the drafts."""
    path = run.path / COSTS_NAME
    decoder = None
    if run.kept and path.exists():
        # If this decoder differs and cannot take the costs, claim() reports the difference.
        with contextlib.suppress(TypeError, ValueError), use_costs(read_costs(path)):
            decoder = make()
    decoder = make() if decoder is None else decoder
    rows, partitioner = decoder.batch_size, decoder.method.partitioner
    multiple = partitioner.row_multiple if partitioner else 1
    if rows % multiple:
        raise UserError(
            f"batch_size={rows} must be a multiple of {multiple}, because the mesh splits the "
            f"rows: choose {rows + -rows % multiple}"
        )
    return decoder


def _say_outputs(
    records: Sequence[Record], show: int, decoder: Decoder, prompts: Mapping[int, Any]
) -> None:
    """Prints the first outputs, coloured by the sources of their tokens, and the acceptance."""
    rows = []
    for record in records[:show]:
        i, tokens, sources = record["id"], record.get("tokens", ()), record.get("sources", ())
        text_of = decoder.text_after(prompts[i]) if tokens else None
        parts = split(record["prediction"] or "", tokens, text_of)
        name = f"{i}.{record['sample']}" if "sample" in record else str(i)
        rows.append((name, list(zip(parts, sources, strict=True))))
    if rows:
        print(Shown(tuple(rows)).text(has_colours(sys.stderr)), file=sys.stderr)
    if (acceptance := acceptance_of(records)).drafts:
        for line in str(acceptance).splitlines():
            tell(line)
