from tests.training.kill_train import run


def test_killed_twice_it_ends_with_the_same_bits():
    # This seed kills once before the first step and once amid the steps.
    outcome = run(kills=2, seed=14)
    assert outcome["kills"] == len(outcome["killed_after"]) == 2
    assert outcome["compared"] > 100
