"""Bulk decoding on Ray: what is written equals what one process decodes, whatever is killed."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import specjax
from specjax.data.few_shot import FewShot
from specjax.errors import UserError
from specjax.partitioning import make_mesh

pd = pytest.importorskip("pandas", reason="pandas is absent: pip install 'specjax[ray]'")
pa = pytest.importorskip("pyarrow", reason="pyarrow is absent: pip install 'specjax[ray]'")
ray = pytest.importorskip("ray", reason="Ray is absent: pip install 'specjax[ray]'")

from pyarrow import parquet as pq

from specjax.integrations import ray as bulk

# Ray's own.
pytestmark = pytest.mark.filterwarnings("ignore")

TEXTS = [f"A man has {n} dogs." for n in range(2, 20)] + [""]
ROWS = pa.table(
    {
        "id": [3 * n + 1 for n in range(len(TEXTS))],
        "inputs": TEXTS,
        "origin": [{"file": "a", "line": n} for n in range(len(TEXTS))],
    }
)
OPTIONS = {"max_new_tokens": 8, "batch_size": 4, "rule": "OPT(0.2)"}


def make_decoder(mesh=None):
    return specjax.Decoder(specjax.load_pair(mesh=mesh), **OPTIONS)


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def alone():
    return bulk.BatchDecoder(make_decoder, seed=5)(ROWS)


def test_a_batch_has_what_a_decoder_gives(alone):
    decoder = make_decoder()
    result = decoder(TEXTS[:-1], ids=ROWS["id"].to_pylist()[:-1], seed=5)
    rows = alone.to_pylist()
    assert [row["prediction"] for row in rows[:-1]] == list(result.texts)
    assert [row["tokens"] for row in rows[:-1]] == [row.tokens.tolist() for row in result]
    assert sum(row["emitted"] for row in rows) == result.info.emitted
    assert sum(row["verifier_calls"] for row in rows) == result.info.verifier_calls
    assert [row["origin"] for row in rows] == ROWS["origin"].to_pylist()
    assert rows[-1]["prediction"] is None and "id=55" in rows[-1]["error"]
    other = bulk.BatchDecoder(make_decoder, seed=6)(ROWS)
    assert other["tokens"] != alone["tokens"]


def _written(folder, kind):
    # Ray makes no frame of lists and a missing list.
    rows = bulk.FORMATS[kind].read(str(folder / "predictions")).take_all()
    return _split(pd.DataFrame(rows).sort_values("id"))


def _split(rows):
    """The rows without their log-probabilities, whose last bits depend on the batch; and these."""
    sums = ["log_prob_processed", "log_prob_target"]
    return json.loads(rows.drop(columns=sums).to_json(orient="records")), rows[sums].to_numpy(float)


def _check_equal(found, wanted):
    assert found[0] == wanted[0]
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-5)


def _source(tmp_path, kind, table=ROWS):
    folder = tmp_path / "in"
    folder.mkdir()
    if kind == "parquet":
        for i in range(2):
            pq.write_table(table.slice(10 * i, 10), folder / f"{i}.parquet")
    else:
        lines = [json.dumps(row) for row in table.to_pylist()]
        (folder / "rows.jsonl").write_text("\n".join(lines))
    return folder


def _dying(marker):
    """A decoder whose process is killed once, after a row."""
    decoder = make_decoder()
    rows = decoder.rows

    def some(*args, **options):
        for i, row in enumerate(rows(*args, **options)):
            if i == 1 and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield row

    decoder.rows = some
    return decoder


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_two_actors_of_which_one_is_killed_write_what_one_process_does(
    cluster, alone, tmp_path, kind
):
    marker = tmp_path / "killed"
    options = {"source": _source(tmp_path, kind), "seed": 5, "batch_rows": 5}
    run = functools.partial(
        bulk.infer, output_dir=tmp_path / "out", workers=bulk.Workers(2), **options
    )
    metrics = run(functools.partial(_dying, marker))
    assert marker.exists()
    _check_equal(_written(tmp_path / "out", kind), _split(alone.to_pandas()))
    assert (metrics["rows"], metrics["failed"]) == (len(TEXTS), 1)
    assert metrics["emitted"] == sum(alone["emitted"].to_pylist())
    # Once more: nothing is left to do, and nothing is written twice.
    assert run(make_decoder) == metrics
    with pytest.raises(UserError, match="seed: 5 there, 6 here"):
        run(make_decoder, seed=6)


def _over_two(*_):
    return make_decoder(make_mesh(None, 1))


def test_a_slice_of_two_processes_writes_the_same(cluster, alone, tmp_path):
    workers = bulk.Workers(1, {"CPU": 1}, hosts=2)
    source = _source(tmp_path, "parquet")
    bulk.infer(_over_two, source=source, output_dir=tmp_path / "out", workers=workers, seed=5)
    _check_equal(_written(tmp_path / "out", "parquet"), _split(alone.to_pandas()))


def test_a_task_makes_the_prompts(alone):
    renamed = ROWS.rename_columns(["id", "caption", "origin"])
    batches = bulk.BatchDecoder(make_decoder, seed=5, task=FewShot(prompt="{caption}"))
    assert batches(renamed)["tokens"] == alone["tokens"]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (ROWS.drop(["id"]), "has no column 'id'"),
        (ROWS.set_column(0, "id", [[1] * len(TEXTS)]), "id=1 is that of 19 rows"),
        (ROWS.set_column(0, "id", [[-1, *range(len(TEXTS) - 1)]]), "whole number in 0 .."),
        (ROWS.set_column(0, "id", [list(map(str, range(len(TEXTS))))]), "whole number in 0 .."),
        (ROWS.append_column("tokens", [TEXTS]), "has a column 'tokens'"),
        (ROWS.rename_columns(["id", "text", "origin"]), "has no column 'inputs'"),
        (ROWS.slice(0, 0), "has no rows"),
    ],
)
def test_rows_that_cannot_be_told_apart_are_refused(cluster, tmp_path, table, words):
    source = _source(tmp_path, "parquet", table)
    options = {"source": source, "output_dir": tmp_path / "out", "workers": bulk.Workers()}
    with pytest.raises(UserError, match=words):
        bulk.infer(make_decoder, **options)
    assert not (tmp_path / "out").exists()


def _refusing():
    return specjax.Decoder(specjax.load_pair(), max_draft=0)


def _measuring():
    return specjax.Decoder(specjax.load_pair(), stopping="CostAware()", batch_size=1)


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (_refusing, {}, "max_draft must"),
        (_measuring, {}, "costs must be given on Ray"),
        (make_decoder, {"seed": -1}, "seed must be a whole number"),
        (make_decoder, {"truncate": "middle"}, "truncate"),
        (make_decoder, {"task": FewShot(prompt="{inputs}", limit=3)}, "limit must be left out"),
    ],
)
def test_what_no_actor_can_do_is_refused_before_rows_are_decoded(make, options, words):
    with pytest.raises(UserError, match=words):
        bulk.BatchDecoder(make, **options)


def test_a_refusal_of_an_actor_is_the_drivers(cluster, tmp_path):
    options = {"source": _source(tmp_path, "jsonl"), "output_dir": tmp_path / "out"}
    with pytest.raises(UserError, match="max_draft must"):
        bulk.infer(_refusing, workers=bulk.Workers(), **options)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="topology must be VERSION:TOPOLOGY"):
        bulk.Workers(topology="4x4")


def test_the_command_goes_on_after_its_driver_was_killed_and_equals_infer(tmp_path):
    rows = [{"id": n, "inputs": text} for n, text in enumerate(TEXTS[:-1])]
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    words = [sys.executable, "-m", "specjax", "infer", f"--gin.INPUT={source}"]
    words += ["--gin.RULE=OPT(0.2)", "--gin.MAX_NEW_TOKENS=8", "--gin.BATCH_SIZE=4"]
    on_ray = [*words, f"--gin.OUTPUT_DIR={tmp_path / 'ray'}", "--gin_file=runs/ray.gin"]
    on_ray += ["--gin.WORKERS=2", "--gin.BATCH_ROWS=3"]
    killed = subprocess.Popen(on_ray, start_new_session=True)
    predictions = tmp_path / "ray" / "predictions"
    while not predictions.exists() or not [*predictions.glob("*.json")]:
        assert killed.poll() is None
        time.sleep(0.05)
    killed.kill()
    killed.wait()
    done = {path.name for path in predictions.glob("*.json")}
    ran = subprocess.run(on_ray, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert done <= {path.name for path in predictions.glob("*.json")}
    subprocess.run([*words, f"--gin.OUTPUT_DIR={tmp_path / 'one'}"], check=True)
    lines = (tmp_path / "one" / "predictions.jsonl").read_text().splitlines()
    one = [json.loads(line) for line in lines]
    for row in one:
        row |= row.pop("info")
    wanted = pd.DataFrame(one)
    found = bulk.FORMATS["jsonl"].read(str(predictions)).to_pandas().sort_values("id")
    names = [name for name in found if name in wanted]
    assert {"id", "inputs", "prediction", "tokens", "ended_by", "emitted", "rounds"} <= {*names}
    _check_equal(_split(found[names]), _split(wanted[names]))
    assert json.loads(ran.stdout)["rows"] == len(rows)
    assert Path(tmp_path / "ray" / "config.gin").exists()
