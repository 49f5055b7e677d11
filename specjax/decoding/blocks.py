"""A drafted block: it is proposed, scored and judged. It is a chain, or a tree.

Node 0 is the last committed token. Only this module knows which token of a block follows which.
After verification, the accepted path goes on as a chain.

Axes: B rows, G longest block, N = G + 1 nodes, V vocabulary, D width, T committed tokens, W tokens
of a pass.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from specjax.checks import check_scores
from specjax.decoding.history import put_at
from specjax.errors import UserError
from specjax.platforms import rows_in_tiles
from specjax.processing import distributions_along
from specjax.sampling.distributions import confidence
from specjax.sampling.draws import draw
from specjax.types import (
    Acceptance,
    Bonus,
    Cache,
    DraftBlock,
    Drafter,
    DraftInputs,
    LanguageModel,
    Params,
    Path,
    Prompts,
    Sampling,
    ScoredBlock,
    TreeShape,
    Verification,
)
from specjax.verification import accept, draw_next


def wanted_limits(
    drafter: Drafter, params: Params, state: Any, limits: Int32[Array, " B"]
) -> Int32[Array, " B"]:
    """The limits that the drafter decides on before it drafts, at most `limits`."""
    chosen = drafter.draft_limits(params, state, limits)
    _assert_kind(f"{type(drafter).__name__}.draft_limits", chosen, jnp.int32, *limits.shape)
    return jnp.clip(chosen, 0, limits)


def propose_block(
    drafter: Drafter, params: Params, state: Any, inputs: DraftInputs
) -> tuple[DraftBlock, Any]:
    """The drafter's block and state.

    Asserts hold its author to the shapes of `specjax.types.Drafter`. Blocks are cut at the limits,
    which is exact, because these were known before the draft.
    """
    block, state = drafter.propose(params, state, inputs)
    where = f"{type(drafter).__name__}.propose"
    assert isinstance(block, DraftBlock), f"{where} must return a types.DraftBlock first"
    rows, longest, vocab = inputs.limits.size, drafter.max_draft, drafter.vocab_size
    _assert_kind(f"{where}: tokens", block.tokens, jnp.int32, rows, longest)
    _assert_kind(f"{where}: num_drafted", block.num_drafted, jnp.int32, rows)
    assert block.probs is not None or not drafter.num_uniforms, f"{where}: tokens need probs"
    if block.probs is not None and block.drawn_from is None:
        _assert_kind(f"{where}: probs", block.probs, jnp.float32, rows, longest + 1, vocab)
    if inputs.with_confidence:
        of_nodes = (rows, longest + 1, vocab)
        _assert_kind(f"{where}: confidences", block.confidences, jnp.float32, *of_nodes)
    if drafter.traits.drafts_trees:
        _assert_kind(f"{where}: parents", block.parents, jnp.int32, rows, longest)
    else:
        assert block.parents is None, f"{where}: parents need the trait drafts_trees"
    _assert_calls(where, drafter, block.calls)
    return block._replace(num_drafted=jnp.clip(block.num_drafted, 0, inputs.limits)), state


def read_bonus(
    drafter: Drafter, params: Params, state: Any, inputs: DraftInputs, block: DraftBlock
) -> tuple[Bonus, Any]:
    """The drafter's distribution after the block, and its state."""
    bonus, state = drafter.bonus(params, state, inputs, block)
    where = f"{type(drafter).__name__}.bonus"
    assert isinstance(bonus, Bonus), f"{where} must return a types.Bonus first"
    of_rows = (inputs.limits.size, drafter.vocab_size)
    _assert_kind(f"{where}: probs", bonus.probs, jnp.float32, *of_rows)
    if inputs.with_confidence:
        _assert_kind(f"{where}: confidences", bonus.confidences, jnp.float32, *of_rows)
    _assert_calls(where, drafter, bonus.calls)
    return bonus, state


