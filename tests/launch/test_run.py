"""launch/tpu.sh setup, run, logs and fetch; the workers' part runs here as it does there."""

import subprocess

import pytest

BUCKET = {"BUCKET": "gs://bucket"}
RUN = ("run", "runs/infer.gin", "--gin.INPUT=a b.txt")


def test_setup_installs_the_checkout_with_its_pinned_versions_on_all_workers(cloud):
    cloud.set(node="READY", workers=2)
    for worker in (0, 1):
        (cloud.path / f"home-{worker}").mkdir()
    done = cloud.launch("setup")
    assert done.returncode == 0, done.stderr
    assert "specjax-worker 0 installed" in done.stdout
    assert "specjax-worker 1 installed" in done.stdout
    installs = (cloud.path / "pip.txt").read_text().splitlines()
    extras = "tpu,eval,int8,constraints,gguf"
    assert installs == [f"install --quiet -c constraints.txt --editable .[{extras}]"] * 2
    assert (cloud.path / "home-1" / "specjax" / "launch" / "worker.sh").exists()


def test_setup_without_a_tpu_says_how_to_get_one(cloud):
    done = cloud.launch("setup")
    assert done.returncode == 1
    assert "there is no TPU specjax in us-central1-a: run `launch/tpu.sh create`" in done.stderr


@pytest.mark.parametrize("workers", [1, 3])
def test_a_run_ends_on_all_workers_and_is_fetched(cloud, workers):
    cloud.ready(workers)
    done = cloud.launch(*RUN, **BUCKET)
    assert done.returncode == 0, done.stderr
    assert f"watching run run on {workers} worker(s)" in done.stderr
    started = (cloud.path / "specjax.txt").read_text().splitlines()
    assert len(started) == workers
    # A configuration without its files can be continued; files without it are refused.
    sent = [c for c in cloud.calls("storage") if "worker-0" in c and "storage ls" not in c]
    sent = [c for c in sent if not c.endswith("worker-0.log")]  # which may be there before results
    assert sent[0].startswith("storage cp")
    assert "infer_config.json gs://bucket/run/worker-0/" in sent[0]
    assert sent[1].startswith("storage rsync")
    assert "infer --gin_file=runs/infer.gin --gin.INPUT=a b.txt --gin.OUTPUT_DIR=/" in started[0]
    assert cloud.launch("fetch", **BUCKET).returncode == 0
    assert len(cloud.rows("fetched/run/worker-0")) == 6
    logs = [f"worker-{worker}.log" for worker in range(workers)]
    assert sorted(x.name for x in (cloud.path / "fetched/run").iterdir()) == ["worker-0", *logs]


def test_results_are_fetched_from_the_first_worker_where_there_is_no_bucket(cloud):
    cloud.ready(2)
    done = cloud.launch(*RUN)
    assert done.returncode == 0, done.stderr
    assert "BUCKET is not set: a pre-emption loses the results" in done.stderr
    assert cloud.launch("fetch", FETCH_DIR="here").returncode == 0
    assert len(cloud.rows("here/run/worker-0")) == 6
    assert len(list((cloud.path / "here" / "run").iterdir())) == 1


def test_a_gin_file_of_ones_own_is_copied_to_all_workers(cloud):
    cloud.ready(2)
    (cloud.path / "mine.gin").write_text("BATCH_SIZE = 8\n")
    done = cloud.launch("run", "mine.gin", RUN_NAME="first")
    assert done.returncode == 0, done.stderr
    for worker in (0, 1):
        copied = cloud.path / f"home-{worker}" / "specjax" / "runs" / "first.gin"
        assert copied.read_text() == "BATCH_SIZE = 8\n"
    assert "--gin_file=runs/first.gin" in (cloud.path / "specjax.txt").read_text()
    done = cloud.launch("run", "nothing.gin")
    assert done.returncode == 1
    assert "there is no gin file nothing.gin, here or in gin_configs" in done.stderr


def test_a_pre_empted_run_goes_on_with_what_is_in_the_bucket(cloud):
    """The machine and its disk go after three rows; a new one decodes the other three."""
    cloud.ready(2)
    (cloud.path / "waits").touch()
    half = ["row.2 bucket/run/worker-0/predictions.jsonl"]
    half += [f"begun bucket/run/worker-{w}.log" for w in (0, 1)]
    taken = {"node": "PREEMPTED"}
    cloud.faults(
        {
            "match": "*worker.sh status",
            "once_there": half,  # a text and the file that must have it
            **taken,
            "wipe": True,
            "stderr": "Connection refused",
        },
        # The new machine may write on.
        {"match": "*tpu-vm create*", "forget": "waits"},
    )
    done = cloud.launch(*RUN, MODE="spot", **BUCKET)
    assert done.returncode == 0, done.stderr
    assert "TPU specjax is PREEMPTED: creating it again; the run continues from" in done.stderr
    assert "gs://bucket/run" in done.stderr
    rows = cloud.rows("bucket/run/worker-0")
    assert [row.split()[1] for row in rows] == list("012345")
    assert {row.split()[-1] for row in rows[:3]} <= {"1", "2"}
    assert {row.split()[-1] for row in rows[3:]} <= {"3", "4"}
    for worker in (0, 1):
        # The log of the machine that is gone stays, before the other's.
        log = (cloud.path / "bucket" / "run" / f"worker-{worker}.log").read_text()
        assert log.count("specjax infer: begun") == 2


