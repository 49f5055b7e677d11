"""Rounds with drafted trees along known texts, without decoding.

An emitted text y follows pi. Where it reaches a node of the tree with weight P (see `Traversal`),
the child of rank i has the next token y and is accepted with probability

    f_i min(l_i(y), m_i(y)) / (P pi(y)),

where l_i is the law of this child's token, m_i the mass that is left for it (m_1 = P pi), and f_i
the probability that its elder siblings fail. The child's weight is then min(1, m_i(y) / l_i(y)).
So the rounds are a Markov chain along the text, as those of chains are (see `study.expect`). If a
law depends on the tokens of elder siblings (children without replacement), these are drawn.

Only the emitted text is followed, so a tree whose shape depends on other tokens cannot be walked.

Axes: B rows, N longest text, V vocabulary, D depth, K children of a node.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.compilation import jit
from specjax.drafting import Tree
from specjax.drafting.trees import Topology
from specjax.errors import UserError
from specjax.rules import Lossless
from specjax.sampling.draws import TINY, num_uniforms, total
from specjax.study.expect import (
    Expected,
    Laws,
    coupled,
    expect,
    laws_of_models,
    ratio_error,
    sampling_key,
    visits,
)
from specjax.text import TextModel
from specjax.text.setting import Setting
from specjax.text.teacher_forcing import KnownTexts, batches, rows_at_once
from specjax.types import Array, Rule, Verification
from specjax.verification import TopDown, Traversal, Walk

# Verification -> whether masses are those of whole paths; None: the target alone decides.
_JUDGES: Mapping[type, bool | None] = MappingProxyType(
    {Traversal: True, TopDown: False, Walk: None}
)

# The number of arrays over the vocabulary that a batch needs.
_ARRAYS = 16


class Targets(NamedTuple):
    """The target distributions pi along texts, and tokens that follow them."""

    probs: Array  # [B, N, V]
    tokens: Array  # [B, N]


class TreeLaw(NamedTuple):
    """The rounds that begin at each position: the law of accepted tokens, and that of a leaf."""

    accepted: np.ndarray  # [B, N, D + 1]
    whole: np.ndarray  # [B, N]


class _Below(NamedTuple):
    """The children of a node at each position, `[K, B, N]`.

    These are the probability that the text goes on below each, its weight there, and the
    probability that it is accepted, for any text.
    """

    accepted: Any  # [K, B, N]
    weights: Any  # [K, B, N]
    rates: Any  # [K, B, N]


def cannot_walk(tree: Tree, judge: Verification) -> str | None:
    """Returns why a tree cannot be walked along texts, or None."""
    if not isinstance(tree.shape, Topology):
        return "the shape of a tree with a beam depends on tokens that are not in the text"
    if type(judge) not in _JUDGES:
        return f"of trees, {type(judge).__name__} verification has no estimate"
    return None


@jit
def targets_along(rule: Rule, drafter: Laws, verifier: Laws, tokens: Array, key: Array) -> Targets:
    """The targets of a rule with scalar strengths along texts; `key` is consumed."""
    size = (*tokens.shape, 1, 1 + num_uniforms(verifier.probs.shape[-1]))
    uniforms = jax.random.uniform(key, size, jnp.float32)
    read = (rule.reads_draft_confidence, rule.reads_verifier_confidence)
    laws = (drafter, verifier)
    confidences = [x.confidences if used else None for x, used in zip(laws, read, strict=True)]

    def at(q: Any, p: Any, q_conf: Any, p_conf: Any, token: Any, u: Any) -> tuple[Array, Array]:
        pi = rule(q, p, q_conf, p_conf)
        return pi, coupled(pi, p, token, u)[0]

    given = (drafter.probs, verifier.probs, *confidences, tokens, uniforms)
    axes = tuple(None if x is None else 0 for x in given)
    return Targets(*jax.vmap(jax.vmap(at, in_axes=axes), in_axes=axes)(*given))


def walk_tree(
    tree: Tree, judge: Verification, drafter: Laws, targets: Targets, key: Array
) -> TreeLaw:
    """The rounds of a tree along texts; `cannot_walk` returns None for it. `key` is consumed.

    The drafter's distributions have confidences only if it is greedy, for the order of its tokens.
    """
    shape, joint = tree.shape, _JUDGES[type(judge)]
    assert isinstance(shape, Topology)
    depths, counts = (0, *shape.depths), np.bincount(shape.parents, minlength=shape.size + 1)
    rows, width = targets.tokens.shape
    orders = _orders(tree.children, shape.widest, drafter)
    weights: dict[int, Any] = {0: jnp.ones((rows, width), jnp.float32)}
    reached = {0: np.ones((rows, width))}
    stands = np.zeros((rows, width, max(depths) + 1))
    whole = np.zeros((rows, width))
    child = 1
    for node, (depth, count) in enumerate(zip(depths, counts.tolist(), strict=True)):
        own = reached.pop(node)
        stands[..., depth] += own
        if not count:
            whole += own
            continue
        given = (weights.pop(node), drafter.probs, orders, targets, jax.random.fold_in(key, node))
        below = _below(tree.children, count, joint, *given)
        accepted = np.asarray(below.accepted, np.float64)
        for rank in range(count):
            # At the end of the texts nothing is accepted.
            later = np.zeros((rows, width))
            later[:, : max(width - depth, 0)] = accepted[rank][:, depth:]
            reached[child] = own * later
            weights[child] = jnp.pad(below.weights[rank, :, :-1], ((0, 0), (1, 0)))
            child += 1
    ends = np.pad(stands[..., 1:], ((0, 0), (0, 0), (0, 1)))
    # With drawn siblings the estimates of probabilities may be negative: only their mean counts.
    return TreeLaw(stands - ends, whole)


def tree_of(setting: Setting) -> Tree:
    """Returns the trees that a setting drafts."""
    plan = setting.part("drafting")
    if not isinstance(plan, Tree):
        raise UserError(f"setting must draft trees, got drafting={setting.drafting!r}")
    return plan


class TreeEstimate(NamedTuple):
    """The estimate of a setting with trees, and the probability that a round accepts a leaf."""

    expected: Expected
    whole: float


def expect_trees(
    models: Mapping[str, TextModel],
    texts: KnownTexts,
    settings: Sequence[Setting],
    *,
    draws: int = 4,
    seed: int = 0,
) -> list[TreeEstimate]:
    """Estimates settings with trees on the verifier's outputs, of one drafter and one sampling.

    `draws` is the number of draws for rules whose pi is not p, and for children that are drawn
    without replacement, with this seed.
    """
    trees = {setting: tree_of(setting) for setting in settings}
    names = ("rule", "drafter", "temperature", "top_k", "top_p")
    chains = [Setting(**{name: getattr(x, name) for name in names}) for x in settings]
    known = {sampling_key(settings[0]): texts}
    plain = expect(models, known, chains, draws=draws, seed=seed)
    pair = models[settings[0].drafter], models["verifier"]
    greedy = settings[0].temperature < TINY
    rules = [setting.part("rule") for setting in settings]
    reads = (
        greedy or any(rule.reads_draft_confidence for rule in rules),
        any(rule.reads_verifier_confidence for rule in rules),
    )
    laws_of: dict[Setting, list[TreeLaw]] = {setting: [] for setting in settings}
    one = jax.random.key(seed)
    rows_of = rows_at_once(texts, pair[0].model.vocab_size, _ARRAYS)
    for i, (of_texts, rows) in enumerate(batches(texts, rows_of)):
        laws = list(laws_of_models(pair, rows, settings[0].sampling, reads))
        drafter = laws[0] if greedy else laws[0]._replace(confidences=None)
        key = jax.random.fold_in(jax.random.fold_in(one, i), 1)
        for setting, rule in zip(settings, rules, strict=True):
            tree, judge = trees[setting], setting.part("verification")
            if reason := cannot_walk(tree, judge):
                raise UserError(f"{setting.described()} cannot be estimated: {reason}")
            several = []
            for draw in jax.random.split(key, _draws_of(tree, rule, draws)):
                targets = targets_along(rule, *laws, jnp.asarray(rows.outputs), draw)
                several.append(
                    walk_tree(tree, judge, drafter, targets, jax.random.fold_in(draw, 1))
                )
            stacked = (np.stack(x)[:, : len(of_texts)] for x in zip(*several, strict=True))
            laws_of[setting].append(TreeLaw(*stacked))
    emitted = np.asarray([len(text) for text in texts.outputs])
    estimates = []
    for setting, chain in zip(settings, plain, strict=True):
        accepted, whole = (np.concatenate(x, axis=1) for x in zip(*laws_of[setting], strict=True))
        begun = visits(accepted, emitted)
        rounds = begun.sum(axis=2).mean(axis=0)
        expected = dataclasses.replace(
            chain,
            setting=setting,
            tokens_per_call=int(emitted.sum()) / float(rounds.sum()),
            error=ratio_error(emitted, rounds),
            drafted_per_call=float(trees[setting].shape.size),
        )
        estimates.append(TreeEstimate(expected, float((begun * whole).sum() / begun.sum())))
    return estimates


def tree_rates(
    models: Mapping[str, TextModel],
    texts: KnownTexts,
    setting: Setting,
    most: int,
    *,
    draws: int = 4,
    seed: int = 0,
) -> np.ndarray:
    """How often the children of a node are accepted, `[K, K]`, for `theory.best_tree`.

    At [b - 1, i] stands the child of rank i, from 0, of a node with b of at most K = `most`
    children. Both models read the texts once. The rates are means over the positions of the texts,
    by recursive rejection at one node: with `Traversal` verification they are a little higher.
    """
    tree, rule = tree_of(setting), setting.part("rule")
    pair = models[setting.drafter], models["verifier"]
    greedy = setting.temperature < TINY
    reads = greedy or rule.reads_draft_confidence, rule.reads_verifier_confidence
    sums, seen = np.zeros((most, most)), 0
    one, draws = jax.random.key(seed), _draws_of(tree, rule, draws)
    rows_of = rows_at_once(texts, pair[0].model.vocab_size, _ARRAYS)
    for i, (_, rows) in enumerate(batches(texts, rows_of)):
        laws = list(laws_of_models(pair, rows, setting.sampling, reads))
        seen += int(rows.real.sum())
        for own in jax.random.split(jax.random.fold_in(one, i), draws):
            targets = targets_along(rule, *laws, jnp.asarray(rows.outputs), own)
            drafter = laws[0] if greedy else laws[0]._replace(confidences=None)
            orders = _orders(tree.children, most, drafter)
            whole = jnp.ones(rows.outputs.shape, jnp.float32)
            for count in range(1, most + 1):
                given = whole, drafter.probs, orders, targets, own
                below = _below(tree.children, count, False, *given)
                found = np.asarray(below.rates, np.float64)[:, rows.real]
                sums[count - 1, :count] += found.sum(axis=1) / draws
    return np.clip(sums / seen, 0.0, 1.0)


def _draws_of(tree: Tree, rule: Rule, draws: int) -> int:
    drawn = tree.children == "without" or not isinstance(rule, Lossless)
    return draws if drawn else 1


def _orders(kind: str, most: int, drafter: Laws) -> Array:
    """Larger for better tokens, `[B, N, V]`; for "top" and "top+1" the best tokens, `[B, N, K]`."""
    order = drafter.probs if drafter.confidences is None else drafter.confidences
    return _tops(most, order) if kind.startswith("top") else order


@functools.partial(jit, static_argnums=0)
def _tops(most: int, order: Array) -> Array:
    return jax.lax.top_k(order, most)[1]


@functools.partial(jit, static_argnums=(0, 1, 2))
def _below(
    kind: str,
    count: int,
    joint: bool | None,
    weight: Array,
    q: Array,
    orders: Array,
    targets: Targets,
    key: Array,
) -> _Below:
    """The children of a node that has `weight [B, N]` where the text reaches it."""
    shape = q.shape if kind == "without" else (*q.shape[:2], 0)
    noise = jax.random.gumbel(key, shape, jnp.float32)
    one = functools.partial(_children, kind, count, joint)
    found = jax.vmap(jax.vmap(one))(weight, q, orders, noise, *targets)
    return _Below(*(jnp.moveaxis(x, -1, 0) for x in found))


def _children(
    kind: str,
    count: int,
    joint: bool | None,
    weight: Array,
    q: Array,
    order: Array,
    noise: Array,
    pi: Array,
    token: Array,
) -> tuple[Array, Array, Array]:
    mass, left, fails = weight * pi, 1.0 - weight, jnp.float32(1.0)
    found: list[tuple[Array, Array, Array]] = []
    for law, drawn in _laws(kind, count, q, order, noise):
        through = jnp.minimum(law, mass) if joint is not None else law * pi
        chance = jnp.minimum(1.0, mass / jnp.where(law > 0.0, law, 1.0))
        after = chance[token] if joint else jnp.float32(1.0)
        found.append((fails * through[token], after, fails * total(through)))
        if joint is None:
            # The target's token is drawn first, and an elder sibling may have it.
            fails *= 1.0 - law[token] if drawn is None else (drawn != token).astype(jnp.float32)
            continue
        rest = jnp.maximum(mass - law, 0.0)
        below = total(rest) + left
        fails *= below if drawn is None else 1.0 - jnp.where(law[drawn] > 0.0, chance[drawn], 0.0)
        scale = jnp.where(below > 0.0, 1.0 / jnp.where(below > 0.0, below, 1.0), 0.0)
        mass, left = rest * scale, left * scale
    own = weight * pi[token]
    accepted, weights, rates = (jnp.stack(x) for x in zip(*found, strict=True))
    return accepted / jnp.where(own > 0.0, own, 1.0), weights, rates


def _laws(
    kind: str, count: int, q: Array, order: Array, noise: Array
) -> Iterator[tuple[Array, Array | None]]:
    """The law `[V]` of each child, as `Tree` draws; and its token if later laws need it."""
    hot = functools.partial(jax.nn.one_hot, num_classes=q.size, dtype=jnp.float32)
    if kind == "independent":
        yield from ((q, None) for _ in range(count))
    elif kind == "without":
        keys = jnp.log(q) + noise
        for _ in range(count):
            weight = total(q)
            some = weight > 0.0
            drawn = jnp.argmax(jnp.where(some, keys, order))
            yield jnp.where(some, q / jnp.where(some, weight, 1.0), hot(drawn)), drawn
            q = q.at[drawn].set(0.0)
            keys, order = (x.at[drawn].set(-jnp.inf) for x in (keys, order))
    else:
        tops = order[:count]
        if kind == "top+1":
            rest = q.at[tops[:-1]].set(0.0)
            weight = total(rest)
            some = weight > 0.0
            yield jnp.where(some, rest / jnp.where(some, weight, 1.0), hot(tops[-1])), None
            tops = tops[:-1]
        yield from ((hot(token), None) for token in tops)
