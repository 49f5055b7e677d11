from tests.training.kill_train import run


def test_killed_twice_it_ends_with_the_same_bits():
    outcome = run(kills=2, seed=1)
    assert outcome["kills"] == len(outcome["killed_after"]) == 2
    assert outcome["compared"] > 100
