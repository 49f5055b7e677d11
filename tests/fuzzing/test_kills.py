"""Commands that are killed and started again end as if nobody had killed them."""

import pytest

from tests.fuzzing import kills

KILLS = {**dict.fromkeys(kills.COMMANDS, 3), "infer": 20, "train": 6, "hosts": 10}


@pytest.mark.parametrize(
    ("command", "times"),
    [
        ("infer", 1),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in KILLS.items()),
    ],
)
def test_a_killed_command_ends_like_one_that_nobody_kills(command, times):
    assert kills.run(command, times)["kills"] >= times
