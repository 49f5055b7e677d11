"""What a user's own parts may return, and how a wrong part is told: in one line, by its name."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import testing, types
from specjax.tokenizers import ByteTokenizer
from specjax.types import LogProbs
from tests import tiny_pair
from tests.variants import variants

VOCAB = 259
SHAPE = {"max_new_tokens": 3, "batch_size": 2, "buckets": (16,)}


@pytest.fixture(scope="module")
def pair():
    return specjax.Pair(drafter=tiny_pair.tabular(2), verifier=tiny_pair.tabular(1))


@dataclasses.dataclass(frozen=True)
class Short(types.Drafter):
    """Draws from a table `[V, V]`; a block ends after an odd token."""

    max_draft: int = 2
    vocab_size: int = VOCAB
    num_uniforms: int = 2
    beyond: int = 0

    def prefill(self, params, prompts, max_length):
        return jnp.zeros(prompts.inputs.shape[0])

    def propose(self, params, state, inputs):
        alive, count = inputs.active, jnp.zeros_like(inputs.tokens)
        drawn, probs = [inputs.tokens], []
        for i in range(self.max_draft):
            probs.append(params[drawn[-1]])
            below = jnp.cumsum(probs[-1], axis=1)
            drawn.append((inputs.uniforms[:, i : i + 1] > below).sum(axis=1, dtype=jnp.int32))
            count += (alive & (i < inputs.limits)).astype(jnp.int32)
            alive &= drawn[-1] % 2 == 0
        probs.append(params[drawn[-1]])
        count = count + self.beyond
        block = types.DraftBlock(
            jnp.stack(drawn[1:], axis=1), jnp.stack(probs, axis=1), None, count, {}
        )
        return block, state

    def bonus(self, params, state, inputs, block):
        drafted = jnp.concatenate([inputs.tokens[:, None], block.tokens], axis=1)
        last = jnp.take_along_axis(drafted, block.num_drafted[:, None], axis=1)[:, 0]
        return types.Bonus(params[last], None, {}), state


def _table(seed):
    """Logits `[V + 1, V]` of three tokens."""
    logits = np.full((VOCAB + 1, VOCAB), -np.inf, np.float32)
    logits[:, 10:13] = np.random.default_rng(seed).normal(size=(VOCAB + 1, 3)) * 1.5
    return logits


@pytest.mark.parametrize("beyond", variants([9, 0, -9], 9))
def test_blocks_of_any_claimed_length_are_exact(beyond):
    """Two tokens of 4,000 rows follow the verifier: what is claimed past a limit is cut off."""
    p, rows = _table(1), 4000
    verifier = specjax.TextModel(testing.TabularModel(VOCAB, 1), jnp.asarray(p), ByteTokenizer())
    q = jax.nn.softmax(jnp.asarray(_table(2))[:VOCAB], axis=-1)
    decoder = specjax.Decoder(
        verifier, drafting=specjax.WithParams(Short(beyond=beyond), q), max_new_tokens=2,
        batch_size=1024, buckets=(16,),
    )  # fmt: skip
    result = decoder([[20]] * rows, seed=1, draft_limit=[i % 3 for i in range(rows)])
    seen = Counter(tuple(tokens.tolist()) for tokens in result.tokens)
    law = np.asarray(jax.nn.softmax(jnp.asarray(p), axis=-1))
    three = range(10, 13)
    off = sum(abs(seen[a, b] / rows - law[20, a] * law[a, b]) for a in three for b in three)
    assert off / 2 < 0.03
    limits = np.arange(rows) % 3
    longest = result.info.per_row.drafted_lengths * np.arange(3)
    assert (longest.max(axis=1) <= limits * longest.max()).all()


def _own(base, **methods):
    """A part of class `Mine` with other methods or fields than those of `base`."""
    return dataclasses.dataclass(frozen=True)(type("Mine", (base,), methods))


def _stop(step, **fields):
    return {"stopping": _own(types.Stopping, step=step, **fields)()}


def _draft(change):
    def propose(self, *args, **options):
        block, state = Short.propose(self, *args, **options)
        return change(block, state)

    table = jnp.full((VOCAB, VOCAB), 1 / VOCAB, jnp.float32)
    return {"drafting": specjax.WithParams(_own(Short, propose=propose)(), table)}


WRONG = {
    "stops are numbers": (
        _stop(lambda self, params, state, drawn: (drawn.token, state)),
        r"Mine.step: stops are bool\[B\]",
    ),
    "stops are one for all rows": (
        _stop(lambda self, params, state, drawn: (jnp.bool_(True), state)),
        r"Mine.step: stops are bool\[B\]",
    ),
    "draft probabilities": (
        _draft(lambda block, state: (block._replace(probs=block.probs[:, :-1]), state)),
        r"Mine.propose: probs must be float32\[2, 3, 259\]",
    ),
    "names of calls": (
        _draft(lambda block, state: (block._replace(calls={"me": jnp.int32(1)}), state)),
        "Mine.propose: calls must name the model_names",
    ),
    "another block": (
        _draft(lambda block, state: (tuple(block), state)),
        "Mine.propose must return a types.DraftBlock first",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_part_that_returns_something_else_is_named(pair, name):
    parts, message = WRONG[name]
    models = pair.verifier if "drafting" in parts else pair
    with pytest.raises((AssertionError, ValueError), match=message):
        specjax.Decoder(models, **parts, **SHAPE)([[20], [21]])


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (
            lambda self, params, cache, tokens, at: (jnp.zeros((*tokens.shape, 7)),) * 2 + ((),),
            r"Mine.score: logits must be floats \[2, 1, 259\], got float32\[2, 1, 7\]",
        ),
        (
            lambda self, params, cache, tokens, at: (jnp.zeros((*tokens.shape, VOCAB)),) * 2,
            r"Mine.score must return \(logits, hidden, updates\)",
        ),
    ],
)
def test_a_language_model_that_returns_something_else_is_named(pair, score, message):
    model = _own(testing.TabularModel, score=score, extend=types.LanguageModel.extend)(VOCAB, 1)
    mine = specjax.TextModel(model, pair.verifier.params, pair.verifier.tokenizer)
    for models in (mine, specjax.Pair(drafter=pair.drafter, verifier=mine)):
        with pytest.raises(AssertionError, match=message.replace("2, 1,", "2, [16],")):
            specjax.Decoder(models, **SHAPE)([[20], [21]])


def test_parts_that_cannot_be_hashed_are_refused(pair):
    @dataclasses.dataclass
    class Loose(types.Stopping):
        x: int = 1

        def step(self, params, state, drawn):
            return drawn.token > 3, state

    with pytest.raises(ValueError, match=r"stopping must be hashable, got a Loose .*frozen=True"):
        specjax.Decoder(pair, stopping=Loose())


def test_log_probabilities_that_a_method_does_not_write_are_nan(pair):
    class Silent(type(specjax.Decoder(pair.verifier).method)):
        def step(self, params, state):
            new = super().step(params, state)
            return new._replace(log_probs=LogProbs(), sources=None)

    alone = specjax.Decoder(pair.verifier, **SHAPE)
    method = Silent(pair.verifier.model, eos_ids=alone.method.eos_ids)
    mine = specjax.Decoder(pair.verifier, method=specjax.WithParams(method, alone.params), **SHAPE)
    assert np.isnan(mine([[20]], log_probs=True)[0].log_probs).all()
    assert np.isfinite(alone([[20]], log_probs=True)[0].log_probs).all()
    # Sources likewise.
    row = mine([[20]], sources=True)[0]
    assert set(row.sources) == {"unknown"} and row.text in repr(row.show())
    assert set(alone([[20]], sources=True)[0].sources) == {"verifier"}
