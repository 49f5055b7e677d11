import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.data import Batching
from specjax.models import T5
from specjax.runs.output_directory import locked
from specjax.training import AdamW, Objective, Teacher, train
from tests.training.toy import (
    CONFIG,
    EOS,
    OBJECTIVE,
    OPTIMIZER,
    copy_pairs,
    train_arguments,
)


def log(directory):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows:
        row.pop("target_tokens_per_second", None)
    return rows


def assert_equal_trees(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    directory = tmp_path_factory.mktemp("finished")
    return directory, train(**train_arguments(directory))


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
    train(**train_arguments(tmp_path, num_steps=20))
    # What a kill may leave behind: rows past the checkpoint, and a torn line.
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 25, "loss": 1.0}\n{"step": 26, "lo')
    continued = train(**train_arguments(tmp_path))
    assert_equal_trees(continued.params, result.params)
    assert log(tmp_path) == log(directory)


def test_a_finished_run_gives_its_result_again(finished):
    directory, result = finished
    before = (directory / "metrics.jsonl").read_text()
    again = train(**train_arguments(directory))
    assert again[:2] == result[:2]
    assert_equal_trees(again.params, result.params)
    assert (directory / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"seed": 8}, "seed: 7 there, 8 here"),
        ({"objective": Objective(ema_decay=0.5)}, "objective.ema_decay: 0.9 there, 0.5 here"),
        ({"config": CONFIG.replace(dropout_rate=0.3)}, "model.dropout_rate: 0.1 there, 0.3 here"),
        ({"training_pairs": copy_pairs(200)}, "training_data: "),
        ({"validation_pairs": copy_pairs(30, seed=1)}, "validation_data: "),
        ({"optimizer": dataclasses.replace(OPTIMIZER, b2=0.9)}, "optimizer.b2: 0.98 there, 0.9"),
        ({"pad_id": 2}, "pad_id: 0 there, 2 here"),
        # 32 rows on one device, 30 on three: other batches.
        ({"num_devices": 3}, "rows_per_batch: [32] there, [30] here"),
        ({"init_params": T5(CONFIG).init(jax.random.key(0))}, "init_params: None there, "),
        ({"notes": {"samples": 3}}, "samples: None there, 3 here"),
    ],
)
def test_another_configuration_is_refused(finished, changes, told):
    directory, _ = finished
    with pytest.raises(ValueError, match="holds a run of another configuration") as error:
        train(**train_arguments(directory, **changes))
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_several_devices_compute_the_same(tmp_path):
    assert len(jax.devices()) == 8
    # Of 32 rows nine are real: two devices of four hold none of them.
    changes = {"training_pairs": copy_pairs(9), "num_steps": 3, "log_every": 1}
    rows = []
    for devices in (1, 4):
        directory = tmp_path / str(devices)
        train(**train_arguments(directory, num_devices=devices, **changes))
        rows.append(log(directory))
    assert len(rows[0]) == len(rows[1]) == 4
    for one, four in zip(*rows, strict=True):
        # Sums over rows are taken in another order.
        assert one == pytest.approx(four, rel=1e-4)


def test_a_run_may_be_continued_on_other_devices_that_make_the_same_batches(tmp_path):
    train(**train_arguments(tmp_path, num_steps=10))
    result = train(**train_arguments(tmp_path, num_steps=11, num_devices=4))
    assert result.step == 11


def test_without_an_average_the_parameters_are_the_result(tmp_path):
    result = train(**train_arguments(tmp_path, num_steps=5, objective=Objective(ema_decay=0.0)))
    assert result.step == 5
    assert jax.tree.structure(result.params) == jax.tree.structure(T5(CONFIG).abstract_params())


def test_it_starts_from_given_parameters(finished, tmp_path):
    _, result = finished
    start = train(
        **train_arguments(tmp_path, num_steps=1, checkpoint_every=1, init_params=result.params)
    )
    assert start.validation_loss == pytest.approx(result.validation_loss, abs=0.05)


