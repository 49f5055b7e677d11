"""A record of a finished run that was edited is refused by name, or changes no result."""

import functools
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import strategies as st

import specjax
from specjax.fingerprints import digest
from specjax.runs.evaluation import evaluate
from specjax.runs.inference import infer
from specjax.runs.predictions import CONFIG_NAME, PREDICTIONS_NAME, hash_of, lines_of
from specjax.runs.run_directory import fingerprint_of
from specjax.study.choose import Search
from specjax.text.results import COUNTS
from specjax.training import HeadRecipe, train_head
from specjax.training.head_data import Labelling
from specjax.training.teacher import SAMPLES_NAME, store_pairs
from specjax.training.trainer import run_directory
from tests import tiny_pair
from tests.cli.infer_command import write
from tests.fuzzing.law import assert_untouched, contents
from tests.fuzzing.mutations import Change, changes
from tests.fuzzing.world import TEXTS
from tests.study import world
from tests.training import toy

ROWS = 6


class Run(NamedTuple):
    """A kind of run.

    Attributes:
      make: makes the run of a seed in a directory.
      again: starts the same command, or a command that reads the run; the result as JSON values.
      sealed: the files that are records, as patterns.
    """

    make: Callable[[Path, int], Any]
    again: Callable[[Path], Any]
    sealed: tuple[str, ...]


def _compare(output: Path, seed: int = 0, **others: Any) -> Any:
    asked = [world.VERIFIER, *world.settings({"OPT({})": (0.1, 0.5)})[2:]]
    results = world.run(output, asked, how=world.measuring(seed=seed), **others)
    lines = [json.loads(line) for line in (output / "points.jsonl").read_text().splitlines()]
    figures = [
        {k: v for k, v in x.get("figures", {}).items() if "latency" not in k and "time" not in k}
        for x in lines
    ]
    return [results["done"], results["failed"], [x["setting"] for x in lines], figures]


def _limits(output: Path, seed: int = 0) -> Any:
    search = Search(max_nats=9.0, candidates=2, held_out=0.5)
    found = _compare(output, seed, measured="front", search=search)
    return [found, json.loads((output / "results.json").read_text())["setting"] is not None]


def _rows(seed: int, ids: range) -> list[dict[str, Any]]:
    lengths = {"drafted_lengths": [0, 1], "accepted_lengths": [0, 1]}
    info = {**dict.fromkeys(COUNTS, 2), **lengths, "rounds": 1, "calls": {"verifier": 2}}
    rest = {"prediction": f"x {seed}", "ended_by": "eos", "info": info}
    return [{"id": i, "inputs": f"in {i}", **rest} for i in ids]


def _write_rows(output: Path, seed: int) -> None:
    rows = _rows(seed, range(ROWS))
    inputs = [(row["inputs"], None) for row in rows]
    configuration = {"seed": seed, "rows": ROWS, "input": hash_of(inputs)}
    output.mkdir()
    about = {"files": [PREDICTIONS_NAME], "kept": True, "environment": {}}
    (output / CONFIG_NAME).write_text(json.dumps(configuration | about))
    (output / PREDICTIONS_NAME).write_bytes(lines_of(rows, fingerprint_of(configuration)))


def _evaluate(output: Path) -> Any:
    bootstrap = specjax.evaluation.Bootstrap(resamples=100)
    return evaluate(output, metrics=(), bootstrap=bootstrap)["methods"]["out"]["figures"]


def _infer(output: Path, seed: int = 0) -> Any:
    def make() -> specjax.Decoder:
        return specjax.Decoder(specjax.Pair(**world.models()), **world.OPTIONS, batch_size=4)

    source = output.parent / "input.txt"
    if not source.exists():
        write(output.parent, TEXTS)
    metrics = infer(make, source=source, output_dir=output, seed=seed, progress=False)
    metrics.pop("this_process")
    return [metrics, (output / PREDICTIONS_NAME).read_text()]


