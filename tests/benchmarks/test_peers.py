"""The comparison with other systems runs on any pair and names bad input; no time is asserted."""

import dataclasses
import io
import json
import sys

import ctranslate2
import numpy as np
import pytest
import sentencepiece
import torch
import transformers

from benchmarks import grown as _grown
from benchmarks import peers
from benchmarks.peers import main
from specjax.checkpoints import save_model
from specjax.models import CausalLM, LlamaConfig, Seq2SeqLM, T5Config
from specjax.tokenizers.load import keep_sentinels
from tests import tiny_pair
from tests.models.tiny import random_params

SIZES = {"embed_dim": 32, "num_heads": 2, "head_dim": 8, "mlp_dim": 32, "num_encoder_layers": 2}


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pair")
    named = tiny_pair.write_bench_inputs(directory)
    for name in tiny_pair.SIZES:
        keep_sentinels(directory / "models" / name, tiny_pair.VOCAB)  # as exported ones have it
    small = ["--drafts=2", "--max-new=6", "--repeats=1", "--pilot=1"]
    return [*named, *small]


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    """Two threads wait for each other on a busy machine, for seconds per token."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(peers, "_thread_counts", lambda: [1])
    yield
    torch.set_num_threads(threads)


@pytest.mark.exhaustive
@pytest.mark.parametrize("grown", [(), ("--grown",)])
def test_all_sides_emit_the_same_tokens(arguments, rows, monkeypatch, grown):
    """Both sides read the grown verifier, so equal outputs show that it was saved correctly."""
    monkeypatch.setattr(_grown, "T5_BASE", SIZES | {"num_decoder_layers": 3})
    assert main([*arguments, *grown]) == 0
    rows = rows()
    assert [(row["method"], row["peer"]) for row in rows] == [
        *(("plain", "transformers"), ("assisted", "transformers")),
        *(("plain", "CTranslate2"), ("assisted", "CTranslate2")),
    ]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["ours_tokens_per_s"] / row["theirs_tokens_per_s"])
        assert row["same_outputs"] == row["prompts"] == 4
        assert row["ours_as_plain"] == row["theirs_as_plain"] == 4
        assert row["ratio_low"] <= row["ratio_high"]
    for row in rows[:2]:
        assert row["theirs_setting"] in row["theirs_tried"]
    assert [row["ours_setting"] for row in rows] == ["-", "G=2", "-", "G=2"]
    # One run of each side stands in all of its lines.
    assert rows[2]["theirs_setting"] == rows[3]["theirs_setting"] == "1 thread"
    assert rows[2]["theirs_tokens_per_s"] == rows[3]["theirs_tokens_per_s"]
    assert rows[1]["ours_tokens_per_s"] == rows[3]["ours_tokens_per_s"]


def test_other_outputs_are_counted(arguments, rows, monkeypatch):
    """Changes the peer's last layer."""
    load = peers.load_model

    def spoilt(*args):
        model = load(*args)
        torch.nn.init.normal_(model.lm_head.weight, generator=torch.Generator().manual_seed(0))
        return model

    monkeypatch.setattr(peers, "load_model", spoilt)
    assert main(arguments) == 0
    plain, assisted, *others = rows()
    assert plain["same_outputs"] < 4 and assisted["same_outputs"] < 4
    assert [row["same_outputs"] for row in others] == [4, 4]
    assert plain["ours_as_plain"] == assisted["ours_as_plain"] == 4


def test_the_peer_uses_its_draft_settings(arguments, rows, monkeypatch):
    """It drafts with constant length G or its own defaults, greedily, with our length limit."""
    generate = transformers.T5ForConditionalGeneration.generate
    seen = set()

    def spy(self, *args, **options):
        if assistant := options.get("assistant_model"):
            given = assistant.generation_config
            seen.add((given.num_assistant_tokens, given.assistant_confidence_threshold))
            assert options["max_new_tokens"] == 6 and options["do_sample"] is False
        return generate(self, *args, **options)

    monkeypatch.setattr(transformers.T5ForConditionalGeneration, "generate", spy)
    assert main([*arguments, "--prompts=1", "--no-ctranslate2"]) == 0
    assert [row["peer"] for row in rows()] == ["transformers"] * 2
    assert seen == {(2, 0.0), (None, None)}


