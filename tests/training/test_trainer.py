import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.data.batching import Batching
from specjax.models import Seq2SeqLM
from specjax.training import AdamW, TrainingData, train
from specjax.training.losses import Total
from specjax.training.tasks import TextTask
from specjax.training.trainer import training_environment
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


@pytest.mark.parametrize(
    "change",
    [
        # What a kill may leave behind: rows past the checkpoint, and a torn line.
        lambda log: log + '{"step": 25, "loss": 1.0}\n{"step": 26, "lo',
        lambda log: "",
        lambda log: log.replace('"loss": ', '"loss": 1', 1),
        lambda log: "my notes\n" + log.split("\n", 1)[1],
    ],
    ids=["torn", "empty", "a number", "a line"],
)
def test_stopped_and_continued_equals_uninterrupted(finished, tmp_path, change):
    """Whatever has become of the log."""
    directory, result = finished
    train_copies(tmp_path, num_steps=20)
    file = tmp_path / "metrics.jsonl"
    changed = change(file.read_text())
    file.unlink()
    if changed:
        file.write_text(changed)
    continued = train_copies(tmp_path)
    assert_equal_trees(continued.params, result.params)
    assert log(tmp_path) == log(directory)


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Boundless(AdamW):
    """A learning rate of one's own."""

    def rate(self, step):
        return jnp.full((), jnp.inf)


BROKEN = jax.tree.map(lambda x: x * np.nan, Seq2SeqLM(CONFIG).init(jax.random.key(0)))
BOUNDLESS = Boundless(learning_rate=1.0, warmup_steps=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"init_params": BROKEN}, "the loss is nan at step 5; lower the learning rate"),
        # No loss has seen the last update.
        ({"optimizer": BOUNDLESS, "num_steps": 1}, "validation loss is .* at step 1; lower the"),
        ({"choose_by": "score", "num_steps": 1}, "choose_by='score' is not measured in this run"),
    ],
)
def test_what_cannot_be_a_result_is_never_a_checkpoint(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        train_copies(tmp_path, **changes)
    assert not any((tmp_path / "checkpoints").glob("[0-9]*"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "gpu: some card"}, "environment.device: 'gpu: some card' there, 'cpu: "),
        ({"versions": {"flax": "0.11.0"}}, "environment.versions.flax: '0.11.0' there, "),
        ({"generator": "rbg"}, "environment.generator: 'rbg' there, 'threefry2x32' here"),
    ],
)
def test_another_environment_is_refused_unless_allowed(
    tmp_path, capsys, monkeypatch, changes, message
):
    ours = training_environment()
    changes = {k: {**ours[k], **v} if isinstance(v, dict) else v for k, v in changes.items()}
    with monkeypatch.context() as patch:
        patch.setattr("specjax.training.trainer.training_environment", lambda: ours | changes)
        train_copies(tmp_path, num_steps=1)
    with pytest.raises(ValueError, match="has a run of another configuration") as error:
        train_copies(tmp_path, num_steps=2)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert "allow_other_environment=True" in str(error.value)
    assert train_copies(tmp_path, num_steps=2, allow_other_environment=True).step == 2
    assert message in capsys.readouterr().err
    # It is said once: the run is now this environment's.
    assert train_copies(tmp_path, num_steps=3).step == 3
    assert capsys.readouterr().err == ""
    with pytest.raises(ValueError, match=r"num_steps=1: .* has already done 3 updates"):
        train_copies(tmp_path, num_steps=1)


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
    # Other devices that make the same batches may go on.
    assert train_copies(tmp_path / "4", num_devices=1, **changes | {"num_steps": 4}).step == 4


def test_a_run_draws_the_same_whatever_the_default_generator(finished, tmp_path):
    """Initial parameters, dropout and the order of the data: only the first two are JAX's."""
    _, result = finished
    with jax.default_prng_impl("rbg"), jax.threefry_partitionable(False):
        other = train_copies(tmp_path)
    assert_equal_trees(other.params, result.params)


def test_the_figure_that_chooses_is_the_callers(tmp_path):
    """The highest of any figure but the loss: here it falls with each checkpoint."""
    scores = iter([3.0, 2.0, 1.0])

    def evaluate(params):
        assert all(len(leaf.devices()) == 1 for leaf in jax.tree.leaves(params))
        return {"validation_score": next(scores)}

    result = train_copies(tmp_path, num_devices=2, choose_by="score", evaluate=evaluate)
    logged = {r["step"]: r["validation_score"] for r in log(tmp_path) if "validation_score" in r}
    assert logged == {10: 3.0, 20: 2.0, 30: 1.0}
    assert (result.step, result.figures["validation_score"]) == (10, 3.0)
    assert result.validation_loss == result.figures["validation_loss"]
    # The latest two and the best.
    kept = sorted(int(path.name) for path in (tmp_path / "checkpoints").glob("[0-9]*"))
    assert kept == [10, 20, 30]


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
