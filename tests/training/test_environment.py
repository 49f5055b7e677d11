import json

import jax
import pytest

from specjax.training.trainer import training_environment
from tests.training.toy import train_copies


def recorded(directory):
    return json.loads((directory / "train_config.json").read_text())["environment"]


def test_a_run_records_versions_generator_and_device(tmp_path):
    train_copies(tmp_path, num_steps=1)
    environment = recorded(tmp_path)
    assert environment["versions"].keys() >= {"specjax", "jax", "jaxlib", "flax", "optax"}
    assert environment["versions"]["jax"] == jax.__version__
    assert environment["generator"] == "threefry2x32"
    assert environment["device"].startswith("cpu: ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "gpu: some card"}, "environment.device: 'gpu: some card' there, 'cpu: "),
        ({"versions": {"flax": "0.11.0"}}, "environment.versions.flax: '0.11.0' there, "),
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
    assert message in str(error.value)
    assert "allow_other_environment=True" in str(error.value)
    assert "\n" not in str(error.value)
    assert train_copies(tmp_path, num_steps=2, allow_other_environment=True).step == 2
    assert message in capsys.readouterr().err
    # It is said once: the run is now this environment's.
    assert train_copies(tmp_path, num_steps=3).step == 3
    assert capsys.readouterr().err == ""