def test_pre_emptions_have_a_limit(cloud):
    cloud.ready()
    (cloud.path / "waits").touch()
    taken = {"node": "PREEMPTED"}
    cloud.faults(
        {
            "match": "*worker.sh status",
            **taken,
            "wipe": True,
            "stderr": "Connection refused",
            "always": True,
        }
    )
    done = cloud.launch(*RUN, RESTARTS="1")
    assert done.returncode == 1
    assert "and all RESTARTS=1 are used" in done.stderr
    assert len(cloud.calls(" create ")) == 1


def test_a_tpu_that_was_deleted_is_not_made_again(cloud):
    cloud.ready()
    (cloud.path / "waits").touch()
    gone = {"forget": "node", "wipe": True, "stderr": "Connection refused"}
    cloud.faults({"match": "*worker.sh status", **gone})
    done = cloud.launch(*RUN)
    assert done.returncode == 1
    assert "TPU specjax was deleted: create, setup and run again" in done.stderr
    assert not cloud.calls(" create ")


def test_a_dead_worker_is_named_and_nothing_is_deleted(cloud):
    cloud.ready(3)
    (cloud.path / "waits").touch()
    cloud.faults({"match": "*worker.sh status", "dead": 1})
    done = cloud.launch(*RUN, SSH_ATTEMPTS="2", **BUCKET)
    assert done.returncode == 1
    assert "worker(s) 1 do not answer, TPU specjax is READY (1 of 2)" in done.stderr
    assert len(cloud.calls("worker.sh status")) == 2
    assert "worker(s) 1 of TPU specjax never answered: run `launch/tpu.sh delete`" in done.stderr
    assert "continues from the results in gs://bucket/run" in done.stderr
    assert not cloud.calls(" delete ")


@pytest.mark.parametrize("broken", ["dead", "mute"])
def test_a_worker_that_does_not_stop_is_named(cloud, broken):
    cloud.ready(3)
    (cloud.path / "waits").touch()
    assert cloud.launch(*RUN, "--detach").returncode == 0
    cloud.faults({"match": "*worker.sh stop", broken: 1})
    done = cloud.launch("stop", SSH_ATTEMPTS="2")
    assert done.returncode == 1
    assert "specjax-worker 2 stopped" in done.stdout
    assert "stopping failed on worker(s) 1 of 3: try again" in done.stderr


SETUP, MINE = ("setup",), ("run", "mine.gin")


@pytest.mark.parametrize(
    ("words", "match", "broken", "told"),
    [
        (SETUP, "*worker.sh install", "dead", "setup failed on"),
        (SETUP, "*worker.sh install", "mute", "setup failed on"),  # whatever gcloud's status
        (SETUP, "* scp *specjax.tar.gz*", "dead", "copying the checkout failed on"),
        (MINE, "*mkdir -p specjax/runs*", "dead", "making the directory of runs failed on"),
        (MINE, "* scp *run.gin*", "dead", "copying the gin file failed on"),
        ((*RUN, "--detach"), "*worker.sh start*", "mute", "starting failed on"),
        (RUN, "*worker.sh stop", "dead", "stopping failed on"),  # before a restart
    ],
)
def test_a_worker_that_fails_is_named(cloud, words, match, broken, told):
    cloud.ready(3)
    (cloud.path / "mine.gin").write_text("BATCH_SIZE = 8\n")
    if "stop" in match:
        (cloud.path / "ends").write_text("137")
    cloud.faults({"match": match, broken: 1})
    done = cloud.launch(*words, SSH_ATTEMPTS="2")
    assert done.returncode == 1
    assert f"{told} worker(s) 1 of 3" in done.stderr
    if words is MINE:
        assert not cloud.calls("worker.sh start")


def test_a_copy_that_fails_for_all_and_not_for_each_is_done(cloud):
    cloud.ready(2)
    (cloud.path / "mine.gin").write_text("BATCH_SIZE = 8\n")
    cloud.faults({"match": "* scp *--worker=all*", "stderr": "Broken pipe", "always": True})
    done = cloud.launch("run", "mine.gin", SSH_ATTEMPTS="2")
    assert done.returncode == 0, done.stderr
    assert len(cloud.calls(" scp ")) == 4


