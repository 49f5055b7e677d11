"""The interface of tasks, losses over parameters; and the task that learns texts.

Axes: B rows, L tokens of a row, T target tokens, V vocabulary.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, Key

from specjax.data.batching import Batching, BucketedBatches, JoinedLayout, PairLayout, TokenPairs
from specjax.errors import UserError
from specjax.models import ModelConfig, model_from_config
from specjax.training.losses import Objective, Total, masked_total, token_totals
from specjax.types import Params


class Task(Protocol):
    """A loss over the parameters of a model.

    An instance is a frozen, hashable dataclass of plain values, model configurations and such
    dataclasses: it is the key of jitted steps, and a run records it. Arrays are in `params`, which
    are trained, and in `constants`, which are not: the parameters of a teacher, or of the model
    below a head.
    """

    def __hash__(self) -> int:
        """By value, like a frozen dataclass."""

    @property
    def item_name(self) -> str:
        """The name of the items that the loss is a mean over, in the plural: "target tokens"."""

    def init(self, key: Key[Array, ""]) -> Params:
        """Initial parameters: a nested dict of float32 arrays."""

    def loss(self, params: Params, constants: Any, batch: Any, key: Key[Array, ""]) -> Total:
        """The loss, summed over a batch: a pytree of arrays with the rows first."""

    def evaluate(self, params: Params, constants: Any, batch: Any) -> Mapping[str, Total]:
        """Figures of a batch of validation data by name, without randomness.

        "loss" is required; the mean of the total that `TrainerConfig.choose_by` names chooses the
        best checkpoint.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextTask:
    """Trains a language model on pairs of texts; `constants` are the teacher's parameters.

    An encoder-decoder reads `PairBatch`es, a decoder-only network `JoinedBatch`es. Rows are padded
    on the right, where no target sees it. A target includes its end-of-sequence token.

    Attributes:
      model: the network.
      objective: the loss per target token.
      pad_id: fills up rows. An encoder-decoder neither learns nor reads it, even in the data; for a
        decoder-only network it may be the end-of-sequence token.
      eos_id: the end-of-sequence token, the only input of an encoder-decoder's row without a pair.
      teacher: the network to distil from, if and only if `objective.distillation_weight > 0`.
    """

    model: ModelConfig
    objective: Objective = dataclasses.field(default_factory=Objective)
    pad_id: int = 0
    eos_id: int = 1
    teacher: ModelConfig | None = None

    item_name: ClassVar[str] = "target tokens"

    def __post_init__(self) -> None:
        if self._has_encoder and self.pad_id == self.eos_id:
            raise UserError(
                f"pad_id={self.pad_id} is also the end-of-sequence token, which would never be "
                "learnt; use a vocabulary with a separate padding token"
            )
        distils = self.objective.distillation_weight > 0.0
        assert distils == (self.teacher is not None), "a teacher has a weight, and only a teacher"
        if (teacher := self.teacher) is None:
            return
        if (teacher.encoder_style is not None) != self._has_encoder:
            raise UserError(
                f"a {type(teacher).__name__.removesuffix('Config')} cannot teach a "
                f"{type(self.model).__name__.removesuffix('Config')} token by token; set "
                "distillation_weight to 0 and use its samples, or use another teacher"
            )
        if teacher.vocab_size != self.model.vocab_size:
            raise UserError(
                f"the teacher's vocab_size={teacher.vocab_size} and the network's vocab_size="
                f"{self.model.vocab_size} must be equal"
            )

    @property
    def _has_encoder(self) -> bool:
        return self.model.encoder_style is not None

    def init(self, key: Key[Array, ""]) -> Params:
        return model_from_config(self.model).init(key)

    def loss(self, params: Params, constants: Params, batch: Any, key: Key[Array, ""]) -> Total:
        drops = self.model.style.dropout_rate > 0.0
        logits = self.logits(self.model, params, batch, key if drops else None)
        reference = None
        if self.teacher is not None:
            reference = self.logits(self.teacher, constants, batch)
        targets, mask = self.targets(batch)
        return masked_total(self.objective.per_token(logits, targets, reference), mask)

    def evaluate(self, params: Params, constants: Params, batch: Any) -> dict[str, Total]:
        return token_totals(self.logits(self.model, params, batch), *self.targets(batch))

    def targets(self, batch: Any) -> tuple[Int32[Array, "B T"], Bool[Array, "B T"]]:
        """The tokens that `logits` predicts, and those that count.

        Those that count are adjacent in each row.
        """
        if self._has_encoder:
            return batch.targets, batch.targets != self.pad_id
        return batch.tokens[:, 1:], batch.is_target[:, 1:]

    def logits(
        self, config: ModelConfig, params: Params, batch: Any, key: Key[Array, ""] | None = None
    ) -> Float32[Array, "B T V"]:
        """Logits of the targets, all positions at once.

        Returns:
          `[B, T, V]` float32. In a decoder-only network, entry t predicts `tokens[:, t + 1]`.
        """
        network: Any = model_from_config(config)
        if config.encoder_style is None:
            return network.apply(params, batch.tokens[:, :-1])
        inputs, targets = batch
        first = config.decoder_start_token  # type: ignore[attr-defined]
        start = jnp.full((targets.shape[0], 1), first, targets.dtype)
        before = jnp.concatenate([start, targets[:, :-1]], axis=1)
        mask = inputs != self.pad_id
        return network.apply(params, inputs, before, encoder_mask=mask, dropout_key=key)

    def batches(
        self, pairs: TokenPairs, batching: Batching, *, seed: int | None, row_multiple: int
    ) -> BucketedBatches:
        """Batches of pairs, for this task."""
        largest = int(pairs.tokens.max())
        if largest >= self.model.vocab_size:
            raise UserError(
                f"the data contain token {largest}, but the network's vocab_size="
                f"{self.model.vocab_size}; make it larger, or use another vocabulary"
            )
        pad = self.pad_id
        paired = self._has_encoder
        layout = PairLayout(pad_id=pad, eos_id=self.eos_id) if paired else JoinedLayout(pad_id=pad)
        return BucketedBatches(pairs, batching, layout, seed=seed, row_multiple=row_multiple)

    def target_room(self, input_length: int, longest: int) -> int:
        """The number of target tokens that fit with this many input tokens into a bucket."""
        if self._has_encoder:
            return longest if input_length <= longest else 0
        return max(longest - input_length, 0)
