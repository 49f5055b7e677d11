"""`specjax demo code` shows drafted answers, and runs their tests."""

import dataclasses
import re

import jax
import pytest

import specjax
from specjax.cli import demo_code
from specjax.cli.main import main
from specjax.evaluation.sandbox import Sandbox
from tests import tiny_pair

SOLUTIONS = [
    "```python\nimport itertools\n\ndef run_lengths(text):\n"
    "    return [(x, len(list(run))) for x, run in itertools.groupby(text)]\n```",
    "def merge(intervals):\n    out = []\n    for begin, end in sorted(intervals):\n"
    "        if out and begin <= out[-1][1]:\n"
    "            out[-1] = (out[-1][0], max(end, out[-1][1]))\n"
    "        else:\n            out.append((begin, end))\n    return out\n",
    "def to_roman(number):\n    text = ''\n"
    "    for value, name in zip((1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1),\n"
    "                           'M CM D CD C XC L XL X IX V IV I'.split()):\n"
    "        text, number = text + number // value * name, number % value\n    return text\n",
    demo_code._LEDGER.replace(
        "        self.entries.append((account, -amount))",
        "        if self.balance(account) < amount:\n            raise ValueError\n"
        "        self.entries.append((account, -amount))",
    ),
]


@pytest.fixture
def uncontained(monkeypatch):
    """Runs the programs without bwrap: they are ours."""
    monkeypatch.setattr(demo_code, "missing", lambda: None)
    monkeypatch.setattr(demo_code, "Sandbox", lambda: Sandbox(uncontained=True))


def test_right_answers_pass_and_wrong_ones_do_not(uncontained):
    wrong = [demo_code._LEDGER, *SOLUTIONS[:3]]
    told = demo_code.test_counts({"alone": SOLUTIONS, "with drafts": wrong})
    assert told == "Answers that pass their tests: 4 of 4 alone, 0 of 4 with drafts."


def test_without_the_sandbox_the_tests_do_not_run(monkeypatch):
    monkeypatch.setattr(demo_code, "missing", lambda: "bwrap is not installed")
    assert demo_code.test_counts({"alone": SOLUTIONS}).startswith(
        "The tests did not run (bwrap is not installed)"
    )


@pytest.mark.parametrize("drafter", [[], ["--drafter=y", "--weights=floats"]])
def test_answers_are_shown_and_a_verdict_ends_them(monkeypatch, capsys, uncontained, drafter):
    verifier = tiny_pair.chat_model()
    others = jax.tree.map(lambda x: 1.1 * x, verifier.params)
    both = {"verifier": verifier, "drafter": dataclasses.replace(verifier, params=others)}
    asked = {}

    def load(*, weights, dtype, **paths):
        asked.update(paths, weights=weights)
        return specjax.Pair(**{name: both[name] for name in paths})

    monkeypatch.setattr(demo_code, "load_pair", load)
    assert main(["demo", "code", "--verifier=x", "--max-new-tokens=6", *drafter]) == 0
    assert asked == {
        "verifier": "x", "weights": "int8", **({"drafter": "y", "weights": None} if drafter else {})
    }  # fmt: skip
    shown = capsys.readouterr().out
    for exercise in demo_code.EXERCISES:
        _, _, rest = shown.partition(f"> {exercise.request}\n\n0: ")
        assert re.search(r"^source of 6 tokens: ", rest, re.MULTILINE)
    assert "The texts are equal." in shown
    *_, tests, verdict = shown.splitlines()
    assert tests == "Answers that pass their tests: 0 of 4 alone, 0 of 4 with drafts."
    assert "at no loss" in verdict or "does not pay" in verdict
