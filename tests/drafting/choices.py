"""The exact law of what rounds emit, through their own code: every draw is a choice.

Where a token is drawn or a block is accepted, the code is made to take the outcome that its
"uniform" names, and to note how probable that was. All combinations of choices of one round run as
rows of one batch, through the drafter, the round and `commit` as they are. What a row draws and
does not use is counted with all its outcomes, so that the probabilities still add up to one.

Axes: C combinations of choices, S states, U uniforms of a round, V vocabulary, N tokens.
"""

import collections
import contextlib
import functools
import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import speculative
from specjax.decoding.method import add_step
from specjax.drafting import CaterpillarDrafter
from specjax.drafting.cascades import SeveralDrafters
from specjax.processing import advance, bound, initial_processing
from specjax.sampling import Sampling, distribution
from specjax.types import PromptBatch
from specjax.verification import num_accepted_probs
from tests.models.tiny import quick_jit

_DRAWING = (
    "specjax.processing",
    "specjax.verification.chains",
    "specjax.decoding.blocks",
    "specjax.drafting.trees",
    "specjax.verification.traversal",
    "tests.decoding.trees",
)


class Choices:
    """Notes the probability of what each row was made to draw."""

    def __init__(self):
        self.weights = None

    def start(self, rows, outcomes):
        # Of a draw that is never made all outcomes count alike.
        self.weights = np.full(rows, 1.0 / np.prod(outcomes))

    def take(self, law, choice):
        """Picks the outcomes `choice [R, ...]`, from 1, of `law [R, ..., n]`; any positive sum."""
        law, choice = np.asarray(law, np.float64), np.asarray(choice).astype(np.int64) - 1
        if (choice < 0).all():
            return np.zeros_like(choice, np.int32)  # a draw that nobody looks at
        total = law.sum(axis=-1)
        chance = np.take_along_axis(law, choice[..., None], axis=-1)[..., 0]
        with np.errstate(all="ignore"):
            chance = np.where(total > 0, chance / total, 1.0 / law.shape[-1])
        factors = np.nan_to_num(chance) * law.shape[-1]
        self.weights *= factors.reshape(self.weights.size, -1).prod(axis=1)
        return choice.astype(np.int32)

    @contextlib.contextmanager
    def installed(self):
        """Puts the choices in the place of the draws."""

        def choose(law, choice):
            return jax.pure_callback(
                self.take,
                jax.ShapeDtypeStruct((), jnp.int32),
                law,
                choice,
                vmap_method="expand_dims",
            )

        def draw(weights, uniform):
            return choose(weights, uniform.reshape(-1)[0])

        def drawn(logits, sampling, uniform):
            law = distribution(logits, sampling)
            return law, draw(law, uniform)

        def accepted(algorithm, uniforms, acceptance):
            law = num_accepted_probs(algorithm, acceptance.thresholds)
            return choose(law, uniforms[0])

        def passes(uniform, chance):
            return choose(jnp.stack([1.0 - chance, chance]), uniform) == 1

        modules = {name: importlib.import_module(name) for name in _DRAWING}
        places = (
            (modules["specjax.processing"], "drawn", drawn),
            (modules["specjax.verification.chains"], "draw", draw),
            (modules["specjax.verification.chains"], "_num_accepted", accepted),
            (modules["specjax.decoding.blocks"], "draw", draw),
            (modules["specjax.drafting.trees"], "draw", draw),
            (modules["specjax.verification.traversal"], "passes", jax.vmap(passes)),
            (modules["tests.decoding.trees"], "passes", passes),
        )
        before = [getattr(module, name) for module, name, _ in places]
        for module, name, new in places:
            setattr(module, name, new)
        try:
            yield self
        finally:
            for (module, name, _), old in zip(places, before, strict=True):
                setattr(module, name, old)


