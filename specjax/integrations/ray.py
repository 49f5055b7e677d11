"""Bulk decoding with Ray Data: rows in, the same rows with their outputs out, over a cluster.

A row's output depends on its id and the seed alone, so a row that is decoded twice, because an
actor was lost, has the same output twice. Files in the output directory, which all machines of the
cluster must see:

    ray_config.json   everything that determines the outputs, and its fingerprint
    predictions/      files of rows, in any order; each is written whole
    checkpoint/       the ids of the rows that are written (Ray's)
    metrics.json      totals over all rows, written at the end
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import ray
from ray.data.checkpoint import CheckpointConfig
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from ray.util.tpu import slice_placement_group

from specjax.checks import PathLike, join_names, whole_number
from specjax.data.examples import SourceRecord, field_of
from specjax.data.few_shot import FewShot
from specjax.errors import MissingFileError, UserError, tell
from specjax.runs import processes
from specjax.runs.inference import check_seed, tokens_of
from specjax.runs.predictions import hash_of
from specjax.runs.run_directory import RunDirectory
from specjax.text import Decoder
from specjax.text.requests import chat_options, check_truncate
from specjax.text.results import COUNTS, Row, finite

_CONFIG, _METRICS, _PREDICTIONS, _CHECKPOINT = (
    "ray_config.json", "metrics.json", "predictions", "checkpoint",
)  # fmt: skip
# The column of the rows' numbers.
_ID = "id"


class Format(NamedTuple):
    """How Ray reads and writes files."""

    read: Callable[[str], ray.data.Dataset]
    write: Callable[..., None]
    options: Mapping[str, Any]


FORMATS = {
    "parquet": Format(ray.data.read_parquet, ray.data.Dataset.write_parquet, {}),
    "jsonl": Format(
        ray.data.read_json,
        ray.data.Dataset.write_json,
        {"double_precision": 15, "force_ascii": False},  # digits enough for float32
    ),
}
# Those of a row alone: the drafter's passes serve all rows of a batch, and differ with them.
_COUNTS = tuple(name for name in COUNTS if name != "drafter_calls")
# The columns that are added to a row.
ADDED = pa.schema(
    [
        ("prediction", pa.string()),
        ("tokens", pa.list_(pa.int32())),
        ("log_prob_processed", pa.float64()),
        ("log_prob_target", pa.float64()),
        ("ended_by", pa.string()),
        *((name, pa.int64()) for name in _COUNTS),
        ("drafted_lengths", pa.list_(pa.int64())),
        ("accepted_lengths", pa.list_(pa.int64())),
        ("error", pa.string()),
    ]
)
_FAILED = {**dict.fromkeys(_COUNTS, 0), "ended_by": "error"}


@dataclasses.dataclass(frozen=True)
class Workers:
    """The actors that decode.

    Attributes:
      count: their number.
      resources: what each needs of its host, such as `{"TPU": 8}` or `{"GPU": 1}`. CPUs that are
        counted here are lost to Ray's tasks that read, filter and write, which need two.
      hosts: the number of hosts that are one actor: their processes form one JAX program.
      topology: the version and topology of a TPU slice of several hosts, such as "v5e:4x4": each
        actor is a whole one, instead of `resources` and `hosts`.
    """

    count: int = 1
    resources: Mapping[str, float] = dataclasses.field(default_factory=dict)
    hosts: int = 1
    topology: str | None = None

    def __post_init__(self) -> None:
        whole_number("workers", self.count, low=1)
        if self.topology is not None and not all(self.topology.partition(":")):
            raise UserError(
                f"topology must be VERSION:TOPOLOGY, such as 'v5e:4x4', got {self.topology!r}"
            )

    @property
    def actor(self) -> tuple[type, dict[str, Any], dict[str, Any]]:
        """The class of an actor, its arguments, and Ray's options for it."""
        if self.hosts == 1 and self.topology is None:
            return BatchDecoder, {}, _amounts(self.resources)
        return SliceDecoder, {"workers": self}, {"num_cpus": 0}


