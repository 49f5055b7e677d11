"""The audit finds right verifiers exact, and tells each known bug from them."""

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import time

import numpy as np
import pytest
import transformers

from benchmarks import audited
from benchmarks.known_bugs import COUPLED, EQUIVALENT, RIGHT, WRONG
from specjax import rules
from specjax.cli.main import main
from specjax.testing import Verdict, audit
from specjax.testing.auditing.hard_cases import hard_cases
from specjax.testing.auditing.laws import Outcomes, half_width, joint_law, score

FEW = ("q zeros", "joint residual", "other rows", "L=0")  # they tell all bugs
EDGE = "<= in a test accepts impossible tokens at u = 0"
PADDING = "padding is read as drafted tokens"
token = RIGHT["Token"]


HOW_MANY = pytest.mark.parametrize(
    "cases", [FEW, pytest.param(None, marks=pytest.mark.exhaustive)], ids=["few", "all"]
)


def exact(function, cases=None, tolerance=1e-12, **options):
    found = audit(function, cases=cases, **options)
    assert found.verdict is Verdict.EXACT, found
    assert all((row.variation or 0.0) <= tolerance for row in found.rows), found
    return found


@HOW_MANY
@pytest.mark.parametrize("name", WRONG)
def test_each_known_bug_is_told(name, cases):
    verdicts = {EDGE: Verdict.EDGE, PADDING: Verdict.INVALID}
    verdicts |= dict.fromkeys(COUPLED, Verdict.COUPLED)
    found = audit(WRONG[name], cases=cases)
    assert found.verdict is verdicts.get(name, Verdict.BIASED), found


@HOW_MANY
@pytest.mark.parametrize("name", [*RIGHT, *EQUIVALENT])
def test_right_verifiers_in_float64_are_exact(name, cases):
    exact({**RIGHT, **EQUIVALENT}[name], cases)


@HOW_MANY
@pytest.mark.parametrize("name", ["token", "block", "walk", "top_down", "traversal"])
def test_our_verifiers_are_exact_in_their_own_code(name, cases):
    if cases:
        cases = ["random"] if name in ("top_down", "walk") else ["random", "joint residual"]
    exact(getattr(audited, f"specjax_{name}"), cases, tolerance=1e-6, time_limit=1200)


def test_one_round_of_greedy_block_is_biased_without_its_carry():
    # Over rounds, with the carry, its law is enumerated in tests/verification.
    found = audit(audited.specjax_greedy_block_one_round, cases=["joint residual"])
    assert found.verdict is Verdict.BIASED
    assert found.worst.first_wrong == 2


def test_a_declared_rule():
    declared = {"rule": rules.Lossy(0.3), "cases": ["random", "toy"]}
    assert audit(audited.lossy, **declared).verdict is Verdict.LOSSY
    assert audit(audited.lossy, cases=["toy"]).verdict is Verdict.BIASED
    assert audit(token, **declared).verdict is Verdict.BIASED


def test_transformers_is_exact_but_for_an_edge():
    pytest.importorskip("transformers")
    options = {"arrays": "torch", "cases": ["toy"]}
    found = audit(audited.transformers, **options)
    assert (found.verdict, found.rows[0].edge) == (Verdict.EXACT, 0), found
    assert audit(audited.transformers, **options | {"cases": ["T=0"]}).verdict is Verdict.EDGE
    weighted = functools.partial(audited.transformers, weight=0.7)
    assert audit(weighted, **options).verdict is Verdict.BIASED


def test_what_is_audited_beside_a_round():
    drafts = {"arrays": "torch", "cases": ["ties"], "drafts": "argmax"}
    assert audit(audited.transformers, **drafts).verdict is Verdict.BIASED
    assert audit(audited.tpu_inference, cases=["toy"], drafts="certain").verdict is Verdict.EXACT
    edge = audit(audited.tpu_inference, cases=["p zeros"], drafts="certain")
    assert edge.verdict is Verdict.EDGE
    both = audited._two_laws()
    assert (both["verdict"], both["largest_tv"]) == ("TWO LAWS", 0.087)
    logits = np.random.default_rng(0).normal(size=(50, 8))
    given = audited._filter_law(logits, 1.0, 0.7, first=True)
    np.testing.assert_array_equal(given, audited._filter_law(logits, 1.0, 0.7, first=False))
    found = audited._assistant_after_a_rejection()["verdict"]
    newer = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24)
    assert found == ("STALE ROW" if newer else "NOT BUILT")


def emitted(tokens, draft_logits, target_logits, uniforms, uniform_next, lengths):
    """Token, with logits in and tokens out."""
    given = np.exp(draft_logits), np.exp(target_logits), uniforms, uniform_next, lengths
    return np.array(emitted_rows(token(tokens, *given), tokens))


