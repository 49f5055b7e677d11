"""`benchmarks.epochs`: without drawing, later epochs copy what the first one wrote."""

from benchmarks import epochs
from tests import tiny_pair


def test_epochs_have_a_column_each(tmp_path, rows):
    words = [*tiny_pair.write_bench_inputs(tmp_path), "--temperature=0", "--epochs=2"]
    assert epochs.main([*words, "--max-new=12", "--samples=2", "--rows=4", "--draft=4"]) == 0
    without, kept = rows()
    assert (without["drafting"], kept["drafting"]) == ("Lookup()", "Lookup(earlier=8)")
    assert without["epoch 1"] == without["epoch 2"] and kept["epoch 1"] < kept["epoch 2"]
