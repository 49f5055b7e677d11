"""Each processor's logits equal those of transformers' processor, after the same tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import processing, processors
from specjax.types import PromptBatch, Sampling
from tests.decoding.helpers import bound_to
from tests.models.tiny import quick_jit

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
V, ROWS, PROMPT, OUTPUT = 23, 12, 9, 7
LENGTHS = np.array([1, 2, 3, 9, 9, 5, 4, 7, 6, 1, 8, 2], np.int32)


def peer(name, *args, **named):
    """A peer of a row; an argument may be a function of the length of its prompt."""
    kinds = [f"{name}{kind}" for kind in ("LogitsProcessor", "LogitsWarper")]
    kind = next(getattr(transformers, each) for each in kinds if hasattr(transformers, each))

    def call(length, ids, scores):
        first = [x(length) if callable(x) else x for x in args]
        return kind(*first, **{k: v(length) for k, v in named.items()})(ids, scores)

    return call


def over_output(call):
    """A peer that sees only the output."""
    return lambda length, ids, scores: call(0, ids[:, length:], scores)


def over_prompt(call):
    return lambda length, ids, scores: call(0, ids[:, :length], scores)


CASES = {
    "bias": (
        processors.LogitBias({3: 2.5, 0: -1.0, 22: 4.0}),
        peer("SequenceBias", [[[3], 2.5], [[0], -1.0], [[22], 4.0]]),
    ),
    "repetition": (processors.RepetitionPenalty(1.7), peer("RepetitionPenalty", 1.7)),
    "repetition, output": (
        processors.RepetitionPenalty(1.7, over="output"),
        peer("RepetitionPenalty", 1.7, prompt_ignore_length=lambda length: length),
    ),
    "repetition, prompt": (
        processors.RepetitionPenalty(1.7, over="prompt"),
        over_prompt(peer("RepetitionPenalty", 1.7)),
    ),
    **{f"n-gram {n}": (processors.NoRepeatNgram(n), peer("NoRepeatNGram", n)) for n in (1, 2, 3)},
    "n-gram, output": (
        processors.NoRepeatNgram(2, over="output"),
        over_output(peer("NoRepeatNGram", 2)),
    ),
    "least": (
        processors.MinNewTokens(3, eos_ids=(1, 4)),
        peer("MinNewTokensLength", lambda length: length, 3, [1, 4]),
    ),
    "first": (
        processors.ForcedTokens({0: 5}),
        over_output(
            lambda length, ids, scores: peer("ForcedBOSToken", 5)(
                0, torch.zeros((1, ids.shape[1] + 1), dtype=torch.int64), scores
            )
        ),
    ),
    "suppressed": (processors.SuppressTokens((2, 8)), peer("SuppressTokens", [2, 8])),
    "suppressed first": (
        processors.SuppressTokens((2, 8), first=1),
        over_output(peer("SuppressTokensAtBegin", [2, 8], 0)),
    ),
    "min-p": (processors.MinP(0.3), peer("MinP", 0.3)),
    "typical": (processors.TypicalP(0.6), peer("Typical", 0.6)),
    "epsilon": (processors.EpsilonCutoff(0.07), peer("Epsilon", 0.07)),
    "eta": (processors.EtaCutoff(0.2), peer("Eta", 0.2)),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers(name):
    (given, other) = CASES[name]
    (processor,), (shared,) = bound_to(V, given)
    rng = np.random.default_rng(len(name))
    # Few kinds of tokens, so that they repeat.
    prompts = rng.integers(0, 6, (ROWS, PROMPT)).astype(np.int32)
    outputs = rng.integers(0, 6, (ROWS, OUTPUT)).astype(np.int32)
    batch = PromptBatch(jnp.asarray(prompts), jnp.asarray(LENGTHS), ids=None, limits=None)
    state = processor.init(shared, batch, V, OUTPUT + 1)
    step = quick_jit(lambda state, x: processor.process(shared, state, x))
    changed = 0
    for emitted in range(OUTPUT + 1):
        logits = (3.0 * rng.standard_normal((ROWS, V))).astype(np.float32)
        logits[:, 11] = -np.inf  # what another processor forbids stays so
        ours = np.asarray(step(state, jnp.asarray(logits)))
        for row in range(ROWS):
            ids = [*prompts[row, : LENGTHS[row]], *outputs[row, :emitted]]
            given = torch.tensor(np.array([ids], np.int64)), torch.tensor(logits[row : row + 1])
            theirs = other(int(LENGTHS[row]), *given)[0].numpy()
            np.testing.assert_allclose(ours[row], theirs, rtol=1e-6, err_msg=f"row {row}")
        changed += (ours != logits).sum()
        if emitted < OUTPUT:
            state = processor.advance(shared, state, jnp.asarray(outputs[:, emitted]))
    assert changed > ROWS / 2


def test_all_together_run_in_the_order_of_transformers():
    """With temperature, top-k and top-p between them, given in another order."""
    given = {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "min_new_tokens": 3}
    given |= {"suppress_tokens": [2], "begin_suppress_tokens": [5], "sequence_bias": [[[3], 2.5]]}
    given |= {"temperature": 0.7, "top_k": 12, "top_p": 0.9, "min_p": 0.03, "typical_p": 0.8}
    given |= {"epsilon_cutoff": 0.04, "eta_cutoff": 0.3, "eos_token_id": [1, 4], "do_sample": True}
    config = transformers.GenerationConfig(**given)
    config._eos_token_tensor = torch.tensor([1, 4])

    class Model(transformers.GenerationMixin):
        config = transformers.PretrainedConfig()

    def peers(length):
        return Model()._get_logits_processor(config, length, None, None, [], "cpu", {})

    ours = [
        *(processors.EtaCutoff(0.3), processors.EpsilonCutoff(0.04), processors.TypicalP(0.8)),
        *(processors.MinP(0.03), processors.SuppressTokens((5,), first=1)),
        *(processors.SuppressTokens((2,)), processors.MinNewTokens(3, eos_ids=(1, 4))),
        *(processors.NoRepeatNgram(2), processors.RepetitionPenalty(1.7)),
        processors.LogitBias({3: 2.5}),
    ]
    ours, shared = bound_to(V, *ours)
    drawn = Sampling(0.7, 12, 0.9, ours)
    rng = np.random.default_rng(0)
    rows = 4
    prompts = rng.integers(0, 6, (rows, PROMPT)).astype(np.int32)
    outputs = rng.integers(0, 6, (rows, 4)).astype(np.int32)
    batch = PromptBatch(prompts, LENGTHS[:rows], np.arange(rows), np.full(rows, 4), sampling=drawn)
    state = processing.initial_processing(batch, V, 5, shared)
    drawn = jax.tree.map(lambda x: jnp.broadcast_to(x, rows), drawn)
    drawn = processing.with_params(processing.with_processing(drawn, state), shared)
    kept = []
    for emitted in range(5):
        logits = rng.standard_normal((rows, V)).astype(np.float32)
        found = np.asarray(processing.distributions(jnp.asarray(logits), drawn))
        for row in range(rows):
            ids = torch.tensor([[*prompts[row, : LENGTHS[row]], *outputs[row, :emitted]]])
            theirs = peers(int(LENGTHS[row]))(ids.long(), torch.tensor(logits[row : row + 1]))[0]
            want = torch.softmax(theirs, 0).numpy()
            np.testing.assert_allclose(found[row], want, atol=1e-6, err_msg=f"{emitted} {row}")
            kept.append((want > 0).sum())
        if emitted < 4:
            token = jnp.asarray(outputs[:, emitted : emitted + 1])
            drawn = processing.advance(drawn, token, jnp.ones(rows))
    assert min(kept) >= 1 and len(set(kept)) > 3


def test_a_long_ngram_makes_a_short_program():
    """Also one that is longer than the text, which forbids nothing."""
    batch = PromptBatch(jnp.zeros((1, 9), jnp.int32), jnp.array([9]), ids=None, limits=None)
    logits = jnp.zeros((1, V))
    for size, forbidden in ((8, 1), (9, 1), (11, 0), (10_000, 0)):
        one = processors.NoRepeatNgram(size)
        state = one.advance((), one.init((), batch, V, 2), jnp.zeros(1, jnp.int32))
        program = jax.make_jaxpr(lambda state, x, one=one: one.process((), state, x))(state, logits)
        assert len(str(program).splitlines()) < 300
        found = jax.core.eval_jaxpr(
            program.jaxpr, program.consts, *jax.tree.leaves((state, logits))
        )
        assert int(jnp.sum(found[0] == -jnp.inf)) == forbidden, size


@pytest.mark.parametrize("over", ["both", "output"])
def test_counts_are_those_of_the_openai_penalties(over):
    """transformers has neither: the formula of OpenAI's documentation."""
    rng = np.random.default_rng(3)
    prompts, outputs = (rng.integers(0, 6, (2, 5)).astype(np.int32) for _ in range(2))
    lengths = np.array([5, 2], np.int32)
    batch = PromptBatch(jnp.asarray(prompts), jnp.asarray(lengths), ids=None, limits=None)
    logits = rng.standard_normal((2, V)).astype(np.float32)
    for kind, most in ((processors.FrequencyPenalty, 9), (processors.PresencePenalty, 1)):
        one = kind(np.array([0.5, -0.25]), over=over)
        state = one.init((), batch, V, 5)
        for column in outputs.T:
            state = one.advance((), state, jnp.asarray(column))
        found = np.asarray(one.process((), state, jnp.asarray(logits)))
        for row, strength in enumerate((0.5, -0.25)):
            text = [*outputs[row], *(prompts[row, : lengths[row]] if over == "both" else [])]
            counts = np.minimum(np.bincount(text, minlength=V), most)
            np.testing.assert_allclose(found[row], logits[row] - strength * counts, rtol=1e-6)


