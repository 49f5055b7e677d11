"""The rows and the configuration of a run are read only if they are its own, and of their types."""

import json
import os

import pytest

from specjax.errors import UserError
from specjax.runs import predictions
from specjax.runs.evaluation import read_predictions
from specjax.runs.predictions import CONFIG_NAME, PREDICTIONS_NAME, hash_of, lines_of, resume
from specjax.runs.run_directory import fingerprint_of
from specjax.text.results import COUNTS

ROWS = 6
INPUTS = [(f"in {i}", None) for i in range(ROWS)]
CONFIG = {"seed": 0, "rows": ROWS, "input": hash_of(INPUTS)}
RUN = fingerprint_of(CONFIG)


def record(i):
    info = {**dict.fromkeys(COUNTS, 2), "rounds": 1, "calls": {"verifier": 2}}
    info |= {"drafted_lengths": [0, 1], "accepted_lengths": [0, 1]}
    return {"id": i, "inputs": f"in {i}", "prediction": "x", "ended_by": "eos", "info": info}


def write_run(directory, rows=None, **settings):
    """Writes a run of these rows, by default all."""
    directory.mkdir(parents=True)
    config = {**CONFIG, "environment": {"device": "cpu"}, "files": [], "kept": True, **settings}
    (directory / CONFIG_NAME).write_text(json.dumps(config))
    rows = map(record, range(ROWS)) if rows is None else rows
    (directory / PREDICTIONS_NAME).write_bytes(lines_of(rows, fingerprint_of(config)))
    return directory


@pytest.mark.parametrize("name", [CONFIG_NAME, PREDICTIONS_NAME])
def test_a_pipe_in_the_place_of_a_file_does_not_hang(tmp_path, name):
    run = write_run(tmp_path / "run")
    (run / name).unlink()
    os.mkfifo(run / name)
    with pytest.raises((UserError, OSError), match="not a regular file"):
        read_predictions(run)


@pytest.mark.parametrize(
    "rows",
    [
        lines_of([record(1), record(0)], "0" * 64),
        lines_of([record(0)], RUN) + lines_of([record(1)], fingerprint_of({**CONFIG, "seed": 7})),
        lines_of([record(0), record(1)], RUN).replace(b"in 1", b"in 9"),
        lines_of([record(0), record(1)], RUN).replace(b'": "', b'":"'),
    ],
)
def test_rows_of_another_run_and_changed_rows_are_refused(tmp_path, rows):
    run = write_run(tmp_path / "run")
    (run / PREDICTIONS_NAME).write_bytes(rows)
    for read in (
        lambda: resume(run / PREDICTIONS_NAME, RUN, {(i, 0): f"in {i}" for i in range(ROWS)}, ()),
        lambda: read_predictions(run),
    ):
        with pytest.raises(UserError, match=rf"{PREDICTIONS_NAME}:[12]: the line is not a row"):
            read()


@pytest.mark.parametrize(
    "rest",
    [
        *(b"[]\n", b"\xff\n", b'{"id": 0}\n'),
        *(b"my notes", b'{"id"x', b'{"text": "mine"}', b"{'"),  # a torn row would begin otherwise
        *(lines_of([row], RUN) for row in (record(0), record(99), {**record(1), "inputs": "x"})),
    ],
)
def test_what_is_no_row_of_this_run_is_refused_and_kept(tmp_path, rest):
    path = tmp_path / PREDICTIONS_NAME
    path.write_bytes(lines_of([record(0)], RUN) + rest)
    before = path.read_bytes()
    with pytest.raises(UserError, match=f"{PREDICTIONS_NAME}:2: the line is not a row of this run"):
        resume(path, RUN, {(i, 0): f"in {i}" for i in range(ROWS)}, ())
    assert path.read_bytes() == before


