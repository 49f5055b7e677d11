"""`specjax infer` with several outputs of each input."""

import itertools
import json

import pytest

import specjax
from specjax.cli.main import main
from specjax.types import Sampling
from tests import tiny_pair
from tests.cli.infer_command import TEXTS, arguments, rows, write, write_cut

LONG = " ".join(tiny_pair.sentences(9, seed=1))
KEYS = list(itertools.product(range(len(TEXTS) + 1), range(3)))


@pytest.fixture(scope="module")
def sampled(paths, tmp_path_factory):
    directory = tmp_path_factory.mktemp("samples")
    source = write(directory, [*TEXTS[:4], LONG, *TEXTS[4:]])
    assert main(arguments(paths, source, directory / "out", NUM_SAMPLES=3)) == 0
    return source, directory / "out"


def test_lines_are_the_decoders_rows(paths, sampled):
    found = rows(sampled[1])
    assert [(row["id"], row["sample"]) for row in found] == KEYS
    assert [row["id"] for row in found if "error" in row] == [4, 4, 4]
    decoder = specjax.Decoder(
        specjax.load_pair(**paths), max_draft=3, max_new_tokens=12, batch_size=4,
        buckets=(16, 24), sampling=Sampling(1.0),
    )  # fmt: skip
    ids = [i for i in range(len(TEXTS) + 1) if i != 4]
    result = decoder(TEXTS, seed=0, ids=ids, num_samples=3)
    assert [row["prediction"] for row in found if "error" not in row] == result.texts
    metrics = json.loads((sampled[1] / "metrics.json").read_text())
    assert metrics["rows"] == len(KEYS) and metrics["failed"] == 3


@pytest.mark.parametrize("seed", range(2))
def test_a_run_cut_anywhere_is_completed_to_the_same_bytes(paths, sampled, tmp_path, seed):
    source, output = sampled
    whole = write_cut(output, tmp_path, seed)
    assert main(arguments(paths, source, tmp_path, NUM_SAMPLES=3)) == 0
    assert (tmp_path / "predictions.jsonl").read_bytes() == whole


def test_samples_are_scored_as_seeds(sampled, tmp_path, capsys):
    source, output = sampled
    references = write(tmp_path, source.read_text().splitlines(), "references.txt")
    score = ["evaluate", f"--gin.PREDICTIONS={output}", f"--gin.REFERENCES={references}"]
    assert main(score) == 0
    scores = json.loads(capsys.readouterr().out.splitlines()[-1])
    (method,) = scores["methods"].values()
    assert scores["rows"] == len(TEXTS) + 1 and method["failed"] == 3
    assert "bleu" in method["figures"]
    path = output / "predictions.jsonl"
    whole = path.read_bytes()
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
    assert main(score) == 2
    assert "there is no row with id 11 and sample 2: finish" in capsys.readouterr().err
    path.write_bytes(whole)
