"""Strengths that are learnt from the context, against the best ones and one strength for all.

A head gives the strength of a rule at each position, before its token is drawn (as DIVERSED gives
the weight of a mixture). It is trained for the most accepted tokens less their cost in nats. The
`network` reads the drafter's last hidden state and confidences, `linear` the confidences alone: its
numbers are those of the rule `Learnt`, which the benchmark prints. All are measured along texts of
the verifier. The best strengths are those of each position by itself, chosen with p and q known:
those of `LossyTuned` accept the most for the same nats in sum (the rule `KLPrice`).
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import command
from specjax import rules
from specjax.acceptance_head import (
    NUM_FEATURES,
    HeadConfig,
    apply_head,
    confidence_features,
    init_head,
    top_confidences,
)
from specjax.cli.bench import check_positive
from specjax.cli.report import Report
from specjax.compilation import jit
from specjax.data.examples import read_examples
from specjax.rules.target import kl_divergence
from specjax.rules.varying import scaled
from specjax.text import Decoder, Models, load_pair
from specjax.text.directories import built_in_pair
from specjax.text.teacher_forcing import batches, read, written
from specjax.training import AdamW
from specjax.training.losses import Total, masked_total
from specjax.training.progress import say
from specjax.training.step import init_state, make_train_step
from specjax.types import Array, Params, Sampling

HELP = "acceptance at equal nats: strengths learnt from the context, the best, one for all"
# The strengths of the table, as log-odds.
_LOGITS = np.linspace(-12.0, 9.0, 43, dtype=np.float32)
_RULES = {"LossyTuned": rules.LossyTuned(0.9999), "Mixture": rules.Mixture(0.0)}
# Of the frontiers: their rules, from strict to loose.
_FRONTIERS: dict[str, list[Any]] = {
    "best": [rules.KLPrice(float(x)) for x in np.geomspace(1e-2, 30.0, 40)],
    "one": [rules.LossyTuned(float(x)) for x in 1.0 / (1.0 + np.exp(-_LOGITS))],
    "ball": [rules.KLBall(float(x)) for x in np.geomspace(1e-4, 8.0, 40)],
}
_CHUNK, _BATCH = 256, 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the pair, the texts and the prices."""
    parser.add_argument("--data-dir", required=True, help="the directory of Multi30k")
    parser.add_argument("--pair", default="multi30k_ende", help="a built-in pair")
    parser.add_argument("--drafter", default="drafter", help="its drafter")
    parser.add_argument(
        "--rule", choices=sorted(_RULES), default="LossyTuned", help="the rule of the strengths"
    )
    parser.add_argument("--training", type=int, default=500, help="inputs of train to learn from")
    parser.add_argument("--validation", type=int, default=250, help="inputs of val to measure on")
    parser.add_argument("--epochs", type=int, default=40, help="passes over the training texts")
    parser.add_argument("--rate", type=float, default=2e-3, help="learning rate")
    parser.add_argument(
        "--prices", type=float, nargs="+", default=[0.5, 2.0], help="nats per accepted token"
    )


class Positions(NamedTuple):
    """What is known at each position of texts: n of them, K strengths."""

    hidden: Any  # [n, D], the drafter's last hidden state
    features: Any  # [n, F], of its distribution
    q: Any  # [n, V]
    p: Any  # [n, V]
    accepted: Any = None  # [n, K], by the rule at the strengths of the table
    nats: Any = None  # [n, K]


@dataclasses.dataclass(frozen=True)
class StrengthTask:
    """The `Task` of a head that gives strengths: fewest rejections at a price per nat."""

    head: HeadConfig
    price: float

    item_name = "positions"

    def logits(self, params: Params, given: Positions) -> Array:
        """The log-odds of the strengths, `[n]`; a head without `confidences` reads nothing else."""
        read = given.hidden if self.head.confidences else given.features
        return apply_head(self.head, params, read, given.features)

    def loss(self, params: Params, constants: Any, batch: Positions, key: Array) -> Total:
        step = _LOGITS[1] - _LOGITS[0]
        place = jnp.clip((self.logits(params, batch) - _LOGITS[0]) / step, 0.0, _LOGITS.size - 1.0)
        low = jnp.clip(place.astype(jnp.int32), 0, _LOGITS.size - 2)
        worth = batch.accepted - batch.nats / self.price
        ends = [jnp.take_along_axis(worth, (low + i)[:, None], 1)[:, 0] for i in (0, 1)]
        share = place - low.astype(jnp.float32)
        worth = ends[0] + share * (ends[1] - ends[0])
        return masked_total(1.0 - worth[:, None], jnp.ones((worth.size, 1), bool))


