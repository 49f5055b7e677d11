"""The recipe for encoder-decoders: T5 by teacher forcing and distillation.

Axes: B rows, P input tokens, T target tokens, V vocabulary.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from specjax.data.batching import Batching, BucketedBatches, PairBatch, PairLayout
from specjax.data.pairs import TokenPairs
from specjax.models import T5, T5Config
from specjax.models.config import ModelConfig
from specjax.training.losses import Objective, masked_total, token_totals
from specjax.training.task import Total
from specjax.training.text_task import check_teacher, check_vocabulary
from specjax.types import Array, Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seq2Seq:
    """T5 learns the targets of `PairBatch`es; a `Task` whose constants are the teacher's.

    Attributes:
      model: the network.
      objective: the loss per target token.
      pad_id: marks padding; where the data holds it, it is neither learnt nor attended to.
      eos_id: the end-of-sequence token.
      teacher: the network to distil from, if `objective.distillation_weight > 0`.

    Raises:
      ValueError: the padding token ends sequences, or the teacher does not fit.
    """

    model: T5Config
    objective: Objective = dataclasses.field(default_factory=Objective)
    pad_id: int = 0
    eos_id: int = 1
    teacher: ModelConfig | None = None

    item_name: ClassVar[str] = "target tokens"
    families: ClassVar[tuple[type[ModelConfig], ...]] = (T5Config,)

    def __post_init__(self) -> None:
        if self.pad_id == self.eos_id:
            raise ValueError(
                f"pad_id={self.pad_id} is also the end-of-sequence token, which would never be "
                "learnt; use a vocabulary with a padding token of its own"
            )
        check_teacher(self.model, self.teacher, self.objective, self.families)

    def init(self, key: Array) -> Params:
        """See `Task`."""
        return T5(self.model).init(key)

    def loss(self, params: Params, constants: Params, batch: PairBatch, key: Array) -> Total:
        """See `Task`."""
        use_dropout = self.model.dropout_rate > 0.0
        logits = self.logits(self.model, params, batch, key if use_dropout else None)
        reference = None
        if self.teacher is not None:
            assert isinstance(self.teacher, T5Config)
            reference = self.logits(self.teacher, constants, batch)
        targets, mask = self.targets(batch)
        return masked_total(self.objective.per_token(logits, targets, reference), mask)

    def evaluate(self, params: Params, constants: Params, batch: PairBatch) -> dict[str, Total]:
        """See `Task`."""
        return token_totals(self.logits(self.model, params, batch), *self.targets(batch))

    def targets(self, batch: PairBatch) -> tuple[Array, Array]:
        """See `TextTask`."""
        return batch.targets, batch.targets != self.pad_id

    def logits(
        self, config: T5Config, params: Params, batch: PairBatch, key: Array | None = None
    ) -> Array:
        """Logits of the targets, all positions at once.

        Args:
          config: the network: the student's or the teacher's.
          params: its parameters.
          batch: inputs `[B, P]` and targets `[B, T]`.
          key: a PRNG key for dropout; None drops nothing.

        Returns:
          `[B, T, V]` float32.
        """
        inputs, targets = batch
        start = jnp.full((targets.shape[0], 1), config.decoder_start_token, targets.dtype)
        decoder_inputs = jnp.concatenate([start, targets[:, :-1]], axis=1)
        mask = inputs != self.pad_id
        return T5(config).apply(params, inputs, decoder_inputs, encoder_mask=mask, dropout_key=key)

    def batches(
        self, pairs: TokenPairs, batching: Batching, *, seed: int | None, row_multiple: int
    ) -> BucketedBatches:
        """Batches of pairs, for this task.

        Args:
          pairs: the data.
          batching: the shapes.
          seed: of the order; None keeps the data's.
          row_multiple: of devices that share the rows.

        Returns:
          The batches.

        Raises:
          ValueError: a token is not in the network's vocabulary, or no pair fits a bucket.
        """
        check_vocabulary(pairs, self.model)
        layout = PairLayout(pad_id=self.pad_id, eos_id=self.eos_id)
        return BucketedBatches(pairs, batching, layout, seed=seed, row_multiple=row_multiple)

    def target_room(self, input_length: int, longest: int) -> int:
        """How many target tokens fit beside so many input tokens into a bucket of `longest`."""
        return longest if input_length <= longest else 0
