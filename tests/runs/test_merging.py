"""Parts of several processes become one run; what does not belong together is refused."""

import json
import os
import shutil

import pytest

from specjax.cli.main import main
from specjax.errors import UserError
from specjax.runs import merging, predictions, processes
from specjax.runs.evaluation import read_predictions
from specjax.runs.predictions import CONFIG_NAME, PREDICTIONS_NAME, hash_of, lines_of, resume
from specjax.runs.processes import Process
from specjax.runs.run_directory import GIN_NAME, fingerprint_of
from specjax.text.engine import groups_of, split
from specjax.text.results import COUNTS

ROWS = 6
INPUTS = [(f"in {i}", None) for i in range(ROWS)]
CONFIG = {"seed": 0, "rows": ROWS, "input": hash_of(INPUTS)}
RUN = fingerprint_of(CONFIG)


def record(i):
    info = {**dict.fromkeys(COUNTS, 2), "rounds": 1, "calls": {"verifier": 2}}
    info |= {"drafted_lengths": [0, 1], "accepted_lengths": [0, 1]}
    return {"id": i, "inputs": f"in {i}", "prediction": "x", "ended_by": "eos", "info": info}


def lines(*ids, run=RUN):
    return lines_of(map(record, ids), run)


def write_part(directory, index, count, ids, **settings):
    path = directory / Process(index, count).directory
    path.mkdir(parents=True)
    config = {**CONFIG, "environment": {"device": "cpu"}, **settings}
    config |= {"part": {"index": index}, "files": [], "kept": True}
    (path / CONFIG_NAME).write_text(json.dumps(config))
    (path / PREDICTIONS_NAME).write_bytes(lines(*ids, run=fingerprint_of(config)))
    return path