def infer(
    make_decoder: Callable[[], Decoder],
    *,
    source: PathLike,
    output_dir: PathLike,
    workers: Workers,
    batch_rows: int = 512,
    format: str | None = None,
    allow_other_environment: bool = False,
    on_start: Callable[..., None] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Decodes the rows of Parquet or JSONL files, and continues an earlier run that was stopped.

    Args:
      make_decoder: see `BatchDecoder`.
      source: a file, a folder or an address of them. Each row has its own whole number in
        0 .. 2**32 - 1 as `id`.
      output_dir: a directory that all machines see: a new one, or that of a run with the same
        configuration and input.
      workers: the actors. One is started before, to check everything.
      batch_rows: the rows that an actor gets and writes together; the rest is lost with it.
      format: "parquet" or "jsonl", of input and output; by default by the files' names.
      allow_other_environment, on_start: see `specjax.runs.inference.infer`.
      **options: of `BatchDecoder`.

    Returns:
      The content of `metrics.json`.

    Raises:
      UserError: the input has no ids, the models cannot be used, or the output directory has
        another run.
    """
    source = str(source)
    if "://" not in source:
        source = os.path.abspath(os.path.expanduser(source))
    format = format or _format_of(source)
    if format not in FORMATS:
        raise UserError(f"`format` must be one of {join_names(FORMATS)}, got {format!r}")
    read, write, written_as = FORMATS[format]
    with RunDirectory(
        output_dir, config_name=_CONFIG, makes=(_PREDICTIONS, _CHECKPOINT, _METRICS)
    ) as run:
        if not ray.is_initialized():
            ray.init(log_to_driver=False)  # standard output is the metrics'
        ids, content = _check(read(source), source, options)
        kind, arguments, amounts = workers.actor
        arguments |= {"make_decoder": make_decoder, **options}
        described = _describe(kind, arguments, amounts)
        run.claim(
            {**described, "input": content, "rows": len(ids)},
            allow_other_environment=allow_other_environment,
        )
        run.keep()
        if on_start is not None:
            on_start(run, paths={"source": source})
        path, start = run.own(_PREDICTIONS), time.perf_counter()
        with _checkpoint(run.own(_CHECKPOINT)):
            rows = read(source).repartition(target_num_rows_per_block=batch_rows)
            decoded = rows.map_batches(
                kind,
                fn_constructor_kwargs=arguments,
                batch_size=None,
                batch_format="pyarrow",
                compute=ray.data.ActorPoolStrategy(size=workers.count),
                **amounts,
            )
            write(decoded, str(path), **written_as)
        seconds = time.perf_counter() - start
        metrics = _totals(read(str(path)), ids)
        run.write_json(_METRICS, metrics)
    if metrics["failed"] == metrics["rows"]:
        raise UserError(f"all {metrics['rows']} inputs failed: {path} has the errors")
    tell(
        f"{metrics['rows']} rows are in {path}, {metrics['failed']} of them without an "
        f"output (`error` says why); this call took {seconds:.0f} s"
    )
    return metrics


def _format_of(source: str) -> str:
    path = Path(source)
    if "://" not in source and not path.exists():
        raise MissingFileError(f"{source}: no such file or folder: check the path")
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    endings = {file.name.removesuffix(".gz").rpartition(".")[2] for file in files}
    found = {"parquet": "parquet", "jsonl": "jsonl", "json": "jsonl"}
    formats = {found[ending] for ending in endings if ending in found}
    if len(formats) != 1:
        raise UserError(
            f"{source} must be Parquet or JSONL files (.parquet, .jsonl), of one kind: name the "
            "format, or convert them"
        )
    return formats.pop()


def _check(
    rows: ray.data.Dataset, source: str, options: Mapping[str, Any]
) -> tuple[np.ndarray, str]:
    """The ids of all rows, and a hash of their content in any order."""
    schema = rows.schema()
    if schema is None or not rows.count():
        raise UserError(f"{source} has no rows: it must have at least one")
    columns = schema.names
    inputs = options.get("inputs_field", "inputs")
    if options.get("task") is None and inputs not in columns:
        raise UserError(
            f"{source} has no column {inputs!r} (it has {join_names(map(repr, columns))}): name "
            "that of the prompts as inputs_field"
        )
    if _ID not in columns:
        raise UserError(
            f"{source} has no column {_ID!r} (it has {join_names(map(repr, columns))}): give each "
            "row its own whole number, which with the seed determines its random numbers"
        )
    if same := [name for name in ADDED.names if name in columns]:
        raise UserError(
            f"{source} has a column {same[0]!r}, which the outputs get too: rename it, or give "
            "another input"
        )
    found = list(rows.map_batches(_digests, batch_format="pyarrow").iter_batches())
    ids = np.concatenate([batch[_ID] for batch in found])
    if ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= 2**32:
        raise UserError(f"{source}: each {_ID!r} must be a whole number in 0 .. {2**32 - 1}")
    values, counts = np.unique(ids, return_counts=True)
    if len(values) < len(ids):
        raise UserError(
            f"{source}: {_ID}={values[counts.argmax()]} is that of {counts.max()} rows: give each "
            "its own"
        )
    total = sum(int(batch["digest"].sum(dtype=np.uint64)) for batch in found) % 2**64
    return values, f"{total:016x}"


def _digests(rows: pa.Table) -> pa.Table:
    lines = (json.dumps(row, sort_keys=True, default=str) for row in rows.to_pylist())
    digests = [int.from_bytes(hashlib.sha256(x.encode()).digest()[:8]) for x in lines]
    return pa.table({_ID: rows[_ID], "digest": pa.array(digests, pa.uint64())})


def _amounts(resources: Mapping[str, float]) -> dict[str, Any]:
    """Ray's options for what an actor needs."""
    given = dict(resources)
    amounts = {"num_cpus": given.pop("CPU", 0), "num_gpus": given.pop("GPU", 0)}
    return {**amounts, **({"resources": given} if given else {})}


def _describe(kind: type, arguments: Mapping[str, Any], amounts: Mapping[str, Any]) -> Any:
    """What an actor says of its decoder, or its refusal."""
    first = ray.remote(_First).options(**amounts).remote()
    described = first.describe.remote(kind, arguments)
    try:
        if not ray.wait([described], timeout=60.0)[0]:
            has = ray.cluster_resources()
            tell(f"waiting for the first actor; the cluster has {has}")
        return ray.get(described)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, UserError | OSError):
            raise error.cause from None
        raise
    finally:
        ray.kill(first)


