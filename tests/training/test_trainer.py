import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.data.batching import Batching
from specjax.models import Seq2SeqLM
from specjax.training import AdamW, Objective, TrainingData, train
from specjax.training.losses import Total
from specjax.training.tasks import TextTask
from specjax.training.trainer import run_directory
from tests.training.toy import (
    BATCHING,
    CONFIG,
    OBJECTIVE,
    OPTIMIZER,
    assert_equal_trees,
    copy_pairs,
    train_copies,
    trainer_config,
)


def task(objective=OBJECTIVE, teacher=None, **changes):
    return TextTask(model=CONFIG.replace(**changes), objective=objective, teacher=teacher)


def log(directory):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows:
        row.pop("items_per_second", None)
    return rows


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    directory = tmp_path_factory.mktemp("finished")
    return directory, train_copies(directory)


def test_the_loss_goes_down_and_the_log_tells_it(finished):
    directory, result = finished
    rows = log(directory)
    losses = [row["loss"] for row in rows if "loss" in row]
    validation = {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row}
    assert [row["step"] for row in rows if "loss" in row] == [5, 10, 15, 20, 25, 30]
    assert sorted(validation) == [10, 20, 30]
    assert losses == sorted(losses, reverse=True)
    # Who does not look at the source pays (3 log 9 + log 5) / 4 = 2.05 nats per token.
    assert result.validation_loss < 1.8
    assert result.step == min(validation, key=validation.get)
    assert result.validation_loss == validation[result.step]


def test_stopped_and_continued_equals_uninterrupted(finished, tmp_path):
    directory, result = finished
    train_copies(tmp_path, num_steps=20)
    # What a kill may leave behind: rows past the checkpoint, and a torn line.
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 25, "loss": 1.0}\n{"step": 26, "lo')
    continued = train_copies(tmp_path)
    assert_equal_trees(continued.params, result.params)
    assert log(tmp_path) == log(directory)


# As many steps as are done, or more.
@pytest.mark.parametrize(
    ("change", "steps"),
    [
        (lambda text: None, 30),
        (lambda text: "", 20),
        (lambda text: text[:200], 30),
        (lambda text: text.replace('"loss": ', '"loss": 1', 1), 20),
        (lambda text: "my notes\n" + text, 30),
        (lambda text: text.split("\n", 1)[1], 20),
    ],
    ids=["gone", "empty", "cut", "a number", "a line more", "a line less"],
)
def test_a_changed_log_is_restored(finished, tmp_path, change, steps):
    train_copies(tmp_path, num_steps=20)
    file = tmp_path / "metrics.jsonl"
    own = file.read_text()
    file.unlink()
    if (text := change(own)) is not None:
        file.write_text(text)
    train_copies(tmp_path, num_steps=steps)
    assert file.read_text().startswith(own)
    if steps == 30:
        assert log(tmp_path) == log(finished[0])


def test_a_finished_run_gives_its_result_again(finished):
    directory, result = finished
    before = (directory / "metrics.jsonl").read_text()
    again = train_copies(directory)
    assert again[:2] == result[:2]
    assert_equal_trees(again.params, result.params)
    assert (directory / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"seed": 8}, "seed: 7 there, 8 here"),
        ({"ema_decay": 0.5}, "ema_decay: 0.9 there, 0.5 here"),
        ({"task": task(dropout_rate=0.3)}, "task.model.dropout_rate: 0.1 there, 0.3 here"),
        ({"training_pairs": copy_pairs(200)}, "training.data: "),
        ({"validation_pairs": copy_pairs(30, seed=1)}, "validation.data: "),
        ({"optimizer": dataclasses.replace(OPTIMIZER, b2=0.9)}, "optimizer.b2: 0.98 there, 0.9"),
        ({"task": dataclasses.replace(task(), pad_id=2)}, "task.pad_id: 0 there, 2 here"),
        # 32 rows on one device, 30 on three: other batches.
        ({"num_devices": 3}, "training.rows_per_batch: [32] there, [30] here"),
        ({"init_params": Seq2SeqLM(CONFIG).init(jax.random.key(0))}, "init_params: None there, "),
        ({"notes": {"samples": 3}}, "samples: None there, 3 here"),
    ],
)
def test_another_configuration_is_refused(finished, changes, told):
    directory, _ = finished
    with pytest.raises(ValueError, match="has a run of another configuration") as error:
        train_copies(directory, **changes)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_several_devices_compute_the_same(tmp_path):
    assert len(jax.devices()) == 8
    # Of 32 rows nine are real: two devices of four hold none of them.
    changes = {"training_pairs": copy_pairs(9), "num_steps": 3, "log_every": 1}
    rows = []
    for devices in (1, 4):
        directory = tmp_path / str(devices)
        train_copies(directory, num_devices=devices, **changes)
        rows.append(log(directory))
    assert len(rows[0]) == len(rows[1]) == 4
    for one, four in zip(*rows, strict=True):
        # Sums over rows are taken in another order.
        assert one == pytest.approx(four, rel=1e-4)


