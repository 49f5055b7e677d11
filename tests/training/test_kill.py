import pytest

from tests.training.kill_train import run

# The first kill comes amid the steps.
SEED = 0


@pytest.mark.parametrize("kills", [1, pytest.param(6, marks=pytest.mark.exhaustive)])
def test_a_killed_run_ends_with_the_same_bits(kills):
    outcome = run(kills=kills, seed=SEED)
    assert outcome["kills"] == len(outcome["killed_after"]) == kills
    assert outcome["compared"] > 100