def test_parts_become_one_in_the_order_of_the_inputs(tmp_path, capsys):
    write_part(tmp_path / "worker-0", 0, 2, [5, 0, 2])
    write_part(tmp_path / "worker-1", 1, 2, [1, 4, 3], environment={"device": "other"})
    assert main(["merge", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["emitted"] == 2 * ROWS
    assert "merged 2 parts: 6 predictions in" in told.err
    assert (
        "was decoded in another environment (environment.device: 'cpu' there, 'other' here)"
        in told.err
    )
    merged = (tmp_path / PREDICTIONS_NAME).read_bytes()
    assert merged == lines(*range(ROWS))
    config = json.loads((tmp_path / CONFIG_NAME).read_text())
    assert config["rows"] == ROWS and "part" not in config
    # Again, and from parts that are named.
    named = [str(tmp_path / "worker-1"), str(tmp_path / "worker-0" / Process(0, 2).directory)]
    assert main(["merge", str(tmp_path), *named]) == 0
    assert (tmp_path / PREDICTIONS_NAME).read_bytes() == merged


def test_parts_are_scored_as_the_run_that_they_make(tmp_path, capsys):
    write_part(tmp_path / "run" / "worker-0", 0, 2, [5, 0, 2])
    other = write_part(tmp_path / "run" / "worker-1", 1, 2, [1, 4])
    score = ["evaluate", f"--gin.PREDICTIONS={tmp_path / 'run'}", "--gin.METRICS=()"]
    assert main(score) == 2
    assert "1 of 6 rows are in no part; the first is 3" in capsys.readouterr().err
    with (other / PREDICTIONS_NAME).open("ab") as file:
        file.write(lines(3))
    assert main(score) == 0
    apart = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not (tmp_path / "run" / PREDICTIONS_NAME).exists()  # nothing is written there
    assert main(["merge", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert main(score) == 0
    merged = json.loads(capsys.readouterr().out.splitlines()[-1])
    figures = [scores["methods"]["run"]["figures"] for scores in (apart, merged)]
    assert apart["rows"] == ROWS and figures[0] == figures[1]


def test_the_last_part_to_end_merges(tmp_path, capsys):
    def ends(index):
        part = merging.directory_of(tmp_path, Process(index, 2))
        merging.finish(part, Process(index, 2), None)
        return (tmp_path / PREDICTIONS_NAME).exists()

    write_part(tmp_path, 0, 2, [0, 2, 4])
    assert not ends(0)
    assert "part 0 of 2 is done. The last part to end merges all in" in capsys.readouterr().err
    other = write_part(tmp_path, 1, 2, [1, 3])
    with (other / PREDICTIONS_NAME).open("ab") as file:
        file.write(lines(5)[:-5])  # as it is being written
    assert not ends(0)
    (other / PREDICTIONS_NAME).write_bytes(lines(1, 3, 5))
    assert ends(1)
    assert len((tmp_path / PREDICTIONS_NAME).read_bytes().splitlines()) == ROWS


def test_what_is_no_whole_run_is_refused(tmp_path, capsys):
    def refused(*words):
        assert main(["merge", *map(str, words)]) == 2
        told = capsys.readouterr().err
        assert told.startswith("specjax merge: ") and told.count("\n") == 1
        assert not (tmp_path / PREDICTIONS_NAME).exists()
        return told

    (tmp_path / "part--of-2").mkdir()  # not the name of a part
    assert "there is no directory part-I-of-N" in refused(tmp_path)
    first = write_part(tmp_path, 0, 2, [0, 1, 2])
    told = refused(tmp_path)
    assert (
        "must have part-00000-of-00002, part-00001-of-00002, each once, and has part-00000" in told
    )
    other = write_part(tmp_path, 1, 2, [3, 4], seed=1)
    assert "is not part of the same run as" in (told := refused(tmp_path))
    assert "seed: 0 there, 1 here" in told
    shutil.rmtree(other)
    write_part(tmp_path, 1, 2, [3, 4])
    assert "1 of 6 rows are in no part; the first is 5: run" in refused(tmp_path)
    shutil.rmtree(other)
    write_part(tmp_path, 1, 2, [3, 4, 5, 0])
    assert "have a row twice, or rows of other inputs" in refused(tmp_path)
    shutil.rmtree(other)
    write_part(tmp_path, 1, 2, [3, 4, 5, 6])
    assert "have a row twice, or rows of other inputs" in refused(tmp_path)
    shutil.rmtree(other)
    write_part(tmp_path, 1, 2, [3, 4, 5])
    changed = (first / PREDICTIONS_NAME).read_bytes()
    (first / PREDICTIONS_NAME).write_bytes(changed.replace(b"in 1", b"in 9"))
    assert f"{PREDICTIONS_NAME}:2: the line is not a row" in refused(tmp_path)
    shutil.rmtree(other)
    write_part(tmp_path / "moved", 0, 2, [0])
    (tmp_path / "moved" / Process(0, 2).directory).rename(tmp_path / Process(1, 2).directory)
    assert f"has no {CONFIG_NAME} of this part" in refused(tmp_path)
    again = tmp_path / "again"
    write_part(again, 0, 2, [0])
    assert "each once, and has part-00000-of-00002, part-00000" in refused(
        tmp_path, tmp_path, again
    )
    write_part(tmp_path, 0, 3, [])
    assert "part-00000-of-00002, part-00000-of-00003" in refused(tmp_path)
    (tmp_path / "more").mkdir()
    write_part(tmp_path / "more", 0, 1, range(ROWS))
    (tmp_path / "more" / Process(0, 1).directory / CONFIG_NAME).unlink()
    assert f"has no {CONFIG_NAME} of this part" in refused(tmp_path / "more")


def test_plans_are_dealt_evenly():
    lengths = [3] * 40 + [9] * 30 + [20] * 5
    plans = list(groups_of(lengths, (4, 16, 32), 4, 1, 2))
    for count in (1, 2, 3):
        dealt = split(plans, count)
        assert sorted(row for part in dealt for row in part) == list(range(75))
        assert max(map(len, dealt)) - min(map(len, dealt)) <= 8
        for plan in plans:
            assert sum(bool(set(map(int, plan.members)) & set(part)) for part in dealt) == 1
    assert split(plans[:1], 3)[1:] == [[], []]


def test_a_lost_process_is_told_in_one_line():
    import jax

    lost = jax.errors.JaxRuntimeError("UNKNOWN: Gloo AllGather failed:\nConnection closed by peer")
    together = Process(0, 2, together=True)
    with (
        pytest.raises(processes.LostProcessError, match="process 0 of 2 lost another process"),
        processes.naming_lost_processes(together),
    ):
        raise lost
    for part, error in ((None, lost), (Process(0, 2), lost), (together, ValueError("UNAVAILABLE"))):
        with pytest.raises(type(error)), processes.naming_lost_processes(part):
            raise error


def test_another_environment_is_allowed_for_a_part_of_a_merged_run(tmp_path):
    write_part(tmp_path, 0, 1, range(ROWS))
    assert main(["merge", str(tmp_path)]) == 0
    part = merging.directory_of(tmp_path, Process(0, 1))
    here = {**CONFIG, "environment": {"device": "other"}}
    with pytest.raises(ValueError, match=r"environment.device: 'cpu' there, 'other' here"):
        merging.check_whole(part, here, False)
    merging.check_whole(part, here, True)
    with pytest.raises(ValueError, match="seed: 0 there, 1 here"):
        merging.check_whole(part, {**here, "seed": 1}, True)


@pytest.fixture
def parts(tmp_path):
    """Two parts that can be merged."""
    return write_part(tmp_path, 0, 2, [0, 2, 4]), write_part(tmp_path, 1, 2, [1, 3, 5])


def edit(directory, /, **values):
    path = directory / CONFIG_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        # Rows of a run with another seed, all or some.
        (lambda part: (part / PREDICTIONS_NAME).write_bytes(lines(1, 3, 5, run="0" * 64)), ":1: "),
        (
            lambda part: (part / PREDICTIONS_NAME).write_bytes(
                lines(1, 3) + lines(5, run=fingerprint_of({**CONFIG, "seed": 7}))
            ),
            ":3: the line is not a row of this run",
        ),
        # A row of another text under this id.
        (
            lambda part: (part / PREDICTIONS_NAME).write_bytes(
                lines(1, 3) + lines_of([{**record(5), "inputs": "in 6"}], RUN)
            ),
            "have a row twice, or rows of other inputs",
        ),
        (lambda part: (part / GIN_NAME).write_bytes(b"# \xff\n"), None),
        (lambda part: edit(part, part=["x"]), "has no infer_config.json of this part"),
        (lambda part: edit(part, files=["../precious"]), None),
    ],
)
def test_parts_that_were_changed_are_refused(parts, tmp_path, capsys, change, told):
    precious = tmp_path.parent / f"{tmp_path.name} precious"
    precious.mkdir()
    change(parts[1])
    status = main(["merge", str(tmp_path)])
    error = capsys.readouterr().err
    assert precious.exists()
    if told is None:  # not read
        assert status == 0
        return
    assert status == 2 and told in error and error.count("\n") == 1
    assert not (tmp_path / PREDICTIONS_NAME).exists()


@pytest.mark.parametrize(
    "values", [{"rows": 5}, {"rows": "6"}, {"rows": [6]}, {"seed": 5}, {"input": None}]
)
def test_configurations_that_were_changed_are_refused(parts, tmp_path, capsys, values):
    """In all parts alike, and with the fingerprint that the file had."""
    for part in parts:
        edit(part, **values)
    assert main(["merge", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and str(parts[0]) in error
    assert not (tmp_path / PREDICTIONS_NAME).exists()


def test_a_configuration_as_gin_that_is_not_utf_8_is_refused(parts, tmp_path, capsys):
    (parts[0] / GIN_NAME).write_bytes(b"# \xff\n")
    assert main(["merge", str(tmp_path)]) == 2
    assert "config.gin is not UTF-8" in capsys.readouterr().err


def test_a_copy_of_a_part_is_refused_wherever_it_lies(parts, tmp_path, capsys):
    shutil.copytree(parts[0], tmp_path / "copy" / parts[0].name)
    assert main(["merge", str(tmp_path)]) == 2
    assert "and has part-00000-of-00002, part-00000-of-00002, part" in capsys.readouterr().err


@pytest.mark.parametrize("name", [CONFIG_NAME, PREDICTIONS_NAME])
def test_a_pipe_in_the_place_of_a_file_does_not_hang(parts, tmp_path, capsys, name):
    (parts[1] / name).unlink()
    os.mkfifo(parts[1] / name)
    assert main(["merge", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "not a regular file" in error and error.count("\n") == 1


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
    part = write_part(tmp_path / "run", 0, 1, range(ROWS))
    rows = [changed(i, name, value) if i == 1 else record(i) for i in range(ROWS)]
    (part / PREDICTIONS_NAME).write_bytes(lines_of(rows, RUN))
    inputs = {(i, 0): f"in {i}" for i in range(ROWS)}
    for read in (
        lambda: merging.merge(tmp_path / "merged", [part]),
        lambda: resume(part / PREDICTIONS_NAME, RUN, inputs, ()),
        lambda: read_predictions(part / PREDICTIONS_NAME),
        lambda: read_predictions(tmp_path / "run"),
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


@pytest.mark.parametrize(
    "settings",
    [
        {"rows": "6"},
        {"rows": None},
        {"num_samples": "1"},
        {"input": 3},
        {"models": 3},
        {"model_names": []},
    ],
)
def test_a_configuration_with_other_types_is_told(tmp_path, settings):
    part = write_part(tmp_path / "run", 0, 1, range(ROWS), **settings)
    with pytest.raises(UserError, match=str(tmp_path / "run")):
        merging.merge(tmp_path / "merged", [part])
