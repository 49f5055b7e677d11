"""launch/tpu.sh create and delete, against a gcloud that fails on purpose."""

import subprocess

import pytest

QUOTA = (
    "Quota limit 'TPUV5sPreemptibleLitepodServingPerProjectPerZoneForTPUAPI' has been exceeded. "
    "Limit: 0 in zone us-central1-a."
)
CAPACITY = 'There is no more capacity in the zone "us-central1-a"; you can try in another zone'

MADE = {
    "on-demand": ("compute tpus tpu-vm create specjax", set()),
    "spot": ("compute tpus tpu-vm create specjax", {"--spot"}),
    "queued": ("compute tpus queued-resources create specjax", {"--node-id=specjax"}),
    "queued-spot": ("compute tpus queued-resources create specjax", {"--spot"}),
    "flex-start": (
        "alpha compute tpus queued-resources create specjax",
        {"--provisioning-model=flex-start", "--max-run-duration=4h"},
    ),
}


@pytest.mark.parametrize("mode", MADE)
def test_each_mode_makes_a_ready_tpu_and_delete_leaves_nothing(cloud, mode):
    done = cloud.launch("create", MODE=mode, PROJECT="mine")
    assert done.returncode == 0, done.stderr
    assert "READY and costs money" in done.stderr
    [call] = cloud.calls(" create ")
    command, flags = MADE[mode]
    assert call.startswith(command)
    assert flags <= set(call.split())
    assert {"--zone=us-central1-a", "--project=mine", "--accelerator-type=v5litepod-8"} <= set(
        call.split()
    )
    assert "=v2-alpha-tpuv5-lite" in call
    assert ("--spot" in call) == ("spot" in mode)
    assert cloud.launch("delete").returncode == 0
    assert cloud.there("node") is None
    assert cloud.there("request") is None


def test_a_tpu_that_is_there_is_taken_as_it_is(cloud):
    cloud.set(node="READY")
    assert cloud.launch("create").returncode == 0
    assert not cloud.calls(" create ")
    done = cloud.launch("create", ACCELERATOR_TYPE="v5litepod-16")
    assert done.returncode == 1
    assert "is a v5litepod-8, not a v5litepod-16" in done.stderr


REMADE = "TPU specjax is {}: deleting it and creating it again"
# What is there, how each creation fails, whether it succeeds, what is told, creations, deletions.
FOUND = [
    ({}, {"stderr": QUOTA, "always": True}, 1, "request more under IAM & Admin > Quotas", 1, 0),
    (
        {},
        {"stderr": "PERMISSION_DENIED: 'tpu.nodes.create' denied", "always": True},
        *(1, "get the role TPU Admin", 1, 0),
    ),
    (
        {},
        {"stderr": "INVALID_ARGUMENT: accelerator type v9-8", "always": True},
        *(1, "accelerator-types list --zone=us-central1-a", 1, 0),
    ),
    # The call fails, and the node is there all the same.
    (
        {},
        {"stderr": "timed out", "node": ["CREATING", "CREATING", "READY"]},
        *(0, "is CREATING: waiting", 1, 0),
    ),
    (
        {},
        {"stderr": QUOTA, "node": "STOPPED"},
        *(1, "deleting the half-made TPU specjax (STOPPED)", 1, 1),
    ),
    ({"node": "PREEMPTED"}, {}, 0, REMADE.format("PREEMPTED"), 1, 1),
    ({"node": "UNKNOWN"}, {}, 0, REMADE.format("UNKNOWN"), 1, 1),
    (
        {"node": "STOPPED"},
        {},
        *(1, "keeps its disk: start it with `gcloud compute tpus tpu-vm start", 0, 0),
    ),
    ({"request": "FAILED"}, {}, 0, "", 1, 1),
    ({"request": "SUSPENDED"}, {}, 0, "", 1, 1),
]


@pytest.mark.parametrize(("there", "fault", "status", "told", "made", "deleted"), FOUND)
def test_what_is_found_is_waited_for_replaced_or_told(
    cloud, there, fault, status, told, made, deleted
):
    cloud.set(**there)
    if fault:
        cloud.faults({"match": "*tpu-vm create*", **fault})
    done = cloud.launch("create", MODE="queued-spot" if "request" in there else "on-demand")
    assert done.returncode == status and told in done.stderr, done.stderr
    assert fault.get("stderr") != QUOTA or QUOTA in done.stderr
    assert (len(cloud.calls(" create ")), len(cloud.calls(" delete "))) == (made, deleted)
    if status == 0 or deleted:
        assert cloud.there("node") == (None if status else "READY")


def test_a_full_zone_is_tried_again_up_to_a_limit(cloud):
    fault = {"match": "*tpu-vm create*", "stderr": CAPACITY}
    cloud.faults(fault, fault)
    assert cloud.launch("create").returncode == 0
    assert len(cloud.calls(" create ")) == 3
    assert cloud.launch("delete").returncode == 0
    cloud.faults({**fault, "always": True})
    done = cloud.launch("create", CREATE_ATTEMPTS="2")
    assert done.returncode == 1
    assert len(cloud.calls(" create ")) == 5
    assert "no free v5litepod-8 in 2 attempts" in done.stderr


