"""What training, its data and its figures refuse: what is given, and what is told."""

import pytest

from specjax.acceptance_head import HeadConfig
from specjax.data.batching import check_pairs
from specjax.data.examples import Example
from specjax.data.few_shot import FewShot, Template
from specjax.errors import UserError
from specjax.evaluation import Bootstrap
from specjax.training import AdamW, Objective, Teacher
from specjax.training.recipe import Evaluation
from tests.training.toy import trainer_config


def adam(**changes):
    return lambda: AdamW(**{"learning_rate": 1.0, "warmup_steps": 5, **changes})


def shots(**changes):
    return lambda: FewShot(**{"prompt": "Q: {a}", "completion": "{b}", **changes})


def given(kind, **options):
    return lambda: kind(**options)


def pairs(*examples):
    return lambda: check_pairs(list(examples))


TEMPLATES = ("a { b", "a }", "{}", "{a..b}", "{|x}")
TOTAL = "give total_steps if and only"
REFUSED = [
    (adam(relative="false"), "AdamW: relative must be True or False, got 'false'"),
    (adam(warmup_steps=0), "warmup_steps must be finite and above 0, got 0"),
    (adam(warmup_steps=9, decay="cosine", total_steps=9), "=9 must be below total_steps=9"),
    (adam(floor=1.5, decay="cosine", total_steps=9), "floor must lie in [0, 1], got 1.5"),
    (adam(decay="cosine"), f"decay='cosine' and total_steps=None: {TOTAL}"),
    (adam(total_steps=9), f"decay='inverse_sqrt' and total_steps=9: {TOTAL}"),
    (adam(decay="linear"), "decay must be one of inverse_sqrt, cosine, got 'linear'"),
    (adam(b2=1.0), "AdamW: b2 must lie in [0, 1), got 1.0"),
    (adam(weight_decay=-1.0), "weight_decay must be finite and at least 0, got -1.0"),
    *((given(Objective, jsd_beta=x), "jsd_beta must lie in (0, 1), got") for x in (0.0, 1.0)),
    *(
        (given(Objective, lk_eta=x), "lk_eta must be finite and at least 0, got")
        for x in (-1.0, float("inf"))
    ),
    (given(Objective, label_smoothing=1.5), "Objective: label_smoothing must lie in [0, 1), got 1"),
    (given(Objective, distillation_weight=1.5), "distillation_weight must lie in [0, 1], got 1.5"),
    (given(Objective, label_smoothing="x"), "Objective: label_smoothing must be a number, got 'x'"),
    (given(Teacher, on_policy_share="half"), "on_policy_share must be a number, got 'half'"),
    (given(Evaluation, metrics="bleu"), "`metrics` must be a tuple of names, got 'bleu'; write"),
    (given(Evaluation, metrics=("meteor",)), "`metrics` must be names in bleu, "),
    (given(Evaluation, max_new_tokens=0), "Evaluation: max_new_tokens must be "),
    (given(Evaluation, limit=1.5), "Evaluation: limit must be "),
    (given(Evaluation, batch_size="x"), "Evaluation: batch_size must be a number, got 'x'"),
    (given(Evaluation, at_checkpoints=1), "at_checkpoints must be True or False, got 1"),
    (given(trainer_config, progress="no"), "progress must be True or False, got 'no'"),
    (given(trainer_config, allow_other_environment=1), "environment must be True or False, got 1"),
    *(
        (given(trainer_config, **{name: 0}), f"{name} must be a whole number of at least 1, got 0")
        for name in ("num_steps", "checkpoint_every", "log_every", "num_devices")
    ),
    (given(trainer_config, ema_decay=1.0), "ema_decay must lie in [0, 1), got 1.0"),
    (given(HeadConfig, width=0), "HeadConfig: width must be a whole number of at least 1, got 0"),
    (given(HeadConfig, width="8"), "HeadConfig: width must be a number, got '8'"),
    (given(HeadConfig, width=8, blocks=-1), "blocks must be a whole number of at least 0"),
    (given(HeadConfig, width=8, confidences=1), "confidences must be True or False, got 1"),
    (given(Bootstrap, resamples=10), "Bootstrap: resamples must be a whole number of at least 100"),
    (given(Bootstrap, level=1.0), "Bootstrap: level must lie in (0, 1)"),
    (given(Bootstrap, seed=-1), "Bootstrap: seed must"),
    (shots(shots=2, examples="x", completion=""), "a file, and `completion`"),
    (shots(shots=-1), "shots must be"),
    (shots(limit=0), "limit must be"),
    (shots(prompt=3), "prompt must be a text, got 3"),
    (shots(completion=None), "completion must be a text, got None"),
    (shots(references=1), "references must be a text, got 1"),
    (shots(separator=None), "separator must be a text, got None"),
    (shots(instruction=1), "instruction must be a text, got 1"),
    *((given(Template, source=text), "the template") for text in TEMPLATES),
    (pairs(Example(0, "a", "b"), Example(1, "a")), "example 1 must have a single reference text"),
    (pairs(), "the source has no examples"),
    (pairs(Example(3, "a", "b\ud800")), "example 3 has half a surrogate pair"),
    (pairs(Example(2, "a", ("b", "c"))), "example 2 must have a single reference text"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_is_wrong_is_told_in_one_line(make, message):
    with pytest.raises(UserError) as told:
        make()
    assert message in str(told.value) and "\n" not in str(told.value)
