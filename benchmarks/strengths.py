"""Strengths that are learnt from the context, against the best ones and one strength for all.

A network on the drafter's last hidden state and confidences gives the strength of `LossyTuned` at
each position, before its token is drawn (as DIVERSED gives the weight of a mixture). It is trained
for the most accepted tokens less their cost in nats. All are measured along texts of the verifier.
The best strengths are those of each position by itself: the price that an accepted token costs
there is the same everywhere, so that no other strengths accept more for the same nats in sum.
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
from specjax.acceptance_head.network import (
    HeadConfig,
    apply_head,
    confidence_features,
    drawn_confidences,
    init_head,
)
from specjax.cli.bench.report import Report
from specjax.cli.bench.workload import check_positive
from specjax.compilation import jit
from specjax.data.examples import read_examples
from specjax.rules.target import kl_divergence
from specjax.text import Decoder, Pair, load_pair
from specjax.text.directories import built_in_pair
from specjax.text.known_texts import batches, read, written
from specjax.training import AdamW
from specjax.training.losses import Total, masked_total
from specjax.training.progress import say
from specjax.training.step import init_state, make_train_step
from specjax.types import Array, Params, Sampling

HELP = "acceptance at equal nats: strengths learnt from the context, the best, one for all"
# The strengths of the table, as -log(1 - strength): closer where little is relaxed.
_LOG_RATIOS = (8.0 * np.linspace(0.0, 1.0, 33) ** 2).astype(np.float32)
# Of the frontiers: nats per accepted token, and nats per position.
_PRICES, _BOUNDS = np.geomspace(1e-2, 30.0, 80), np.geomspace(1e-4, 8.0, 80)
_CHUNK, _BATCH = 256, 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the pair, the texts and the prices."""
    parser.add_argument("--data-dir", required=True, help="the directory of Multi30k")
    parser.add_argument("--pair", default="multi30k_ende", help="a built-in pair")
    parser.add_argument("--drafter", default="drafter", help="its drafter")
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
    accepted: Any  # [n, K], by `LossyTuned` at the strengths of the table
    nats: Any  # [n, K]
    q: Any = None  # [n, V]
    p: Any = None  # [n, V]


@dataclasses.dataclass(frozen=True)
class Learnt:
    """The `Task` of a network that gives strengths: fewest rejections at a price per nat."""

    head: HeadConfig
    price: float

    item_name = "positions"

    def places(self, params: Params, hidden: Array, features: Array) -> Array:
        """Where in the table of strengths, from 0 to K - 1, `[n]`."""
        logits = apply_head(self.head, params, hidden, features)
        return jax.nn.sigmoid(logits) * (len(_LOG_RATIOS) - 1)

    def loss(self, params: Params, constants: Any, batch: Positions, key: Array) -> Total:
        """See `Task`: 1 - A + KL / price, between the table's strengths."""
        place = self.places(params, batch.hidden, batch.features)
        low = jnp.clip(place.astype(jnp.int32), 0, len(_LOG_RATIOS) - 2)
        worth = batch.accepted - batch.nats / self.price
        ends = [jnp.take_along_axis(worth, (low + i)[:, None], 1)[:, 0] for i in (0, 1)]
        share = place - low.astype(jnp.float32)
        worth = ends[0] + share * (ends[1] - ends[0])
        return masked_total(1.0 - worth[:, None], jnp.ones((worth.size, 1), bool))


def run(args: argparse.Namespace) -> Report:
    """Measures the frontiers of constant strengths and prices, and trains a network per price."""
    check_positive(args, "training", "validation", "epochs")
    directory = built_in_pair(args.pair)
    pair = load_pair(drafter=directory / args.drafter, verifier=directory / "verifier", head=False)
    learn, test = (
        _positions(pair, args.data_dir, name, count, seed, keep)
        for seed, (name, count, keep) in enumerate(
            (("train", args.training, False), ("val", args.validation, True))
        )
    )
    frontiers = _frontiers(test)
    rows = []
    for price in args.prices:
        task = Learnt(HeadConfig(pair.drafter.width, confidences=True), float(price))
        learnt = _of_head(task, _train(task, learn, args), test)
        rows.append(_row("learnt", price, learnt, frontiers))
        rows.append(_row("best", price, _best(price, test), frontiers))
        # The one strength that is worth most at this price, on the training texts.
        one = int(np.argmax((learn.accepted - learn.nats / price).mean(axis=0)))
        constant = test.accepted[:, one].mean(), test.nats[:, one].mean()
        rows.append(_row("one", price, constant, frontiers))
    notes = [f"{len(test.hidden)} positions; Lossless accepts {test.accepted[:, 0].mean():.4f}"]
    return Report(rows, list(rows[0]), notes)


def _best(price: float, test: Positions) -> tuple[Any, Any]:
    """Mean acceptance and nats of the strengths that are worth most at each position."""
    places = np.argmax(test.accepted - test.nats / price, axis=1)[:, None]
    return tuple(np.take_along_axis(x, places, 1).mean() for x in (test.accepted, test.nats))


