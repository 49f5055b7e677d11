"""Keeps a draft head up to date with a verifier whose weights change, as in rollouts."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from specjax.data.batching import JoinedLayout
from specjax.text import Pair, TextModel
from specjax.text.teacher_forcing import KnownTexts
from specjax.training.drafter_recipe import DrafterRecipe
from specjax.training.drafter_task import Frozen
from specjax.training.step import AdamW, TrainState, init_state, make_train_step
from specjax.training.teacher import buckets_for


class _Constant(AdamW):
    def rate(self, step: Any) -> Array:
        done = jnp.asarray(step, jnp.float32) + 1.0
        return self.learning_rate * jnp.minimum(done / self.warmup_steps, 1.0)


class HeadRefresh:
    """Trains a draft head on texts of its verifier, a few updates a call.

        refresh = HeadRefresh(DrafterRecipe(max_draft=5), updates=8)
        head = refresh(pair, texts)  # after each change of the verifier's weights

    The verifier reads the texts once more, with its present weights. The optimiser goes on from
    call to call, so each head has a `HeadRefresh` of its own. A call compiles one program a length.

    Args:
      recipe: the loss: its `max_draft`, `objective`, `decay` and `anchors`.
      updates: of a call.
      rows: texts of an update, drawn anew; on a mesh rounded up, so that its devices share them.
      learning_rate: constant after ten updates.
      seed: of what is drawn.
    """

    def __init__(
        self,
        recipe: DrafterRecipe | None = None,
        *,
        updates: int = 8,
        rows: int = 32,
        learning_rate: float = 1e-3,
        seed: int = 0,
    ) -> None:
        self._recipe, self._updates, self._rows = recipe or DrafterRecipe(), updates, rows
        self._optimizer = _Constant(learning_rate=learning_rate, warmup_steps=10)
        self._seed, self._rng = seed, np.random.default_rng(seed)
        self._state: TrainState | None = None

    def __call__(self, pair: Pair, texts: KnownTexts) -> TextModel:
        """Returns the head after more updates, on texts of a decoder-only verifier."""
        head, verifier = pair.drafter, pair.verifier
        model: Any = head.model
        learnt, frozen = dict(head.params["network"]), Frozen(verifier.params)
        if (places := head.params.get("places")) is not None:
            drafted = jnp.argsort(places)[: model.config.rows].astype(jnp.int32)
            frozen = Frozen(verifier.params, drafted, places, learnt.pop("logits_dense"))
        if self._state is None:
            floats = jax.tree.map(lambda x: x.astype(jnp.float32), learnt)
            self._state = verifier.place(init_state(floats, self._optimizer, 0.0))
        task = self._recipe.task(model.config, verifier)
        step = make_train_step(task, self._optimizer, seed=self._seed, ema_decay=0.0)
        both = list(zip(*texts, strict=True))
        length = buckets_for(np.concatenate(each) for each in both)[-1]
        rows = -(-self._rows // verifier.row_multiple) * verifier.row_multiple
        for _ in range(self._updates):
            chosen = self._rng.permutation(len(both))[:rows]
            layout = JoinedLayout(pad_id=verifier.tokenizer.pad_id)
            batch: Any = layout.fill([both[i] for i in chosen], rows, length)
            if verifier.partitioner is not None:
                batch = verifier.partitioner.place_rows(batch)
            self._state, _ = step(self._state, frozen, batch)
        # Copies, because the next call takes the buffers of the state.
        trained = jax.tree.map(
            lambda new, old: jnp.array(new, old.dtype), self._state.params, learnt
        )
        params = {**head.params, "network": {**head.params["network"], **trained}}
        return dataclasses.replace(head, params=params)