def run(args: argparse.Namespace) -> Report:
    """Measures the frontiers of constant strengths and prices, and trains two heads per price."""
    check_positive(args, "training", "validation", "epochs")
    directory = built_in_pair(args.pair)
    pair = load_pair(drafter=directory / args.drafter, verifier=directory / "verifier", head=False)
    rule = _RULES[args.rule]
    learn, test = (
        _positions(pair, args.data_dir, name, count, seed)
        for seed, (name, count) in enumerate((("train", args.training), ("val", args.validation)))
    )
    accepted, nats = _table(rule, learn.q, learn.p)
    learn = learn._replace(accepted=accepted, nats=nats)
    frontiers = {name: _frontier(of_rules, test) for name, of_rules in _FRONTIERS.items()}
    lossless, _ = _mean(rules.Lossless(), test)
    notes = [f"{len(test.q)} positions; Lossless accepts {lossless:.4f}"]
    heads = {
        "network": HeadConfig(pair.drafter.width, confidences=True),
        "linear": HeadConfig(NUM_FEATURES, blocks=0),
    }
    rows = []
    for price in args.prices:
        for name, head in heads.items():
            task = StrengthTask(head, float(price))
            params = _train(task, learn, args)
            strengths = scaled(rule, jax.nn.sigmoid(task.logits(params, test)))
            if name == "linear":
                strengths = _learnt(rule, params)
                notes.append(f"price {price}: {strengths}")
            rows.append(_row(name, price, _mean(strengths, test), frontiers))
        # The one strength that is worth most at this price, on the training texts.
        worth = (learn.accepted - learn.nats / price).mean(axis=0)
        one = scaled(rule, jax.nn.sigmoid(_LOGITS[np.argmax(worth)]))
        rows.append(_row("one", price, _mean(one, test), frontiers))
        rows.append(_row("best", price, _mean(rules.KLPrice(price), test), frontiers))
    return Report(rows, list(rows[0]), notes)


def _learnt(rule: Any, params: Params) -> rules.Learnt:
    """The rule of a linear head."""
    out = jax.device_get(params["out"])
    numbers = [round(float(x), 4) for x in (*out["kernel"][:, 0], out["bias"][0])]
    return rules.Learnt(rule, *numbers)


def _frontier(of_rules: Sequence[Any], test: Positions) -> np.ndarray:
    """Mean acceptance and nats of rules, `[2, n]`."""
    return np.asarray([_mean(rule, test) for rule in of_rules]).T


def _row(
    name: str, price: float, found: tuple[float, float], frontiers: dict[str, Any]
) -> dict[str, Any]:
    """A row of the report: what others accept at the same mean nats."""
    accepted, nats = found
    row = {"strengths": name, "price": price, "nats": nats, "accepted": accepted}
    row["worth"] = accepted - nats / price
    at = {name: np.interp(nats, x[1], x[0]) for name, x in frontiers.items()}
    return row | {f"{name}_at_nats": float(x) for name, x in at.items()}


def _positions(pair: Models, directory: str, name: str, count: int, seed: int) -> Positions:
    """Both models along the verifier's own texts for the first inputs of a data set."""
    source = read_examples(f"{name}.en.gz", format="text", directory=directory)
    alone = Decoder(pair.verifier, sampling=Sampling(1.0), max_new_tokens=64, batch_size=64)
    prompts = [alone.encode(example.inputs) for _, example in zip(range(count), source)]  # noqa: B905
    texts = written(alone, prompts, seed=seed)
    found = []
    for _, rows in batches(texts, 64, by_length=True):
        read_now = _read(pair.drafter.model, pair.verifier.model, *_params(pair), rows)
        found.append([np.asarray(x)[rows.real] for x in read_now])
    hidden, q, p = (np.concatenate(parts) for parts in zip(*found, strict=True))
    say(f"{name}: {len(q):,} positions")
    features = _by_chunk(_features, q)
    return Positions(hidden, features, q, p)


