"""The pairs of distributions on which wrong verifiers differ most from right ones.

A case is a drafter and a verifier over all prefixes of a block, as tables by depth.

Axes: B rows, D drafts, G >= L padded block, L drafted tokens, N = G + 1 positions, V vocabulary,
d = L + 1 tokens of a round.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int32

# A vocabulary from which top-k cuts tokens.
MANY_TOKENS = 100
# The largest vocabulary of a case, for errors of 1e-7 per token.
LARGE_VOCAB = 32_768


class VerifyArguments(NamedTuple):
    """What a verifier gets; docs/audit.md describes the fields."""

    tokens: Int32[np.ndarray, "B G"]
    draft_probs: Float64[np.ndarray, "B G V"]
    target_probs: Float64[np.ndarray, "B N V"]
    uniforms: Float64[np.ndarray, "B G"]
    uniform_next: Float64[np.ndarray, " B"]
    lengths: Int32[np.ndarray, " B"]


@dataclasses.dataclass(frozen=True)
class HardCase:
    """A drafter and a verifier over all prefixes.

    Attributes:
      name: a few words.
      draft: L tables; table i is `[V] * i + [V]`, q after each prefix of i tokens.
      target: L + 1 tables, p likewise.
      max_draft: G; the block is padded with `pad`, and its rows with a distribution that is sure
        of `pad`, so that a verifier that reads the padding accepts it.
      pad: the padding token.
      others: rows that come first in every batch, each a block of G tokens with its q and p.
      law: whether the law can be enumerated; else only impossible tokens are counted.
    """

    name: str
    draft: tuple[np.ndarray, ...]
    target: tuple[np.ndarray, ...]
    max_draft: int
    pad: int = 0
    others: tuple[tuple[np.ndarray, np.ndarray, np.ndarray], ...] = ()
    law: bool = True

    @property
    def length(self) -> int:
        return len(self.draft)

    @property
    def vocab(self) -> int:
        return self.target[0].shape[-1]

    @property
    def is_padded(self) -> bool:
        return self.max_draft > self.length

    def with_drafts(self, drafts: str) -> "HardCase":
        """The case whose tokens are drawn otherwise: see `specjax.testing.audit`."""
        if drafts != "certain":
            return self
        return dataclasses.replace(self, draft=tuple(_most_probable(q) for q in self.draft))

    def blocks(self, drafts: str) -> tuple[Int32[np.ndarray, "D L"], Float64[np.ndarray, " D"]]:
        """All drafts that can happen, and their probabilities."""
        tokens, weights = np.zeros((1, 0), np.int32), np.ones(1)
        for table in self.draft:
            drawn_from = table if drafts == "drawn" else _most_probable(table)
            q = drawn_from[tuple(tokens.T)].reshape(len(tokens), self.vocab)
            at, token = np.nonzero(q)
            tokens = np.concatenate([tokens[at], token[:, None].astype(np.int32)], axis=1)
            weights = weights[at] * q[at, token]
        return tokens, weights

    def rows(
        self, tokens: Int32[np.ndarray, "B L"], coordinates: Float64[np.ndarray, "B d"]
    ) -> VerifyArguments:
        """The arguments for drafts; coordinates are the uniforms of tests and of the next token."""
        count, length, longest = len(tokens), self.length, self.max_draft
        sure = np.full(self.vocab, 0.5 / max(self.vocab - 1, 1))
        sure[self.pad] = 0.5
        block = np.full((count, longest), self.pad, np.int32)
        block[:, :length] = tokens
        draft = np.broadcast_to(sure, (count, longest, self.vocab)).copy()
        target = np.broadcast_to(sure, (count, longest + 1, self.vocab)).copy()
        for i in range(length + 1):
            index = tuple(tokens[:, :i].T)
            if i < length:
                draft[:, i] = self.draft[i][index]
            target[:, i] = self.target[i][index]
        uniforms = np.full((count, longest), 0.01)  # padding that is read is accepted
        uniforms[:, :length] = coordinates[:, :length]
        lengths = np.full(count, length, np.int32)
        return VerifyArguments(block, draft, target, uniforms, coordinates[:, length], lengths)

    def with_others(self, rows: VerifyArguments, uniform: float = 0.5) -> VerifyArguments:
        """The rows, after the case's other rows."""
        if not self.others:
            return rows
        block, draft, target = (np.stack(each) for each in zip(*self.others, strict=True))
        count = len(block)
        others = (
            *(block.astype(np.int32), draft, target),
            *(np.full((count, self.max_draft), uniform), np.full(count, uniform)),
            np.full(count, self.max_draft, np.int32),
        )
        return VerifyArguments(*(np.concatenate(x) for x in zip(others, rows, strict=True)))


