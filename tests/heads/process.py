"""The law that rounds of a head's drafter must have, from a fresh state before every round.

A head's distributions depend on where a round began. So under a rule that reads them the target is
a process: from each place where a round may begin, all drafts, their lengths and their targets are
enumerated with a drafter that has just read the text, and the outcomes by the verification's laws.

Axes: C drafts, G longest block, N = G + 1 nodes, V vocabulary.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from specjax import testing
from specjax.types import DraftInputs, Prompts, Sampling
from tests.laws import Choices, numbers, outcomes_of, probabilities
from tests.models.tiny import quick_jit


@quick_jit
def _applied(rule, *distributions):
    return jax.vmap(jax.vmap(rule))(*distributions)


class Process:
    """Enumerates what rounds must emit, for a drafter of a `TinyHead`."""

    def __init__(self, tiny, drafter, verify):
        self.tiny, self.drafter = tiny, drafter
        self.vocab, self.longest = drafter.vocab_size, drafter.max_draft
        self.drafts = np.array(list(itertools.product(range(self.vocab), repeat=self.longest)))
        self.outcomes = quick_jit(jax.vmap(outcomes_of(verify)))
        self.choices = Choices()
        self.propose = quick_jit(self._propose)

    def _propose(self, params, text, length, temperature):
        """Blocks of all drafts after a text, and the distributions after whole blocks."""
        rows, tiny, drafter = len(self.drafts), self.tiny, self.drafter
        verifier = tiny.verifier.reading(tiny.head.config.boundaries)
        prompts = Prompts(jnp.tile(text, (rows, 1)), jnp.full(rows, length, jnp.int32))
        size = text.size + self.longest + 1
        filled = verifier.prefill(tiny.verifier_params, prompts, size)
        state = drafter.prefill(params, prompts, size, verifier=filled)
        limits, everyone = jnp.full(rows, self.longest, jnp.int32), jnp.ones(rows, bool)
        uniforms = jnp.asarray(self.drafts + 1, jnp.float32)[:, : drafter.num_uniforms]
        settings = Sampling(jnp.full(rows, temperature))
        given = filled.tokens, limits, uniforms, settings, everyone, drafter.has_confidence
        inputs = DraftInputs(*given, memory=filled.cache)
        block, state = drafter.propose(params, state, inputs)
        if not drafter.traits.draws_bonus:
            return block, None
        return block, drafter.bonus(params, state, inputs, block)[0]

    def tables(self, prompt, num_tokens, temperature):
        """The verifier's distributions and confidences after every continuation."""
        given = self.tiny.verifier, self.tiny.verifier_params, prompt, num_tokens
        logits = testing.prefix_distributions(*given, lambda logits: logits)
        return probabilities(logits, temperature), probabilities(logits, 1.0)

    def __call__(self, params, rule, prompt, num_tokens, temperature=1.0):
        """The law of the first tokens, `[V ** N]`; and how far rounds are from their targets."""
        room = num_tokens + self.longest
        p_table, conf_table = self.tables(prompt, room, temperature)
        law, farthest = np.zeros((self.vocab,) * num_tokens), 0.0
        starts, lengths = {(): 1.0}, set()
        while starts:
            emitted = min(starts, key=len)
            chance = starts.pop(emitted)
            text = np.zeros(len(prompt) + num_tokens, np.int32)
            text[: len(prompt) + len(emitted)] = (*prompt, *emitted)
            self.choices.start(len(self.drafts), [self.vocab] * self.longest)
            with self.choices.installed():
                given = params, jnp.asarray(text), len(prompt) + len(emitted)
                block, bonus = jax.tree.map(np.asarray, self.propose(*given, temperature))
            drafted = block.num_drafted
            lengths |= set(drafted.tolist())
            inside = np.arange(self.longest) < drafted[:, None]
            # Of what was not drafted one choice stands for all.
            ends = np.arange(self.longest + 1)
            path = np.concatenate([np.tile(emitted, (len(self.drafts), 1)), self.drafts], axis=1)
            which = numbers(path[:, None].astype(int), len(emitted) + ends[None], self.vocab)
            p, p_conf = p_table[which], conf_table[which]
            # Of copies there are no confidences, and no rule reads them.
            drawn = [x for x in (block.probs, block.confidences) if x is not None]
            q, q_conf = drawn[0].copy(), drawn[-1].copy()
            if bonus is not None:
                for x, last in ((q, bonus.probs), (q_conf, bonus.confidences)):
                    if last is None:
                        continue
                    np.put_along_axis(x, drafted[:, None, None], last[:, None], axis=1)
            pi = np.asarray(_applied(rule, q, p, q_conf, p_conf))
            at_bonus = ends == drafted[:, None]
            mass = np.take_along_axis(q[:, :-1], self.drafts[..., None], axis=2)[..., 0]
            weight = np.prod(np.where(inside, mass, self.drafts == 0), axis=1)
            accepted, following = map(
                np.asarray, self.outcomes(self.drafts.astype(np.int32), q, pi, drafted)
            )
            following = np.where(at_bonus[..., None], pi, following)
            of_round = {}
            for case, count, token in itertools.product(
                range(len(self.drafts)), ends, range(self.vocab)
            ):
                part = weight[case] * accepted[case, count] * following[case, count, token]
                if part > 0:
                    new = (*self.drafts[case, :count].tolist(), token)
                    of_round[new] = of_round.get(new, 0.0) + part
            farthest = max(farthest, self._distance(of_round, pi, drafted))
            for new, part in of_round.items():
                both = (*emitted, *new)
                if len(both) >= num_tokens:
                    law[both[:num_tokens]] += chance * part
                else:
                    starts[both] = starts.get(both, 0.0) + chance * part
        return law.reshape(-1), farthest, lengths

    def _distance(self, of_round, pi, drafted):
        """How far a round, continued by its own targets, is from them (lengths all equal)."""
        if (drafted < self.longest).any():
            return 0.0
        size = self.longest + 1
        target = {}
        for case, draft in enumerate(self.drafts.tolist()):
            chances = [pi[case, i, x] for i, x in enumerate(draft)]
            target[tuple(draft)] = [1.0, *np.cumprod(chances)], pi[case]
        wanted, found = {}, {}
        for text in itertools.product(range(self.vocab), repeat=size):
            products, at = target[text[:-1]]
            wanted[text] = products[-1] * at[-1, text[-1]]
            total = 0.0
            for count in range(1, size + 1):
                part = of_round.get(text[:count], 0.0)
                rest = [at[i, text[i]] for i in range(count, size)]
                total += part * np.prod(rest)
            found[text] = total
        return sum(abs(found[x] - wanted[x]) for x in wanted) / 2
