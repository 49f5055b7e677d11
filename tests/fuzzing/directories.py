"""A directory of a model or of a run is read rightly, or refused in one line that names it.

A run is continued, whatever has become of its directory.
"""

import json
import shutil

from hypothesis import strategies as st

from specjax.writing import CHECKSUMS_NAME
from tests.fuzzing.law import assert_untouched, contents, scratch, start
from tests.fuzzing.mutations import Change, changes
from tests.fuzzing.world import PREDICTIONS, TEXTS, World, command


def law_of_models(world: World, format: str, which: str, draw: st.DataObject) -> None:
    with scratch() as place:
        damaged, outside = place / which, place / "outside"
        outside.mkdir()
        shutil.copytree(world.pairs[format][which], damaged)
        files = sorted(str(p.relative_to(damaged)) for p in damaged.rglob("*") if p.is_file())
        made = draw.draw(st.lists(changes(files), min_size=1, max_size=2), label="changes")
        for change in made:
            change.apply(damaged, outside)
        before = contents(place)
        pair = {**world.pairs[format], which: damaged}
        ended = start(command(pair, world.source, place / "out"))
        assert_untouched(before, _without(contents(place), "out"), set())
        if ended.status:
            assert str(damaged) in ended.refusal, ended.refusal
            assert not (place / "out").exists()
        else:
            lines = (place / "out/predictions.jsonl").read_bytes()
            assert lines.count(b"\n") == len(TEXTS)
            if _is_checked({change.file for change in made}):
                assert lines == world.lines[format]


def _is_checked(files: set[str]) -> bool:
    """Whether no change of these files may lead to other predictions."""
    arrays = {file for file in files if file.endswith(".safetensors") or file.startswith("params/")}
    return files in (arrays, {CHECKSUMS_NAME})


def _without(found, name: str):
    return {k: v for k, v in found.items() if k != name and not k.startswith(f"{name}/")}


OWN = ["infer_config.json", PREDICTIONS, "metrics.json", "runs.jsonl", "config.gin"]
# Names that the run uses, or looks like using; and names that mean nothing to it.
BESIDE = [
    ".specjax.lock", f".{PREDICTIONS}.unfinished", ".infer_config.json.unfinished", "notes.txt",
    "train_config.json", "state", f"{PREDICTIONS}.bak",
]  # fmt: skip


_KIND = st.sampled_from(["finished", "stopped", "stopped", "other", "new"])
_ADDED = st.one_of(
    st.builds(
        Change, st.sampled_from(BESIDE), st.just("add"), st.just(0), st.sampled_from([b"", b"mine"])
    ),
    st.builds(
        Change,
        st.sampled_from([*BESIDE, *OWN]),
        st.just("become"),
        st.just(0),
        st.sampled_from(["file", "directory", "dangling", "circle", "linked"]),
    ),
)
PREDICTIONS_CASE = (
    st.sampled_from(["stopped", "finished"]),
    st.lists(changes([PREDICTIONS]), min_size=1, max_size=3),
)
DIRECTORY_CASE = (
    _KIND,
    st.lists(st.one_of(_ADDED, changes(OWN)), min_size=1, max_size=3),
)


def law_of_runs(world: World, kind: str, made: list[Change]) -> None:
    with scratch() as place:
        output, outside = place / "out", place / "outside"
        outside.mkdir()
        shutil.copytree(world.runs[kind], output)
        for change in made:
            change.apply(output, outside)
        before, foreign = contents(output), contents(outside)
        ended = start(world.command(output))
        after = contents(output)
        assert_untouched(foreign, contents(outside), set())
        assert_untouched(before, after, {*OWN, *_remains(before)})
        if ended.status:
            assert str(output) in ended.refusal
            _assert_kept(before, after, world.lines["hf"])
        else:
            assert (output / PREDICTIONS).read_bytes() == world.lines["hf"]
            assert json.loads((output / "metrics.json").read_bytes())["rows"] == len(TEXTS)
        assert _bytes(after, "runs.jsonl").startswith(_bytes(before, "runs.jsonl"))


def _remains(before) -> list[str]:
    """What killed processes leave, which the next start removes: an empty lock, half a file."""
    unfinished = [name for name in BESIDE if name.endswith(".unfinished")]
    return [*unfinished, *(name for name in [".specjax.lock"] if _bytes(before, name) == b"")]


def _bytes(found, name: str) -> bytes:
    content = found.get(name, (0, b"", 0))[1]
    return content if isinstance(content, bytes) else b""


def _assert_kept(before, after, lines: bytes) -> None:
    """A refused start leaves each file as it was, or adds to the predictions what belongs there."""
    for name in OWN:
        if name == PREDICTIONS and after.get(name) != before.get(name):
            was, now = (_bytes(found, name).splitlines() for found in (before, after))
            assert set(was[:-1]) <= set(now) <= {*was, *lines.splitlines()}
        elif name not in ("runs.jsonl", "config.gin", "infer_config.json"):
            assert after.get(name) == before.get(name), name
        else:
            assert name not in before or name in after