def hard_cases(seed: int = 0) -> tuple[HardCase, ...]:
    """The cases of distributions, and of pipelines: other rows, padding, larger vocabularies."""
    rng = np.random.default_rng(seed)

    def random(depth: int) -> np.ndarray:
        return rng.dirichlet(np.ones(3), size=(3,) * depth)

    def tables(count: int, make: Callable[[int], np.ndarray]) -> tuple[np.ndarray, ...]:
        return tuple(make(depth) for depth in range(count))

    def case(name: str, length: int, draft: object, target: object, **more: object) -> HardCase:
        both = [
            tables(n, x if callable(x) else functools.partial(_everywhere, x))
            for n, x in ((length, draft), (length + 1, target))
        ]
        return HardCase(name, *both, **{"max_draft": length, **more})  # type: ignore[arg-type]

    def same(name: str, p: Sequence[np.ndarray], q: Sequence[np.ndarray]) -> HardCase:
        return HardCase(name, tuple(q[: len(p) - 1]), tuple(p), len(p) - 1)

    equal = tables(3, random)
    near = [p * (1.0 + 1e-9 * rng.uniform(-1.0, 1.0, p.shape)) for p in equal]
    near = [p / p.sum(axis=-1, keepdims=True) for p in near]
    zeros = _without(tables(3, random), rng)
    greedy, other = (tables(3, lambda d: _most_probable(random(d))) for _ in range(2))
    other_rows = tuple(_other_row(rng, 2) for _ in range(2))
    # Of a padded case: they fill the block.
    longer = [_other_row(np.random.default_rng(seed + 1), length) for length in (2, 3)]
    return (
        case("random", 2, random, random),
        case("L=3", 3, random, random),
        case("toy", 2, [1 / 3, 2 / 3], [2 / 3, 1 / 3]),
        case("q one-hot", 2, lambda d: _most_probable(random(d)), random),
        same("q = p", equal, equal),
        same("q near p", equal, near),
        same("p zeros", zeros, tables(3, random)),
        same("q zeros", *_each_without(tables(3, random), tables(2, random), rng)),
        case("disjoint", 2, [0.6, 0.4, 0.0, 0.0], [0.0, 0.0, 0.7, 0.3]),
        same("T=0", greedy, other),
        same("T=0 equal", greedy, greedy),
        case("ties", 2, [0.25, 0.25, 0.5], [0.4, 0.4, 0.2]),
        case("wide residual", 2, [0.85, 0.05, 0.05, 0.05], [0.25] * 4),
        _by_depth(
            "joint residual",
            ([0.6, 0.2, 0.2], [0.85, 0.1, 0.05]),
            ([0.3, 0.4, 0.3], [0.1, 0.5, 0.4], [0.2, 0.5, 0.3]),
        ),
        _by_depth(
            "rises, then falls",
            ([0.3, 0.5, 0.2], [0.7, 0.2, 0.1], [0.2, 0.3, 0.5]),
            ([0.6, 0.1, 0.3], [0.2, 0.3, 0.5], [0.5, 0.4, 0.1], [0.1, 0.2, 0.7]),
        ),
        case("other rows", 2, random, random, others=other_rows),
        dataclasses.replace(same("other rows, q = p", equal, equal), others=other_rows),
        case("L=0", 0, random, random, max_draft=2, pad=1, others=(longer[0],)),
        case("L=1 in G=3", 1, random, random, max_draft=3, pad=2, others=(longer[1],)),
        _many(seed),
        _large(),
    )


