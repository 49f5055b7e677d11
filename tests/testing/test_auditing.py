"""The audit finds right verifiers exact, and tells each known bug from them."""

import functools
import json
import os
import threading
import time

import numpy as np
import pytest

from benchmarks import audited
from specjax import rules
from specjax.cli.main import main
from specjax.testing import Verdict, audit
from specjax.testing.auditing import hard_cases
from specjax.testing.auditing.injected import is_single
from specjax.testing.auditing.reference_verifiers import COUPLED, EQUIVALENT, RIGHT, WRONG

FEW = ("q zeros", "joint residual", "other rows", "L=0")  # they tell all bugs
EDGE = "<= in a test accepts impossible tokens at u = 0"
PADDING = "padding is read as drafted tokens"
token = RIGHT["Token"]


def told(name, cases):
    """A bug's report has its own verdict and its own name."""
    found = audit(WRONG[name], cases=cases)
    if name == EDGE:
        assert found.verdict is Verdict.EDGE, found
        return
    if name == PADDING:
        assert found.verdict is Verdict.INVALID, found
        return
    assert found.verdict is (Verdict.COUPLED if name in COUPLED else Verdict.BIASED), found
    assert found.nearest is not None and found.nearest[0] == name, found


def exact(function, cases=None, tolerance=1e-12, **options):
    found = audit(function, cases=cases, **options)
    assert found.verdict is Verdict.EXACT, found
    assert all((row.variation or 0.0) <= tolerance for row in found.rows), found
    return found


@pytest.mark.parametrize("name", WRONG)
def test_each_known_bug_is_told_by_name(name):
    told(name, FEW)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", WRONG)
def test_each_known_bug_is_told_in_all_cases(name):
    told(name, None)


def test_there_are_24_bugs_and_19_cases_of_distributions():
    assert len(WRONG) == 24
    assert len(hard_cases()) == 19 + 2


@pytest.mark.parametrize("name", [*RIGHT, *EQUIVALENT])
def test_right_verifiers_in_float64_are_exact(name):
    found = exact({**RIGHT, **EQUIVALENT}[name], FEW)
    for row in found.rows:  # what they accept is what theory says
        best = row.block if name == "Block" else row.token
        assert row.accepted == pytest.approx(best, abs=1e-12)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [*RIGHT, *EQUIVALENT])
def test_right_verifiers_are_exact_in_all_cases(name):
    exact({**RIGHT, **EQUIVALENT}[name])


@pytest.mark.parametrize("name", ["token", "block", "walk", "top_down", "traversal"])
def test_our_verifiers_are_exact_in_their_own_code(name):
    cases = ["random"] if name in ("top_down", "walk") else ["random", "joint residual"]
    exact(getattr(audited, f"specjax_{name}"), cases, tolerance=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["token", "block", "walk", "top_down", "traversal"])
def test_our_verifiers_are_exact_in_all_cases(name):
    exact(getattr(audited, f"specjax_{name}"), tolerance=1e-6, time_limit=1200)


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
    found = audit(audited.transformers, cases=["toy"])
    assert (found.verdict, found.rows[0].edge) == (Verdict.EXACT, 0), found
    assert audit(audited.transformers, cases=["T=0"]).verdict is Verdict.EDGE
    weighted = functools.partial(audited.transformers, weight=0.7)
    assert audit(weighted, cases=["toy"]).verdict is Verdict.BIASED


def emitted(tokens, draft_logits, target_logits, uniforms, uniform_next, lengths):
    """Token, with logits in and tokens out."""
    n, y = token(
        tokens, np.exp(draft_logits), np.exp(target_logits), uniforms, uniform_next, lengths
    )
    at = np.arange(tokens.shape[1] + 1)
    padded = np.pad(tokens, ((0, 0), (0, 1)))
    return np.where(at < n[:, None], padded, np.where(at == n[:, None], y[:, None], -1))


