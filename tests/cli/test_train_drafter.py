"""`specjax train drafter` from a tiny verifier and prompts to a head that drafts for it."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import specjax
from specjax.checkpoints import save_model
from specjax.cli.main import main
from specjax.data.batching import TokenPairs
from specjax.runs.run_directory import Store
from specjax.training.checkpoint_store import CheckpointStore
from tests.fuzzing.kills import interrupted
from tests.heads.tiny_heads import llama
from tests.tiny_pair import sentences, write_pair
from tests.variants import variants

SETTINGS = {
    "NUM_STEPS": 40,
    "WARMUP_STEPS": 4,
    "LEARNING_RATE": 0.02,
    "MAX_DRAFT": 3,
    "MAX_NEW_TOKENS": 8,
    "TOKENS_PER_BATCH": 256,
    "VerifierTexts.shard_rows": 24,
    "SAMPLE_BATCH_SIZE": 12,
    "TrainerConfig.checkpoint_every": 20,
    "TrainerConfig.progress": False,
}
GREEDY = specjax.Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    for name, count, seed in (("train", 60, 0), ("validation", 12, 1)):
        text = "\n".join(sentences(count, seed)) + "\n"
        (directory / f"{name}.txt").write_text(text, encoding="utf-8")
    write_pair(directory / "pair")
    model, params = llama(259, layers=4)
    # Words of few letters, which may end.
    kernel = params["decoder"]["logits_dense"]["kernel"]
    few = np.isin(np.arange(259), [1, *range(100, 112)])
    params["decoder"]["logits_dense"]["kernel"] = np.where(few, kernel, 0.01 * kernel)
    save_model(directory / "llama", model, params, format="hf")
    return directory


def run(data, output, verifier="pair/verifier", **bindings):
    values = {
        **SETTINGS,
        "DATA_DIR": data,
        "TRAIN": "train.txt",
        "VALIDATION": "validation.txt",
        "VERIFIER": data / verifier,
        "OUTPUT_DIR": output,
        **bindings,
    }
    if verifier == "llama":
        values = {"TOKENIZER": "bytes", **values}
    return main(["train", "drafter", *(f"--gin.{name}={x}" for name, x in values.items())])


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    output = tmp_path_factory.mktemp("run")
    assert run(data, output) == 0
    return output


def figures(output):
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "validation_loss" in row]


def outcome(output):
    """All that a run has made but what tells of its process."""
    files = [f for f in output.rglob("*") if f.is_file() and "checkpoints" not in f.parts]
    kept = {f: f.read_bytes() for f in files if f.parent.name in ("drafter", "samples")}
    return {str(f.relative_to(output)): content for f, content in kept.items()}, figures(output)


def check_drafts(data, output, verifier, **options):
    """The head writes the verifier's greedy texts, as often at a time as it was measured."""
    pair = specjax.load_pair(verifier=verifier, drafter=output / "drafter", **options)
    prompts = (data / "validation.txt").read_text().splitlines()
    shape = {"max_new_tokens": 8, "batch_size": 12, "buckets": (64,), "sampling": GREEDY}
    alone = specjax.Decoder(pair.verifier, **shape)(prompts)
    drafted = specjax.Decoder(pair, max_draft=3, **shape)(prompts)
    assert [x.tolist() for x in drafted.tokens] == [x.tolist() for x in alone.tokens]
    results = json.loads((output / "results.json").read_text())
    rounds = sum(int(row.info.rounds) for row in drafted)
    measured = sum(map(len, alone.tokens)) + sum(map(bool, alone.ended))
    assert results["validation_tokens_per_call_greedy"] == pytest.approx(measured / rounds)


def test_the_result_drafts_for_its_verifier(data, trained, capsys):
    check_drafts(data, trained, data / "pair" / "verifier")
    first, last = figures(trained)
    assert last["validation_loss"] < first["validation_loss"]
    assert {"config.gin", "runs.jsonl", "train_config.json"} <= {f.name for f in trained.iterdir()}


def test_it_learns(data, trained, tmp_path):
    """One update at no rate leaves the head untrained."""
    assert run(data, tmp_path, NUM_STEPS=2, WARMUP_STEPS=1, LEARNING_RATE=1e-9) == 0
    untrained, trained = (json.loads((x / "results.json").read_text()) for x in (tmp_path, trained))
    for text in ("greedy", "sampled"):
        name = f"validation_tokens_per_call_{text}"
        assert trained[name] > untrained[name] + 0.1
    assert trained["validation_acceptance"] > untrained["validation_acceptance"]