def test_a_run_may_be_continued_on_other_devices_that_make_the_same_batches(tmp_path):
    train_copies(tmp_path, num_steps=10)
    result = train_copies(tmp_path, num_steps=11, num_devices=4)
    assert result.step == 11


def test_without_an_average_the_parameters_are_the_result(tmp_path):
    result = train_copies(tmp_path, num_steps=5, ema_decay=0.0)
    assert result.step == 5
    assert jax.tree.structure(result.params) == jax.tree.structure(
        Seq2SeqLM(CONFIG).abstract_params()
    )


def test_it_starts_from_given_parameters(finished, tmp_path):
    _, result = finished
    start = train_copies(tmp_path, num_steps=1, checkpoint_every=1, init_params=result.params)
    assert start.validation_loss == pytest.approx(result.validation_loss, abs=0.05)


def test_a_student_learns_its_teachers_distribution(finished, tmp_path):
    _, result = finished
    distilled = task(Objective(label_smoothing=0.0, distillation_weight=1.0), teacher=CONFIG)
    train_copies(tmp_path, task=distilled, constants=result.params, ema_decay=0.0)
    divergences = [row["loss"] for row in log(tmp_path) if "loss" in row]
    assert divergences[-1] < 0.3 * divergences[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_steps": 0}, "num_steps must be a whole number of at least 1, got 0"),
        ({"num_steps": 1.5}, "num_steps must be a whole number of at least 1, got 1.5"),
        ({"checkpoint_every": 0}, "checkpoint_every must be .* got 0"),
        ({"log_every": 0}, "log_every must be .* got 0"),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"ema_decay": 1.0}, r"ema_decay must lie in \[0, 1\), got 1.0"),
        ({"num_devices": 0}, "num_devices must be .* got 0"),
        ({"num_devices": 9}, "must be at most 8 .devices of this process., got 9"),
        ({"task": task(param_dtype="bfloat16")}, "param_dtype=bfloat16: small updates"),
        ({"task": task(vocab_size=8)}, "the data contain token 11, but the network's vocab_size=8"),
        ({"batching": Batching(bucket_lengths=(1,))}, "all 300 pairs are longer than 1 tokens"),
        ({"init_params": {"token_embedder": np.zeros(3)}}, "do not have the network's names"),
    ],
)
def test_unusable_arguments_are_told_and_bind_nothing(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        train_copies(tmp_path, **changes)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_recorded_is_told(tmp_path):
    optimizer = AdamW(learning_rate=0.01, warmup_steps=1, floor=np.float32(0.0))
    with pytest.raises(TypeError, match="float32 is not JSON serializable"):
        train_copies(tmp_path, optimizer=optimizer)
    assert not (tmp_path / "train_config.json").exists()


def test_fewer_updates_than_done_are_refused(finished):
    directory, _ = finished
    with pytest.raises(ValueError, match=r"num_steps=20: .* has already done 30 updates"):
        train_copies(directory, num_steps=20)


def test_a_second_process_is_kept_out(finished):
    directory, _ = finished
    with run_directory(directory), pytest.raises(OSError, match="is used by another process"):
        train_copies(directory)


def test_an_output_directory_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file/run cannot be written"):
        train_copies(tmp_path / "file" / "run")


def test_a_loss_that_is_no_number_stops_the_run(tmp_path):
    params = Seq2SeqLM(CONFIG).init(jax.random.key(0))
    params["decoder"]["decoder_norm"]["scale"] *= np.nan
    with pytest.raises(ValueError, match="the loss is nan at step 5; lower the learning rate"):
        train_copies(tmp_path, init_params=params)
    assert not any((tmp_path / "checkpoints").glob("[0-9]*"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Boundless(AdamW):
    """A learning rate of one's own."""

    def rate(self, step):
        return jnp.full((), jnp.inf)


def test_an_update_that_ruins_the_parameters_is_never_a_checkpoint(tmp_path):
    optimizer = Boundless(learning_rate=1.0, warmup_steps=1)
    with pytest.raises(ValueError, match="the validation loss is .* at step 1; lower the learning"):
        train_copies(tmp_path, optimizer=optimizer, num_steps=1)
    assert not any((tmp_path / "checkpoints").glob("[0-9]*"))


def test_the_configuration_is_in_the_record(finished):
    directory, _ = finished
    record = json.loads((directory / "train_config.json").read_text())
    assert record["ema_decay"] == 0.9
    assert record["task"]["objective"]["label_smoothing"] == OBJECTIVE.label_smoothing
    assert record["task"]["model"]["vocab_size"] == CONFIG.vocab_size


def test_a_run_draws_the_same_whatever_the_default_generator(finished, tmp_path):
    """Initial parameters, dropout and the order of the data: only the first two are JAX's."""
    _, result = finished
    with jax.default_prng_impl("rbg"), jax.threefry_partitionable(False):
        other = train_copies(tmp_path)
    assert_equal_trees(other.params, result.params)


def test_figures_of_an_evaluation_are_logged_at_each_checkpoint(tmp_path):
    seen = []

    def evaluate(params):
        assert all(len(leaf.devices()) == 1 for leaf in jax.tree.leaves(params))
        seen.append(params)
        return {"score": float(len(seen))}

    train_copies(tmp_path, num_steps=20, num_devices=2, evaluate=evaluate)
    scores = {row["step"]: row["score"] for row in log(tmp_path) if "score" in row}
    assert scores == {10: 1.0, 20: 2.0}


def test_the_figure_that_chooses_is_the_callers(tmp_path):
    """The highest of any figure but the loss: here it falls with each checkpoint."""
    scores = iter([3.0, 2.0, 1.0])
    evaluate = lambda params: {"validation_score": next(scores)}  # noqa: E731
    result = train_copies(tmp_path, choose_by="score", evaluate=evaluate)
    assert result.step == 10
    assert result.figures["validation_score"] == 3.0
    assert result.validation_loss == result.figures["validation_loss"]
    # The latest two and the best.
    kept = sorted(int(path.name) for path in (tmp_path / "checkpoints").glob("[0-9]*"))
    assert kept == [10, 20, 30]


def test_a_figure_that_is_not_measured_chooses_nothing(tmp_path):
    with pytest.raises(ValueError, match="choose_by='score' is not measured in this run"):
        train_copies(tmp_path, num_steps=1, choose_by="score")


def test_the_data_may_grow_once_the_run_is_claimed(tmp_path):
    grown = []

    def grow():
        assert (tmp_path / "train_config.json").exists()
        grown.append(1)
        return task().batches(copy_pairs(600), BATCHING, seed=7, row_multiple=1)

    train_copies(tmp_path, num_steps=10, grow=grow)
    assert grown == [1]
    # 600 pairs in batches of 32, where the references alone are 300.
    assert log(tmp_path)[0]["epoch"] == pytest.approx(5 / 19)


@dataclasses.dataclass(frozen=True)
class Head:
    """A linear head on a frozen random layer: not a language model, and not on pairs of texts."""

    item_name = "points"

    def init(self, key):
        return {"kernel": jnp.zeros((4, 1))}

    def loss(self, params, constants, batch, key):
        x, y = batch
        error = jnp.square(jnp.tanh(x @ constants["layer"]) @ params["kernel"] - y)
        return Total(jnp.sum(error), jnp.asarray(error.size, jnp.int32))

    def evaluate(self, params, constants, batch):
        loss = self.loss(params, constants, batch, None)
        return {"loss": loss, "doubled": loss._replace(sum=2.0 * loss.sum)}


class Points:
    batches_per_epoch = 2

    def __init__(self, layer):
        self.layer = layer

    def batch(self, step):
        x = np.random.default_rng(step % 2).normal(size=(8, 3)).astype(np.float32)
        return x, np.tanh(x @ self.layer) @ np.ones((4, 1), np.float32)

    def epoch(self):
        return (self.batch(step) for step in range(2))

    def describe(self):
        return {"points": 16}


def test_a_head_on_frozen_parameters_is_one_more_task(tmp_path):
    layer = np.random.default_rng(5).normal(size=(3, 4)).astype(np.float32)
    data = TrainingData(training=Points(layer), validation=Points(layer))
    optimizer = AdamW(learning_rate=0.2, warmup_steps=1)
    config = trainer_config(optimizer=optimizer, num_steps=100, checkpoint_every=50, ema_decay=0.0)
    options = {"constants": {"layer": layer}, "output_dir": tmp_path}
    result = train(config, Head(), data, **options)
    rows = [row for row in log(tmp_path) if "validation_loss" in row]
    assert rows[-1]["validation_doubled"] == pytest.approx(2.0 * rows[-1]["validation_loss"])
    assert result.validation_loss < 0.05
    np.testing.assert_allclose(result.params["kernel"], np.ones((4, 1)), atol=0.3)
    with pytest.raises(ValueError, match="constants: "):
        train(config, Head(), data, **{**options, "constants": {"layer": layer + 1.0}})
