"""Training T5 by teacher forcing and distillation, resumable to the bit."""

from specjax.training.distillation import add_teacher_samples
from specjax.training.greedy import generate
from specjax.training.loop import Teacher, TrainResult, train
from specjax.training.losses import cross_entropy, distillation_loss, masked_mean
from specjax.training.optimizer import AdamW, Cosine, InverseSqrt, Schedule
from specjax.training.recipe import greedy_bleu, run_recipe
from specjax.training.step import (
    Objective,
    StepMetrics,
    TrainState,
    init_state,
    make_eval_step,
    make_train_step,
)
from specjax.training.vocabulary import train_vocabulary

__all__ = [
    "AdamW",
    "Cosine",
    "InverseSqrt",
    "Objective",
    "Schedule",
    "StepMetrics",
    "Teacher",
    "TrainResult",
    "TrainState",
    "add_teacher_samples",
    "cross_entropy",
    "distillation_loss",
    "generate",
    "greedy_bleu",
    "init_state",
    "make_eval_step",
    "make_train_step",
    "masked_mean",
    "run_recipe",
    "train",
    "train_vocabulary",
]