def test_strengths_are_leaves_and_the_rest_is_structure():
    penalty = processors.RepetitionPenalty(np.array([1.0, 2.0]), over="output")
    assert [leaf.tolist() for leaf in jax.tree.leaves(penalty)] == [[1.0, 2.0]]
    again = jax.tree.map(lambda x: x, penalty)
    assert again.over == "output"
    assert jax.tree.structure(penalty) != jax.tree.structure(processors.RepetitionPenalty(1.0))


P = processors
WRONG = [
    (lambda: P.MinP(1.5), r"^MinP.min_p must lie in \[0, 1\], got 1.5"),
    (lambda: P.TypicalP(0.0), "typical_p"),
    (lambda: P.EpsilonCutoff(1.0), "epsilon"),
    (lambda: P.EtaCutoff(-0.1), "epsilon"),
    (lambda: P.RepetitionPenalty(0.0), "penalty"),
    (lambda: P.RepetitionPenalty(1.1, over="all"), "over must be one of 'both'"),
    (lambda: P.FrequencyPenalty(float("inf")), "penalty"),
    (lambda: P.NoRepeatNgram(0), "size"),
    (lambda: P.NoRepeatNgram(2, over="prompt"), "one of 'both', 'output', got 'prompt'"),
    (lambda: P.LogitBias({}), "leave the processor out"),
    (lambda: P.LogitBias({-1: 2.0}), "token ids of at least 0, got -1"),
    (lambda: P.LogitBias({3: float("nan")}), "NaN|nan"),
    (lambda: P.LogitBias({3: -np.inf}), r"to forbid tokens write SuppressTokens\(\(3,\)\)"),
    (lambda: P.SuppressTokens(["the"]), "token ids of at least 0, got 'the'"),
    (lambda: P.SuppressTokens("the"), "a list of token ids"),
    (lambda: P.ForcedTokens({-1: 3}), "positions"),
    (lambda: P.ForcedTokens(3), "tokens must be like"),
    (lambda: P.MinNewTokens(-1), "tokens"),
    (lambda: P.LinearTemperature(0.0, 1.0, 5), "first"),
    (lambda: P.LinearTemperature(1.0, 1.0, 0), "tokens"),
]


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_a_wrong_value_is_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()