def prefill_drafter(
    drafter: Drafter, params: Params, prompts: Prompts, max_length: int, verifier: Any
) -> Any:
    """The drafter's state after prompts; only those that read its states get `verifier`."""
    reads = {"verifier": verifier} if drafter.traits.boundaries else {}
    return drafter.prefill(params, prompts, max_length, **reads)


def commit_tokens(
    drafter: Drafter,
    state: Any,
    tokens: Int32[Array, "B T"],
    counts: Int32[Array, " B"],
    hidden: Float[Array, "B T D"] | None = None,
) -> Any:
    """The drafter's state after a commit; only those that read hidden states take them."""
    if drafter.traits.reads_verifier_hidden:
        return drafter.commit(state, tokens, counts, hidden=hidden)
    return drafter.commit(state, tokens, counts)


def _assert_kind(what: str, value: Any, dtype: Any, *shape: int) -> None:
    kind = getattr(value, "shape", None), getattr(value, "dtype", None)
    assert kind == (shape, jnp.dtype(dtype)), f"{what} must be {dtype.__name__}{list(shape)}"


def _assert_calls(where: str, drafter: Drafter, calls: Any) -> None:
    assert set(calls) == set(drafter.model_names), f"{where}: calls must name the model_names"


class Scored(NamedTuple):
    """The verifier's output for a block.

    Attributes:
      p: its distributions; arbitrary past the width of the pass.
      p_conf: its confidences, or None.
      hidden: the hidden states behind them, or None.
      logits: of `p`, or None.
      cache: its cache with the block in it.
    """

    p: Float32[Array, "B N V"]
    p_conf: Float32[Array, "B N V"] | None
    hidden: Float[Array, "B N D"] | None
    logits: Float32[Array, "B N V"] | None
    cache: Cache


def score(
    model: LanguageModel,
    params: Params,
    cache: Cache,
    sampling: Sampling,
    widths: Sequence[int],
    tokens: Int32[Array, "B W"],
    positions: Int32[Array, " B"],
    longest: Int32[Array, ""],
    parents: Int32[Array, "B G"] | None = None,
    *,
    with_confidence: bool,
    with_hidden: bool = False,
    with_logits: bool = False,
    skipped: Int32[Array, " B"] | None = None,
    rows: int = 0,
) -> Scored:
    """Reads blocks in the smallest of `widths` that holds the `longest`; each width is compiled.

    Args:
      model: the verifier, then its parameters and its cache.
      sampling: fields `[B]`.
      tokens: more than G + 1 only with `skipped`; at most the largest width.
      positions: those of the first tokens.
      longest: the number of tokens that matter.
      parents: of trees; None for chains.
      with_confidence: whether to return confidences (static); likewise the next two.
      skipped: tokens before the first distribution to return; None for 0.
      rows: with `skipped`, the number of distributions to return (static).
    """
    full, tree = widths[-1], shape_of(parents)

    def outputs(logits: Array, hidden: Array, tokens: Array) -> Any:
        above = None if parents is None else parents[:, : tokens.shape[1] - 1]
        if skipped is not None:
            place = skipped[:, None] + jnp.arange(rows, dtype=jnp.int32)[None]
            pick = jax.vmap(lambda row, at: row.at[at].get(mode="clip"))
            logits, tokens = pick(logits, place), pick(tokens, place)
        with jax.named_scope("distribution"):
            logits = rows_in_tiles(logits)
            p = rows_in_tiles(distributions_along(logits, sampling, tokens[:, 1:], above))
            p_conf = jax.vmap(jax.vmap(confidence))(logits) if with_confidence else None
        p_conf = None if p_conf is None else rows_in_tiles(p_conf)
        return p, p_conf, hidden if with_hidden else None, logits if with_logits else None

    if len(widths) == 1:
        read_now = tokens[:, :full]
        shape = () if tree is None else (part_of(tree, 0, full),)
        with jax.named_scope("verifier_pass"):
            read = model.extend(params, cache, read_now, positions, *shape)
        p, p_conf, hidden, logits = outputs(read.logits, read.hidden, read_now)
        return Scored(p, p_conf, hidden, logits, read.cache)

    def branch(width: int, tokens: Array, positions: Array) -> Any:
        read_now = tokens[:, :width]
        with jax.named_scope("verifier_pass"):
            if tree is None:
                returned = model.score(params, cache, read_now, positions)
            else:
                of_width = part_of(tree, 0, width)
                returned = model.score_tree(params, cache, read_now, positions, of_width)
        logits, hidden, updates = check_scores(model, returned, read_now)
        return *outputs(logits, hidden, read_now), updates

    like = jax.eval_shape(functools.partial(branch, full), tokens, positions)

    def pad(x: Array, like: Any) -> Array:
        return jnp.pad(x, [(0, all_ - now) for now, all_ in zip(x.shape, like.shape, strict=True)])

    def padded(width: int, tokens: Array, positions: Array) -> Any:
        # Padded to one shape: entries past the width are masked, or overwritten before they are
        # read.
        return jax.tree.map(pad, branch(width, tokens, positions), like)

    index = jnp.searchsorted(jnp.asarray(widths, jnp.int32), longest)
    branches = [functools.partial(padded, width) for width in widths]
    p, p_conf, hidden, logits, updates = lax.switch(index, branches, tokens, positions)
    # Outside of the switch: its branches would copy the cache.
    with jax.named_scope("verifier_pass"):
        return Scored(p, p_conf, hidden, logits, model.write(cache, updates, positions))


