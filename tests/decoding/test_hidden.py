"""Drafters that read the verifier's hidden states of what was committed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decoding, drafting, testing, types
from specjax.decoding.method import jitted_run
from specjax.processing import distributions, draws
from tests.decoding.helpers import AfterTokenOne, begin

V = 3
MODEL = testing.TabularModel(V, 2)
P = jnp.asarray(testing.random_table(1, V, 2, scale=1.5))
Q = jnp.asarray(np.random.default_rng(2).normal(size=(V, V)), jnp.float32)


@dataclasses.dataclass(frozen=True)
class FromHidden(types.Drafter):
    """Draws by the hidden state that gave the last committed token, and by the token before.

    The hidden state of a tabular model is its logits. Parameters: what is added after each token.
    """

    max_draft: int = 2
    vocab_size: int = V
    num_uniforms: int = 2
    has_confidence: bool = True

    traits = types.DraftTraits(prefix_only=False, fixed_length=True, reads_verifier_hidden=True)

    def prefill(self, params, prompts, max_length):
        return jnp.zeros((prompts.inputs.shape[0], V))

    def propose(self, params, state, inputs):
        last, drafted, probs = inputs.tokens, [], []
        for i in range(self.max_draft):
            uniforms = inputs.uniforms[:, i : i + 1]
            q, last = draws(0.3 * state + params[last], inputs.sampling, uniforms)
            drafted.append(last)
            probs.append(q)
        probs = jnp.stack([*probs, jnp.zeros_like(q)], axis=1)
        confidences = probs if inputs.with_confidence else None
        tokens = jnp.stack(drafted, 1)
        return types.DraftBlock(tokens, probs, confidences, inputs.limits, {}), state

    def bonus(self, params, state, inputs, block):
        drafted = jnp.concatenate([inputs.tokens[:, None], block.tokens], axis=1)
        last = jnp.take_along_axis(drafted, block.num_drafted[:, None], axis=1)[:, 0]
        q = distributions(0.3 * state + params[last], inputs.sampling)
        return types.Bonus(q, q if inputs.with_confidence else None, {}), state

    def commit(self, state, tokens, counts, hidden=None):
        newest = jnp.maximum(counts - 1, 0)[:, None, None]
        newest = jnp.take_along_axis(hidden, newest, axis=1)[:, 0]
        return jnp.where(counts[:, None] > 0, newest, state)


def test_rows_get_their_own_hidden_state_of_their_last_token():
    inputs, lengths = np.array([[0, 1, 2], [2, 0, 0], [1, 1, 0]], np.int32), np.array([3, 1, 2])
    for stopping in (None, AfterTokenOne()):
        # Of several widths the hidden states come out of a branch.
        widths = None if stopping is None else (1, 3)
        method = decoding.Speculative(MODEL, FromHidden(), widths=widths)
        params = decoding.MethodParams(P, Q)
        state = begin(
            method, params, inputs, lengths, ids=np.arange(3), limits=np.array([9, 4, 9]), max_new=9
        )
        for _ in range(4):
            state = method.run(params, state, 1)
            for row in np.flatnonzero(~np.asarray(state.finished)):
                tokens = np.asarray(state.tokens[row])[: int(state.lengths[row])].tolist()
                text = [V, V, *inputs[row, : lengths[row]].tolist(), *tokens][-3:-1]
                want = P[text[0] * (V + 1) + text[1]]
                np.testing.assert_allclose(state.inner.drafter[row], want, atol=1e-6)
    assert int(state.info.accepted_lengths[:, 1:].sum()) > 0


def widths_of_branches(jaxpr):
    """The last axes of what the branches of a program return."""
    found = set()
    for equation in jaxpr.eqns:
        if equation.primitive.name == "cond":
            found |= {x.aval.shape[-1] for x in equation.outvars if x.aval.shape}
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            found |= widths_of_branches(inner) if hasattr(inner, "eqns") else set()
    return found


def test_nothing_is_kept_for_drafters_that_do_not_ask():
    """The branches of several widths give no hidden states `[B, G + 1, D]` then."""

    @dataclasses.dataclass(frozen=True)
    class Wide(testing.TabularModel):
        """Of hidden states that no other array is as wide as."""

        def score(self, params, cache, tokens, positions):
            logits, _, updates = super().score(params, cache, tokens, positions)
            return logits, jnp.tile(logits[..., :1], (1, 1, 77)), updates

    @dataclasses.dataclass(frozen=True)
    class Deaf(FromHidden):
        traits = types.DraftTraits()

        def commit(self, state, tokens, counts, hidden=None):
            return state

    @dataclasses.dataclass(frozen=True)
    class Narrow(FromHidden):
        def commit(self, state, tokens, counts, hidden=None):
            return super().commit(state, tokens, counts, hidden[..., :V])

    kept = {}
    for drafter in (Deaf(), Narrow()):
        method = decoding.Speculative(Wide(V, 2), drafter, widths=(1, 3))
        params = decoding.MethodParams(P, Q)
        given = {"ids": np.arange(2), "limits": np.full(2, 3), "max_new": 3}
        state = begin(method, params, np.zeros((2, 1), np.int32), np.ones(2, np.int32), **given)
        traced = jitted_run().trace(method, params, state, jnp.int32(1), jnp.int32(2), None)
        kept[type(drafter).__name__] = 77 in widths_of_branches(traced.jaxpr.jaxpr)
    assert kept == {"Deaf": False, "Narrow": True}


def test_such_drafters_stand_before_the_verifier_alone():
    with pytest.raises(
        ValueError, match="FromHidden reads the verifier's hidden states: it cannot"
    ):
        drafting.cascades.VerticalCascade(FromHidden(), MODEL, 3)
    with pytest.raises(ValueError, match="FromHidden reads the verifier's hidden states"):
        drafting.cascades.HorizontalCascade((drafting.Chain(MODEL, 1), FromHidden()))