def _table(rule: Any, q: Any, p: Any) -> np.ndarray:
    """Acceptance and nats at each strength of the table, `[2, n, K]`."""
    table = [_by_chunk(_each, scaled(rule, jax.nn.sigmoid(x)), q, p) for x in _LOGITS]
    return np.moveaxis(np.asarray(table), (0, 1), (2, 0))


def _params(pair: Models) -> tuple[Params, Params]:
    return pair.drafter.prepared, pair.verifier.prepared


@functools.partial(jit, static_argnums=(0, 1))
def _read(drafter: Any, verifier: Any, small: Params, large: Params, rows: Any) -> Any:
    """The drafter's hidden states, q and p at all positions, at temperature 1."""
    own, other = read(drafter, small, rows), read(verifier, large, rows)
    plain = Sampling(jnp.float32(1.0))
    return own.hidden.astype(jnp.float32), own.probs(plain), other.probs(plain)


@jit
def _features(q: Array) -> Array:
    return jax.vmap(lambda q: confidence_features(*top_confidences(q)))(q)


@jit
def _each(rule: Any, q: Array, p: Array) -> tuple[Array, Array]:
    """Acceptance and nats of a rule with strengths per position, `[n]`."""

    def one(rule: Any, q: Array, p: Array) -> tuple[Array, Array]:
        pi = rule(q, p, q, p)
        return rules.accept_probability(q, pi), kl_divergence(pi, p)

    return jax.vmap(one)(rule, q, p)


def _mean(rule: Any, test: Positions) -> tuple[float, float]:
    """The mean acceptance and nats of a rule."""
    accepted, nats = _by_chunk(_each, rule, test.q, test.p)
    return float(accepted.mean()), float(nats.mean())


def _by_chunk(function: Callable[..., Any], *columns: Any) -> Any:
    """A function of rows, by a fixed number of rows; the last ones are filled by repetition."""
    count, out = len(columns[-1]), []
    columns = jax.tree.map(lambda x: x if np.ndim(x) else np.full(count, x, np.float32), columns)
    for start in range(0, count, _CHUNK):
        places = np.minimum(np.arange(start, start + _CHUNK), count - 1)
        given = jax.tree.map(lambda x, at=places: np.asarray(x)[at], columns)
        out.append(jax.device_get(function(*given)))
    return jax.tree.map(lambda *parts: np.concatenate(parts)[:count], *out)


def _train(task: StrengthTask, learn: Positions, args: argparse.Namespace) -> Params:
    """The network after all epochs, a running average."""
    per_epoch = len(learn.hidden) // _BATCH
    if not per_epoch:
        raise ValueError(
            f"--training must give at least {_BATCH:,} positions, got {len(learn.hidden):,}: give "
            "more inputs"
        )
    optimizer = AdamW(
        # Four numbers move slowly.
        learning_rate=args.rate * (1.0 if task.head.blocks else 10.0),
        warmup_steps=10,
        decay="cosine",
        total_steps=max(11, per_epoch * args.epochs),
    )
    step = make_train_step(task, optimizer, seed=0, ema_decay=0.99)
    state = init_state(init_head(task.head, jax.random.key(0)), optimizer, 0.99)
    table = learn._replace(q=None, p=None)
    rng = np.random.default_rng(0)
    for epoch in range(args.epochs):
        order = rng.permutation(len(learn.hidden))[: per_epoch * _BATCH]
        for members in order.reshape(per_epoch, _BATCH):
            batch = jax.tree.map(lambda x, at=members: x[at], table)
            state, metrics = step(state, None, batch)
        if epoch % 10 == 9:
            say(f"price {task.price}: epoch {epoch + 1}, loss {float(metrics.loss):.4f}")
    return state.best_params


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; see `command.main`."""
    return command.main(__file__, HELP, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