def _train(output: Path, seed: int = 0) -> Any:
    """A run that keeps samples, whose checkpoints of every step count."""
    task = toy.TextTask(model=toy.CONFIG, objective=toy.OBJECTIVE)

    def batches(pairs: Any) -> Any:
        return task.batches(pairs, toy.BATCHING, seed=seed, row_multiple=1)

    with run_directory(output, [SAMPLES_NAME]) as run:
        result = toy.train_copies(
            run,
            task=task,
            training_pairs=toy.copy_pairs(4),
            validation_pairs=toy.copy_pairs(4, seed=1),
            grow=lambda: batches(store_pairs(run, "teacher", lambda: toy.copy_pairs(20, seed))),
            seed=seed,
            num_steps=3,
            checkpoint_every=1,
            log_every=1,
        )
    return [result.step, result.validation_loss, digest(result.params)]


@functools.cache
def _pair() -> specjax.Pair:
    return specjax.load_pair(**tiny_pair.shared_pair())


def _train_head(output: Path, seed: int = 0) -> Any:
    labelling = Labelling(max_new_tokens=4, shard_rows=4, batch_size=4)
    sizes = {"epochs": 2, "blocks": 0, "rows_per_batch": 4, "checkpoints": 4}
    found = train_head(
        HeadRecipe(labelling=labelling, seed=seed, progress=False, **sizes),
        _pair,
        output_dir=output,
        training_data=world.EXAMPLES,
        validation_data=world.EXAMPLES[:4],
    )
    return [found]


RUNS = {
    "infer": Run(_infer, _infer, ("predictions.jsonl", "infer_config.json")),
    "compare": Run(_compare, _compare, ("points/*",)),
    "limits": Run(_limits, _limits, ("points/*",)),
    "train": Run(_train, _train, ("samples/*", "checkpoints/**/*")),
    "train head": Run(_train_head, _train_head, ("head_data/*", "checkpoints/**/*")),
    "evaluate": Run(_write_rows, _evaluate, ("predictions.jsonl",)),
}


@functools.cache
def made(name: str) -> tuple[Path, Path, Any]:
    """A finished run, one with another seed, and the result of the first."""
    root = Path(tempfile.mkdtemp(prefix="specjax-fuzz-records-"))
    for seed, place in enumerate(("out", "other")):
        RUNS[name].make(root / place, seed)
    return root / "out", root / "other", RUNS[name].again(root / "out")


def files_of(name: str, place: Path) -> list[str]:
    found = {path for pattern in RUNS[name].sealed for path in place.glob(pattern)}
    return sorted(str(path.relative_to(place)) for path in found if path.is_file())


def edit(place: Path, other: Path, names: list[str], how: str, i: int, j: int) -> None:
    """Swaps two records, copies one over another, or takes one, or lines of one, of `other`."""
    first, second = (place / names[k % len(names)] for k in (i, j))
    theirs = other / first.relative_to(place)
    if how == "swap":
        content = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(content)
    elif how == "copy":
        first.write_bytes(second.read_bytes())
    elif how == "other" and theirs.exists():
        first.write_bytes(theirs.read_bytes())
    elif how == "lines" and theirs.exists():
        mine, new = (x.read_bytes().splitlines(keepends=True) for x in (first, theirs))
        k = j % max(1, min(len(mine), len(new)))
        first.write_bytes(b"".join([*mine[:k], *new[k : k + 1], *mine[k + 1 :]]))


_CHANGE = st.one_of(
    changes(["x.jsonl"], ("directory", "dangling", "circle", "removed")),
    st.tuples(st.sampled_from(["swap", "copy", "other", "lines"]), st.integers(0, 999)),
)
CASE = (st.sampled_from(sorted(RUNS)), st.integers(0, 99), _CHANGE)
# Without decoding.
QUICK_CASE = (st.just("evaluate"), st.integers(0, 99), _CHANGE)


def law(name: str, which: int, change: Change | tuple[str, int]) -> None:
    finished, other, expected = made(name)
    with tempfile.TemporaryDirectory(prefix="specjax-fuzz-") as scratch:
        place, outside = Path(scratch, "out"), Path(scratch, "outside")
        shutil.copytree(finished, place)
        outside.mkdir()
        names = files_of(name, place)
        if isinstance(change, tuple):
            edit(place, other, names, change[0], which, change[1])
        else:
            change = Change(names[which % len(names)], change.how, change.at, change.value)
            change.apply(place, outside)
        foreign = contents(outside)
        try:
            found = RUNS[name].again(place)
        except (ValueError, OSError) as error:
            assert str(place) in str(error) and "\n" not in str(error), error
        else:
            assert json.loads(json.dumps(found)) == json.loads(json.dumps(expected))
        assert_untouched(foreign, contents(outside), set())
