"""The exact law of the texts that the loop writes, through its own code: every draw is a choice.

Where a token is drawn or a block is accepted, the code is made to take the outcome that its
"uniform" names, and to note how probable that was. All combinations of choices of one round run as
rows of one batch, through the drafter, the round and the loop as they are, beside rows of other
prompts and limits. What a row draws and does not use is counted with all its outcomes, so that the
probabilities still add up to one.

One small world serves all laws: three tokens, tables over two of them, outputs of at most four.
The methods in which one model writes at a time run through the same code.

Axes: B rows, C combinations of choices, P prefixes, V vocabulary, N tokens.
"""

import contextlib
import dataclasses
import functools
import importlib
import itertools
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax import testing
from specjax.decoding import cascades as sequential
from specjax.decoding import method as methods
from specjax.decoding import speculative
from specjax.drafting import Lookup
from specjax.drafting.cascades import SeveralDrafters
from specjax.drafting.trees import CaterpillarDrafter
from specjax.sampling.distributions import distribution
from specjax.types import PromptBatch, Sampling, ScoredBlock, traced_dataclass
from specjax.verification import next_token_probs, num_accepted_probs
from tests.models.tiny import quick_jit
from tests.tables import RULES, targets

V, EOS, NEW = 3, 2, 4
MODEL = testing.TabularModel(V, 2)
# P verifies; the others draft. Some tokens are impossible.
P, A, B = (
    jnp.asarray(testing.random_table(seed, V, 2, scale=1.2, zeros=0.1)) for seed in (5, 6, 7)
)
# So many rows share a step.
_ROWS = 4096
_DRAWING = (
    "specjax.processing",
    "specjax.verification.chains",
    "specjax.decoding.blocks",
    "specjax.decoding.cascades",
    "specjax.drafting.lookup",
    "specjax.drafting.trees",
    "specjax.verification.traversal",
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
            (modules["specjax.processing"], "draw_from_logits", drawn),
            (modules["specjax.verification.chains"], "draw", draw),
            (modules["specjax.verification.chains"], "_num_accepted", accepted),
            (modules["specjax.decoding.blocks"], "draw", draw),
            (modules["specjax.decoding.cascades"], "draw", draw),
            (modules["specjax.decoding.cascades"], "lax", _ZeroPastTheEnd()),
            (modules["specjax.drafting.lookup"], "draw", draw),
            (modules["specjax.drafting.trees"], "draw", draw),
            (modules["specjax.verification.traversal"], "passes", jax.vmap(passes)),
        )
        with contextlib.ExitStack() as patches:
            for module, name, new in places:
                patches.enter_context(mock.patch.object(module, name, new))
            yield self


class _ZeroPastTheEnd:
    """`lax` in which an index past the end gives 0, as of a draw that nobody looks at."""

    def __getattr__(self, name):
        return getattr(lax, name)

    def dynamic_index_in_dim(self, x, index, **options):
        found = lax.dynamic_index_in_dim(x, index, **options)
        return jnp.where(index < x.shape[options["axis"]], found, 0)


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
    if isinstance(drafter, Lookup):  # it draws places
        return [2 * drafter.earlier] * drafter.num_uniforms
    if drafter.traits.drafts_trees:
        return [vocab] * drafter.num_uniforms
    return [vocab] * longest if drafter.num_uniforms else []


def round_slots(one_round):
    """The same of a round: drafts, the number accepted, the next token."""
    if not isinstance(one_round, speculative.Round):
        return [one_round.vocab_size] * (one_round.max_draft + 1)
    drafter = one_round.drafter
    if drafter.traits.drafts_trees:
        return [*slots(drafter), *[2] * drafter.max_draft, drafter.vocab_size]
    unread = [1] * (drafter.max_draft - 1)
    return [*slots(drafter), drafter.max_draft + 1, *unread, drafter.vocab_size]