def test_waiting_has_an_end_and_goes_on_later(cloud):
    cloud.set(request="WAITING_FOR_RESOURCES")
    done = cloud.launch("create", MODE="queued", WAIT_SECONDS="0")
    assert done.returncode == 1
    assert "still WAITING_FOR_RESOURCES after 0 s: run `create` to keep waiting" in done.stderr
    assert not cloud.calls("delete")
    cloud.set(request=["PROVISIONING", "ACTIVE"])
    assert cloud.launch("create", MODE="queued").returncode == 0
    assert not cloud.calls(" create ")


def test_a_cloud_that_does_not_answer_is_not_taken_for_an_empty_one(cloud):
    silent = "Could not reach the server"
    cloud.faults({"match": "*describe*", "stderr": silent, "always": True})
    for command in (["create"], ["setup"], ["run", "runs/infer.gin"]):
        done = cloud.launch(*command)
        assert done.returncode == 1
        assert silent in done.stderr
        assert "cannot read the state of TPU specjax" in done.stderr
    assert not [c for c in cloud.calls() if "describe" not in c]


def test_what_cannot_be_deleted_is_told_as_a_cost(cloud):
    cloud.set(node="READY", undeletable=True)
    done = cloud.launch("delete")
    assert done.returncode == 1
    assert "could not be deleted (node READY, request NONE) AND MAY COST MONEY" in done.stderr


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"MODE": "cheap"}, "MODE must be on-demand, spot, queued, queued-spot or flex-start"),
        (
            {"ACCELERATOR_TYPE": "tpu7x-8"},
            "ACCELERATOR_TYPE=tpu7x-8: set RUNTIME_VERSION",
        ),
        ({"RUN_NAME": "a b"}, "RUN_NAME must have only letters"),
        ({"BUCKET": "mine"}, "BUCKET must begin with gs://, got mine"),
        ({"COMMAND": "inferr"}, "COMMAND must be infer, evaluate"),
        ({"COMMAND": "infer evaluate"}, "or 'train head', got 'infer evaluate'"),
        ({"COMMAND": "sweep"}, "train, 'train drafter' or 'train head', got 'sweep'"),
        ({"WORKER": "0; x"}, "WORKER must be all or a whole number, got '0; x'"),
        ({"CREATE_ATTEMPTS": ""}, None),
        *[
            ({name: value}, f"{name} must be a {'' if 'Y_S' in name else 'whole '}number, got '")
            for name in ("CREATE_ATTEMPTS", "WAIT_SECONDS", "SSH_ATTEMPTS", "RETRY_SECONDS")
            for value in ("BASH_VERSINFO[$(touch made; echo 0)]", "-1", "8x")
        ],
    ],
)
def test_a_wrong_variable_is_told_before_anything_is_made(cloud, variables, told):
    done = cloud.launch("create", **variables)
    assert not list(cloud.path.rglob("made"))
    if told is None:  # its default
        assert done.returncode == 0
        return
    assert done.returncode == 1
    assert told in done.stderr
    assert not cloud.calls(" create ")


def test_what_is_not_there_is_not_called_deleted(cloud):
    done = cloud.launch("delete", PROJECT="mine", ZONE="us-east5-b")
    assert done.returncode == 1
    assert "there is no TPU specjax in us-east5-b of project mine, so nothing is deleted" in (
        done.stderr
    )
    assert "gcloud compute tpus tpu-vm list --zone=-" in done.stderr
    assert not cloud.calls(" delete ")


@pytest.mark.parametrize(
    "reply",
    ["NOT_FOUND: Location us-x1-a is not found", "INVALID_ARGUMENT: unknown location us-x1"],
)
def test_an_unknown_zone_is_not_taken_for_an_empty_one(cloud, reply):
    cloud.faults({"match": "*describe*", "stderr": reply, "always": True})
    for command in ("create", "delete"):
        done = cloud.launch(command)
        assert done.returncode == 1 and reply in done.stderr
        assert "cannot read the state of TPU specjax" in done.stderr
    assert not cloud.calls(" create ") and not cloud.calls(" delete ")


@pytest.mark.parametrize(
    "variables",
    [
        {"PROCESS_COUNT": "a[$(touch made)]", "PROCESS_INDEX": "0"},
        {"PROCESS_COUNT": "2", "PROCESS_INDEX": "a[$(touch made)]"},
        {"COMMAND": "infer evaluate"},
    ],
)
def test_a_worker_checks_its_variables_too(cloud, variables):
    done = subprocess.run(
        ["bash", cloud.checkout / "launch" / "worker.sh", "status"],
        env={**cloud.env, **variables},
        cwd=cloud.path,
        capture_output=True,
        text=True,
    )
    assert done.returncode in (1, 2) and "must be" in done.stderr
    assert not list(cloud.path.rglob("made"))
