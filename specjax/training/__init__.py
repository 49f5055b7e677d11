"""Training: a trainer of any loss over a model, and the recipes that use it.

Other parts of a recipe have their own modules: `tasks` (a loss, `TextTask`), `teacher`
(distillation, `VerifierTexts`), `recipe` (`Evaluation`), `head_data` (`Labelling`), `vocabulary`.
"""

from specjax.training.drafter_recipe import DrafterRecipe, train_drafter
from specjax.training.head_recipe import HeadRecipe, train_head
from specjax.training.head_refresh import HeadRefresh
from specjax.training.losses import Objective
from specjax.training.recipe import Recipe, train_model
from specjax.training.step import AdamW
from specjax.training.teacher import Teacher
from specjax.training.trainer import TrainerConfig, TrainingData, train

__all__ = [
    "AdamW",
    "DrafterRecipe",
    "HeadRecipe",
    "HeadRefresh",
    "Objective",
    "Recipe",
    "Teacher",
    "TrainerConfig",
    "TrainingData",
    "train",
    "train_drafter",
    "train_head",
    "train_model",
]
