import shutil

import jax
import numpy as np
import pytest

from specjax.data.batching import Batching
from specjax.runs.run_directory import Store
from specjax.training import Objective
from specjax.training.tasks import TextTask
from specjax.training.teacher import SAMPLES_NAME, StudentSamples
from specjax.training.trainer import run_directory
from tests.training.toy import (
    BATCHING,
    CONFIG,
    EOS,
    LLAMA,
    Numbers,
    assert_equal_trees,
    copy_pairs,
    train_copies,
)
from tests.variants import variants

OBJECTIVE = Objective(label_smoothing=0.0, distillation_weight=1.0)
TASK = TextTask(model=CONFIG, objective=OBJECTIVE, teacher=CONFIG)
TEACHER = TASK.init(jax.random.key(1))


def phases(run, task=TASK, every=4, share=0.5):
    return StudentSamples(
        run, share, every, task, Numbers(),
        longest=16, seed=7, progress=False,
    )  # fmt: skip


def opened(path):
    return run_directory(path, [SAMPLES_NAME])


def train_on_policy(path, **changes):
    with opened(path) as run:
        options = {"num_steps": 10, "checkpoint_every": 3, "phases": phases(run)}
        return train_copies(run, task=TASK, constants=TEACHER, **(options | changes))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "run"
    return path, train_on_policy(path)


@pytest.mark.parametrize("stop", variants([3, 4, 9], 4))
def test_stopped_and_continued_equals_uninterrupted(finished, tmp_path, stop):
    """Stopped in the first phase, where one ends, and amid another, past its checkpoint."""
    path, result = finished
    train_on_policy(tmp_path, num_steps=stop)
    if stop == 9:  # what a kill may leave: the samples of a phase whose steps are all lost
        shutil.rmtree(tmp_path / "checkpoints" / "9")
    continued = train_on_policy(tmp_path)
    assert_equal_trees(continued.params, result.params)
    assert (tmp_path / "metrics.jsonl").exists()
    stored = [
        {f.name: f.read_bytes() for f in (p / SAMPLES_NAME).iterdir()} for p in (path, tmp_path)
    ]
    assert len(stored[0]) == 2 and stored[0] == stored[1]


def test_samples_that_cannot_be_drawn_again_are_named(finished, tmp_path):
    path, _ = finished
    shutil.copytree(path, tmp_path / "run")
    (sample,) = (tmp_path / "run" / SAMPLES_NAME).glob("student-8-*")
    sample.write_bytes(sample.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"student-8-.* is not a valid record of this run"):
        train_on_policy(tmp_path / "run", num_steps=11)
    sample.unlink()
    with pytest.raises(
        ValueError, match=r"of step 8 are missing in .*, and the parameters that drew them"
    ):
        train_on_policy(tmp_path / "run", num_steps=11)


@pytest.mark.parametrize("task", [TASK, TextTask(model=LLAMA)], ids=["seq2seq", "decoder_only"])
def test_the_chosen_rows_have_targets_of_the_student_and_the_others_their_own(tmp_path, task):
    batching = Batching(tokens_per_batch=256, bucket_lengths=(8,) if task is TASK else (8, 16))
    batches = task.batches(copy_pairs(60), batching, seed=7, row_multiple=1)
    params = task.init(jax.random.key(2))
    with opened(tmp_path) as run:
        run.claim({})
        phase = phases(run, task)
        assert_equal_trees(phase.begin(batches, 0, params)(1), batches.batch(1))
        batch_of = phase.begin(batches, 4, params)
    own = changed = 0
    for step in range(4, 8):
        mixed, plain = batch_of(step), batches.batch(step)
        inputs, length = batches.inputs(step)
        for row, source in enumerate(inputs):
            target, original = (_target(b, row, len(source)) for b in (mixed, plain))
            # Cut at the room of its batch, without an end that was not drawn.
            assert 0 < len(target) <= task.target_room(len(source), length)
            assert EOS not in target[:-1]
            same = np.array_equal(target, original)
            own, changed = own + same, changed + (not same)
        if task is TASK:
            np.testing.assert_array_equal(mixed.inputs, plain.inputs)
    # An untrained student does not copy; half of the rows are its own.
    assert 0.3 < changed / (own + changed) < 0.7


def _target(batch, row, prompt):
    if hasattr(batch, "targets"):
        return batch.targets[row][batch.targets[row] != 0]
    return batch.tokens[row][batch.is_target[row]]


def test_only_what_the_phase_reads_is_drawn(tmp_path):
    batches = TASK.batches(copy_pairs(300), BATCHING, seed=7, row_multiple=1)
    with opened(tmp_path) as run:
        run.claim({})
        phases(run, every=2, share=1.0).begin(batches, 2, TEACHER)
        drawn = Store(run, SAMPLES_NAME).get(("student", 2)).arrays
    assert len(drawn["offsets"]) == 2 * sum(len(batches.inputs(s)[0]) for s in (2, 3)) + 1
