"""Commands that are killed and started again end as if nobody had killed them."""

import pytest

from tests.cli import kill_together


# `infer` has a test of its own, in test_infer.py.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "command",
    ["compare", "limits", "evaluate", "train", "train_head", "train_drafter", "convert"],
)
def test_a_killed_command_ends_like_one_that_nobody_kills(command):
    assert kill_together.run(command, kills=3, seed=1)["kills"] >= 3
