"""Training: one trainer of any loss over a model, and the recipes that stand on it."""

from specjax.training.acceptance import Acceptance, AcceptedTokens, accepted_total
from specjax.training.decoder_only import DecoderOnly
from specjax.training.distillation import add_teacher_samples
from specjax.training.divergences import (
    forward_kl,
    jensen_shannon,
    reverse_kl,
    total_variation,
)
from specjax.training.environment import environment
from specjax.training.head_data import HeadBatch, HeadBatches, HeadData, Labelling
from specjax.training.head_evaluation import compare_predictors
from specjax.training.head_grid import HeadGrid, run_head_grid
from specjax.training.head_labels import Positions, label
from specjax.training.head_recipe import HeadRecipe, run_head_recipe
from specjax.training.head_task import HeadTask
from specjax.training.losses import (
    Objective,
    cross_entropy,
    masked_total,
    token_totals,
)
from specjax.training.on_policy import OnPolicy
from specjax.training.optimizer import AdamW, Cosine, InverseSqrt, Schedule
from specjax.training.preparation import make_task
from specjax.training.recipe import Recipe
from specjax.training.recipe_runner import run_recipe
from specjax.training.scoring import Evaluation, Scorer
from specjax.training.seq2seq import Seq2Seq
from specjax.training.step import (
    StepMetrics,
    TrainState,
    init_state,
    make_eval_step,
    make_train_step,
)
from specjax.training.task import Task, Total
from specjax.training.text_task import TextTask
from specjax.training.trainer import TrainResult, train
from specjax.training.trainer_config import TrainerConfig
from specjax.training.training_data import Batches, Phases, TrainingData
from specjax.training.vocabulary import train_vocabulary

__all__ = [
    "Acceptance",
    "AcceptedTokens",
    "AdamW",
    "Batches",
    "Cosine",
    "DecoderOnly",
    "Evaluation",
    "HeadBatch",
    "HeadBatches",
    "HeadData",
    "HeadGrid",
    "HeadRecipe",
    "HeadTask",
    "InverseSqrt",
    "Labelling",
    "Objective",
    "OnPolicy",
    "Phases",
    "Positions",
    "Recipe",
    "Schedule",
    "Scorer",
    "Seq2Seq",
    "StepMetrics",
    "Task",
    "TextTask",
    "Total",
    "TrainResult",
    "TrainState",
    "TrainerConfig",
    "TrainingData",
    "accepted_total",
    "add_teacher_samples",
    "compare_predictors",
    "cross_entropy",
    "environment",
    "forward_kl",
    "init_state",
    "jensen_shannon",
    "label",
    "make_eval_step",
    "make_task",
    "make_train_step",
    "masked_total",
    "reverse_kl",
    "run_head_grid",
    "run_head_recipe",
    "run_recipe",
    "token_totals",
    "total_variation",
    "train",
    "train_vocabulary",
]