def test_a_machine_under_repair_is_waited_for(cloud):
    """Longer than SSH_ATTEMPTS looks, for maintenance takes minutes."""
    cloud.ready()
    (cloud.path / "waits").touch()
    repaired = {"node": [*["REPAIRING"] * 5, "READY"], "forget": "waits"}
    cloud.faults({"match": "*worker.sh status", "stderr": "Connection refused", **repaired})
    done = cloud.launch(*RUN, SSH_ATTEMPTS="2")
    assert done.returncode == 0, done.stderr
    assert "worker(s) 0 do not answer, TPU specjax is REPAIRING: waiting" in done.stderr
    assert len(cloud.calls("worker.sh start")) == 1
    (cloud.path / "waits").touch()
    stopped = {"node": "STOPPED", "stderr": "Connection refused"}
    cloud.faults({"match": "*worker.sh status", **stopped})
    done = cloud.launch(*RUN, "--gin.A=b")
    assert done.returncode == 1
    assert "somebody stopped TPU specjax" in done.stderr
    assert not cloud.calls(" delete ")


def test_a_worker_that_is_not_up_yet_after_a_repair_is_not_dead(cloud):
    cloud.ready()
    (cloud.path / "waits").touch()
    refused = {"match": "*worker.sh status", "stderr": "Connection refused"}
    repaired = {"node": ["REPAIRING", "READY"], "forget": "waits"}
    cloud.faults(refused, {**refused, **repaired}, refused)
    done = cloud.launch(*RUN, SSH_ATTEMPTS="2")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("(1 of 2)") == 2


def test_a_worker_that_does_not_know_which_it_is_starts_nothing(cloud):
    """Two workers of one number would write over each other."""
    cloud.ready(2)
    environment = {**cloud.env, "HOSTNAME": "machine", "PROCESS_COUNT": "2"}
    home = cloud.path / "home-0" / "specjax"

    def status(**variables):
        command = ["bash", home / "launch" / "worker.sh", "status"]
        return subprocess.run(
            command, env={**environment, **variables}, capture_output=True, text=True
        )

    done = status()
    assert done.returncode == 1
    assert "cannot tell which of 2 workers this is" in done.stderr
    assert status(PROCESS_INDEX="1").stdout == "specjax-worker 1 absent\n"
    assert status(PROCESS_COUNT="1").stdout == "specjax-worker 0 absent\n"


def test_bad_input_is_shown_and_not_tried_again(cloud):
    cloud.ready()
    (cloud.path / "ends").write_text("2")
    done = cloud.launch(*RUN)
    assert done.returncode == 1
    assert "specjax infer: the input is wrong" in done.stdout
    assert "worker 0 refused its input (above): correct it and run again" in done.stderr
    assert len((cloud.path / "specjax.txt").read_text().splitlines()) == 1


def test_a_program_that_dies_is_started_again_where_it_was(cloud):
    cloud.ready()
    (cloud.path / "ends").write_text("137")
    done = cloud.launch(*RUN)
    assert done.returncode == 0, done.stderr
    assert "worker 0 failed 137: restarting (1 of 5)" in done.stderr
    rows = cloud.rows("home-0/specjax/runs/run")
    assert [row.split()[-1] for row in rows] == list("111222")


def test_one_run_at_a_time_and_stop(cloud):
    cloud.ready()
    (cloud.path / "waits").touch()
    assert cloud.launch(*RUN, "--detach").returncode == 0
    again = cloud.launch(*RUN, "--detach")
    assert again.returncode == 0
    assert "specjax-worker 0 already runs" in again.stdout
    for words, variables in ((["--gin.SEED=1"], {}), ([], {"COMMAND": "evaluate"})):
        changed = cloud.launch(*RUN, *words, "--detach", **variables)
        assert changed.returncode == 1
        told = "run run is active with other arguments or another gin file (infer --gin_file="
        assert told in changed.stderr and "attempt" not in changed.stderr
    other = cloud.launch(*RUN, "--detach", RUN_NAME="other")
    assert other.returncode == 1
    assert "run run uses the TPU: stop it with RUN_NAME=run launch/tpu.sh stop" in other.stderr
    assert cloud.launch("stop").returncode == 0
    assert cloud.launch(*RUN, "--detach", RUN_NAME="other").returncode == 0