BAD = [
    *(("id", value) for value in ("1", None, 1.0, True, [1], {}, -1, 2**40)),
    *(("sample", value) for value in ("0", None, [])),
    *(("inputs", value) for value in (None, 3, ["in 1"])),
    *(("targets", value) for value in (None, 3, [3], {})),
    *(("prediction", value) for value in (3, ["x"])),
    *(("tokens", value) for value in (3, None, "12", ["1"], [1.5], [[1]], [-1], [2**70])),
    *(("sources", value) for value in (3, "ab", ["drafter"], [1])),
    *((name, value) for name in ("ended_by", "nan", "error") for value in (3, None)),
    *(("log_prob_target", value) for value in ("1", [], True, 10**400)),
    *(("log_prob_processed", value) for value in ("1", {})),
    *(("info", value) for value in (None, 3, [], {}, "x")),
    *(("info.rounds", value) for value in ("1", None, -1, 2**70)),
    *(("info.calls", value) for value in (None, [], {"verifier": "2"}, 3)),
    *(("info.drafted_lengths", value) for value in (3, ["1"], [[1]], None)),
    *(("info.nodes", value) for value in (3, [[1]], [1, 1], [["1"], [1]])),
]


def changed(i, name, value):
    found = record(i)
    holder, key = (found["info"], name[5:]) if name.startswith("info.") else (found, name)
    holder[key] = value
    return found


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_value_of_another_type_is_told_with_its_line(tmp_path, name, value):
    rows = [changed(i, name, value) if i == 1 else record(i) for i in range(ROWS)]
    run = write_run(tmp_path / "run", rows)
    inputs = {(i, 0): f"in {i}" for i in range(ROWS)}
    for read in (
        lambda: resume(run / PREDICTIONS_NAME, RUN, inputs, ()),
        lambda: read_predictions(run / PREDICTIONS_NAME),
        lambda: read_predictions(run),
    ):
        with pytest.raises(
            UserError, match=rf"{PREDICTIONS_NAME}:2: .*{name.split('.')[0].removesuffix('s')}"
        ):
            read()


@pytest.mark.parametrize("name", ["id", "inputs", "prediction", "ended_by", "info", "info.calls"])
def test_a_value_that_is_absent_is_told(tmp_path, name):
    row = record(0)
    holder, key = (row["info"], name[5:]) if name.startswith("info.") else (row, name)
    del holder[key]
    (tmp_path / PREDICTIONS_NAME).write_bytes(lines_of([row], RUN))
    with pytest.raises(UserError, match=f"{PREDICTIONS_NAME}:1: the row has no '{name}'"):
        resume(tmp_path / PREDICTIONS_NAME, RUN, {(0, 0): "in 0"}, ())


@pytest.mark.parametrize("body", [b"[1}", b'{"id": }', b'{"id": ' + b"[" * 20_000 + b"}"])
def test_a_sealed_line_that_is_no_object_is_told(tmp_path, body):
    line = body[:-1] + predictions._CHECKSUM % predictions._checksum(body) + b"\n"
    (tmp_path / PREDICTIONS_NAME).write_bytes(line)
    with pytest.raises(UserError, match=f"{PREDICTIONS_NAME}:1: the line is not a row of this run"):
        resume(tmp_path / PREDICTIONS_NAME, RUN, {}, ())


@pytest.mark.parametrize("failed", [(), (0,)])
def test_a_row_that_failed_where_this_run_does_not_is_refused(tmp_path, failed):
    row = {"id": 0, "inputs": "in 0", "prediction": None, "error": "too long"}
    row = record(0) if failed else row
    (tmp_path / PREDICTIONS_NAME).write_bytes(lines_of([row], RUN))
    with pytest.raises(UserError, match=f"{PREDICTIONS_NAME}:1: the line is not a row of this run"):
        resume(tmp_path / PREDICTIONS_NAME, RUN, {(0, 0): "in 0"}, failed)


def test_rows_may_have_other_models_and_lengths(tmp_path):
    rows = [changed(1, "info.calls", {"other": 1}), changed(0, "info.drafted_lengths", [0, 1, 0])]
    (tmp_path / PREDICTIONS_NAME).write_bytes(lines_of(rows, RUN))
    (found,) = read_predictions(tmp_path / PREDICTIONS_NAME)
    assert {name: calls.tolist() for name, calls in found.counts.calls.items()} == {
        "verifier": [2, 0],
        "other": [0, 1],
    }
    assert predictions.acceptance_of(rows).drafted_lengths == (2, 0)


@pytest.mark.parametrize("settings", [{"models": 3}, {"model_names": []}, {"files": 3}])
def test_a_configuration_with_other_types_is_told(tmp_path, settings):
    run = write_run(tmp_path / "run", **settings)
    with pytest.raises(UserError, match=rf"{CONFIG_NAME} is damaged"):
        read_predictions(run)