def slots(drafter):
    """How many outcomes each uniform of a drafter's block has: 1 where it is not read."""
    vocab, longest = drafter.vocab_size, drafter.max_draft
    if hasattr(drafter, "reviewer"):
        inner = round_slots(drafter._round)
        return inner * (drafter.num_uniforms // len(inner))
    if isinstance(drafter, SeveralDrafters):
        return [n for each in drafter.drafters for n in slots(each)]
    if isinstance(drafter, CaterpillarDrafter):
        return slots(drafter.drafter)
    if drafter.traits.drafts_trees:
        return [vocab] * drafter.num_uniforms
    return [vocab] * longest if drafter.num_uniforms else []


def round_slots(one_round):
    """The same of a round: drafts, the number accepted, the next token."""
    drafter = one_round.drafter
    if drafter.traits.drafts_trees:
        return [*slots(drafter), *[2] * drafter.max_draft, drafter.vocab_size]
    unread = [1] * (drafter.max_draft - 1)
    return [*slots(drafter), drafter.max_draft + 1, *unread, drafter.vocab_size]


def rounds_of(one_round, chosen, limit=None):
    """A jitted round and commit, of choices in the place of uniforms."""
    limit = one_round.drafter.max_draft if limit is None else limit

    @quick_jit
    def run(params, sampling, state, uniforms):
        rows = uniforms.shape[0]
        everyone = jnp.ones(rows, bool)
        limits = jnp.full(rows, limit, jnp.int32)
        outcome = one_round(params, sampling, state, uniforms, everyone, limits)
        emitted = outcome.step.tokens, outcome.step.counts
        after = one_round.commit(state, outcome.step.inner, *emitted, outcome.hidden)
        return *emitted, (after, advance(sampling, *emitted).processing)

    def call(params, sampling, state, uniforms, outcomes):
        chosen.start(len(uniforms), outcomes)
        out = jax.tree.map(np.asarray, run(params, sampling, state, uniforms))
        return *out, chosen.weights.copy()

    return call


def combinations_of(outcomes):
    """All choices of a round, `[C, U]`."""
    each = [np.arange(1, n + 1) for n in outcomes]
    return np.array(list(itertools.product(*each)), np.float32)


class Outputs:
    """Enumerates what the whole loop writes, ends of sequence and all limits inside.

    Args:
      method: a `Speculative`.
      max_new: the longest output.
    """

    def __init__(self, method, max_new=3):
        self.method, self.choices, self.max_new = method, Choices(), max_new
        self.outcomes = round_slots(method)
        assert len(self.outcomes) == method.num_uniforms
        self.combinations = combinations_of(self.outcomes)

        @quick_jit
        def step(params, state, combos):
            rows = lambda x: jnp.broadcast_to(x, (len(combos), *x.shape[1:]))  # noqa: E731
            state = jax.tree.map(rows, state)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(speculative, "step_uniforms", lambda *_: combos)
                return add_step(state, method.step(params, state), method.eos_ids)

        self.step = step

    def __call__(self, params, prompt, limit, draft_limit, temperature=1.0):
        """Output -> its probability, of up to `limit` tokens."""
        one = np.ones(1, np.int32)
        prompts = PromptBatch(
            np.asarray([prompt], np.int32), one * len(prompt), ids=one, limits=one * limit,
            draft_limits=one * draft_limit, sampling=Sampling(np.float32(temperature)),
        )  # fmt: skip
        law, rng = collections.Counter(), np.random.default_rng(0)
        states = {(): (1.0, self.method.init(params, prompts, max_new=self.max_new))}
        with self.choices.installed():
            while states:
                text = min(states, key=len)
                chance, state = states.pop(text)
                self.choices.start(len(self.combinations), self.outcomes)
                after = self.step(params, state, self.combinations)
                finished, lengths, tokens = map(
                    np.asarray, (after.finished, after.lengths, after.tokens)
                )
                weights = chance * self.choices.weights
                assert abs(self.choices.weights.sum() - 1.0) < 1e-4
                # Which of the states that come to the same text goes on is left to chance.
                for row in rng.permutation(np.flatnonzero(weights > 0)):
                    new = tuple(tokens[row, : lengths[row]].tolist())
                    if finished[row]:
                        law[new] += weights[row]
                        continue
                    kept = jax.tree.map(lambda x: x[row : row + 1], after)  # noqa: B023
                    old, kept = states.get(new, (0.0, kept))
                    states[new] = (old + weights[row], kept)
        return law


class Law:
    """Enumerates a round; compiled once for all parameters and temperatures.

    Args:
      one_round: the round.
      processors: change the distributions; or None.
      limit: of the drafts; by default the longest.
    """

    def __init__(self, one_round, processors=None, limit=None):
        self.round = one_round
        self.processors = None if processors is None else tuple(processors)
        self.outcomes = round_slots(one_round)
        assert len(self.outcomes) == one_round.num_uniforms
        self.choices = Choices()
        self.run = rounds_of(one_round, self.choices, limit)
        self.prefill = quick_jit(functools.partial(one_round.prefill, max_length=40))
        self.combinations = combinations_of(self.outcomes)

    def __call__(self, params, prompt, num_tokens, temperature=1.0):
        """The law of the first N tokens after a prompt, `[V ** N]` float64."""
        vocab, combos = self.round.verifier.vocab_size, self.combinations
        with self.choices.installed():
            inputs = jnp.asarray([prompt], jnp.int32)
            one = jnp.array([len(prompt)])
            drawn = Sampling(processors=self.processors)
            prompts = PromptBatch(inputs, one, ids=one, limits=one * 0 + num_tokens, sampling=drawn)
            room = num_tokens + self.round.drafter.max_draft + 1
            at = initial_processing(prompts, vocab, room, params.processors)
            first = self.prefill(params, prompts.prompts), at
            law = np.zeros((vocab,) * num_tokens)
            # emitted tokens and carry -> chance, and one of the states that come there
            states = {((), ()): (1.0, jax.tree.map(np.asarray, first))}
            rng = np.random.default_rng(0)
            while states:
                emitted, carry = min(states, key=lambda key: len(key[0]))
                chance, state = states.pop((emitted, carry))
                rows = len(combos)
                by_row = jax.tree.map(lambda x: np.repeat(x, rows, axis=0), state)  # noqa: B023
                temperatures = jnp.full(rows, temperature, jnp.float32)
                processors = jax.tree.map(lambda x: np.repeat(x, rows), drawn.processors)  # noqa: B023
                sampling = Sampling(temperatures, processors=processors, processing=by_row[1])
                tokens, counts, after, weights = self.run(
                    params, bound(sampling, params.processors), by_row[0], combos, self.outcomes
                )
                after = (after[0], bound(Sampling(processing=after[1]), None).processing)
                assert abs(weights.sum() - 1.0) < 1e-4, weights.sum()
                # Which of the states that come to the same tokens goes on is left to chance: how
                # they came there may be seen in how far they lag alone.
                for row in rng.permutation(np.flatnonzero(weights > 0)):
                    new = (*emitted, *(int(x) for x in tokens[row, : counts[row]]))
                    if len(new) >= num_tokens:
                        law[new[:num_tokens]] += chance * weights[row]
                        continue
                    key = (new, tuple(x[row].tobytes() for x in jax.tree.leaves(after[0].carry)))
                    kept = jax.tree.map(lambda x: x[row : row + 1], after)  # noqa: B023
                    old, kept = states.get(key, (0.0, kept))
                    states[key] = (old + chance * weights[row], kept)
        return law.reshape(-1)