def powers_of_two(full: int) -> tuple[int, ...]:
    """1, 2, 4, ... below `full`, and `full`."""
    return (*(1 << i for i in range((full - 1).bit_length())), full)


def check_widths(widths: Any, full: int) -> None:
    """Raises UserError unless widths are a tuple that increases up to `full`."""
    whole = isinstance(widths, tuple) and all(type(width) is int for width in widths)
    rising = whole and list(widths) == sorted({*widths, full}) and widths[0] >= 1
    if not rising or widths[-1] != full:
        raise UserError(
            f"widths must be a tuple of whole numbers that increases from at least 1 to G + 1 = "
            f"{full}, got {widths}"
        )


def shape_of(parents: Array | None) -> TreeShape | None:
    """The places of the nodes with `parents [B, G]`; None for a chain."""
    if parents is None:
        return None
    longest = parents.shape[1]  # the path of a chain
    numbers = jnp.arange(longest + 1, dtype=jnp.int32)
    follows = jnp.pad(parents, ((0, 0), (1, 0)))[:, :, None] == numbers[None, None]
    itself = jnp.eye(longest + 1, dtype=bool)[None]
    seen = jnp.tril(follows, -1) | itself
    for _ in range((longest - 1).bit_length()):
        # Ways of up to twice as many steps; the sums of zeros and ones are exact.
        ways = seen.astype(jnp.float32)
        seen = jnp.einsum("bij,bjk->bik", ways, ways) > 0
    return TreeShape(jnp.sum(seen, axis=2, dtype=jnp.int32) - 1, seen)


def with_nodes(tree: TreeShape, parents: Array) -> TreeShape:
    """A whole tree with more nodes, of `parents [B, n]` in it."""
    pick, count = jax.vmap(lambda x, at: x[at]), parents.shape[1]
    itself = jnp.broadcast_to(jnp.eye(count, dtype=bool)[None], (parents.shape[0], count, count))
    new = jnp.concatenate([pick(tree.seen, parents), itself], axis=2)
    old = jnp.pad(tree.seen, ((0, 0), (0, 0), (0, count)))
    depths = jnp.concatenate([tree.depths, pick(tree.depths, parents) + 1], axis=1)
    return TreeShape(depths, jnp.concatenate([old, new], axis=1))


