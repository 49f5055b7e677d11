"""The recipe for decoder-only networks: Llama and Gemma 2, prompt and target in one row.

Axes: B rows, L tokens, V vocabulary.
"""

import dataclasses
from typing import ClassVar

from specjax.data.batching import Batching, BucketedBatches, JoinedBatch, JoinedLayout
from specjax.data.pairs import TokenPairs
from specjax.models import Gemma2, Gemma2Config, Llama, LlamaConfig
from specjax.models.config import ModelConfig
from specjax.training.losses import Objective, masked_total, token_totals
from specjax.training.task import Total
from specjax.training.text_task import check_teacher, check_vocabulary
from specjax.types import Array, Params

Config = LlamaConfig | Gemma2Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderOnly:
    """Learns the targets of `JoinedBatch`es, not their prompts; constants are the teacher's.

    Rows are padded on the right, where no target looks. The end-of-sequence token is part of a
    target, and learnt.

    Attributes:
      model: the network.
      objective: the loss per target token.
      pad_id: fills up rows; it may be the end-of-sequence token.
      teacher: the network to distil from, if `objective.distillation_weight > 0`.

    Raises:
      ValueError: the teacher does not fit.
    """

    model: Config
    objective: Objective = dataclasses.field(default_factory=Objective)
    pad_id: int = 0
    teacher: ModelConfig | None = None

    item_name: ClassVar[str] = "target tokens"
    families: ClassVar[tuple[type[ModelConfig], ...]] = (LlamaConfig, Gemma2Config)

    def __post_init__(self) -> None:
        check_teacher(self.model, self.teacher, self.objective, self.families)

    def init(self, key: Array) -> Params:
        """See `Task`."""
        return _network(self.model).init(key)

    def loss(self, params: Params, constants: Params, batch: JoinedBatch, key: Array) -> Total:
        """See `Task`; these networks have no dropout."""
        logits, reference = self.logits(self.model, params, batch), None
        if self.teacher is not None:
            assert isinstance(self.teacher, Config)
            reference = self.logits(self.teacher, constants, batch)
        targets, mask = self.targets(batch)
        return masked_total(self.objective.per_token(logits, targets, reference), mask)

    def evaluate(self, params: Params, constants: Params, batch: JoinedBatch) -> dict[str, Total]:
        """See `Task`."""
        return token_totals(self.logits(self.model, params, batch), *self.targets(batch))

    def targets(self, batch: JoinedBatch) -> tuple[Array, Array]:
        """See `TextTask`."""
        return batch.tokens[:, 1:], batch.is_target[:, 1:]

    def logits(self, config: Config, params: Params, batch: JoinedBatch) -> Array:
        """Logits of all tokens but the first.

        Args:
          config: the network: the student's or the teacher's.
          params: its parameters.
          batch: tokens `[B, L]`.

        Returns:
          `[B, L - 1, V]` float32; entry t predicts `tokens[:, t + 1]`.
        """
        return _network(config).apply(params, batch.tokens[:, :-1])

    def batches(
        self, pairs: TokenPairs, batching: Batching, *, seed: int | None, row_multiple: int
    ) -> BucketedBatches:
        """Batches of pairs, for this task.

        Args:
          pairs: the data.
          batching: the shapes; a bucket must hold a prompt with its target.
          seed: of the order; None keeps the data's.
          row_multiple: of devices that share the rows.

        Returns:
          The batches.

        Raises:
          ValueError: a token is not in the network's vocabulary, or no pair fits a bucket.
        """
        check_vocabulary(pairs, self.model)
        layout = JoinedLayout(pad_id=self.pad_id)
        return BucketedBatches(pairs, batching, layout, seed=seed, row_multiple=row_multiple)

    def target_room(self, input_length: int, longest: int) -> int:
        """How many target tokens fit beside so many input tokens into a bucket of `longest`."""
        return max(longest - input_length, 0)


def _network(config: Config) -> Llama | Gemma2:
    return Llama(config) if isinstance(config, LlamaConfig) else Gemma2(config)
