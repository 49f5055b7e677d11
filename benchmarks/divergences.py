"""The divergences of `specjax train`, by the drafted tokens that the verifier accepts.

A drafter goes on learning from its verifier with each divergence: from the same weights, on the
same batches, at the same rates; or a new drafter of the same sizes learns (`--from-scratch`). The
verifier reads each batch once for all of them.
"""

import argparse
import dataclasses
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import command
from benchmarks.acceptance import figures
from specjax import rules, verification
from specjax.checkpoints import load_model
from specjax.cli.bench import check_positive
from specjax.cli.report import Report
from specjax.compilation import jit
from specjax.data.batching import Batching, TokenPairs, tokenize_pairs
from specjax.data.examples import read_aligned
from specjax.models import model_from_config
from specjax.text import Decoder, Pair, TextModel
from specjax.text.directories import DEFAULT_PAIR, built_in_pair
from specjax.text.teacher_forcing import KnownTexts
from specjax.tokenizers import load_tokenizer
from specjax.training import AdamW, Objective
from specjax.training.losses import DIVERGENCES, Total, masked_total
from specjax.training.progress import say
from specjax.training.step import TrainState, init_state, make_train_step
from specjax.training.tasks import TextTask
from specjax.training.teacher import PREFIX, TEXTS, AcceptedTokens, draw_pairs
from specjax.types import Array, Params, Sampling

HELP = "tokens per verifier call of a drafter that was trained further with each divergence"
_BATCHING = Batching(tokens_per_batch=2048, bucket_lengths=(20, 32, 88))
_EMA_DECAY = 0.99
# The number of inputs of val that measure a drafter.
_VALIDATION = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the pair, the data and the training."""
    parser.add_argument("--data-dir", required=True, help="the directory of Multi30k")
    parser.add_argument("--divergences", nargs="+", choices=DIVERGENCES, default=list(DIVERGENCES))
    parser.add_argument("--steps", type=int, default=100, help="updates of each drafter")
    parser.add_argument("--rate", type=float, default=0.01, help="learning rate (AdamW.relative)")
    parser.add_argument(
        "--from-scratch", action="store_true", help="train new drafters of the same sizes"
    )
    parser.add_argument("--seeds", type=int, default=3, help="orders of the data")
    parser.add_argument("--max-draft", type=int, default=5, help="draft length G")


@dataclasses.dataclass(frozen=True)
class Student:
    """The task of one of several students; `constants` are the teacher's logits and its number."""

    task: TextTask
    divergences: tuple[str, ...]

    item_name = "target tokens"

    def loss(self, params: Params, constants: tuple[Array, Array], batch: Any, key: Array) -> Total:
        reference, number = constants
        logits = self.task.logits(self.task.model, params, batch)
        targets, mask = self.task.targets(batch)

        def per_token(name: str) -> Any:
            objective = Objective(distillation_weight=1.0, divergence=name)
            return lambda: objective.per_token(logits, targets, reference)

        return masked_total(lax.switch(number, [per_token(x) for x in self.divergences]), mask)


def make_step(task: TextTask, divergences: tuple[str, ...], optimizer: AdamW) -> Any:
    """A step of all students, whose states are stacked, with one pass of the teacher."""
    # The step's seed is that of dropout, which these networks do not have.
    config: Any = task.teacher
    step = make_train_step(Student(task, divergences), optimizer, seed=0, ema_decay=_EMA_DECAY)

    @functools.partial(jit, donate_argnums=0)
    def together(states: TrainState, teacher: Params, batch: Any) -> tuple[TrainState, Array]:
        reference = task.logits(config, teacher, batch)

        def one(student: tuple[TrainState, Array]) -> tuple[TrainState, Array]:
            state, metrics = step(student[0], (reference, student[1]), batch)
            return state, metrics.loss

        return lax.map(one, (states, jnp.arange(len(divergences), dtype=jnp.int32)))

    return together