def part_of(tree: TreeShape, start: int, end: int) -> TreeShape:
    """The nodes `start .. end` of a whole tree, after those before."""
    return TreeShape(tree.depths[:, :end], tree.seen[:, start:end, :end])


def draft_probs(block: DraftBlock, vocab: int) -> Array:
    """`DraftBlock.probs` of a chain; of certain tokens one-hot, and made where they are read."""
    if block.probs is not None:
        return block.probs
    return jax.nn.one_hot(jnp.pad(block.tokens, ((0, 0), (0, 1))), vocab, dtype=jnp.float32)


class Judgement(NamedTuple):
    """The number of accepted tokens; of chains their `Acceptance`, of trees the path."""

    accepted: Int32[Array, " B"]
    acceptance: Acceptance | None
    path: Path | None


def judge(
    verification: Verification, uniforms: Array, block: DraftBlock, targets: Array, carry: Any
) -> Judgement:
    """Decides which tokens are accepted; `uniforms [B, G]`, `targets [B, G + 1, V]`."""
    if block.parents is None:
        needed = verification.needs_probs
        probs = draft_probs(block, targets.shape[2]) if needed else block.probs
        chains = ScoredBlock(block.tokens, probs, targets, block.num_drafted)
        of_chains = jax.vmap(functools.partial(accept, verification))
        acceptance, accepted = of_chains(uniforms, chains, carry)
        return Judgement(accepted, acceptance, None)
    tree = block.parents, block.laws, block.drawn_from
    trees = ScoredBlock(block.tokens, block.probs, targets, block.num_drafted, *tree)
    path = jax.vmap(verification.walk)(uniforms, trees)
    return Judgement(path.length, None, path)


def node_counts(path: Path, block: DraftBlock) -> Int32[Array, "B 2 G"]:
    """Which nodes of a tree were drafted and accepted."""
    nodes = jnp.arange(1, block.tokens.shape[1] + 1, dtype=jnp.int32)
    in_path = nodes[None] <= path.length[:, None]
    hit = (path.nodes[:, :, None] == nodes[None, None]) & in_path[:, :, None]
    there = nodes[None] <= block.num_drafted[:, None]
    return jnp.stack([there, hit.any(axis=1)], axis=1).astype(jnp.int32)


def along(judged: Judgement, block: DraftBlock, *others: Any) -> tuple[Any, ...]:
    """The block and arrays `[B, G + 1, ...]` like it, by the nodes of the accepted path.

    A path that ends at a leaf becomes a chain that is accepted whole; any other path becomes a
    chain whose next token was rejected. Chains do not change.
    """
    path = judged.path
    if path is None or block.parents is None:
        return block, *others
    index = jnp.arange(block.tokens.shape[1], dtype=jnp.int32)[None]
    nodes = jnp.where(index < path.length[:, None], path.nodes, 0)
    last = jnp.max(jnp.where(index == path.length[:, None] - 1, nodes, 0), axis=1)
    has_child = (block.parents == last[:, None]) & (index < block.num_drafted[:, None])
    places = jnp.pad(nodes, ((0, 0), (1, 0)))
    pick = jax.vmap(lambda x, at: x[at])
    of_nodes = lambda x: pick(jnp.pad(x, ((0, 0), (1, 0))), nodes)  # noqa: E731
    chain = block._replace(
        tokens=of_nodes(block.tokens),
        num_drafted=path.length + has_child.any(axis=1).astype(jnp.int32),
        parents=None,
        laws=None,
        sources=None if block.sources is None else of_nodes(block.sources),
        drawn_from=None,
    )
    every = (chain, *others)
    chain, *others = jax.tree.map(lambda x: pick(x, places) if jnp.ndim(x) == 3 else x, every)
    return chain, *others


