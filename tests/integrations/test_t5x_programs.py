"""T5X's own programs, from the shipped gin files: a pair that T5X has trained decodes in them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.with_t5x import import_t5x

import_t5x()
pytestmark = pytest.mark.filterwarnings("ignore")

import specjax
from tests.integrations.t5x_task import TEXTS
from tests.xla_flags import quick_flags

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
SEARCH = f"{specjax.__path__[0]}/gin_configs,{HERE}"


def _environment(devices):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {
        **os.environ,
        "XLA_FLAGS": quick_flags(devices),
        "PYTHONPATH": path,
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def _program(*command, devices=1):
    """Standard error of a program of T5X; it must end well."""
    ran = subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=_environment(devices),
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stderr


def _gin(run, trained, **names):
    """The flags of a run with the tiny pair."""
    files = ("t5x_tiny.gin", f"t5x/runs/{run}.gin")
    names = {
        "CHECKPOINT_PATH": str(trained / "verifier" / "checkpoint_40"),
        "DRAFTER_CHECKPOINT_PATH": str(trained / "drafter"),
        "MIXTURE_OR_TASK_NAME": "specjax_copy",
        "TASK_FEATURE_LENGTHS": {"inputs": 8, "targets": 8},
        **names,
    }
    return [
        f"--gin_search_paths={SEARCH}",
        *(f"--gin_file={file}" for file in files),
        *(f"--gin.{name}={value!r}" for name, value in names.items()),
        "--gin.utils.DatasetConfig.batch_size=8",
        "--gin.utils.RestoreCheckpointConfig.dtype='float32'",
    ]


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A drafter, a verifier and both in one checkpoint, and what was decoded at once."""
    directory = tmp_path_factory.mktemp("t5x")
    _program("tests.integrations.t5x_pair", str(directory))
    return directory


@pytest.fixture(scope="session")
def results(trained):
    """What was decoded interactively."""
    return json.loads((trained / "results.json").read_text())


@pytest.fixture(scope="session")
def alone(results):
    """What T5X's own `temperature_sample` decodes with each network at temperature 0."""
    return {role: network["texts"] for role, network in results["alone"].items()}


def test_the_interactive_model_decodes_as_t5x_alone(results, alone):
    assert results["together"]["texts"] == alone["verifier"] != alone["drafter"]
    # The pair has learnt something, or nothing would be shown.
    assert len(set(alone["verifier"])) > 3
    score = results["alone"]["verifier"]["score"]
    assert results["together"]["score"] == pytest.approx(score, rel=1e-5)
    assert sum(results["aux"]["accepted"]) > 0


def test_infer_on_eight_devices_in_two_partitions_decodes_as_t5x_alone(trained, alone, tmp_path):
    told = _program(
        "t5x.infer",
        *_gin("infer", trained, INFER_OUTPUT_DIR=str(tmp_path), TEMPERATURE=0.0),
        "--gin.infer.checkpoint_ds_iter=False",
        # On CPUs T5X reads no num_partitions: the submesh says two devices for each replica.
        "--gin.partitioning.PjitPartitioner.num_partitions=None",
        "--gin.partitioning.PjitPartitioner.model_parallel_submesh=(1, 2)",
        devices=8,
    )
    assert "specjax" in (tmp_path / "config.gin").read_text(), told
    (file,) = tmp_path.glob("specjax_copy-predict_with_aux.jsonl-*-of-00001")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["prediction"] for row in rows] == alone["verifier"]
    for row in rows:
        assert row["aux"]["scores"] == 0.0 and row["aux"]["ended_by"] in (1, 2)
        assert 0 <= row["aux"]["accepted"] <= row["aux"]["drafted"]
    assert sum(row["aux"]["accepted"] for row in rows) > 0


# At temperature 0, OPT(1.0) never defers, for its penalty is 1 where the two differ.
@pytest.mark.parametrize(
    ("rule", "writer", "paths"),
    [("Lossless", "verifier", "one"), ("OPT(1.0)", "drafter", "two")],
    ids=["one", "two"],
)
def test_eval_has_the_task_s_metric_from_one_checkpoint_or_two(
    trained, alone, tmp_path, rule, writer, paths
):
    one = {
        "CHECKPOINT_PATH": str(trained / "pair" / "checkpoint_40"),
        "DRAFTER_CHECKPOINT_PATH": None,
    }
    _program(
        "t5x.eval",
        *_gin(
            "eval",
            trained,
            **(one if paths == "one" else {"NUM_DECODES": 2}),
            EVAL_OUTPUT_DIR=str(tmp_path),
            TEMPERATURE=0.0,
            RULE=rule,
        ),
    )
    (file,) = tmp_path.rglob("specjax_copy-0*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["prediction"] for row in rows] == alone[writer]
    same = 100 * sum(map(str.__eq__, TEXTS, alone[writer])) / len(TEXTS)
    (metrics,) = tmp_path.rglob("specjax_copy-metrics.jsonl")
    assert json.loads(metrics.read_text().splitlines()[-1])["same"] == pytest.approx(same)


def test_a_checkpoint_that_is_not_there_is_named(tmp_path):
    from specjax.integrations.t5x import restoring

    with pytest.raises(
        FileNotFoundError, match=r"the drafter's checkpoint /nowhere does not exist"
    ):
        restoring.checkpoint_at("drafter", "/nowhere")
    with pytest.raises(FileNotFoundError, match="has no checkpoint_<step>: give a T5X checkp"):
        restoring.checkpoint_at("verifier", str(tmp_path))
    (tmp_path / "checkpoint_7" / "state").mkdir(parents=True)
    found = restoring.checkpoint_at("verifier", f"{tmp_path}/")
    assert found == str(tmp_path / "checkpoint_7")
    with pytest.raises(ValueError, match="must be a path"):
        restoring.checkpoint_at("verifier", ["a", "b"])


def test_a_checkpoint_of_another_size_is_named(trained, tmp_path):
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "t5x.infer",
            *_gin("infer", trained, INFER_OUTPUT_DIR=str(tmp_path)),
            "--gin.drafter/network.T5Config.emb_dim=12",
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=_environment(1),
    )
    assert ran.returncode != 0
    assert "UserError: the drafter's checkpoint" in ran.stderr
    assert "cannot be restored into its network" in ran.stderr