def logarithms(tokens, draft_probs, target_probs, uniforms, uniform_next, lengths):
    return emitted(tokens, draft_probs, target_probs, uniforms, uniform_next, lengths)


def torch_verifier(tokens, draft_probs, target_probs, uniforms, uniform_next, lengths):
    assert tokens.dtype.is_floating_point is False
    given = (draft_probs, target_probs, uniforms, uniform_next, lengths)
    return tuple(map(tokens.new_tensor, token(tokens.numpy(), *(x.numpy() for x in given))))


def test_forms_of_the_call():
    exact(audited.vllm_standard, ["toy"])
    exact(emitted, ["toy", "L=1"])
    exact(logarithms, ["toy"], logits=True)
    pytest.importorskip("torch")
    assert "torch float64" in exact(torch_verifier, ["toy"], arrays="torch").how


def single(tokens, draft_probs, target_probs, uniforms, uniform_next, lengths):
    narrow = (x.astype(np.float32) for x in (draft_probs, target_probs, uniforms, uniform_next))
    return token(tokens, *narrow, lengths)


def test_a_verifier_in_float32_is_judged_in_float32():
    found = audit(single, cases=["random"])
    assert found.verdict is Verdict.EXACT and 1e-12 < found.rows[0].variation < 1e-6, found
    assert found.tolerance == 1e-6
    halfway = float(np.float32(0.3)) + 2.0**-26
    assert is_single(np.array([halfway]), 2.0**-44)
    assert not is_single(np.array([0.3, halfway]), 2.0**-44)


def drawn(tokens, draft_probs, target_probs, generator, lengths, verifier=token):
    uniforms, last = generator.random(tokens.shape), generator.random(len(tokens))
    return verifier(tokens, draft_probs, target_probs, uniforms, last, lengths)


def chosen(tokens, draft_probs, target_probs, lengths):
    """Token on one row, by NumPy's global generators."""
    x, q, p, n = tokens[0], draft_probs[0], target_probs[0], 0
    while n < lengths[0] and np.random.rand() < p[n, x[n]] / q[n, x[n]]:  # noqa: NPY002
        n += 1
    weights = p[n] if n == lengths[0] else np.maximum(p[n] - q[n], 0.0)
    following = np.random.choice(len(weights), p=weights / weights.sum())  # noqa: NPY002
    return np.array([n]), np.array([following])


def test_hooks():
    exact(drawn, ["toy"], mode="hooked")
    exact(chosen, ["toy"], mode="hooked")
    wrong = functools.partial(drawn, verifier=WRONG["the residual is p"])
    assert audit(wrong, cases=["joint residual"], mode="hooked").verdict is Verdict.BIASED


def test_races_of_exponential_noise():
    torch = pytest.importorskip("torch")

    def raced(tokens, draft_probs, target_probs, lengths):
        given = (draft_probs, target_probs)
        n, _ = token(tokens.numpy(), *(x.numpy() for x in given), *halves, lengths.numpy())
        weights = target_probs[0, n[0]]
        return n, (weights / torch.empty_like(weights).exponential_()).argmax()[None]

    halves = np.full((1, 2), 0.0), np.full(1, 0.5)
    # With u = 0 all drafts are accepted, so the target's own draw is all that is left.
    found = audit(raced, cases=["q = p"], mode="hooked", arrays="torch")
    assert found.verdict is Verdict.EXACT, found


def test_a_black_box():
    options = {"cases": ["joint residual"], "mode": "black-box", "samples": 20_000}
    found = audit(drawn, **options)
    assert found.verdict is Verdict.NO_BIAS_FOUND, found
    wrong = functools.partial(drawn, verifier=WRONG["the residual is p"])
    found = audit(wrong, **options)
    assert found.verdict is Verdict.BIASED and found.nearest[0] == "the residual is p", found
    assert found.rows[0].evidence > 6


def raises(*_):
    raise KeyError("no such thing")