@traced_dataclass
class OneOf:
    """A rule for each row, of some in `RULES`: one program serves all of them."""

    number: Any
    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    reads_draft: ClassVar[bool] = True
    reads_verifier_confidence: ClassVar[bool] = True

    @property
    def reads_draft_confidence(self):
        return any(RULES[name].reads_draft_confidence for name in self.names)

    def __call__(self, q, p, q_conf=None, p_conf=None):
        branches = [functools.partial(_target, RULES[name]) for name in self.names]
        return lax.switch(self.number, branches, q, p, q_conf, p_conf)

    @classmethod
    def by_row(cls, names):
        """The rules of these names."""
        some = tuple(dict.fromkeys(names))
        return cls(np.array([some.index(name) for name in names], np.int32), some)


def _target(rule, *distributions):
    return rule(*distributions)


class Row(NamedTuple):
    """A prompt; at most `limit` tokens are written, in drafts of at most `draft_limit`."""

    prompt: tuple[int, ...] = (0, 1)
    limit: int = 3
    draft_limit: int | None = None
    temperature: float = 1.0


class Texts:
    """Enumerates what a method writes; one program serves all rows and parameters.

    Args:
      method: a method.
      max_new: N, the longest output.
      processors: change the distributions.
      between: changes the states of rows between two rounds, by committed tokens alone.
      log_probs: whether `ends` have log-probabilities.
      predictions: of the rows in turn, the tokens of the texts that drafts may be copied from.

    Attributes:
      ends: for each row the state in which each text ended.
      drafted: the lengths of the drafts.
    """

    def __init__(
        self,
        method,
        *,
        max_new=NEW,
        processors=None,
        between=lambda state: state,
        log_probs=False,
        predictions=None,
    ):
        self.method, self.max_new, self.processors = method, max_new, processors
        self.predictions = predictions
        self.between, self.log_probs = between, log_probs
        self.choices, self.ends, self.drafted = Choices(), [], set()
        self.outcomes = round_slots(method)
        assert len(self.outcomes) == getattr(method, "num_uniforms", len(self.outcomes))
        each = [np.arange(1, n + 1) for n in self.outcomes]
        combinations = np.array(list(itertools.product(*each)), np.float32)
        self.size = len(combinations)
        self.together = max(1, _ROWS // self.size)

        @quick_jit
        def step(params, rule, state):
            repeated = lambda x: jnp.repeat(x, self.size, axis=0)  # noqa: E731
            rule, state = jax.tree.map(repeated, (rule, between(state)))
            rows = state.limits.size
            keys = jnp.broadcast_to(jax.random.key(0, impl="threefry2x32"), rows)
            uniforms = jnp.tile(combinations, (self.together, 1))
            with contextlib.ExitStack() as patches:
                for module in (speculative, sequential):
                    patch = mock.patch.object(module, "step_uniforms", lambda *_: uniforms)
                    patches.enter_context(patch)
                state = methods._loop(
                    method,
                    params._replace(rule=rule),
                    state._replace(keys=keys),
                    jnp.int32(1),
                    jnp.int32(rows + 1),
                    None,
                )
            return state._replace(keys=None)

        self.step = step

    def __call__(self, params, rows):
        """For each row the law of its texts: tokens -> probability."""
        rule = jax.tree.map(lambda x: np.broadcast_to(x, len(rows)), params.rule)
        params, rng = params._replace(rule=()), np.random.default_rng(0)
        laws, self.ends, self.drafted = [{} for _ in rows], [{} for _ in rows], set()
        with self.choices.installed():
            first = self._started(params._replace(rule=rule), rows)
            leaves, tree = jax.tree.flatten(first)
            leaves = [np.asarray(x) for x in leaves]
            # (row, text, carry) -> its chance, and one of the states that come there.
            left = {
                (row, (), ()): (1.0, [x[row : row + 1] for x in leaves]) for row in range(len(rows))
            }
            while left:
                now = sorted(left, key=lambda key: (len(key[1]), key))[: self.together]
                chances, states = zip(*(left.pop(key) for key in now), strict=True)
                of_row = np.array([key[0] for key in now])
                fill = np.resize(np.arange(len(now)), self.together)
                batch = [np.concatenate(x)[fill] for x in zip(*states, strict=True)]
                rules = jax.tree.map(lambda x: x[of_row[fill]], rule)  # noqa: B023
                after, weights = self._after(params, rules, jax.tree.unflatten(tree, batch))
                weights = weights[: len(now)] * np.array(chances)[:, None]
                origin = np.repeat(of_row, self.size)
                for key, chance, state in self._merged(after, origin, weights.reshape(-1), rng):
                    row, text, _ = key
                    if int(state.ended_by[0]):
                        laws[row][text] = laws[row].get(text, 0.0) + chance
                        self.ends[row][text] = state
                        continue
                    before, kept = left.get(key, (0.0, None))
                    left[key] = before + chance, jax.tree.leaves(state) if kept is None else kept
        return laws

    def _started(self, params, rows):
        """The state of the prompts, without keys."""
        longest = max(len(row.prompt) for row in rows)
        inputs = np.zeros((len(rows), longest), np.int32)
        for i, row in enumerate(rows):
            inputs[i, : len(row.prompt)] = row.prompt
        most = self.method.max_draft
        limits = [most if row.draft_limit is None else row.draft_limit for row in rows]
        temperatures = np.array([row.temperature for row in rows], np.float32)
        batch = PromptBatch(
            inputs,
            np.array([len(row.prompt) for row in rows], np.int32),
            ids=np.arange(len(rows)),
            limits=np.array([row.limit for row in rows]),
            draft_limits=np.array(limits, np.int32),
            sampling=Sampling(temperatures, processors=self.processors),
            predictions=self._predicted(len(rows)),
        )
        state = self.method.init(params, batch, max_new=self.max_new, log_probs=self.log_probs)
        return state._replace(keys=None)

    def _predicted(self, rows):
        if self.predictions is None:
            return None
        longest = max(len(text) for texts in self.predictions for text in texts)
        predicted = np.full((rows, max(map(len, self.predictions)), longest), -1, np.int32)
        for i, row in enumerate(predicted):
            for place, text in enumerate(self.predictions[i % len(self.predictions)]):
                row[place, : len(text)] = text
        return predicted

    def _after(self, params, rule, batch):
        """The states after a round of all choices, and the chances `[states, C]` of these."""
        self.choices.start(self.together * self.size, self.outcomes)
        after = jax.block_until_ready(self.step(params, rule, batch))
        weights = self.choices.weights.reshape(self.together, self.size)
        np.testing.assert_allclose(weights.sum(axis=1), 1.0, atol=1e-4)
        return jax.tree.map(np.asarray, after), weights

    def _merged(self, after, origin, weights, rng):
        """Yields each row's text and carry, their chance, and one of the states with these.

        Which one is left to chance: how they came there may be seen in how far they lag alone.
        """
        live = rng.permutation(np.flatnonzero(weights > 0))
        self.drafted |= set(np.flatnonzero(after.info.drafted_lengths[live].any(axis=0)).tolist())
        inner = after.inner
        kept = inner.carry if hasattr(inner, "carry") else inner.extra
        carries = [
            np.asarray(x, x.dtype if x.itemsize == 4 else np.int32).reshape(len(x), -1)
            for x in jax.tree.leaves(kept)
        ]
        carries = [x.view(np.int32) for x in carries]
        told = np.column_stack([origin, after.lengths[: len(origin)], after.tokens[: len(origin)]])
        if carries:
            told = np.concatenate([told, *(x[: len(origin)] for x in carries)], axis=1)
        _, first, which = np.unique(told[live], axis=0, return_index=True, return_inverse=True)
        chances = np.bincount(which.reshape(-1), weights=weights[live])
        for at, chance in zip(live[first], chances, strict=True):
            text = tuple(after.tokens[at, : after.lengths[at]].tolist())
            carry = tuple(told[at, 2 + self.max_new :].tolist())
            state = jax.tree.map(lambda x: x[at : at + 1], after)  # noqa: B023
            yield (int(origin[at]), text, carry), chance, state


@functools.cache
def _contexts(prompt, count):
    """The rows of a table for the prefixes of up to `count - 1` tokens, by their last two."""
    tails = itertools.chain(*(itertools.product(range(V), repeat=n) for n in range(count)))
    pairs = np.array([(V, V, *prompt, *tail)[-2:] for tail in tails])
    return pairs @ [V + 1, 1]


def by_committed(state):
    """Limits of drafts that committed tokens decide: nothing after token 1, else by length."""
    last = jnp.take_along_axis(state.tokens, jnp.maximum(state.lengths - 1, 0)[:, None], axis=1)
    limits = jnp.where(last[:, 0] == 1, 0, (3 * state.lengths + 2) % 4)
    return state._replace(draft_limits=limits)


def probabilities(logits, temperature):
    """The distributions at a temperature, in float64 up to the result."""
    logits = np.asarray(logits, np.float64)
    if temperature == 0.0:
        return np.eye(logits.shape[-1], dtype=np.float32)[logits.argmax(axis=-1)]
    weights = np.exp((logits - logits.max(axis=-1, keepdims=True)) / np.float64(temperature))
    return (weights / weights.sum(axis=-1, keepdims=True)).astype(np.float32)


def after(table, row, temperature=None):
    """The distributions `[P, V]` after all prefixes of a row's texts, from the table alone."""
    logits = np.asarray(table)[_contexts(row.prompt, row.limit)]
    return probabilities(logits, row.temperature if temperature is None else temperature)


def target(rule, row, q=None, *, verifier=P, drafter=A):
    """pi after all prefixes; `q` is what the drafts are drawn from, if not the drafter's law."""
    q = after(drafter, row) if q is None else q
    laws = q, after(verifier, row), after(drafter, row, 1.0), after(verifier, row, 1.0)
    # Rules are compiled once: for the prefixes of the longest text.
    more = sum(V**n for n in range(NEW)) - len(q)
    padded = (np.pad(x, ((0, more), (0, 0)), constant_values=np.float32(1 / V)) for x in laws)
    return targets(rule, tuple(padded))[: len(q)]


def law_of(pi, row, ends=(EOS,)):
    """The law of a row's texts whose tokens follow `pi`."""
    found = {}
    full = testing.target_law(pi, row.limit)
    for tokens, chance in zip(itertools.product(range(V), repeat=row.limit), full, strict=True):
        stop = next((i + 1 for i, token in enumerate(tokens) if token in ends), row.limit)
        found[tokens[:stop]] = found.get(tokens[:stop], 0.0) + chance
    return found


def distance(found, wanted):
    """The total variation of two laws."""
    return 0.5 * sum(abs(found.get(x, 0.0) - wanted.get(x, 0.0)) for x in {*found, *wanted})


def array_of(law, vocab, num_tokens):
    """A law of texts of N tokens as an array `[V ** N]` float64."""
    found = np.zeros((vocab,) * num_tokens)
    for text, chance in law.items():
        found[text] = chance
    return found.reshape(-1)


class Law:
    """The law of the first tokens after a prompt, whatever they are.

    Args:
      method: a `Speculative` without end-of-sequence tokens.
      draft_limit: of the drafts; by default the longest.
      options: of `Texts`.
    """

    def __init__(self, method, draft_limit=None, **options):
        self.texts, self.draft_limit = Texts(method, **options), draft_limit

    def __call__(self, params, prompt, num_tokens, temperature=1.0):
        """`[V ** N]` float64."""
        row = Row(tuple(prompt), num_tokens, self.draft_limit, temperature)
        return array_of(self.texts(params, [row])[0], self.texts.method.vocab_size, num_tokens)


def numbers(tokens, lengths, vocab):
    """The places of prefixes `tokens[..., :lengths]` in a table of all prefixes."""
    value = np.zeros(lengths.shape, np.int64)
    for i in range(tokens.shape[-1]):
        value = np.where(i < lengths, value * vocab + tokens[..., i], value)
    return np.array([sum(vocab**n for n in range(k)) for k in range(20)])[lengths] + value


@functools.cache
def outcomes_of(verification):
    """A function: a row's block -> the laws of how many tokens stand, and of the next token."""

    def one_row(tokens, q, p, drafted):
        block = ScoredBlock(tokens, q, p, drafted)
        acceptance = verification.acceptance(block)
        counts = jnp.arange(tokens.size + 1)
        following = jax.vmap(lambda n: next_token_probs(acceptance, block, n))(counts)
        following = jnp.where((counts == drafted)[:, None], p, following)
        return num_accepted_probs(verification, acceptance.thresholds), following

    return one_row
