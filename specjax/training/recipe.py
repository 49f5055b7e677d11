"""How pairs of texts become a model: the settings of `specjax train`."""

import dataclasses
import os

from specjax.checks import check_path, whole_number
from specjax.data.batching import Batching
from specjax.models.config import ModelConfig
from specjax.training.acceptance import Acceptance
from specjax.training.losses import Objective
from specjax.training.on_policy import OnPolicy
from specjax.training.scoring import Evaluation
from specjax.training.vocabulary import VOCABULARY_TYPES

PathLike = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How pairs of texts become a model.

    Attributes:
      model: the network's configuration: a T5, a Llama or a Gemma 2; by default that of
        `init_from`.
      init_from: a model's directory to start from (fine-tuning); its network must be `model`'s.
      vocabulary: a model's directory, a SentencePiece model, a `tokenizer.json`, or "bytes". By
        default that of `init_from` or `teacher`; without these a SentencePiece vocabulary of
        `model.vocab_size` pieces is trained on the training data.
      vocabulary_type: of a trained one, "unigram" or "bpe"; see `train_vocabulary`.
      teacher: a model's directory to distil from, with the same vocabulary; the objective's
        `distillation_weight`, `teacher_samples`, `on_policy` and `acceptance` say how.
      teacher_samples: targets drawn from the teacher for each input, added to the references.
      on_policy: how many rows have targets that the student itself has drawn, for the teacher to
        correct; this needs `distillation_weight` 1.
      acceptance: how the student is measured as the teacher's drafter.
      objective: the loss per target token.
      batching: the shapes of the batches.
      evaluation: what is decoded and scored.
      export_dtype: of the exported arrays: float32, bfloat16 or float16.

    Raises:
      TypeError: for a value of the wrong type.
      ValueError: for a value outside its range, or a teacher without a use.
    """

    model: ModelConfig | None = None
    init_from: PathLike | None = None
    vocabulary: PathLike | None = None
    vocabulary_type: str | None = None
    teacher: PathLike | None = None
    teacher_samples: int = 0
    on_policy: OnPolicy = dataclasses.field(default_factory=OnPolicy)
    acceptance: Acceptance = dataclasses.field(default_factory=Acceptance)
    objective: Objective = dataclasses.field(default_factory=Objective)
    batching: Batching = dataclasses.field(default_factory=Batching)
    evaluation: Evaluation = dataclasses.field(default_factory=Evaluation)
    export_dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("init_from", "vocabulary", "teacher"):
            if getattr(self, name) is not None:
                check_path(getattr(self, name), f"{name}=")
        if self.model is None and self.init_from is None:
            raise ValueError(
                "neither `model` nor `init_from` is given; give a configuration (MODEL, as the "
                "files of gin_configs/models do), or a model's directory to fine-tune (INIT_FROM)"
            )
        if not isinstance(self.model, ModelConfig | None):
            raise TypeError(f"`model` must be a configuration of a network, got {self.model!r}")
        for name, choices in (
            ("export_dtype", ("float32", "bfloat16", "float16")),
            ("vocabulary_type", (*VOCABULARY_TYPES, None)),
        ):
            if getattr(self, name) not in choices:
                told = f"one of {', '.join(filter(None, choices))}, got {getattr(self, name)!r}"
                raise ValueError(f"`{name}` must be {told}")
        samples = whole_number("teacher_samples", self.teacher_samples, low=0)
        object.__setattr__(self, "teacher_samples", samples)
        self._check_teacher()

    def _check_teacher(self) -> None:
        weight, share = self.objective.distillation_weight, self.on_policy.share
        uses = {
            "distillation_weight": weight,
            "teacher_samples": self.teacher_samples,
            "on_policy share": share,
            "acceptance texts": self.acceptance.texts,
        }
        if (self.teacher is not None) != any(uses.values()):
            asked = [f"{name}={value}" for name, value in uses.items() if value]
            raise ValueError(
                f"teacher={self.teacher} and {', '.join(asked) or 'no use for it'}: give a teacher "
                f"exactly if one of {', '.join(uses)} is given"
            )
        if share and weight < 1.0:
            raise ValueError(
                f"on_policy share={share} and distillation_weight={weight}: the rest of the weight "
                "would teach the student its own texts; set distillation_weight to 1"
            )
