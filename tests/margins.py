"""Tracing rows that differ between two ways of computing the same: how near was the decision?

Float sums depend on shapes and devices in their last bits, so where a decision (an argmax, a draw,
an acceptance) lies within rounding of another, the rows part. To trace a row, its logits are
shaken by less than the margin in question: a row that then changes was decided within it.
"""

import dataclasses

import jax
import jax.numpy as jnp

import specjax
from specjax.types import LanguageModel


@dataclasses.dataclass(frozen=True)
class Shaken(LanguageModel):
    """A `LanguageModel` whose parameters end with (by how much logits are off, a seed)."""

    model: object

    @property
    def vocab_size(self):
        return self.model.vocab_size

    def prompt_positions(self, input_lengths, prefix_lengths):
        return self.model.prompt_positions(input_lengths, prefix_lengths)

    def prefill(self, params, *args):
        return self.model.prefill(params[0], *args)

    def write(self, cache, updates, positions):
        return self.model.write(cache, updates, positions)

    def score(self, params, cache, tokens, positions):
        logits, hidden, updates = self.model.score(params[0], cache, tokens, positions)
        margin, seed = params[1]
        noise = jax.random.uniform(jax.random.key(seed), logits.shape, minval=-1.0, maxval=1.0)
        return logits + margin * noise, hidden, updates


def shaken(model: specjax.TextModel, margin: float, seed: int) -> specjax.TextModel:
    params = (model.params, (jnp.float32(margin), jnp.uint32(seed)))
    return dataclasses.replace(model, model=Shaken(model.model), params=params)


def within(pair, prompt, margin, *, seed, row, tries=8, **options) -> bool:
    """Whether row `row` of a run changes when all logits are off by up to `margin`.

    In a probability no more than 2 * margin * p is lost or won by that.
    """

    def decode(margin, shake):
        models = specjax.Pair(
            *(
                shaken(each, margin, shake + i)
                for i, each in enumerate((pair.drafter, pair.verifier))
            )
        )
        decoder = specjax.Decoder(models, **options)
        return decoder([prompt], seed=seed, ids=[row], progress=False).tokens[0].tolist()

    still = decode(0.0, 0)
    return any(decode(margin, 2 * i) != still for i in range(tries))