def emitted_rows(found, tokens):
    n, y = found
    at = np.arange(tokens.shape[1] + 1)
    padded = np.pad(tokens, ((0, 0), (0, 1)))
    rows = np.where(at < n[:, None], padded, np.where(at == n[:, None], y[:, None], -1))
    return rows.tolist()


def torch_verifier(tokens, draft_probs, target_probs, uniforms, uniform_next, lengths):
    assert tokens.dtype.is_floating_point is False
    given = (draft_probs, target_probs, uniforms, uniform_next, lengths)
    return tuple(map(tokens.new_tensor, token(tokens.numpy(), *(x.numpy() for x in given))))


def test_forms_of_the_call():
    exact(audited.vllm_standard, ["toy"])
    exact(emitted, ["toy", "L=1"])
    pytest.importorskip("torch")
    assert "torch float64" in exact(torch_verifier, ["toy"], arrays="torch").how


def single(tokens, draft_probs, target_probs, uniforms, uniform_next, lengths):
    narrow = (x.astype(np.float32) for x in (draft_probs, target_probs, uniforms, uniform_next))
    return token(tokens, *narrow, lengths)


def test_a_verifier_in_float32_is_judged_in_float32():
    found = audit(single, cases=["random"])
    assert found.verdict is Verdict.EXACT and 1e-12 < found.rows[0].variation < 1e-6, found


def drawn(tokens, draft_probs, target_probs, generator, lengths, verifier=token):
    uniforms, last = generator.random(tokens.shape), generator.random(len(tokens))
    return verifier(tokens, draft_probs, target_probs, uniforms, last, lengths)


def test_a_black_box():
    options = {"cases": ["joint residual"], "mode": "black-box", "samples": 20_000}
    found = audit(drawn, **options)
    assert found.verdict is Verdict.NO_BIAS_FOUND, found
    wrong = functools.partial(drawn, verifier=WRONG["the residual is p"])
    found = audit(wrong, **options)
    assert found.verdict is Verdict.BIASED, found


def raises(*_):
    raise KeyError("no such thing")


def muted(answer):
    """A function that raises an error whose message cannot be had."""

    class MuteError(Exception):
        def __str__(self):
            return answer()

    def raises_mute(*_):
        raise MuteError

    return raises_mute


def exits(*_):
    return Exits()


class Exits:
    def __array__(self, *_, **__):
        sys.exit("no array")


def not_a_number(tokens, draft_probs, *_):
    return np.full(len(tokens), np.nan), np.zeros(len(tokens))


def too_few(tokens, draft_probs, *_):
    return np.zeros(len(tokens) + 1, int), np.zeros(len(tokens), int)


def draws(tokens, draft_probs, target_probs, uniforms, uniform_next, lengths):
    uniforms = np.random.default_rng().random(uniforms.shape)
    return token(tokens, draft_probs, target_probs, uniforms, uniform_next, lengths)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (raises, "it raised KeyError: 'no such thing' (test_auditing.py:"),
        (muted(lambda: 1 / 0), "it raised MuteError (test_auditing.py:"),
        (muted(lambda: 5), "it raised MuteError (test_auditing.py:"),
        (muted(sys.exit), "it raised MuteError (test_auditing.py:"),
        (muted(lambda: "two\nlines"), "it raised MuteError: two lines (test_auditing.py:"),
        (exits, "its result cannot be read as an array: SystemExit: no array (test_auditing.py:"),
        (not_a_number, "NaN, out of range"),
        (too_few, "its accepted must have shape [B]"),
        (lambda tokens, draft_probs, *_: tokens, "G + 1 = 3, got an array of shape"),
        (lambda *_: (1, 2, 3), "it must return (accepted, next), got a tuple of 3"),
        (lambda *_: "accepted", "it must return (accepted [B], next [B])"),
        (draws, "draws numbers of its own"),
    ],
)
def test_bad_functions_are_invalid(function, words):
    found = audit(function, cases=["random"], mode="injected")
    assert found.verdict is Verdict.INVALID and words in found.reason, found
    assert "\n" not in found.reason
    json.dumps(found.to_dict(), allow_nan=False)


def test_a_slow_function_is_not_finished():
    def slow(tokens, draft_probs, target_probs, uniforms, uniform_next, lengths):
        time.sleep(0.05)
        return token(tokens, draft_probs, target_probs, uniforms, uniform_next, lengths)

    found = audit(slow, cases=["toy", "random"], time_limit=1.0)
    assert found.verdict is Verdict.NOT_FINISHED and "of 2 cases in the time limit" in found.reason


def first_length(tokens, draft_probs, target_probs, uniforms, uniform_next, lengths):
    lengths = np.full_like(lengths, lengths[0])
    return token(tokens, draft_probs, target_probs, uniforms, uniform_next, lengths)