def test_a_gin_file_that_was_edited_does_not_change_a_run_at_work(cloud):
    cloud.ready()
    (cloud.path / "waits").touch()
    mine, there = cloud.path / "mine.gin", cloud.path / "home-0" / "specjax" / "runs" / "run.gin"
    mine.write_text("BATCH_SIZE = 8\n")
    assert cloud.launch("run", "mine.gin", "--detach").returncode == 0
    assert "already runs" in cloud.launch("run", "mine.gin", "--detach").stdout
    mine.write_text("BATCH_SIZE = 9\n")
    done = cloud.launch("run", "mine.gin", "--detach")
    assert done.returncode == 1 and "or another gin file (infer --gin_file=" in done.stderr
    assert there.read_text() == "BATCH_SIZE = 8\n"
    assert cloud.launch("stop").returncode == 0
    assert cloud.launch("run", "mine.gin", "--detach").returncode == 0
    assert there.read_text() == "BATCH_SIZE = 9\n"


def test_points_that_failed_are_no_reason_to_start_again(cloud):
    cloud.ready()
    (cloud.path / "ends").write_text("3")
    done = cloud.launch(*RUN, COMMAND="compare")
    assert done.returncode == 0, done.stderr
    assert "some settings failed on worker(s) 0, the others are done" in done.stderr
    assert len((cloud.path / "specjax.txt").read_text().splitlines()) == 1


def test_a_command_may_have_two_words(cloud):
    cloud.ready()
    assert cloud.launch(*RUN, COMMAND="train head").returncode == 0
    assert (cloud.path / "specjax.txt").read_text().startswith("train head --gin_file=")


@pytest.mark.parametrize("command", ["evaluate", "train"])
def test_commands_that_are_no_program_of_several_workers_are_refused(cloud, command):
    cloud.ready(2)
    done = cloud.launch(*RUN, COMMAND=command)
    assert done.returncode == 1
    assert f"COMMAND={command} needs one worker, TPU specjax has 2" in done.stderr
    assert not cloud.calls("worker.sh start")


def test_workers_of_one_program_are_left_to_the_runtime(cloud):
    cloud.ready(2)
    assert cloud.launch(*RUN).returncode == 0
    told = (cloud.path / "environment-home-1").read_text()
    assert told == "SPECJAX_DISTRIBUTED=1\n"


def test_a_bucket_that_cannot_be_read_stops_the_run(cloud):
    """An empty directory would begin the run anew, over what is there."""
    cloud.ready()
    cloud.faults({"match": "storage ls*", "stderr": "HTTPError 403: forbidden", "always": True})
    done = cloud.launch(*RUN, RESTARTS="0", **BUCKET)
    assert done.returncode == 1
    assert not (cloud.path / "specjax.txt").exists()
    assert "cannot read gs://bucket/run/worker-0" in cloud.launch("logs").stdout


def test_results_that_cannot_be_stored_are_a_failure(cloud):
    cloud.ready()
    cloud.faults({"match": "storage cp*", "stderr": "HTTPError 503", "always": True})
    done = cloud.launch(*RUN, RESTARTS="0", SYNC_SECONDS="60", **BUCKET)
    assert done.returncode == 1
    assert "worker 0 failed 1, and all RESTARTS=0 are used" in done.stderr
    assert len(cloud.calls("worker.sh start")) == 1
    assert "the last results are not in gs://bucket/run/worker-0" in cloud.launch("logs").stdout


def test_a_full_disk_does_not_cut_what_is_in_the_bucket(cloud):
    cloud.ready()
    (cloud.path / "bin" / "cp").write_text(
        """#!/usr/bin/env bash
[[ ${!#} == *.copy ]] || exec /bin/cp "$@"
mkdir -p "${!#}"
head -c 3 "$2/predictions.jsonl" >"${!#}/predictions.jsonl"
echo "cp: error writing '${!#}/predictions.jsonl': No space left on device" >&2
exit 1
"""
    )
    (cloud.path / "bin" / "cp").chmod(0o755)
    done = cloud.launch(*RUN, RESTARTS="0", SYNC_SECONDS="60", **BUCKET)
    assert done.returncode == 1
    assert not (cloud.path / "bucket" / "run" / "worker-0").exists()
    assert "the last results are not in gs://bucket/run/worker-0" in cloud.launch("logs").stdout


def test_what_fails_once_on_the_network_is_tried_again(cloud):
    cloud.ready()
    (cloud.path / "mine.gin").write_text("")
    lost = {"stderr": "Connection reset"}
    matches = ["*tpu-vm scp*", "*worker.sh start*", "storage cp*config*", "*worker.sh status"]
    cloud.faults(*({"match": match, **lost} for match in matches))
    done = cloud.launch("run", "mine.gin", SYNC_SECONDS="60", **BUCKET)
    assert done.returncode == 0, done.stderr
    assert not list((cloud.path / "faults").iterdir())
    assert len(cloud.rows("bucket/run/worker-0")) == 6
    assert len((cloud.path / "specjax.txt").read_text().splitlines()) == 1
