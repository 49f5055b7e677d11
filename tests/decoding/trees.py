"""A drafter of trees without a model."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax import types


@dataclasses.dataclass(frozen=True)
class Likeliest(types.Drafter):
    """The likeliest tokens after each other, by a table over the last token: `parents` in order.

    A node's children are the likeliest tokens after it; its distribution is the table's.
    """

    vocab_size: int
    parents: tuple[int, ...]
    early: bool = False
    has_confidence: bool = True

    traits = types.DraftTraits(drafts_trees=True)

    @property
    def max_draft(self):
        return len(self.parents)

    def prefill(self, params, prompts, max_length):
        return jnp.zeros(prompts.inputs.shape[0])

    def propose(self, params, state, inputs):
        tokens, limits, active = inputs.tokens, inputs.limits, inputs.active
        nodes, children = [tokens], [0] * (1 + self.max_draft)
        for parent in self.parents:
            order = jnp.argsort(-params[nodes[parent]], axis=-1)
            nodes.append(order[:, children[parent]].astype(jnp.int32))
            children[parent] += 1
        probs = jnp.stack([jax.nn.softmax(params[node], axis=-1) for node in nodes], axis=1)
        # What a leaf is followed by is asked for: nothing may read it here.
        inner = jnp.array([i in self.parents for i in range(1 + self.max_draft)])
        probs = jnp.where(inner[None, :, None], probs, -7.0)
        parents = jnp.broadcast_to(
            jnp.array(self.parents, jnp.int32), (tokens.size, len(self.parents))
        )
        count = limits - (tokens % 2 if self.early else 0)
        count = jnp.where(active, jnp.maximum(count, 0), 0)
        confidences = probs if inputs.with_confidence else None
        drafted = jnp.stack(nodes[1:], axis=1)
        return types.DraftBlock(drafted, probs, confidences, count, {}, parents), state

    def bonus(self, params, state, inputs, block):
        tokens = inputs.tokens
        drafted = jnp.concatenate([tokens[:, None], block.tokens], axis=1)
        last = jnp.take_along_axis(drafted, block.num_drafted[:, None], axis=1)[:, 0]
        probs = jax.nn.softmax(params[last], axis=-1)
        return types.Bonus(probs, probs if inputs.with_confidence else None, {}), state
