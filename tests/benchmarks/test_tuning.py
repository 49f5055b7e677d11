"""The benchmark of `specjax tune` refuses bad input; what it measures is in docs/tuning.md."""

import pytest

from benchmarks.tuning import main, naive_choice
from specjax.tuning import Demand, Judge
from tests.tuning.synthetic import ALONE, TRUTH, World

GIVEN = ["--inputs", "texts.txt", "--references", "references.txt", "--store", "store"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "texts.txt: no such file"),
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--texts", "8"], "--texts must be at least 16, got 8"),
        (["--demands", "fast"], "demand must be such as"),
    ],
)
def test_bad_input_is_one_line(capsys, tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    assert main([*GIVEN, *args]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_naive_choice_meets_every_clause_on_the_texts_it_has_seen():
    world = World(0)
    seen = {setting: world.look(setting, 2) for setting in TRUTH}
    found = {}
    for asked in (
        "nats per token <= 0.1",
        "nats per token <= 0.1 and latency <= 0.42 of the verifier",
    ):
        demand = Demand.of(asked)
        judge = Judge(demand, "bleu", 0.9, world.texts[-1], world.held)
        found[asked] = naive_choice(demand, seen, ALONE, judge, world.texts[-1])
    one, none = found.values()
    # Each clause alone can be met, not both.
    assert one is not None and TRUTH[one][2] > 0.05 and none is None