def test_each_prompt_gets_its_greedy_text_too(data, tmp_path):
    assert run(data, tmp_path, NUM_STEPS=2, WARMUP_STEPS=1, GREEDY_TEXTS=True) == 0
    written = []
    for file in sorted((tmp_path / "samples").glob("training-1-*")):
        stored = load_file(file)
        pairs = TokenPairs(stored["tokens"], stored["offsets"])
        written += [pairs[i][1].tolist() for i in range(len(pairs))]
    verifier = specjax.load_text_model(data / "pair" / "verifier")
    greedy = specjax.Decoder(
        verifier, max_new_tokens=8, batch_size=12, buckets=(64,), sampling=GREEDY
    )((data / "train.txt").read_text().splitlines())
    ends = [[] if row.eos_id is None else [row.eos_id] for row in greedy]
    assert written == [[*row.tokens, *end] for row, end in zip(greedy, ends, strict=True)]


DSPARK = {"MARKOV": "gated", "CONFIDENCE": True, "DrafterRecipe.markov_rank": 4}
KINDS = {
    "dflash": ("pair/verifier", {"KIND": "block", "LAYERS": 1}),
    "dspark": ("llama", {"KIND": "block", "LAYERS": 1, **DSPARK}),
    "domino": ("llama", {"KIND": "block", "MARKOV": "domino", "DrafterRecipe.markov_rank": 4}),
    "dflash2": ("llama", {"KIND": "block", "MARKOV": "selector", "DrafterRecipe.markov_rank": 4}),
    "peagle": ("llama", {"KIND": "peagle", "DRAFT_VOCAB": 20}),
    "mapped": ("llama", {"KIND": "eagle3", "DRAFT_VOCAB": 20, "DIVERGENCE": "lk_hybrid"}),
    "mtp": ("llama", {"KIND": "mtp", "DISTILLATION_WEIGHT": 0.5, "ANCHORS": 4}),
}


@pytest.mark.parametrize("name", variants(KINDS, "mapped"))
def test_kinds(data, tmp_path, name):
    verifier, bindings = KINDS[name]
    assert run(data, tmp_path, verifier, NUM_STEPS=10, **bindings) == 0
    options = {"tokenizer": "bytes"} if verifier == "llama" else {}
    check_drafts(data, tmp_path, data / verifier, **options)


@pytest.mark.exhaustive
def test_a_mesh_trains_the_same(data, trained, tmp_path):
    """The verifier is split over two devices, the rows over two."""
    assert run(data, tmp_path, MESH_DATA=2, MESH_MODEL=2) == 0
    both = (json.loads((x / "results.json").read_text()) for x in (trained, tmp_path))
    one, mesh = ({k: v for k, v in x.items() if k.startswith("validation")} for x in both)
    assert mesh == pytest.approx(one, rel=1e-2)


def test_a_stopped_run_continues_to_the_same_bits(data, trained, tmp_path, monkeypatch):
    """Stopped while the verifier writes, and while the head learns."""
    with interrupted(monkeypatch, Store, "put", 3):
        assert run(data, tmp_path) == 130
    assert len(list((tmp_path / "samples").iterdir())) == 2
    with interrupted(monkeypatch, CheckpointStore, "save"):
        assert run(data, tmp_path) == 130
    # Three shards of 60 prompts, and one of 12 at each temperature.
    assert len(list((tmp_path / "samples").iterdir())) == 5
    assert run(data, tmp_path) == 0
    assert outcome(tmp_path) == outcome(trained)


def test_a_verifier_that_writes_empty_texts_is_refused(data, tmp_path, capsys):
    model, params = llama(259, layers=1)
    params["decoder"]["decoder_norm"]["scale"] = np.ones(8, np.float32)
    kernel = np.zeros((8, 259), np.float32)
    params = jax.tree.map(np.asarray, params)
    hidden = 100.0 * np.sign(np.arange(8) - 3.5).astype(np.float32)
    params["token_embedder"]["embedding"] = np.tile(hidden, (259, 1))
    kernel[:, 1] = hidden
    params["decoder"]["logits_dense"]["kernel"] = kernel
    save_model(data / "mute", model, params, format="hf")
    assert run(data, tmp_path / "run", "mute", TOKENIZER="bytes") == 2
    assert "mute writes only empty texts for the training prompts" in capsys.readouterr().err


def test_another_configuration_in_the_same_directory_is_refused(data, trained, capsys):
    for name, value, message in (
        ("MAX_DRAFT", 2, "task.max_draft: 3 there, 2 here"),
        ("GREEDY_TEXTS", True, "training.greedy_texts: false there, true here"),
        ("TEMPERATURE", 0.5, "training.temperature: 1.0 there, 0.5 here"),
        ("TRAIN", "validation.txt", "training.prompts"),
    ):
        assert run(data, trained, **{name: value}) == 2
        error = capsys.readouterr().err
        assert message.lower() in error.lower() and error.count("\n") == 1