def draw_after(judged: Judgement, uniforms: Array, chain: DraftBlock, bonus: Array) -> Array:
    """The token after the accepted tokens, `[B]`; `bonus [B, V]`: the target after whole blocks."""
    if judged.path is None:
        assert judged.acceptance is not None
        targets = judged.acceptance.targets
        block = ScoredBlock(chain.tokens, chain.probs, targets, chain.num_drafted)
        draw_each = jax.vmap(draw_next)
        return draw_each(uniforms, judged.acceptance, block, judged.accepted, bonus)
    whole = judged.accepted == chain.num_drafted
    return jax.vmap(draw)(jnp.where(whole[:, None], bonus, judged.path.weights), uniforms)


def emit(tokens: Array, accepted: Array, next_token: Array) -> Array:
    """The accepted tokens of `tokens [B, G]`, then the next one; `[B, G + 1]`."""
    index = jnp.arange(tokens.shape[1] + 1)[None]
    padded = jnp.pad(tokens, ((0, 0), (0, 1)))
    return jnp.where(index == accepted[:, None], next_token[:, None], padded)


def last_token(tokens: Array, counts: Array, before: Array) -> Array:
    """The last of the first `counts [B]` of `tokens [B, T]`; `before [B]` if there is none."""
    place = jnp.maximum(counts - 1, 0)[:, None]
    return jnp.where(counts > 0, jnp.take_along_axis(tokens, place, axis=1)[:, 0], before)


def drafted_sources(block: DraftBlock) -> Int32[Array, "B G"]:
    """The part of the drafter that each token came from."""
    return jnp.zeros_like(block.tokens) if block.sources is None else block.sources


def empty_block(
    rows: int, longest: int, vocab: int, with_confidence: bool, with_sources: bool = False
) -> DraftBlock:
    """A block without tokens, of B `rows`, for up to G = `longest` tokens."""
    empty = jnp.zeros((rows, longest + 1, vocab), jnp.float32)
    return DraftBlock(
        tokens=jnp.zeros((rows, longest), jnp.int32),
        probs=empty,
        confidences=empty if with_confidence else None,
        num_drafted=jnp.zeros((rows,), jnp.int32),
        calls={},
        sources=jnp.zeros((rows, longest), jnp.int32) if with_sources else None,
    )


def append_block(block: DraftBlock, part: DraftBlock) -> DraftBlock:
    """The block with the tokens of `part` after its own; passes do not change.

    The bonus position of `part` is not copied: its own drafter may have filled it in.
    """
    starts, counts = block.num_drafted, part.num_drafted
    confidences = block.confidences
    if confidences is not None:
        assert part.confidences is not None
        confidences = _put_first(confidences, part.confidences, starts, counts + 1)
    return block._replace(
        tokens=_put_first(block.tokens, part.tokens, starts, counts),
        probs=_put_first(block.probs, part.probs, starts, counts + 1),
        confidences=confidences,
        num_drafted=starts + counts,
        sources=None
        if block.sources is None
        else _put_first(block.sources, drafted_sources(part), starts, counts),
    )


def cut_from(block: DraftBlock, starts: Array, longest: int) -> DraftBlock:
    """The block without its first `starts [B]` tokens, padded to `longest`."""

    def cut(x: Array, width: int) -> Array:
        place = starts[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
        return jax.vmap(lambda row, at: row.at[at].get(mode="fill", fill_value=0))(x, place)

    confidences = block.confidences
    return block._replace(
        tokens=cut(block.tokens, longest),
        probs=cut(block.probs, longest + 1),
        confidences=None if confidences is None else cut(confidences, longest + 1),
        num_drafted=jnp.maximum(block.num_drafted - starts, 0),
        calls={},
    )


def _put_first(buffer: Array, values: Array, starts: Array, counts: Array) -> Array:
    """Writes the first `counts [B]` of `values [B, n, ...]` at `starts [B]`; see `put_at`."""
    index = jnp.arange(values.shape[1], dtype=jnp.int32)[None]
    return put_at(buffer, values, starts, index < counts[:, None])
