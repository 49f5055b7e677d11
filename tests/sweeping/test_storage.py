"""What was measured, written and read back, and parts of it joined."""

import dataclasses

import numpy as np
import pytest

from specjax.sweeping.measurement import Measured, Times, joined
from specjax.sweeping.storage import read_measured, write_measured


def measured(texts, start=0, *, alone=False):
    draws = np.random.default_rng(start)
    times = [Times(draws.random((2, 3, texts)), draws.integers(9, size=(2, texts))) for _ in "ab"]
    records = [
        [{"id": start + i, "prediction": f"{seed}ä\u2028\n{i}"} for i in range(texts)]
        for seed in (4, 5)
    ]
    return Measured([4, 5], records, times[0], None if alone else times[1], 2, 0)


def same(one, other):
    def plain(found):
        values = {f.name: getattr(found, f.name) for f in dataclasses.fields(found)}
        for name in ("times", "verifier_times"):
            if values[name] is not None:
                values[name] = (values[name].seconds.tolist(), values[name].tokens.tolist())
        for records in values["records"]:
            for record in records:
                record.pop("checksum", None)
        return values

    return plain(one) == plain(other)


@pytest.mark.parametrize("alone", [False, True])
def test_what_is_read_is_what_was_written(tmp_path, alone):
    given = measured(3, alone=alone)
    write_measured(tmp_path, given)
    assert same(read_measured(tmp_path), given)
    assert not same(given, measured(3, start=1, alone=alone))


@pytest.mark.parametrize("name", ["times.npz", "seed4.jsonl.gz", "seed5.jsonl.gz"])
def test_a_damaged_file_is_told(tmp_path, name):
    write_measured(tmp_path, measured(3))
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match="was changed or cut: delete it"):
        read_measured(tmp_path)


def test_parts_are_joined_in_order():
    parts = [measured(2), measured(3, start=2)]
    whole = joined(parts)
    assert [record["id"] for record in whole.records[1]] == [0, 1, 2, 3, 4]
    assert whole.times.seconds.shape == whole.verifier_times.seconds.shape == (2, 3, 5)
    assert (whole.times.tokens[:, 2:] == parts[1].times.tokens).all()
    assert whole.compiled == 4 and joined([measured(2, alone=True)]).verifier_times is None