def last_at_the_end(tokens, draft_probs, target_probs, uniforms, uniform_next, lengths):
    n, y = token(tokens, draft_probs, target_probs, uniforms, uniform_next, lengths)
    return n, np.where(uniform_next == 1 - 2**-24, target_probs.shape[-1] - 1, y)


def small_epsilon(tokens, draft_probs, target_probs, uniforms, uniform_next, lengths):
    given = draft_probs, target_probs + 1e-6, uniforms, uniform_next, lengths
    return token(tokens, *given)


def tail_cut(tokens, draft_probs, target_probs, uniforms, uniform_next, lengths):
    """Top-k of p alone."""
    least = np.sort(target_probs)[..., -min(60, target_probs.shape[-1]), None]
    cut = np.where(target_probs >= least, target_probs, 0.0)
    return token(tokens, draft_probs, cut, uniforms, uniform_next, lengths)


def rarely_other(tokens, draft_probs, target_probs, uniforms, uniform_next, lengths):
    n, y = token(tokens, draft_probs, target_probs, uniforms, uniform_next, lengths)
    return n, np.where(np.random.default_rng().random(len(y)) < 0.1, 0, y)


def with_options(
    tokens, draft_probs, target_probs, uniforms, uniform_next, lengths, p=1.0, **options
):
    given = draft_probs, target_probs, uniforms, uniform_next, lengths
    return emitted_rows(token(tokens, *given), tokens)


def leaves(*_):
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("function", "cases", "options", "verdict", "words"),
    [
        (first_length, ["L=1"], {}, Verdict.COUPLED, "in 'L=1 in G=3'"),
        (audited.vllm_standard, ["L="], {}, Verdict.EXACT, "all 3 cases"),
        (last_at_the_end, ["p zeros"], {}, Verdict.EDGE, "or 1 - 2^-24"),
        (small_epsilon, ["large"], {}, Verdict.BIASED, "emits impossible tokens"),
        (leaves, ["toy"], {}, Verdict.INVALID, "it raised SystemExit: 3"),
        (token, ["toy", "ties"], {"drafts": "certain"}, Verdict.EXACT, "all 2 cases"),
        (token, ["ties"], {"drafts": "argmax"}, Verdict.BIASED, "TV 0.2,"),
        (
            drawn,
            ["toy"],
            {"mode": "black-box", "samples": 50},
            Verdict.NOT_FINISHED,
            "give more samples",
        ),
        (token, ["large"], {}, Verdict.NOT_FINISHED, "no law was computed"),
        (with_options, ["L=1"], {}, Verdict.EXACT, "all 1 cases"),
        (tail_cut, ["many"], {}, Verdict.BIASED, "worst case 'many tokens'"),
        (rarely_other, ["other rows"], {}, Verdict.INVALID, "draws numbers of its own"),
    ],
)
def test_verdicts(function, cases, options, verdict, words):
    found = audit(function, cases=cases, **options)
    assert found.verdict is verdict and words in found.reason, found


def test_the_scores_of_a_biased_case():
    # Rejected tokens are drawn from p: the first token's law is (5, 4) / 9 for (6, 3) / 9.
    (row,) = audit(WRONG["the residual is p"], cases=["toy"]).rows
    assert row.first_wrong == 1 and row.variation >= 1 / 9 - 1e-12
    # With one drafted token and p after it, that is all.
    case = next(x for x in hard_cases() if x.name == "toy")
    short = dataclasses.replace(case, draft=case.draft[:1], target=case.target[:2], max_draft=1)
    drafts, n, y = np.array([[0], [1], [1], [1]]), [1, 1, 0, 0], [0, 0, 0, 1]
    chances = np.array([1 / 3, 1 / 3, 2 / 9, 1 / 9])
    # Accepted tokens are followed by 0 or 1 in p's proportion.
    outcomes = Outcomes(
        np.concatenate([drafts, drafts[:2]]),
        np.array([*n, 1, 1]),
        np.array([*y, 1, 1]),
        np.concatenate([chances * [2 / 3, 2 / 3, 1, 1], chances[:2] / 3]),
    )
    scores = score(short, short.target, outcomes, 1e-9)
    assert scores.variation == pytest.approx(1 / 9) and scores.first_wrong == 1
    assert scores.accepted == pytest.approx(2 / 3)


def sampled(case, law, count, seed):
    """Texts drawn from a law of L + 1 tokens, as outcomes that accept all drafted tokens."""
    rng = np.random.default_rng(seed)
    texts = rng.choice(law.size, size=count, p=law.reshape(-1) / law.sum())
    tokens = np.stack(np.unravel_index(texts, law.shape), axis=1)
    return Outcomes(
        tokens[:, :-1], np.full(count, case.length), tokens[:, -1], np.full(count, 1 / count)
    )