def _everywhere(distribution: object, depth: int) -> np.ndarray:
    values = np.asarray(distribution, np.float64)
    return np.broadcast_to(values, (values.size,) * (depth + 1)).copy()


def _by_depth(
    name: str, draft: Sequence[Sequence[float]], target: Sequence[Sequence[float]]
) -> HardCase:
    """The same distribution after all prefixes of a length."""
    q, p = (tuple(_everywhere(x, i) for i, x in enumerate(each)) for each in (draft, target))
    return HardCase(name, q, p, len(q))


def one_hot(tokens: np.ndarray, vocab: int) -> np.ndarray:
    """`[...]` tokens -> `[..., V]`; an identity matrix of the largest vocabulary has 8 GB."""
    return 1.0 * (np.arange(vocab) == tokens[..., None])


def _most_probable(probs: np.ndarray) -> np.ndarray:
    return one_hot(np.argmax(probs, axis=-1), probs.shape[-1])


def _without(tables: Sequence[np.ndarray], rng: np.random.Generator) -> list[np.ndarray]:
    """The tables, with one impossible token after each prefix."""
    lacking = []
    for table in tables:
        gone = rng.integers(table.shape[-1], size=table.shape[:-1])
        left = np.where(np.arange(table.shape[-1]) == gone[..., None], 0.0, table)
        lacking.append(left / left.sum(axis=-1, keepdims=True))
    return lacking


def _each_without(
    target: Sequence[np.ndarray], draft: Sequence[np.ndarray], rng: np.random.Generator
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Both without one token after each prefix: q lacks the one after p's."""
    p = _without(target, rng)
    gone = [np.argmin(x, axis=-1)[..., None] for x in p]
    q = []
    for table, lacked in zip(draft, gone, strict=False):
        other = (lacked + 1) % table.shape[-1]
        left = np.where(np.arange(table.shape[-1]) == other, 0.0, table)
        q.append(left / left.sum(axis=-1, keepdims=True))
    return p, q


def _other_row(
    rng: np.random.Generator, length: int, vocab: int = 3
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A row whose draft is improbable, with a flat q: it rejects early."""
    p = rng.dirichlet(np.full(vocab, 0.3), size=length + 1)
    q = np.full((length, vocab), 1.0 / vocab)
    return np.argmin(p[:length], axis=-1), q, p


def _many(seed: int) -> HardCase:
    """A drafter that was cut to 12 tokens, and a verifier that was not."""
    rng = np.random.default_rng(seed + 2)
    q, p = np.zeros(MANY_TOKENS), 1.0 / np.arange(2.0, MANY_TOKENS + 2)
    p = rng.permutation(p / p.sum())
    # Probable tokens and others: some residuals, some sure acceptances.
    q[np.argsort(p)[:: -MANY_TOKENS // 12][:12]] = rng.dirichlet(np.ones(12))
    target = np.broadcast_to(p, (MANY_TOKENS, MANY_TOKENS)).copy()
    return HardCase("many tokens", (q,), (p, target), 1)


def _large() -> HardCase:
    """A verifier that is certain, in a large vocabulary."""
    q, p = np.zeros(LARGE_VOCAB), np.zeros(LARGE_VOCAB)
    q[[7, 11]], p[11] = 0.5, 1.0
    # Both tables have the same value after all prefixes; only the first token is looked at.
    target = np.broadcast_to(p, (LARGE_VOCAB, LARGE_VOCAB))
    return HardCase("large V", (q,), (p, target), 1, law=False)
