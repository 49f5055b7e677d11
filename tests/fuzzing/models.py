"""A model's directory is read rightly, or refused in one line that names it."""

import shutil

from hypothesis import strategies as st

from specjax.writing import CHECKSUMS_NAME
from tests.fuzzing import toys
from tests.fuzzing.law import assert_untouched, contents, scratch, start
from tests.fuzzing.mutations import changes
from tests.fuzzing.world import World


def law(world: World, format: str, which: str, draw: st.DataObject) -> None:
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
        ended = start(toys.command(pair, world.source, place / "out"))
        assert_untouched(before, _without(contents(place), "out"), set())
        if ended.status:
            assert str(damaged) in ended.refusal, ended.refusal
            assert not (place / "out").exists()
        else:
            lines = (place / "out/predictions.jsonl").read_bytes()
            assert lines.count(b"\n") == len(toys.TEXTS)
            if _is_checked({change.file for change in made}):
                assert lines == world.lines[format]


def _is_checked(files: set[str]) -> bool:
    """Whether no change of these files may lead to other predictions."""
    arrays = {file for file in files if file.endswith(".safetensors") or file.startswith("params/")}
    return files in (arrays, {CHECKSUMS_NAME})


def _without(found, name: str):
    return {k: v for k, v in found.items() if k != name and not k.startswith(f"{name}/")}