class _Bench:
    """The pair, the data, and the texts of the verifier that measure a drafter."""

    def __init__(self, args: argparse.Namespace):
        directory = built_in_pair(DEFAULT_PAIR)
        self.args, self.names = args, tuple(args.divergences)
        teacher, self.start = (
            load_model(directory / name, dtype="float32") for name in ("verifier", "drafter_small")
        )
        words = load_tokenizer(directory / "verifier")
        self.verifier = TextModel(teacher.model, teacher.params, words, name="verifier")
        self.task = TextTask(
            model=self.start.config,
            objective=Objective(distillation_weight=1.0),
            pad_id=words.pad_id,
            eos_id=words.eos_ids[0],
            teacher=teacher.config,
        )
        self.optimizer = AdamW(
            learning_rate=args.rate,
            warmup_steps=max(1, args.steps // 10),
            decay="cosine",
            total_steps=args.steps,
            relative=True,
        )
        self.step = make_step(self.task, self.names, self.optimizer)
        self.pairs = {
            name: tokenize_pairs(
                _read(args.data_dir, name),
                words.encode,
                lambda text: [*words.encode(text, add_special_tokens=False), words.eos_ids[0]],
            )
            for name in ("train", "val")
        }
        self.accepted = [
            AcceptedTokens(
                self.start.config,
                text,
                args.max_draft,
                functools.partial(self._texts, temperature),
                self.verifier,
            )
            for text, temperature in TEXTS.items()
        ]
        self.prompts = [x.inputs for x in _read(args.data_dir, "test_2017_mscoco")]

    def _texts(self, temperature: float) -> KnownTexts:
        """The verifier's texts for the validation inputs."""
        pairs: TokenPairs = self.pairs["val"]
        inputs = [pairs[i][0] for i in range(min(len(pairs), _VALIDATION))]
        limits = [_BATCHING.bucket_lengths[-1]] * len(inputs)
        drawn = draw_pairs(
            self.verifier, inputs, limits, range(len(inputs)), temperature=temperature
        )
        return KnownTexts(*zip(*(drawn[i] for i in range(len(drawn))), strict=True))

    def train(self, seed: int) -> dict[str, Params]:
        """The students after all updates (their running averages), by their divergences."""
        args = self.args
        batches = self.task.batches(self.pairs["train"], _BATCHING, seed=seed, row_multiple=1)
        start = self.task.init(jax.random.key(seed)) if args.from_scratch else self.start.params
        state = init_state(start, self.optimizer, _EMA_DECAY)
        states = jax.tree.map(lambda x: jnp.stack([x] * len(self.names)), state)
        for i in range(args.steps):
            states, losses = self.step(states, self.verifier.params, batches.batch(i))
            if (i + 1) % 50 == 0:
                say(f"seed {seed}: {i + 1} of {args.steps} updates, losses {losses.tolist()}")
        best = jax.device_get(states.best_params)
        return {name: jax.tree.map(lambda x, i=i: x[i], best) for i, name in enumerate(self.names)}

    def validate(self, params: Params) -> dict[str, float]:
        """The expected accepted tokens of a draft on the verifier's validation texts."""
        return {k: v for figure in self.accepted for k, v in figure(params).items()}

    def decode(self, params: Params, temperature: float, seed: int) -> Any:
        """The totals of decoding the test prompts with a drafter."""
        words = self.verifier.tokenizer
        drafter = TextModel(model_from_config(self.start.config), params, words, name="drafter")
        return Decoder(
            Pair(drafter, self.verifier),
            rule=rules.Lossless(),
            verification=verification.Token(),
            max_draft=self.args.max_draft,
            max_new_tokens=64,
            batch_size=32,
            sampling=Sampling(temperature),
        )(self.prompts, seed=seed).info


def run(args: argparse.Namespace) -> Report:
    """Trains with every divergence and seed, validates, and decodes the test prompts.

    The row "before" is the drafter as it is.

    `accepted` is the expected number of accepted tokens on the verifier's validation texts. A
    figure is the mean over the seeds, `_sd` the standard deviation between them. `_se` is the
    standard error over the prompts, of one seed; the prompts of all seeds are the same, so it is
    not divided. Differences are from the first divergence, prompt by prompt.
    """
    check_positive(args, "steps", "seeds", "max_draft")
    bench = _Bench(args)
    drafters: dict[str, list[Params]] = {name: [] for name in bench.names}
    for seed in range(args.seeds):
        for name, params in bench.train(seed).items():
            drafters[name].append(params)
    drafters["before"] = [bench.start.params]
    rows = []
    for temperature in (1.0, 0.0):
        first: list[Any] = [None] * args.seeds
        for name, params in drafters.items():
            infos = [bench.decode(x, temperature, seed) for seed, x in enumerate(params)]
            row: dict[str, Any] = {"divergence": name, "temperature": temperature}
            row |= means([figures(*pair) for pair in zip(infos, first, strict=False)])
            first = infos if name == bench.names[0] else first
            say(f"{row}")
            rows.append(row)
    for name, params in drafters.items():
        found = [bench.validate(x) for x in params]
        for row in rows:
            if row["divergence"] == name:
                text = "greedy" if row["temperature"] == 0 else "sampled"
                row["accepted"] = float(np.mean([x[f"validation_{PREFIX}{text}"] for x in found]))
    widest = max(rows, key=len)
    return Report(rows, list(widest))


def means(found: list[dict[str, Any]]) -> dict[str, float | None]:
    """The figures of all seeds as one row."""
    row: dict[str, float | None] = {}
    for name, error in (("tokens_per_call", "standard_error"), ("difference", "difference_se")):
        values = [x[name] for x in found]
        if None not in values:
            row[name] = float(np.mean(values))
            row[f"{name}_se"] = float(np.mean([x[error] for x in found]))
            row[f"{name}_sd"] = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return row


def _read(directory: str, name: str) -> list[Any]:
    paths = (f"{name}.en.gz", f"{name}.de.gz")
    return list(read_aligned(*paths, directory=directory))


main = command.program(__file__, HELP, add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
