"""What a task on texts offers beyond its loss, and the checks that such tasks share."""

from typing import Any, Protocol

from specjax.data.batching import Batching, BucketedBatches
from specjax.data.pairs import TokenPairs
from specjax.models.config import ModelConfig
from specjax.training.losses import Objective
from specjax.training.task import Task


class TextTask(Task, Protocol):
    """A task that learns a language model from pairs of texts."""

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
    if teacher is None:
        return
    if not isinstance(teacher, families):
        raise ValueError(
            f"a {type(teacher).__name__.removesuffix('Config')} cannot teach a "
            f"{type(model).__name__.removesuffix('Config')} token by token; set "
            "distillation_weight to 0 and use its samples, or use another teacher"
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