def test_turns_return_outputs_in_order_and_count_what_was_emitted(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    calls = {"a": lambda i: np.full(i, i), "b": lambda i: np.full(3, -i)}
    samples, outputs = peers._turns(calls, range(13), 2)
    assert [x.tolist() for x in outputs["a"]] == [[i] * i for i in range(13)]
    assert [int(x[0]) for x in outputs["b"]] == [-i for i in range(13)]
    assert samples == {"a": [45, 33, 45, 33], "b": [30, 9, 30, 9]}
    assert peers._medians(samples) == {"a": 39.0, "b": 19.5}


def test_ratios_are_those_of_turns():
    """The ratio of the sides' medians, 3 and 2, would be 1.5."""
    found = peers._ratios([2.0, 3.0, 8.0], [1.0, 3.0, 2.0])
    assert found == {"ratio": 2.0, "ratio_low": 1.5, "ratio_high": 3.0}


@pytest.mark.exhaustive
def test_all_end_of_sequence_tokens_become_the_first(tmp_path):
    """Every token ends a sequence, so both sides emit one token, and the same one."""
    paths = tiny_pair.write_pair(tmp_path / "models")
    keep_sentinels(paths["verifier"], tiny_pair.VOCAB)
    pair = peers.load_pair(**paths, dtype="float32")
    for model in (pair.verifier, pair.drafter):
        model.tokenizer.eos_ids = tuple(range(1, tiny_pair.VOCAB))
    ours = peers._ours(pair, [[5, 6, 1]], [2], 6)
    prompts = [[5, 6, 1]]
    theirs = peers.transformers_generations(torch, transformers, pair, prompts, [2], 6, [1])
    other = peers.ctranslate2_generations(ctranslate2, pair.verifier, prompts, 6, [1])
    calls = [*ours[0].values(), *ours[1].values(), *other.values()]
    calls += [*theirs[0].values(), *theirs[1].values()]
    assert [call(0).tolist() for call in calls] == [[1]] * len(calls)


@pytest.mark.parametrize(
    ("library", "remedy"),
    [("torch", "pip install transformers"), ("ctranslate2", "--no-ctranslate2")],
)
def test_without_a_library_the_error_says_so(arguments, capsys, monkeypatch, library, remedy):
    monkeypatch.setitem(sys.modules, library, None)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert f"{library} is not installed" in error and remedy in error and error.count("\n") == 1


def test_a_verifier_that_ctranslate2_cannot_convert_is_named(tmp_path, monkeypatch):
    def fail(self, output_dir):
        raise NotImplementedError("no such\nmodel")

    monkeypatch.setattr(ctranslate2.converters.TransformersConverter, "convert", fail)
    (tmp_path / "config.json").write_text("{}")
    model = dataclasses.replace(tiny_pair.tabular(1), name=str(tmp_path))
    with pytest.raises(
        ValueError, match=r"CTranslate2 cannot convert it \(NotImplementedError: no such model\)"
    ):
        peers.ctranslate2_generations(ctranslate2, model, [[1]], 6, [1])


def test_a_decoder_only_verifier_has_both_peers(tmp_path):
    sizes = {"embed_dim": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "mlp_dim": 24}
    model = CausalLM(LlamaConfig(vocab_size=tiny_pair.VOCAB, num_layers=1, **sizes))
    save_model(tmp_path, model, random_params(model, 0), format="hf")
    words = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(tiny_pair.sentences(200)),
        model_writer=words,
        vocab_size=tiny_pair.VOCAB,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(words.getvalue())
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = {**special, "tokenizer_class": "LlamaTokenizer", "add_bos_token": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    pair = peers.load_pair(drafter=tmp_path, verifier=tmp_path, dtype="float32")
    prompts = [[5, 6, 7], [8, 9]]
    plain, _ = peers.transformers_generations(torch, transformers, pair, prompts, [2], 6, [1])
    other = peers.ctranslate2_generations(ctranslate2, pair.verifier, prompts, 6, [1])
    for i in range(2):
        theirs = plain["1 thread"](i).tolist()
        assert other[1](i).tolist() == theirs and theirs


def test_only_hugging_face_directories_are_compared(arguments, capsys, tmp_path):
    model = Seq2SeqLM(T5Config(vocab_size=tiny_pair.VOCAB, num_decoder_layers=1, **SIZES))
    save_model(tmp_path / "orbax", model, random_params(model, 0))
    assert main([*arguments, f"--verifier={tmp_path / 'orbax'}"]) == 2
    assert "must be a Hugging Face directory, which transformers reads" in capsys.readouterr().err
