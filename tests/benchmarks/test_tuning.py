"""The benchmark of choices refuses bad input; what it measures is in docs/compare.md."""

import pytest

from benchmarks.tuning import main, naive_choice
from specjax.study.demand import Demand, Judge
from tests.study.synthetic import ALONE, LOSSLESS, TRUTH, World

GIVEN = ["--inputs", "texts.txt", "--references", "references.txt", "--store", "store"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "texts.txt: no such file"),
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--texts", "8"], "--texts must be at least 16, got 8"),
        (["--demands", "fast"], "demand must look like"),
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
    best = {name: figure["value"] for name, figure in seen[LOSSLESS].figures.items()}
    # Met by less than the margin, and missed by little: the first is the less sure of the two.
    good = f"quality >= {best['bleu'] - 0.5}"
    fast = f"latency <= {best['relative_latency'] - 0.002} of the verifier"
    found = []
    for asked in (good, f"{good} and {fast}"):
        demand = Demand.of(asked)
        judge = Judge(demand, "bleu", 0.9, world.texts[-1], world.held)
        found.append(naive_choice(demand, seen, ALONE, judge, world.texts[-1]))
    assert found == [LOSSLESS, None]