def test_a_student_learns_its_teachers_distribution(finished, tmp_path):
    _, result = finished
    teacher = Teacher(model=T5(CONFIG), params=result.params)
    objective = Objective(label_smoothing=0.0, distillation_weight=1.0, ema_decay=0.0)
    train(**train_arguments(tmp_path, teacher=teacher, objective=objective))
    divergences = [row["loss"] for row in log(tmp_path) if "loss" in row]
    assert divergences[-1] < 0.3 * divergences[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_steps": 0}, "num_steps must be a whole number in .* got 0"),
        ({"num_steps": 1.5}, "num_steps must be a whole number in .* got 1.5"),
        ({"checkpoint_every": 0}, "checkpoint_every must be .* got 0"),
        ({"log_every": 0}, "log_every must be .* got 0"),
        ({"seed": -1}, "seed must be a whole number in .* got -1"),
        ({"num_devices": 0}, "num_devices must be .* got 0"),
        ({"pad_id": EOS}, "pad_id=1 is also the end-of-sequence token"),
        ({"config": CONFIG.replace(param_dtype="bfloat16")}, "param_dtype=bfloat16: small updates"),
        ({"batching": Batching(bucket_lengths=(1,))}, "all 300 pairs are longer than 1 tokens"),
        ({"num_devices": 9}, "num_devices=9: this process has 8 devices"),
        ({"config": CONFIG.replace(vocab_size=8)}, "training_pairs contain token 11, but"),
        ({"objective": Objective(distillation_weight=0.5)}, "a teacher is needed exactly if"),
        ({"init_params": {"token_embedder": np.zeros(3)}}, "do not have the network's names"),
    ],
)
def test_unusable_arguments_are_told_and_bind_nothing(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        train(**train_arguments(tmp_path, **changes))
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_recorded_is_told(tmp_path):
    optimizer = AdamW(schedule=lambda step: 0.01 * step)
    with pytest.raises(TypeError, match="cannot be recorded with the run; make it a frozen data"):
        train(**train_arguments(tmp_path, optimizer=optimizer))
    assert not (tmp_path / "train_config.json").exists()


def test_fewer_updates_than_done_are_refused(finished):
    directory, _ = finished
    with pytest.raises(ValueError, match=r"num_steps=20: the run in .* has done 30 updates"):
        train(**train_arguments(directory, num_steps=20))


def test_a_second_process_is_kept_out(finished):
    directory, _ = finished
    with locked(directory), pytest.raises(OSError, match="another process is at work in it"):
        train(**train_arguments(directory))


def test_pairs_left_out_are_told(tmp_path, capsys):
    changes = {
        "training_pairs": copy_pairs(50, longest=9),
        "validation_pairs": copy_pairs(20, longest=9),
        "num_steps": 1,
        "progress": True,
    }
    train(**train_arguments(tmp_path, **changes))
    told = capsys.readouterr().err
    for pairs, name in (("training_pairs", "50 training"), ("validation_pairs", "20 validation")):
        count = int((changes[pairs].lengths().max(axis=1) > 8).sum())
        assert count
        assert f"{count} of {name} pairs are longer than the last bucket (8 tokens)" in told


def test_an_output_directory_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"output_dir=.*file/run cannot be written"):
        train(**train_arguments(tmp_path / "file" / "run"))


def test_a_teacher_of_another_size_is_refused(finished, tmp_path):
    _, result = finished
    changes = {
        "teacher": Teacher(model=T5(CONFIG), params=result.params),
        "objective": Objective(distillation_weight=1.0),
        "config": CONFIG.replace(vocab_size=16),
    }
    with pytest.raises(ValueError, match="teacher's vocab_size=12 and the network's vocab_size=16"):
        train(**train_arguments(tmp_path, **changes))


def test_a_loss_that_is_no_number_stops_the_run(tmp_path):
    params = T5(CONFIG).init(jax.random.key(0))
    params["decoder"]["decoder_norm"]["scale"] *= np.nan
    with pytest.raises(ValueError, match="the loss is nan at step 5; lower the learning rate"):
        train(**train_arguments(tmp_path, init_params=params))
    assert not any((tmp_path / "checkpoints").glob("[0-9]*"))


@dataclasses.dataclass(frozen=True)
class Boundless:
    def __call__(self, step):
        return jnp.full((), jnp.inf)


def test_an_update_that_ruins_the_parameters_is_never_a_checkpoint(tmp_path):
    optimizer = AdamW(schedule=Boundless())
    with pytest.raises(ValueError, match="the validation loss is .* at step 1; lower the learning"):
        train(**train_arguments(tmp_path, optimizer=optimizer, num_steps=1))
    assert not any((tmp_path / "checkpoints").glob("[0-9]*"))


@pytest.mark.parametrize(
    ("name", "end"), [("label_smoothing", ")"), ("distillation_weight", "]"), ("ema_decay", ")")]
)
def test_objectives_outside_their_range_are_refused(name, end):
    with pytest.raises(ValueError, match=rf"Objective: {name} must lie in \[0, 1\{end}, got 1.5"):
        Objective(**{name: 1.5})
    with pytest.raises(TypeError, match=f"Objective: {name} must be a number, got 'x'"):
        Objective(**{name: "x"})


def test_the_objective_is_named_in_the_record(finished):
    directory, _ = finished
    record = json.loads((directory / "train_config.json").read_text())
    assert record["objective"]["ema_decay"] == OBJECTIVE.ema_decay
    assert record["model"]["vocab_size"] == CONFIG.vocab_size