def not_a_number(tokens, draft_probs, *_):
    return np.full(len(tokens), np.nan), np.zeros(len(tokens))


def too_few(tokens, draft_probs, *_):
    return np.zeros(len(tokens) + 1, int), np.zeros(len(tokens), int)


def a_word(*_):
    return "accepted"


def draws(tokens, draft_probs, target_probs, uniforms, uniform_next, lengths):
    uniforms = np.random.default_rng().random(uniforms.shape)
    return token(tokens, draft_probs, target_probs, uniforms, uniform_next, lengths)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (raises, "it raised KeyError: 'no such thing'"),
        (not_a_number, "NaN, out of range"),
        (too_few, "its accepted must have shape [B]"),
        (a_word, "it must return (accepted [B], next [B])"),
        (draws, "draws numbers of its own"),
    ],
)
def test_bad_functions_are_invalid(function, words):
    found = audit(function, cases=["random"], mode="injected")
    assert found.verdict is Verdict.INVALID and words in found.reason, found
    json.dumps(found.to_dict(), allow_nan=False)


def test_a_function_that_hangs_is_invalid_and_a_slow_one_is_not_finished():
    release = threading.Event()

    def hangs(tokens, draft_probs, target_probs, uniforms, uniform_next, lengths):
        release.wait(60)

    def slow(tokens, draft_probs, target_probs, uniforms, uniform_next, lengths):
        time.sleep(0.3)
        return token(tokens, draft_probs, target_probs, uniforms, uniform_next, lengths)

    started = time.monotonic()
    assert "no answer" in audit(hangs, time_limit=1.0).reason
    release.set()
    assert audit(slow, time_limit=5.0).verdict is Verdict.NOT_FINISHED
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"mode": "guess"}, ValueError, "mode must be one of 'injected', 'hooked', 'black-box'"),
        ({"cases": ["no"]}, ValueError, "there is no case 'no': choose from 'random'"),
        ({"cases": "toy"}, TypeError, "cases must be a list"),
        ({"rule": 3}, TypeError, "rule must be like"),
        ({"rule": rules.Budgeted(rules.OPT(0.5), 1.0)}, ValueError, "rule must not be Budgeted"),
        ({"samples": 0}, ValueError, "samples must be a whole number"),
        ({"time_limit": 0}, ValueError, "time_limit"),
    ],
)
def test_wrong_options_are_refused(options, error, words):
    with pytest.raises(error) as caught:
        audit(token, **options)
    assert words in str(caught.value)


def test_other_parameters_are_refused():
    with pytest.raises(ValueError, match="takes \\(a, b\\), but a verifier takes"):
        audit(lambda a, b: None)


MINE = """
import os
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
"""


def test_the_command(tmp_path, capfd):
    file, out = tmp_path / "mine.py", tmp_path / "report.json"
    file.write_text(MINE)
    assert main(["audit", f"{file}:right", "--cases", "L=1", "L=0", "--json", str(out)]) == 0
    assert "EXACT: all 2 cases" in capfd.readouterr().out
    assert json.loads(out.read_text())["verdict"] == "EXACT"
    assert main(["audit", f"{file}:crash"]) == Verdict.INVALID.status
    assert "the process ended with status" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["mine"], "'mine' is not MODULE:FUNCTION"),
        (["mine:f", "--rule", "Lossy(3)"], "strength must lie in [0, 1), got 3"),
        (["mine:f", "--time-limit", "0"], "--time-limit"),
        (["mine:f", "--json", f"no{os.sep}such.json"], "there is no directory"),
        (["no_such_module:f"], "no_such_module cannot be imported (ModuleNotFoundError"),
    ],
)
def test_bad_words_end_the_command_with_one_line(words, told, capfd):
    assert main(["audit", *words]) == 2
    error = capfd.readouterr().err.strip()
    assert told in error and "Traceback" not in error, error
