import pytest

from tests.training.kill_train import run

# The first kill comes amid the steps.
SEED = 0


# Its processes take minutes; that a stopped run goes on to the same bits is also seen in
# test_trainer.py and test_on_policy.py, and kills of a command in tests/cli/test_infer.py.
@pytest.mark.exhaustive
@pytest.mark.parametrize("kills", [1, 6])
def test_a_killed_run_ends_with_the_same_bits(kills):
    outcome = run(kills=kills, seed=SEED)
    assert outcome["kills"] == len(outcome["killed_after"]) == kills
    assert outcome["compared"] > 100