def test_intervals_of_samples():
    case = next(x for x in hard_cases() if x.name == "joint residual")
    null = joint_law(case.target)
    half = half_width(case.target, 2000, 0.01)
    assert half < 0.12
    for law in (null, np.roll(null, 1, axis=1)):
        distance = 0.5 * np.abs(law - null).sum()
        for seed in range(50):
            row = score(case, case.target, sampled(case, law, 2000, seed), 0.1)
            assert abs(row.variation - distance) < half


@pytest.mark.parametrize(
    ("function", "options", "words"),
    [
        (Verdict, {}, "function or an instance, got <enum 'Verdict'>"),
        (lambda a, b: None, {}, "takes (a, b), but a verifier takes"),
        (token, {"mode": "guess"}, "mode must be one of 'injected', 'black-box'"),
        (token, {"cases": ["no"]}, "there is no case 'no': choose from 'random'"),
        (token, {"cases": "toy"}, "cases must be a list"),
        (token, {"cases": []}, "cases must be a list"),
        (token, {"rule": 3}, "rule must be like"),
        (token, {"rule": rules.Budgeted(rules.OPT(0.5), 1.0)}, "rule must not have a carry"),
        (token, {"samples": 0}, "samples must be a whole number"),
        (token, {"time_limit": 0}, "time_limit"),
        (token, {"arrays": "cupy"}, "arrays must be one of 'numpy', 'torch', 'jax'"),
    ],
)
def test_wrong_functions_and_options_are_refused(function, options, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        audit(function, **options)


MINE = """
import os
import sys
import numpy as np

def right(tokens, draft_probs, target_probs, uniforms, uniform_next, lengths):
    x, q, p = tokens[:, 0], draft_probs[:, 0], target_probs
    rows = np.arange(len(x))
    n = ((uniforms[:, 0] * q[rows, x] < p[rows, 0, x]) & (lengths > 0)).astype(int)
    left = np.where((n < lengths)[:, None], np.maximum(p[:, 0] - q, 0), p[rows, n])
    sums = np.cumsum(left, axis=1)
    return n, (sums <= uniform_next[:, None] * sums[:, -1:]).sum(axis=1)

def crash(tokens, draft_probs, target_probs, uniforms, uniform_next, lengths):
    os.abort()

def hang(tokens, draft_probs, target_probs, uniforms, uniform_next, lengths):
    while True:
        pass
"""


def test_a_module_whose_error_has_no_message_is_told(tmp_path, capfd):
    file = tmp_path / "mute.py"
    file.write_text("class Mute(Exception):\n    def __str__(self):\n        1 / 0\nraise Mute")
    assert main(["audit", f"{file}:f"]) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and "mute.py cannot be imported (Mute: )" in error


def test_the_command(tmp_path, capfd, monkeypatch):
    file, out = tmp_path / "mine.py", tmp_path / "report.json"
    file.write_text(MINE)
    assert main(["audit", f"{file}:right", "--cases", "L=1", "L=0", "--json", str(out)]) == 0
    assert "EXACT: all 2 cases" in capfd.readouterr().out
    assert json.loads(out.read_text())["verdict"] == "EXACT"
    assert main(["audit", f"{file}:crash"]) == Verdict.INVALID.status
    assert "the process ended with signal SIGABRT" in capfd.readouterr().out
    monkeypatch.setattr("specjax.cli.audit._GRACE", 1.0)
    assert main(["audit", f"{file}:hang", "--time-limit", "1"]) == Verdict.INVALID.status
    assert "it had no answer after" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["mine"], "'mine' is not MODULE:FUNCTION"),
        (["mine:f", "--rule", "Lossy(3)"], "strength must lie in [0, 1), got 3"),
        (["mine:f", "--time-limit", "0"], "--time-limit"),
        (["mine:f", "--json", f"no{os.sep}such.json"], "cannot be written: give a file"),
        (["mine:f", "--json", os.sep], "cannot be written: give a file"),
        (["mine:f", "--seed", "-1"], "--seed must be a whole number of at least 0, got -1"),
        (["README.md:f"], "README.md must be a module or a file whose name ends in .py"),
        (["mine:f", "--rule", "rules.Lossy(0.3)"], "write its name without dots"),
        (["no_such_module:f"], "no_such_module cannot be imported (ModuleNotFoundError"),
    ],
)
def test_bad_words_end_the_command_with_one_line(words, told, capfd):
    assert main(["audit", *words]) == 2
    error = capfd.readouterr().err.strip()
    assert told in error and "Traceback" not in error, error


def test_an_audit_imports_few_libraries():
    code = """
import sys
import numpy as np
from specjax.testing import audit

def verify(tokens, draft_probs, target_probs, generator, lengths):
    return np.zeros(len(tokens), int), np.zeros(len(tokens), int)

assert audit(verify, samples=100, cases=["toy"]).verdict.text == "BIASED"
heavy = {"flax", "orbax", "tensorstore", "torch", "transformers"}
print(sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
