"""The options of one program of several processes, and what each of them writes."""

import jax
import numpy as np
import pytest
from jax._src import distributed

from specjax.cli import hosts
from specjax.cli.main import main
from specjax.runs import inference, processes
from specjax.runs.processes import LostProcessError, Process
from tests.cli.infer_command import TEXTS, arguments, write


def test_only_the_first_process_writes(paths, tmp_path, capsys, monkeypatch):
    """Two processes one after the other, each with all devices; `gather` gives what 0 gave."""
    source, output, given = write(tmp_path, [*TEXTS, ""]), tmp_path / "out", []

    def gather(values):
        given.append(values)
        return np.stack([given[0], values])

    monkeypatch.setattr(processes, "gather", gather)
    monkeypatch.setattr(processes, "check_same", lambda *_: None)
    written, decoded = output / "predictions.jsonl", []

    def record(*row, record_of_row=inference.record_of_row):
        decoded[-1] += 1
        return record_of_row(*row)

    monkeypatch.setattr(inference, "record_of_row", record)
    for known in (0, 5):
        if known:
            whole = written.read_bytes()
            written.write_bytes(b"".join(whole.splitlines(keepends=True)[:known]))
        found = []
        given.clear()
        for index in (0, 1):
            decoded.append(0)
            monkeypatch.setattr(hosts, "start", lambda args, index=index: Process(index, 2))
            assert main(arguments(paths, source, output if not index else tmp_path / "none")) == 0
            found.append(capsys.readouterr().out)
        assert found[0].startswith("{") and not found[1]
        assert len(written.read_bytes().splitlines()) == len(TEXTS) + 1
        assert not (tmp_path / "none").exists()
        assert decoded[-2:] == 2 * [len(TEXTS) - known]
    assert written.read_bytes() == whole
    monkeypatch.undo()
    # It is a run like any other, and a single process finds it complete.
    assert main(arguments(paths, source, output)) == 0
    assert '"this_process": {"rows": 0' in capsys.readouterr().out


def test_a_tpu_of_several_hosts_is_one_program(monkeypatch):
    class Arguments:
        process_count = process_index = coordinator_address = distributed = None

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
        # The worker's own number; JAX may count the processes in another order.
        monkeypatch.setattr(processes, "connect", lambda *_, **wait: None)
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr(distributed.global_state, "process_id", 1)
        assert hosts.start(Arguments) == Process(1, 2) and jax.process_index() == 0
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
    main(["infer", "--gin.INPUT=nothing.txt", "--distributed"])
    assert len(ended) == 1 and "joined, and not connected" in capsys.readouterr().err
