"""What a task on texts offers beyond its loss, and the checks that such tasks share."""

from typing import Any, ClassVar, Protocol

from specjax.data.batching import Batching, BucketedBatches
from specjax.data.pairs import TokenPairs
from specjax.models.config import ModelConfig
from specjax.training.losses import Objective
from specjax.training.task import Task
from specjax.types import Array, Params


class TextTask(Task, Protocol):
    """A task that learns a language model from pairs of texts.

    Attributes:
      families: the configurations of networks that read the same batches.
    """

    families: ClassVar[tuple[type[ModelConfig], ...]]

    @property
    def model(self) -> Any:
        """The network's configuration."""

    def batches(
        self, pairs: TokenPairs, batching: Batching, *, seed: int | None, row_multiple: int
    ) -> BucketedBatches:
        """Batches of pairs, for this task.

        Args:
          pairs: the data.
          batching: the shapes.
          seed: of the order; None keeps the data's.
          row_multiple: of devices that share the rows.
        """

    def logits(self, config: Any, params: Params, batch: Any) -> Array:
        """Logits `[B, T, V]` float32 of all target positions, by a network of the task's family.

        Args:
          config: the network: the student's or a teacher's.
          params: its parameters.
          batch: of `batches`.
        """

    def targets(self, batch: Any) -> tuple[Array, Array]:
        """The tokens `[B, T]` int32 that `logits` predicts, and `[B, T]` bool which of them count.

        Those that count stand side by side in each row.

        Args:
          batch: of `batches`.
        """

    def target_room(self, input_length: int, longest: int) -> int:
        """How many target tokens fit beside so many input tokens into a bucket of `longest`."""


def check_teacher(
    model: ModelConfig,
    teacher: ModelConfig | None,
    objective: Objective,
    families: tuple[type[ModelConfig], ...],
) -> None:
    """Makes sure that there is a teacher exactly where one is needed, and that it fits.

    Args:
      model: the student.
      teacher: the network to distil from, or None.
      objective: the loss.
      families: the configurations that read the same batches as the student.

    Raises:
      ValueError: if not.
    """
    if (objective.distillation_weight > 0.0) != (teacher is not None):
        raise ValueError(
            f"distillation_weight={objective.distillation_weight} and teacher="
            f"{'given' if teacher else 'None'}: a teacher is needed exactly if the weight is > 0"
        )
    if teacher is not None:
        remedy = "set distillation_weight to 0 and use its samples, or use another teacher"
        check_reads_alike(model, teacher, families, remedy)


def check_reads_alike(
    model: ModelConfig, teacher: ModelConfig, families: tuple[type[ModelConfig], ...], remedy: str
) -> None:
    """Makes sure that a teacher can be compared with the student token by token.

    Args:
      model: the student.
      teacher: the network to compare with.
      families: the configurations that read the same batches as the student.
      remedy: what to do if not, for the message.

    Raises:
      ValueError: if not.
    """
    if not isinstance(teacher, families):
        raise ValueError(
            f"a {type(teacher).__name__.removesuffix('Config')} cannot teach a "
            f"{type(model).__name__.removesuffix('Config')} token by token; {remedy}"
        )
    if teacher.vocab_size != model.vocab_size:
        raise ValueError(
            f"the teacher's vocab_size={teacher.vocab_size} and the network's vocab_size="
            f"{model.vocab_size} differ; give the network the teacher's"
        )


def check_vocabulary(pairs: TokenPairs, model: ModelConfig) -> None:
    """Makes sure that the network has a row for every token.

    Args:
      pairs: the data.
      model: the network.

    Raises:
      ValueError: if it has not.
    """
    largest = int(pairs.tokens.max())
    if largest >= model.vocab_size:
        raise ValueError(
            f"the data contain token {largest}, but the network's vocab_size={model.vocab_size}; "
            "make it larger, or use another vocabulary"
        )