class _First:
    def describe(self, kind: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
        decoder = kind(**arguments)
        described = decoder.describe()
        if isinstance(decoder, SliceDecoder):
            decoder.release()
        return described


@contextlib.contextmanager
def _checkpoint(path: Path) -> Iterator[None]:
    context = ray.data.DataContext.get_current()
    before = context.checkpoint_config
    context.checkpoint_config = CheckpointConfig(_ID, str(path), delete_checkpoint_on_success=False)
    try:
        yield
    finally:
        context.checkpoint_config = before


def _totals(rows: ray.data.Dataset, ids: np.ndarray) -> dict[str, Any]:
    """Totals over all rows; raises RuntimeError unless each is there once."""
    found, ended, counts = [], collections.Counter[str](), collections.Counter[str]()
    for batch in rows.select_columns([_ID, "ended_by", *_COUNTS]).iter_batches():
        found.append(batch[_ID])
        ended.update(batch["ended_by"].tolist())
        counts.update({name: int(batch[name].sum()) for name in _COUNTS})
    if not np.array_equal(np.sort(np.concatenate(found)), ids):
        raise RuntimeError(
            "rows are missing, or twice there, because another driver wrote at the same time: "
            "choose another output_dir"
        )
    calls = counts["verifier_calls"]
    return {
        "rows": len(ids),
        "failed": ended["error"],
        "ended": ended["eos"],
        "ended_by_stop": ended["stop"],
        "ended_by_nan": ended["nan"],
        **counts,
        "tokens_per_verifier_call": counts["emitted"] / calls if calls else None,
    }


class BatchDecoder:
    """Decodes batches of rows, as a class for `ray.data.Dataset.map_batches`.

        rows.map_batches(
            BatchDecoder,
            fn_constructor_args=(make_decoder,),
            batch_format="pyarrow",
            batch_size=1024,
            compute=ray.data.ActorPoolStrategy(size=4),
        )

    Each row has its own whole number in 0 .. 2**32 - 1 as `id`. It keeps its columns and gets those
    of `ADDED`; `error` says why it has no output (`ended_by` is "error"), or a part of one ("nan").
    A batch is best many times the Decoder's `batch_size`, because its last rows leave slots empty.

    Args:
      make_decoder: returns the Decoder; called once in each actor. It must be picklable.
      inputs_field: the column of prompts.
      task: makes prompts from rows instead.
      chat, truncate, seed: see `specjax.runs.inference.infer`.

    Raises:
      UserError: an option is wrong, or a batch is not a table.
    """

    def __init__(
        self,
        make_decoder: Callable[[], Decoder],
        *,
        inputs_field: str = "inputs",
        task: FewShot | None = None,
        chat: bool | Mapping[str, Any] = False,
        truncate: str | None = None,
        seed: int = 0,
    ) -> None:
        check_truncate(truncate)
        chat_options("chat", chat)
        check_seed(seed)
        if task is not None and task.limit is not None:
            raise UserError(f"limit must be left out on Ray, got {task.limit}: give fewer rows")
        # Of another file of examples, another run.
        self._examples = "" if task is None else hash_of([x.values for x in task.drawn])
        self._decoder = make_decoder()
        if self._decoder.costs is not None:
            raise UserError(
                "costs must be given on Ray, or each actor measures its own: give a file of "
                "specjax bench --costs"
            )
        self._inputs_field, self._task = inputs_field, task
        self._read: dict[str, Any] = {"chat": chat, "truncate": truncate}
        self._seed = seed

    def __call__(self, batch: pa.Table) -> pa.Table:
        if not isinstance(batch, pa.Table):
            raise UserError(
                f"a batch must be a pyarrow table, got {type(batch).__name__}: give map_batches "
                'batch_format="pyarrow"'
            )
        rows = batch.to_pylist()
        outputs: dict[int, dict[str, Any]] = {}
        prompts: dict[int, np.ndarray] = {}
        for place, values in enumerate(rows):
            record = SourceRecord(f"the row with {_ID}={values[_ID]}", values)
            try:
                prompts[place] = tokens_of(
                    self._decoder, self._inputs(record), record.where, **self._read
                )
            except UserError as error:
                outputs[place] = _FAILED | {"error": str(error)}
        places = list(prompts)
        ids = [rows[place][_ID] for place in places]
        options: dict[str, Any] = {"ids": ids, "seed": self._seed, "progress": False}
        for row in self._decoder.rows(prompts.values(), **options) if prompts else ():
            outputs[places[row.index]] = _output(row)
        added = pa.Table.from_pylist([outputs[i] for i in range(len(rows))], schema=ADDED)
        for name in added.column_names:
            batch = batch.append_column(name, added[name])
        return batch

    def describe(self) -> dict[str, Any]:
        """Returns the JSON values that determine the outputs of rows; see `Decoder.describe`."""
        inputs = self._inputs_field if self._task is None else repr(self._task)
        values = {"seed": self._seed, "inputs": inputs, "examples": self._examples, **self._read}
        return {**self._decoder.describe(), **values}

    def _inputs(self, record: SourceRecord) -> str:
        if self._task is not None:
            return self._task.prompts([record])[0].inputs
        inputs = field_of(record, self._inputs_field, "inputs_field")
        if not isinstance(inputs, str):
            raise UserError(f"{record.where}: {self._inputs_field!r} must be a text, got a list")
        return inputs


def _output(row: Row) -> dict[str, Any]:
    info = row.info
    return {
        "prediction": row.text,
        "tokens": row.tokens.tolist(),
        "log_prob_processed": finite(info.log_prob_processed),
        "log_prob_target": finite(info.log_prob_target),
        "ended_by": row.ended_by,
        **{name: int(getattr(info, name)) for name in _COUNTS},
        "drafted_lengths": info.drafted_lengths.tolist(),
        "accepted_lengths": info.accepted_lengths.tolist(),
        "error": row.error,
    }


class SliceDecoder:
    """A `BatchDecoder` of several hosts whose processes form one JAX program, as in a TPU slice.

    This actor needs no device. It sends each batch to an actor on each host; all rows are the
    same. If one is lost, all end, and Ray starts this actor again. `release` ends them, and so does
    the end of the job.
    """

    def __init__(
        self, make_decoder: Callable[[], Decoder], *, workers: Workers, **options: Any
    ) -> None:
        if workers.topology is None:
            bundles = [dict(workers.resources)] * workers.hosts
            group = placement_group(bundles, strategy="SPREAD")
            self.release = functools.partial(remove_placement_group, group)
        else:
            version, _, topology = workers.topology.partition(":")
            reserved = slice_placement_group(topology, version)
            group, self.release = reserved.placement_group, reserved.shutdown
        ray.get(group.ready())
        self._hosts = [
            ray.remote(_Host)
            .options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, i),
                **_amounts(resources),
            )
            .remote()
            for i, resources in enumerate(group.bundle_specs)
        ]
        address = ray.get(self._hosts[0].address.remote())
        self._on_all("start", address, len(self._hosts), make_decoder, options)

    def __call__(self, batch: pa.Table) -> pa.Table:
        return self._on_all("decode", batch)

    def describe(self) -> dict[str, Any]:
        """See `BatchDecoder.describe`."""
        return self._on_all("describe")

    def _on_all(self, method: str, *args: Any) -> Any:
        """The result of the first host, once all have theirs."""
        calls = [getattr(host, method).remote(i, *args) for i, host in enumerate(self._hosts)]
        try:
            return ray.get(calls)[0]
        except ray.exceptions.RayActorError:
            self.release()  # ends the other hosts
            os._exit(1)


class _Host:
    """One process of a `SliceDecoder`."""

    def address(self) -> str:
        with socket.socket() as free:
            free.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def start(
        self,
        index: int,
        address: str,
        count: int,
        make_decoder: Callable[[], Decoder],
        options: Mapping[str, Any],
    ) -> None:
        processes.meet(address, count, index)
        processes.join(address, count, index)
        self._batches = BatchDecoder(make_decoder, **options)

    def decode(self, index: int, batch: pa.Table) -> pa.Table | None:
        rows = self._batches(batch)
        return None if index else rows

    def describe(self, index: int) -> dict[str, Any]:
        return self._batches.describe()