def _bounded(bound: float, test: Positions) -> tuple[Any, Any]:
    """Mean acceptance and nats of the largest strengths within a bound at each position."""
    rows = zip(test.nats, test.accepted, strict=True)
    found = [(np.interp(bound, *row), min(bound, row[0][-1])) for row in rows]
    return tuple(np.mean(found, axis=0))


def _frontiers(test: Positions) -> dict[str, Any]:
    """Mean nats and acceptance, growing, of three ways to spread the nats over positions."""
    best, ball = (
        np.asarray([way(float(x), test) for x in given]).T[::-1]
        for way, given in ((_best, _PRICES), (_bounded, _BOUNDS))
    )
    # The rules KLPrice, LossyTuned, KLBall.
    return {"best": best, "one": (test.nats.mean(0), test.accepted.mean(0)), "ball": ball}


def _row(
    name: str, price: float, found: tuple[Any, Any], frontiers: dict[str, Any]
) -> dict[str, Any]:
    """A row of the report: what others accept at the same mean nats."""
    accepted, nats = map(float, found)
    row = {"strengths": name, "price": price, "nats": nats, "accepted": accepted}
    row["worth"] = accepted - nats / price
    return row | {f"{k}_at_nats": float(np.interp(nats, *x)) for k, x in frontiers.items()}


def _positions(
    pair: Pair, directory: str, name: str, count: int, seed: int, keep: bool
) -> Positions:
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
    accepted, nats = _by_chunk(_tables, q, p)
    return Positions(hidden, features, accepted, nats, *((q, p) if keep else ()))


def _params(pair: Pair) -> tuple[Params, Params]:
    return pair.drafter.prepared, pair.verifier.prepared


@functools.partial(jit, static_argnums=(0, 1))
def _read(drafter: Any, verifier: Any, small: Params, large: Params, rows: Any) -> Any:
    """The drafter's hidden states, q and p at all positions, at temperature 1."""
    own, other = read(drafter, small, rows), read(verifier, large, rows)
    plain = Sampling(jnp.float32(1.0))
    return own.hidden.astype(jnp.float32), own.probs(plain), other.probs(plain)


@jit
def _features(q: Array) -> Array:
    """The head's features; the drafted token is not known yet, so the largest stands for it."""
    one = lambda q: confidence_features(*drawn_confidences(q, jnp.argmax(q)))  # noqa: E731
    return jax.vmap(one)(q)


@jit
def _tables(q: Array, p: Array) -> tuple[Array, Array]:
    """Acceptance and nats of `LossyTuned` at each strength of the table, `[n, K]`."""
    rows = functools.partial(jnp.full, q.shape[:1])
    strengths = -jnp.expm1(-jnp.asarray(_LOG_RATIOS))
    accepted, nats = jax.lax.map(lambda x: _each(rows(x), q, p), strengths)
    return accepted.T, nats.T


@jit
def _each(strengths: Array, q: Array, p: Array) -> tuple[Array, Array]:
    """Acceptance and nats of `LossyTuned` with a strength per position, `[n]`."""

    def one(strength: Array, q: Array, p: Array) -> tuple[Array, Array]:
        pi = rules.LossyTuned(strength)(q, p)
        return rules.accept_probability(q, pi), kl_divergence(pi, p)

    return jax.vmap(one)(strengths, q, p)


def _of_head(task: Learnt, params: Params, test: Positions) -> tuple[Any, Any]:
    """The mean acceptance and nats with the network's strengths."""
    places = np.asarray(task.places(params, test.hidden, test.features))
    ratios = np.interp(places, np.arange(len(_LOG_RATIOS)), _LOG_RATIOS).astype(np.float32)
    accepted, nats = _by_chunk(_each, -np.expm1(-ratios), test.q, test.p)
    return accepted.mean(), nats.mean()


def _by_chunk(function: Callable[..., Any], *columns: np.ndarray) -> Any:
    """A function of rows, by a fixed number of rows; the last ones are filled by repetition."""
    count, out = len(columns[0]), []
    for start in range(0, count, _CHUNK):
        places = np.minimum(np.arange(start, start + _CHUNK), count - 1)
        out.append(jax.device_get(function(*(x[places] for x in columns))))
    return jax.tree.map(lambda *parts: np.concatenate(parts)[:count], *out)


def _train(task: Learnt, learn: Positions, args: argparse.Namespace) -> Params:
    """The network after all epochs, a running average."""
    per_epoch = len(learn.hidden) // _BATCH
    optimizer = AdamW(
        learning_rate=args.rate,
        warmup_steps=10,
        decay="cosine",
        total_steps=max(11, per_epoch * args.epochs),
    )
    step = make_train_step(task, optimizer, seed=0, ema_decay=0.99)
    state = init_state(init_head(task.head, jax.random.key(0)), optimizer, 0.99)
    rng = np.random.default_rng(0)
    for epoch in range(args.epochs):
        order = rng.permutation(len(learn.hidden))[: per_epoch * _BATCH]
        for members in order.reshape(per_epoch, _BATCH):
            batch = jax.tree.map(lambda x, at=members: x[at], learn)
            state, metrics = step(state, None, batch)
        if epoch % 10 == 9:
            say(f"price {task.price}: epoch {epoch + 1}, loss {float(metrics.loss):.4f}")
    return state.best_params


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; see `command.main`."""
    return command.main(__file__, HELP, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
