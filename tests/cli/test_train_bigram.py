"""`specjax train bigram`: a table from texts, and what is refused."""

import collections
import gzip
import itertools
import json
import re

import numpy as np
import pytest
import safetensors.numpy

import specjax
from specjax.cli.main import main
from specjax.drafting import Bigram
from specjax.drafting.ngrams import frequent_contexts, most_frequent_successors
from specjax.text.directories import load_bigram, save_bigram
from specjax.tokenizers import ByteTokenizer
from specjax.writing import write_checksums
from tests import tiny_pair

TEXTS = tiny_pair.sentences(30, seed=2)


def train(*words):
    return main(["train", "bigram", *map(str, words)])


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("".join(f"{text}\n" for text in TEXTS))
    return path


def test_successors_are_the_most_frequent(monkeypatch):
    """As a dict of counters tells, in parts too."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(5, size=n).tolist() for n in rng.integers(0, 9, 40)]
    counts = collections.defaultdict(collections.Counter)
    for row in rows:
        for a, b in itertools.pairwise(row):
            counts[a][b] += 1
    best = [min(counts[a], key=lambda b: (-counts[a][b], b)) for a in range(5)]
    assert most_frequent_successors(rows, 7).tolist() == [*best, -1, -1]
    monkeypatch.setattr("specjax.drafting.ngrams._AT_ONCE", 7)
    assert most_frequent_successors(iter(rows), 7).tolist() == [*best, -1, -1]


def test_a_text_becomes_a_table(texts, tmp_path, capsys):
    assert train(texts, "--tokenizer=bytes", f"--output={tmp_path / 'table'}") == 0
    assert "of 259 tokens, from 30 texts of " in capsys.readouterr().out
    found = load_bigram(tmp_path / "table")
    words = ByteTokenizer()
    rows = [[0, *words.encode(one)] for one in TEXTS]
    np.testing.assert_array_equal(found.successors, most_frequent_successors(rows, 259))
    assert found.tokenizer_fingerprint == words.fingerprint
    (array,) = (tmp_path / "table").glob("*.safetensors")
    assert array.stat().st_size < 259 * 2 + 200
    # Of other formats, the same.
    jsonl, tsv = tmp_path / "t.jsonl", tmp_path / "t.tsv.gz"
    jsonl.write_text("".join(json.dumps({"de": one}) + "\n" for one in TEXTS))
    tsv.write_bytes(gzip.compress("".join(f"x\t{one}\n" for one in TEXTS).encode()))
    for source, field in ((jsonl, "de"), (tsv, "1")):
        out = tmp_path / source.name.replace(".", "_")
        assert train(source, "--tokenizer=bytes", f"--output={out}", f"--field={field}") == 0
        np.testing.assert_array_equal(load_bigram(out).successors, found.successors)


def test_longer_contexts_are_counted_too(texts, tmp_path, capsys):
    """The successors stay as they were; the table is named in the line and in its notes."""
    out, count = tmp_path / "table", {}
    for more in ([], ["--min-count=20"]):
        assert (
            train(texts, "--tokenizer=bytes", f"--output={out}{len(more)}", "--order=4", *more) == 0
        )
        found = load_bigram(f"{out}{len(more)}")
        count[len(more)] = len(found.followers)
        assert (
            f"and of {len(found.followers):,} contexts of up to 3 tokens" in capsys.readouterr().out
        )
        assert found.order == 4 and found.notes["contexts"] == len(found.followers)
        assert found.notes["min_count"] == (20 if more else 2)
    assert 0 < count[1] < count[0]
    rows = [[0, *ByteTokenizer().encode(one)] for one in TEXTS]
    successors = most_frequent_successors(rows, 259)
    contexts, followers = frequent_contexts(rows, successors, 4, 20)
    np.testing.assert_array_equal(found.successors, successors)
    np.testing.assert_array_equal(found.contexts, contexts)
    np.testing.assert_array_equal(found.followers, followers)
    (array,) = out.with_name("table1").glob("*.safetensors")
    assert array.stat().st_size < 259 * 2 + followers.size * 8 + 400


def test_a_decoder_takes_its_own_vocabulary_alone(texts, tmp_path):
    out = tmp_path / "table"
    assert train(texts, "--tokenizer=bytes", f"--output={out}") == 0
    model = tiny_pair.tabular(1)
    decoder = specjax.Decoder(model, drafting=specjax.drafting.Lookup(bigram=out), max_draft=2)
    table = decoder.params.drafter
    np.testing.assert_array_equal(table, load_bigram(out).successors)
    other = Bigram(np.zeros(24, np.int32), "another")
    with pytest.raises(ValueError, match=r"24 ids \(tokenizer another\) but the model has 259 "):
        specjax.Decoder(model, drafting=specjax.drafting.Lookup(bigram=other))
    # An embedding with more rows than the tokenizer has ids is the same vocabulary.
    mark = ByteTokenizer().fingerprint
    assert load_bigram(out).table("it", mark, 300)[259:].tolist() == [-1] * 41


@pytest.mark.parametrize("size", [40, 2**16, 70_000])
def test_what_is_saved_is_loaded(tmp_path, size):
    table = np.random.default_rng(1).integers(-1, size, size).astype(np.int32)
    table[[0, -1]] = -1
    save_bigram(tmp_path / "t", Bigram(table, "mark", {"texts": 3}))
    found = load_bigram(tmp_path / "t")
    np.testing.assert_array_equal(found.successors, table)
    assert (found.tokenizer_fingerprint, found.notes) == ("mark", {"texts": 3})
    # As before there were longer contexts, so that a specjax of then reads it.
    config = json.loads((tmp_path / "t" / "bigram.json").read_text())
    assert (config["version"], found.order, len(found.contexts)) == (1, 2, 0)
    arrays = safetensors.numpy.load((tmp_path / "t" / "bigram.safetensors").read_bytes())
    assert list(arrays) == ["successors"]


@pytest.mark.parametrize("size", [40, 2**16 - 1, 2**16, 2**18])
@pytest.mark.parametrize("few", [False, True])
def test_longer_contexts_are_saved_too(tmp_path, size, few):
    rng = np.random.default_rng(2)
    contexts = np.unique(rng.integers(size - 20, size, (0 if few else 50, 3)), axis=0)
    contexts = contexts.astype(np.int32)
    contexts[::2, 2] = -1
    contexts = np.unique(contexts, axis=0)
    followers = rng.integers(size, size=len(contexts)).astype(np.int32)
    table = Bigram(np.full(size, -1, np.int32), "mark", {}, contexts, followers)
    save_bigram(tmp_path / "t", table)
    found = load_bigram(tmp_path / "t")
    np.testing.assert_array_equal(found.contexts, contexts)
    np.testing.assert_array_equal(found.followers, followers)
    assert found.order == 4 and found.contexts.dtype == found.followers.dtype == np.int32


def _cut(place):
    path = place / "bigram.safetensors"
    path.write_bytes(path.read_bytes()[:-3])


def _cut_and_signed(place):
    _cut(place)
    write_checksums(place)


def _newer(place):
    path = place / "bigram.json"
    path.write_text(re.sub('"version": .', '"version": 3', path.read_text()))
    write_checksums(place)


def _rewritten(change):
    def damage(place):
        path = place / "bigram.safetensors"
        arrays = safetensors.numpy.load(path.read_bytes())
        change(arrays)
        path.write_bytes(safetensors.numpy.save(arrays))
        write_checksums(place)

    return damage


def _gone(place):
    (place / "bigram.json").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_cut, "bigram.safetensors was changed after specjax wrote it"),
        (_cut_and_signed, "bigram.safetensors is cut short or damaged"),
        (_newer, "version=3 must be 1 or 2 for this specjax to read it"),
        (_gone, "no bigram table found: make a table with `specjax train bigram`"),
        (
            _rewritten(lambda x: x.update(successors=np.full(9, 11, np.int32))),
            "successors must be uint16 or uint32, got int32",
        ),
        (_rewritten(lambda x: x.pop("contexts")), "lacks 'contexts': copy the table again"),
        (
            _rewritten(lambda x: x.update(followers=x["followers"][1:])),
            "contexts must be .* int32 ids: copy the table",
        ),
        (
            _rewritten(lambda x: x.update(contexts=x["contexts"].ravel())),
            "contexts must be .* int32 ids: copy the table",
        ),
        (
            _rewritten(lambda x: x.update(contexts=x["contexts"].astype(np.int64))),
            "contexts must be uint16 or uint32, got int64",
        ),
        (
            _rewritten(lambda x: x.update(contexts=x["contexts"][::-1].copy())),
            "contexts must be .* in lexicographic order without duplicates",
        ),
        (
            _rewritten(lambda x: x["followers"].fill(9)),
            "contexts must be .* int32 ids: copy the table",
        ),
    ],
)
def test_damage_is_told(tmp_path, damage, message):
    contexts = np.array([[1, 2], [1, 3], [8, 0]], np.int32)
    followers = np.array([3, 0, 8], np.int32)
    save_bigram(tmp_path / "t", Bigram(np.zeros(9, np.int32), "mark", {}, contexts, followers))
    damage(tmp_path / "t")
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
        load_bigram(tmp_path / "t")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (np.zeros(3), r"successors must be \[n\] int32, got \[3\] float64"),
        (np.full(3, 3, np.int32), r"successors must lie in -1 .. 2"),
    ],
)
def test_a_bad_table_is_told(table, message):
    with pytest.raises(ValueError, match=message):
        Bigram(table, "mark")


def test_a_text_without_pairs_is_refused(tmp_path, monkeypatch, capsys):
    words = ByteTokenizer()
    words.add_bos, words.bos_id, words.add_eos = True, 2, False
    monkeypatch.setattr("specjax.tokenizers.load_tokenizer", lambda _: words)
    (tmp_path / "t.txt").write_text("\n\n")
    assert train(tmp_path / "t.txt", "--tokenizer=bytes", f"--output={tmp_path / 'o'}") == 2
    assert "t.txt: no text has two tokens: give files with more text" in capsys.readouterr().err
