"""Drafts copied from the text so far: Max-Gram, prompt lookup, and n-gram tables.

Axes: B rows, P prompt length, C tokens of context, G longest block, V vocabulary.

Source: Cascade Speculative Drafting (arXiv 2312.11462), section 3.3.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specjax.checks import check_array, check_count
from specjax.decoding.history import put_at
from specjax.drafting.ngrams import NGrams, check_ngrams, follower
from specjax.errors import UserError
from specjax.types import (
    Array,
    Bonus,
    DraftBlock,
    Drafter,
    DraftTraits,
    Params,
    Prompts,
    Sampling,
)

# The number of tokens compared in a pass over the context; longer matches are rare.
_AT_ONCE = 8


class Match(NamedTuple):
    """The longest ending of each row's context that also occurs earlier.

    Attributes:
      lengths: `[B]` int32, the number of equal tokens; 0 if the last token is new.
      places: `[B]` int32, the place of the token after the earlier occurrence.
    """

    lengths: Array  # [B]
    places: Array  # [B]


class LookupState(NamedTuple):
    """The state of the rows between rounds.

    Attributes:
      context: `[B, C]` int32, the prompt and the committed tokens.
      lengths: `[B]` int32, the number of real tokens in it.
      match: the earlier occurrence of the context's ending.
      begins: `[B]` int32, the first place that n-grams look at.
    """

    context: Array  # [B, C]
    lengths: Array  # [B]
    match: Match
    begins: Array  # [B]


@dataclasses.dataclass(frozen=True)
class LookupDrafter(Drafter):
    """Proposes the tokens after the first occurrence of the context's ending.

    The context is the prompt (of an encoder-decoder the encoder's input, then the forced prefix),
    then the committed tokens. The longest ending that occurs earlier is used. If there is none, or
    the tokens after it reach the end of the context, a table continues; without a table the block
    ends. Tokens are chosen, not drawn: q is one-hot at every temperature, and decoding stays exact.
    Blocks have no `probs`.

    Its parameters: the `[V]` int32 table of each token's most frequent successor, -1 if unknown; or
    `NGrams`, which uses the longest known ending of the text so far; or () for none. `Bigram.table`
    makes both.

    `LookupDrafter(vocab_size, 10, max_ngram=2)` proposes what prompt lookup does in transformers
    (`prompt_lookup_num_tokens=10`, `max_matching_ngram_size=2`), which also cuts a proposal before
    an end of sequence.

    Attributes:
      vocab_size: V.
      max_draft: G >= 1.
      max_ngram: longer endings count as this long; None for no limit.
      min_ngram: shorter endings do not count.
      latest: whether the last of several occurrences is used, not the first.
      overlap: whether a draft continues with its own tokens if the tokens after the match reach the
        end of the context: a text that repeats itself is drafted to any length.

    Raises:
      ValueError: if a number is invalid or out of range, or `min_ngram` is above `max_ngram`.
    """

    vocab_size: int
    max_draft: int
    max_ngram: int | None = None
    min_ngram: int = 1
    latest: bool = False
    overlap: bool = False

    def __post_init__(self) -> None:
        check_count("vocab_size", self.vocab_size, "give the verifier's")
        check_count("max_draft", self.max_draft, "decode with the verifier alone to draft nothing")
        check_count("min_ngram", self.min_ngram, "give a number of tokens")
        if self.max_ngram is None:
            return
        check_count("max_ngram", self.max_ngram, "give a number of tokens, or None for no limit")
        if self.min_ngram > self.max_ngram:
            raise UserError(
                f"min_ngram must be at most max_ngram = {self.max_ngram}, got {self.min_ngram}"
            )

    @property
    def traits(self) -> DraftTraits:
        """A proposal also depends on the beginning of its block."""
        return DraftTraits(prefix_only=False, independent_rows=True, catches_up=True)

    @property
    def source_names(self) -> tuple[str, ...]:
        """Copies are drawn by no model."""
        return ("lookup",)

    def prefill(self, params: Params, prompts: Prompts, max_length: int) -> LookupState:
        # Positions of an encoder-decoder do not count the encoder's input.
        context = jnp.pad(prompts.inputs.astype(jnp.int32), ((0, 0), (0, max_length)))
        lengths = begins = prompts.input_lengths.astype(jnp.int32)
        if (prefix := prompts.prefix) is not None:
            context = put_at(context, prefix.astype(jnp.int32), lengths)
            forced: Any = prompts.prefix_lengths
            if forced is None:
                forced = prefix.shape[1]
            lengths = lengths + jnp.asarray(forced, jnp.int32)
        apart = isinstance(params, NGrams) and params.start >= 0
        return self._state(context, lengths, jnp.where(apart, begins, 0))

    def propose(
        self,
        params: Params,
        state: LookupState,
        tokens: Array,
        limits: Array,
        uniforms: Array,
        sampling: Sampling,
        active: Array,
        *,
        with_confidence: bool,
    ) -> tuple[DraftBlock, LookupState]:
        chain, known = self.chain(params, state, tokens)
        drafted = jnp.minimum(known, jnp.where(active, limits, 0))
        return DraftBlock(chain[:, :-1], None, None, drafted, {}), state

    def bonus(
        self,
        params: Params,
        state: LookupState,
        tokens: Array,
        block: DraftBlock,
        sampling: Sampling,
        *,
        with_confidence: bool,
    ) -> tuple[Bonus, LookupState]:
        """See `Drafter`; if no token follows, the last token again, which is rarely probable.

        A rule that reads q then leaves the verifier's distribution nearly as it is.
        """
        chain, _ = self.chain(params, state, tokens)
        after = jnp.take_along_axis(chain, block.num_drafted[:, None], axis=1)[:, 0]
        return Bonus(jax.nn.one_hot(after, self.vocab_size, dtype=jnp.float32), None, {}), state

    def commit(
        self, state: LookupState, tokens: Array, counts: Array, hidden: Array | None = None
    ) -> LookupState:
        # Tokens past `counts` are after the end, and are overwritten.
        context = put_at(state.context, tokens, state.lengths)
        return self._state(context, state.lengths + counts, state.begins)

    def mark(self, state: LookupState) -> tuple[Array, Match]:
        return state.lengths, state.match

    def rewind(self, state: LookupState, mark: tuple[Array, Match]) -> LookupState:
        lengths, match = mark
        return state._replace(lengths=lengths, match=match)

    def matched(self, state: LookupState) -> Array:
        """The number of tokens of the ending that occur earlier, `[B]` int32; 0 for too few."""
        found = state.match.lengths
        return jnp.where(found >= self.min_ngram, found, 0)

    def _state(self, context: Array, lengths: Array, begins: Array) -> LookupState:
        match = longest_match(context, lengths, most=self.max_ngram, latest=self.latest)
        return LookupState(context, lengths, match, begins)

    def chain(self, params: Params, state: LookupState, tokens: Array) -> tuple[Array, Array]:
        """The tokens of a draft and the token after it.

        Returns:
          `[B, G + 1]` int32, and the number of known tokens among the first G, `[B]` int32.
        """
        place, step = state.match.places[:, None], jnp.arange(self.max_draft + 1, dtype=jnp.int32)
        left = jnp.maximum(state.lengths[:, None] - place, 1)
        follows = jnp.broadcast_to(self.matched(state)[:, None] > 0, (tokens.size, step.size))
        ahead = jnp.broadcast_to(step[None], follows.shape)
        if self.overlap:
            ahead = ahead % left
        else:
            follows &= ahead < left
        copied = jnp.take_along_axis(state.context, place + ahead, axis=1, mode="clip")
        table = _table(params, self.vocab_size)
        ending = _ending(table, state, tokens)
        last, going, chain, known = tokens, jnp.ones(tokens.shape, bool), [], jnp.zeros_like(tokens)
        for i in range(self.max_draft + 1):
            after = _after(table, ending)
            after = jnp.where(follows[:, i], copied[:, i], after)
            going &= after >= 0
            last = jnp.where(going, after, last)
            ending = jnp.concatenate([last[:, None], ending[:, :-1]], axis=1)
            chain.append(last)
            known += going.astype(jnp.int32)
        return jnp.stack(chain, axis=1), jnp.minimum(known, self.max_draft)


def _table(params: Params, vocab_size: int) -> Array | NGrams | None:
    if isinstance(params, NGrams):
        check_ngrams("LookupDrafter's parameters", params, vocab_size)
        return params
    leaves = jax.tree.leaves(params)
    if not leaves:
        return None
    check_array("LookupDrafter's parameters", leaves[0], "[V]", (vocab_size,), jnp.int32)
    return leaves[0]


def _ending(table: Array | NGrams | None, state: LookupState, tokens: Array) -> Array:
    """The last tokens that the table needs, `[B, T]`, the last first; -1 for missing tokens."""
    if not isinstance(table, NGrams):
        return tokens[:, None]
    # The caller gives the last token: an encoder-decoder's start token is in no context.
    back = jnp.arange(1, table.contexts.shape[1], dtype=jnp.int32)[None]
    place, begins = state.lengths[:, None] - 1 - back, state.begins[:, None]
    before = jnp.take_along_axis(state.context, jnp.maximum(place, 0), axis=1)
    before = jnp.where(place == begins - 1, table.start, jnp.where(place >= begins, before, -1))
    return jnp.concatenate([tokens[:, None], before], axis=1)


def _after(table: Array | NGrams | None, ending: Array) -> Array:
    """The token after each ending `[B, T]`, `[B]`; -1 if unknown."""
    if table is None:
        return jnp.full_like(ending[:, 0], -1)
    return follower(table, ending) if isinstance(table, NGrams) else table[ending[:, 0]]


def longest_match(
    context: Array, lengths: Array, *, most: int | None = None, latest: bool = False
) -> Match:
    """Finds the longest ending that occurs earlier, overlaps included.

    It scans the context in every round, so `commit` keeps no index: a scan reads the context once
    for each eight matching tokens, which is little beside a verifier's pass, and needs no prefill.

    Args:
      context: `[B, C]` int32, of which `lengths [B]` tokens are real.
      lengths: `[B]` int32, at least 1.
      most: longer matches count as this long; None for no limit.
      latest: whether the last of several longest matches is used, not the first.

    Returns:
      The matches. An earlier occurrence ends before the last token, so a token follows it.
    """
    real, found = _found(context, lengths, most)
    return _longest(real, found, latest)


def longest_matches(
    context: Array,
    lengths: Array,
    count: int,
    ahead: int,
    *,
    most: int | None = None,
    latest: bool = False,
) -> Match:
    """Finds the longest endings that occur earlier, with different tokens after them.

    Args:
      context: `[B, C]` int32, of which `lengths [B]` tokens are real.
      lengths: `[B]` int32, at least 1.
      count: K, the number of matches (static).
      ahead: the number of tokens that are compared (static).
      most: longer matches count as this long; None for no limit.
      latest: whether later ones are preferred of those that are equally long.

    Returns:
      The matches, each field `[B, K]`, the longest first; their length is 0 if there are fewer.
    """
    real, found = _found(context, lengths, most)
    place = jnp.arange(context.shape[1], dtype=jnp.int32)[None]
    matches = []
    for _ in range(count):
        best = _longest(real, jnp.where(real, found, 0), latest)
        matches.append(best)
        same = real
        for i in range(ahead):
            theirs, own = place + i, best.places[:, None] + i
            token = jnp.take_along_axis(context, own, axis=1, mode="clip")
            equal = (jnp.roll(context, -i, axis=1) == token) & (own < lengths[:, None])
            same &= equal | (theirs >= lengths[:, None])
        real &= ~same
    return Match(*(jnp.stack(each, axis=1) for each in zip(*matches, strict=True)))


def _found(context: Array, lengths: Array, most: int | None) -> tuple[Array, Array]:
    """The places that a token can be copied from, and `_agreeing` there; both `[B, C]`."""
    width = context.shape[1]
    place = jnp.arange(width, dtype=jnp.int32)[None]
    real = (place >= 1) & (place < lengths[:, None])
    return real, _agreeing(context, lengths, real, width if most is None else most)


def _longest(real: Array, found: Array, latest: bool) -> Match:
    width = real.shape[1]
    place = jnp.arange(width, dtype=jnp.int32)[None]
    longest = jnp.max(found, axis=1)
    best = real & (found == longest[:, None])
    if latest:
        return Match(longest, jnp.max(jnp.where(best, place, 0), axis=1))
    return Match(longest, jnp.min(jnp.where(best, place, width - 1), axis=1))


def _agreeing(context: Array, lengths: Array, real: Array, most: int) -> Array:
    """For each place, the number of tokens before it that equal the context's end; `[B, C]`."""
    width = context.shape[1]

    def shift(text: Array) -> Array:
        return jnp.pad(text[:, :width], ((0, 0), (_AT_ONCE, 0)), constant_values=-1)

    def step(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        done, shifted, found = carry  # shifted[:, j + _AT_ONCE] is context[:, j - done]
        at = lengths[:, None] - 1 - done - jnp.arange(_AT_ONCE, dtype=jnp.int32)[None]
        end = jnp.take_along_axis(context, jnp.maximum(at, 0), axis=1)
        # Before the start there is no token, and the two sides differ.
        end = jnp.where(at >= 0, end, -2)
        same = real & (found == done)
        for i in range(_AT_ONCE):
            before = shifted[:, _AT_ONCE - 1 - i :][:, :width]
            same &= (before == end[:, i : i + 1]) & (done + i < most)
            found += same.astype(jnp.int32)
        return done + _AT_ONCE, shift(shifted), found

    def unfinished(carry: tuple[Array, Array, Array]) -> Array:
        return (carry[0] < most) & jnp.any(real & (carry[2] == carry[0]))

    none = jnp.zeros(context.shape, jnp.int32)
    return lax.while_loop(unfinished, step, (jnp.int32(0), shift(context), none))[2]
