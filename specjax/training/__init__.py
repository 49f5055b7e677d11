"""Training: one trainer of any loss over a model, and the recipes that stand on it."""

from specjax.training.decoder_only import DecoderOnly
from specjax.training.distillation import add_teacher_samples
from specjax.training.environment import environment
from specjax.training.head_data import HeadBatch, HeadBatches, HeadData, Labelling
from specjax.training.head_labels import Positions, label
from specjax.training.head_recipe import HeadRecipe, compare_predictors, run_head_recipe
from specjax.training.head_task import HeadTask
from specjax.training.losses import (
    Objective,
    cross_entropy,
    distillation_loss,
    masked_total,
    token_totals,
)
from specjax.training.optimizer import AdamW, Cosine, InverseSqrt, Schedule
from specjax.training.recipe import Recipe, make_task, run_recipe
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
from specjax.training.trainer import Batches, TrainerConfig, TrainingData, TrainResult, train
from specjax.training.vocabulary import train_vocabulary

__all__ = [
    "AdamW",
    "Batches",
    "Cosine",
    "DecoderOnly",
    "Evaluation",
    "HeadBatch",
    "HeadBatches",
    "HeadData",
    "HeadRecipe",
    "HeadTask",
    "InverseSqrt",
    "Labelling",
    "Objective",
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
    "add_teacher_samples",
    "compare_predictors",
    "cross_entropy",
    "distillation_loss",
    "environment",
    "init_state",
    "label",
    "make_eval_step",
    "make_task",
    "make_train_step",
    "masked_total",
    "run_head_recipe",
    "run_recipe",
    "token_totals",
    "train",
    "train_vocabulary",
]
