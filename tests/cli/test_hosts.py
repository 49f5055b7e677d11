"""The options of several processes, and replicas of `specjax infer`."""

import dataclasses
import json

import jax
import pytest

import specjax
from specjax import drafting
from specjax.cli import hosts
from specjax.cli.main import main
from specjax.runs import processes
from specjax.runs.processes import LostProcessError, Process
from specjax.text import setting
from tests.cli.infer_command import TEXTS, arguments, write

BUCKETS = {"BUCKETS": "(4, 16)"}


def replica(index, count=2):
    return ["--process_count", str(count), "--process_index", str(index)]


@pytest.fixture(scope="module")
def alone(paths, tmp_path_factory):
    """The input, and the output of one process."""
    directory = tmp_path_factory.mktemp("alone")
    source = write(directory, [*TEXTS, ""])
    assert main(arguments(paths, source, directory / "out", **BUCKETS)) == 0
    return source, directory / "out"


def test_replicas_write_what_one_process_writes(paths, alone, tmp_path, capsys, monkeypatch):
    source, expected = alone
    output = tmp_path / "out"
    command = arguments(paths, source, output, **BUCKETS)
    monkeypatch.setenv("SPECJAX_PROCESS_COUNT", "2")
    monkeypatch.setenv("SPECJAX_PROCESS_INDEX", "1")
    assert main(command) == 0
    assert "part 1 of 2 is done. The last part to end merges all in" in capsys.readouterr().err
    assert not (output / "predictions.jsonl").exists()
    monkeypatch.delenv("SPECJAX_PROCESS_COUNT")
    monkeypatch.delenv("SPECJAX_PROCESS_INDEX")
    assert main([*command, *replica(0)]) == 0
    assert "merged 2 parts: 12 predictions" in capsys.readouterr().err
    own = [(output / Process(i, 2).directory / "predictions.jsonl").read_bytes() for i in range(2)]
    assert all(len(data.splitlines()) > 2 for data in own)
    written = (expected / "predictions.jsonl").read_bytes()
    assert (output / "predictions.jsonl").read_bytes() == written
    assert (output / "infer_config.json").read_bytes() == (
        expected / "infer_config.json"
    ).read_bytes()
    # A part that was killed after two rows, and started again, by the same process.
    path = output / Process(1, 2).directory / "predictions.jsonl"
    path.write_bytes(b"".join(own[1].splitlines(keepends=True)[:2]) + own[1][:7])
    (output / "predictions.jsonl").unlink()
    assert main([*command, *replica(1)]) == 0
    assert json.loads(capsys.readouterr().out)["this_process"]["rows"] == own[1].count(b"\n") - 2
    assert path.read_bytes() == own[1]
    assert (output / "predictions.jsonl").read_bytes() == written
    # What is merged is a run like any other.
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["this_process"]["rows"] == 0


def test_a_part_of_another_run_is_refused_before_it_decodes(paths, alone, capsys):
    source, output = alone
    assert main([*arguments(paths, source, output, SEED=7, **BUCKETS), *replica(0)]) == 2
    told = capsys.readouterr().err
    assert "has a run of another configuration (seed: 0 there, 7 here)" in told
    assert not list(output.glob("part-*"))


def test_a_tpu_of_several_hosts_is_one_program(monkeypatch):
    class Arguments:
        process_count = process_index = coordinator_address = distributed = None
        joins = True
        command = "infer"

    class Apart(Arguments):  # a comparison or an evaluation, which would wait for the other hosts
        joins = False
        command = "compare"

    joined = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *given: joined.append(given))
    before = jax.config.jax_enable_preemption_service
    try:
        assert hosts.start(Arguments) is None and not joined
        monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
        assert hosts.start(Arguments) is None and not joined
        monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b")
        assert hosts.start(Arguments) is None
        assert joined == [(None, None, None)]
        with pytest.raises(
            ValueError,
            match="specjax compare cannot run as one program of several processes or hosts",
        ):
            hosts.start(Apart)
        assert len(joined) == 1
        # JAX must leave SIGTERM alone.
        assert not jax.config.jax_enable_preemption_service
    finally:
        jax.config.update("jax_enable_preemption_service", before)


def test_a_process_that_is_not_there_in_time_is_no_bad_input(monkeypatch):
    """Status 2 would have launchers give up."""
    late = jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: Barrier timed out")
    told = {late: LostProcessError, RuntimeError("is needed"): ValueError}
    before = jax.config.jax_enable_preemption_service
    try:
        for error, kind in told.items():

            def failing(*_, error=error):
                raise error

            monkeypatch.setattr(jax.distributed, "initialize", failing)
            with pytest.raises(kind, match=str(error)):
                processes.join("a:1", 2, 0)
    finally:
        jax.config.update("jax_enable_preemption_service", before)


def test_a_process_that_fails_while_it_joins_does_not_wait_for_the_others(monkeypatch, capsys):
    """A normal exit would wait for them for minutes."""
    ended = []
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(hosts, "end", ended.append)

    def failing(args):
        raise ValueError("joined, and not connected")

    monkeypatch.setattr(hosts, "start", failing)
    main(["infer", "--gin.INPUT=nothing.txt", *replica(0)])
    assert len(ended) == 1 and "joined, and not connected" in capsys.readouterr().err


def test_meshes_that_divide_nothing_are_refused(paths, alone, tmp_path, capsys):
    def refused(**settings):
        assert main(arguments(paths, alone[0], tmp_path / "out", **settings)) == 2
        return capsys.readouterr().err

    told = refused(MESH_MODEL=4)
    assert "the mesh's MESH_MODEL=4 does not divide the 2 heads of" in told
    assert "choose `MESH_MODEL` from 1, 2" in told and told.count("\n") == 1
    told = refused(MESH_DATA=3, MESH_MODEL=1)
    assert (
        "BATCH_SIZE=4 must be a multiple of 3, because the mesh splits the rows: choose 6" in told
    )
    assert "MESH_DATA=8 times MESH_MODEL=2 needs 16 devices" in refused(MESH_DATA=8, MESH_MODEL=2)


def test_each_replica_does_not_measure_costs(paths, alone, tmp_path, monkeypatch, capsys):
    measured = drafting.Costs((1, 4), (1, 2, 4), (0.1, 0.1), ((1.0, 1.1, 1.2),) * 2)
    pair = specjax.load_pair(**paths)
    measured = dataclasses.replace(measured, pair=pair.fingerprint)
    monkeypatch.setattr(setting, "measure_costs", lambda *_, **__: measured)
    command = arguments(paths, alone[0], tmp_path / "out", STOPPING="CostAware()", **BUCKETS)
    assert main([*command, *replica(0)]) == 2
    assert "several processes must share the same costs" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_one_process_scores(capsys):
    assert main(["evaluate", "--gin.PREDICTIONS=nothing.jsonl", *replica(1)]) == 0
    assert "process 1 of 2 ends: only process 0 scores" in capsys.readouterr().err
