"""Drafts copied from the text so far: Max-Gram, prompt lookup, and n-gram tables.

Axes: B rows, P prompt length, C tokens of context, G longest block, N = G + 1 positions, K copies
or predicted texts, M places that tokens are drawn from, V vocabulary.

Source: Cascade Speculative Drafting (arXiv 2312.11462), section 3.3.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from specjax.checks import PathLike, check_count, check_path, one_number
from specjax.decoding.blocks import draft_probs, drafted_sources
from specjax.decoding.history import put_at
from specjax.drafting.cascades import SeveralDrafters, SeveralState, Widened
from specjax.drafting.chain import USUAL_LENGTH, Chain
from specjax.drafting.heads import EagleDrafter
from specjax.drafting.ngrams import Bigram, NGrams, follower
from specjax.drafting.trees import union_of
from specjax.errors import UserError
from specjax.platforms import row, when
from specjax.sampling.draws import TINY, draw
from specjax.types import (
    Bonus,
    DraftBlock,
    Drafter,
    DraftInputs,
    DraftModels,
    DraftTraits,
    Params,
    Prompts,
)

# The number of tokens compared in a pass over the context; longer matches are rare.
_AT_ONCE = 8
# The tokens of a prompt's end that lead to the beginning of a predicted text.
_TAIL = 16


class Match(NamedTuple):
    """The longest ending of each row's context that also occurs earlier.

    With several occurrences the fields are `[B, K]` or `[B, M]`, the longest first.

    Attributes:
      lengths: the number of equal tokens; 0 if the last token is new.
      places: the place of the token after the earlier occurrence.
    """

    lengths: Int32[Array, " B"]
    places: Int32[Array, " B"]


class LookupState(NamedTuple):
    """The prompt and the committed tokens, how many, and where their ending occurs earlier.

    `begins` is the first place that n-grams look at.
    """

    context: Int32[Array, "B C"]
    lengths: Int32[Array, " B"]
    match: Match
    begins: Int32[Array, " B"]


@dataclasses.dataclass(frozen=True)
class Lookup(Drafter):
    """Proposes the tokens after the first occurrence of the context's ending.

    The context is the prompt (of an encoder-decoder the encoder's input, then the forced prefix),
    then the committed tokens. The longest ending that occurs earlier is used. If there is none, or
    the tokens after it reach the end of the context, a table continues; without a table the block
    ends. Tokens are chosen, not drawn: q is one-hot at every temperature, and decoding stays exact.
    Blocks have no `probs`. With `earlier`, tokens are drawn, and q are the shares of those that
    follow the longest ending.

    Its parameters: the `[V]` int32 table of each token's most frequent successor, -1 if unknown; or
    `NGrams`, which uses the longest known ending of the text so far; or () for none. `Bigram.table`
    makes both.

    `Lookup(max_ngram=2, max_copy=10)` proposes what prompt lookup does in transformers
    (`prompt_lookup_num_tokens=10`, `max_matching_ngram_size=2`), which also cuts a proposal before
    an end of sequence.

    Attributes:
      max_ngram: longer endings count as this long; None for no limit.
      min_ngram: shorter endings do not count.
      latest: whether the last of several occurrences is used, not the first.
      overlap: whether a draft continues with its own tokens if the tokens after the match reach the
        end of the context: a text that repeats itself is drafted to any length.
      bigram: the table: a `Bigram`, a directory of `specjax train bigram`, "built-in" for the
        built-in pair's, or None.
      min_match: it copies only if that many tokens at the text's end have occurred before;
        otherwise the decoder's drafter drafts. None: no model drafts.
      max_copy: the longest copied block; the decoder's `max_draft` by default.
      copy_factor: a copy has at most this times the length of its match, rounded up, as a longer
        match promises a longer copy (SuffixDecoding, arXiv 2411.04975), and a table continues;
        None: up to `max_copy`.
      copies: the number of earlier occurrences that are copied. With several, drafts are trees.
      earlier: the number of earlier answers to the same prompt that it copies from, too: the last
        that a `Decoder` or an engine gave. Where the longest ending occurs several times, each
        token is drawn as often as it follows there; at temperature 0 the most frequent one is
        taken. Endings of 8 tokens or more are equally long, if `max_ngram` does not say otherwise.
        With several `copies` nothing is drawn.
      vocab_size: V; the verifier's when it is bound.
    """

    max_ngram: int | None = None
    min_ngram: int = 1
    latest: bool = False
    overlap: bool = False
    bigram: Bigram | PathLike | None = None
    min_match: int | None = None
    max_copy: int | None = None
    copy_factor: float | None = None
    copies: int = 1
    earlier: int = 0
    vocab_size: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.bigram, Bigram | None):
            check_path(self.bigram, "bigram=")
        for name in ("min_match", "max_copy", "max_ngram"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), "give a number of tokens, or None")
        if self.copy_factor is not None:
            factor = one_number("copy_factor", self.copy_factor, low=0.0, open_low=True)
            object.__setattr__(self, "copy_factor", factor)
        check_count("copies", self.copies, "give the number of copies")
        check_count("min_ngram", self.min_ngram, "give a number of tokens")
        check_count("earlier", self.earlier, "give a number of answers", low=0)
        for name in ("latest", "overlap", "bigram"):
            if self.earlier and getattr(self, name):
                raise UserError(
                    f"{name} must be left out with earlier={self.earlier}: drafts are drawn from "
                    "all that follows the longest ending, and end there"
                )
        check_count("vocab_size", self.vocab_size, "leave it out", low=0)
        if self.copies > 1 and self.min_match is not None:
            raise UserError(
                f"min_match must be left out with copies={self.copies}: use Branches to draft with "
                "a model and with several copies"
            )
        if self.max_ngram is not None and self.min_ngram > self.max_ngram:
            raise UserError(
                f"min_ngram must be at most max_ngram = {self.max_ngram}, got {self.min_ngram}"
            )

    @property
    def max_draft(self) -> int:
        return self.max_copy or USUAL_LENGTH

    @property
    def model_names(self) -> tuple[str, ...]:
        return () if self.min_match is None else ("drafter",)

    @property
    def left_out(self) -> Mapping[str, str]:
        if self.min_match is not None:
            return {}
        why = "drafting=Lookup(...) has no drafter model"
        return dict.fromkeys(("min_draft", "stopping"), why)

    @property
    def drafts_trees(self) -> bool:
        return self.copies > 1

    @property
    def weighs_costs(self) -> bool:
        return self.min_match is not None

    def bind(self, models: DraftModels) -> tuple[Drafter, Params]:
        main = models.model("verifier")
        copier = dataclasses.replace(
            self,
            max_ngram=self.max_ngram
            or (max(_AT_ONCE, self.min_ngram, self.min_match or 0) if self.earlier else None),
            bigram=None,
            min_match=None,
            max_copy=self.max_copy or models.max_draft or USUAL_LENGTH,
            copies=1,
            vocab_size=self.vocab_size if main is None else main.model.vocab_size,
        )
        table = models.table(self.bigram)
        if self.copies > 1:
            return LookupTree(copier, self.copies), table
        if self.min_match is None:
            return copier, table
        drafter, params = Chain().bind(models)
        return LookupFirst(copier, drafter, self.min_match), (table, params)

    @property
    def traits(self) -> DraftTraits:
        # A proposal also depends on the beginning of its block.
        return DraftTraits(
            prefix_only=False,
            independent_rows=True,
            catches_up=True,
            predictions=1 + self.earlier,
        )

    @property
    def num_uniforms(self) -> int:
        return self.max_draft if self.earlier else 0

    @property
    def source_names(self) -> tuple[str, ...]:
        return ("lookup",)

    def prefill(self, params: Params, prompts: Prompts, max_length: int) -> LookupState:
        # Positions of an encoder-decoder do not count the encoder's input.
        context = jnp.pad(prompts.inputs.astype(jnp.int32), ((0, 0), (0, max_length)))
        lengths = begins = prompts.input_lengths.astype(jnp.int32)
        if (prefix := prompts.prefix) is not None:
            context = put_at(context, prefix.astype(jnp.int32), lengths)
            assert prompts.prefix_lengths is not None
            lengths = lengths + prompts.prefix_lengths.astype(jnp.int32)
        only_outputs = isinstance(params, NGrams) and params.start >= 0
        begins = jnp.where(only_outputs, begins, 0)
        if prompts.predictions is not None:
            context, shift = _after_predictions(context, lengths, prompts.predictions)
            lengths, begins = lengths + shift, begins + shift
        return self._state(context, lengths, begins)

    def propose(
        self, params: Params, state: LookupState, inputs: DraftInputs
    ) -> tuple[DraftBlock, LookupState]:
        if self.earlier:
            tokens, probs, count = self._drawn(state, inputs)
        else:
            chain, count = self.chain(params, state, inputs.tokens)
            tokens, probs = chain[:, :-1], None
        drafted = jnp.minimum(count, jnp.where(inputs.active, inputs.limits, 0))
        return DraftBlock(tokens, probs, None, drafted, {}), state

    def bonus(
        self, params: Params, state: LookupState, inputs: DraftInputs, block: DraftBlock
    ) -> tuple[Bonus, LookupState]:
        if self.earlier:  # a draft has what follows it, too
            return Bonus(jax.vmap(row)(block.probs, block.num_drafted), None, {}), state
        # If no token follows, the last token again, which is rarely probable: a rule that reads q
        # then leaves the verifier's distribution nearly as it is.
        chain, _ = self.chain(params, state, inputs.tokens)
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

    def match_lengths(self, state: LookupState) -> Array:
        """The number of tokens of the ending that occur earlier, `[B]` int32; 0 for too few."""
        lengths = state.match.lengths
        lengths = lengths[:, 0] if lengths.ndim == 2 else lengths
        return jnp.where(lengths >= self.min_ngram, lengths, 0)

    def _state(self, context: Array, lengths: Array, begins: Array) -> LookupState:
        if self.earlier:
            _, agreeing = _agreement(context, lengths, self.max_ngram)
            # Each answer has about one place; the first, of the last answers, are kept. Floats are
            # ordered faster on CPUs.
            found = lax.top_k(agreeing.astype(jnp.float32), min(2 * self.earlier, context.shape[1]))
            match = Match(found[0].astype(jnp.int32), found[1])
        else:
            # A scan in every round, so that `commit` keeps no index: it reads the context once for
            # each eight matching tokens, little beside a verifier's pass, and needs no prefill.
            match = _longest(*_agreement(context, lengths, self.max_ngram), self.latest)
        return LookupState(context, lengths, match, begins)

    def _drawn(
        self, state: LookupState, inputs: DraftInputs
    ) -> tuple[Int32[Array, "B G"], Float32[Array, "B N V"], Int32[Array, " B"]]:
        """A draft from all places with the longest match, its q, and the number of known tokens."""
        lengths, places = state.match
        step = jnp.arange(self.max_draft + 1, dtype=jnp.int32)[None, None]
        at = places[:, :, None] + step
        copied = jax.vmap(lambda text, at: text.at[at].get(mode="clip"))(state.context, at)
        follows = (at < state.lengths[:, None, None]) & (copied >= 0)
        if self.copy_factor is not None:
            most = jnp.ceil(lengths.astype(jnp.float32) * self.copy_factor).astype(jnp.int32)
            follows &= step < most[:, :, None]
        matching = self.match_lengths(state)[:, None]
        alive = (lengths == matching) & (matching > 0)
        greedy = (jnp.asarray(inputs.sampling.temperature) < TINY)[:, None]
        last, count, drawn, tokens, weights = inputs.tokens, 0 * inputs.tokens, [], [], []
        for i in range(self.max_draft + 1):
            alive &= follows[:, :, i]
            # If no token follows, the last token again; see `bonus`.
            token = jnp.where(alive, copied[:, :, i], last[:, None])
            same = (token[:, :, None] == token[:, None]) & alive[:, None]
            often = jnp.where(alive, jnp.sum(same, axis=2), 0)
            best = jnp.take_along_axis(token, jnp.argmax(often, axis=1)[:, None], axis=1)
            found = jnp.any(alive, axis=1)
            kept = jnp.where(found[:, None], alive & ~(greedy & (token != best)), True)
            weight = kept.astype(jnp.float32) / jnp.sum(kept, axis=1, dtype=jnp.float32)[:, None]
            tokens.append(token)
            weights.append(weight)
            if i < self.max_draft:
                pick = jax.vmap(draw)(weight, inputs.uniforms[:, i])
                last = jnp.take_along_axis(token, pick[:, None], axis=1)[:, 0]
                drawn.append(last)
                count += found.astype(jnp.int32)
                alive &= token == last[:, None]
        q = jnp.zeros((last.size, step.size, self.vocab_size), jnp.float32)
        q = jax.vmap(jax.vmap(lambda q, token, weight: q.at[token].add(weight)))(
            q, jnp.stack(tokens, axis=1), jnp.stack(weights, axis=1)
        )
        return jnp.stack(drawn, axis=1), q, count

    def chain(self, params: Params, state: LookupState, tokens: Array) -> tuple[Array, Array]:
        """The tokens of a draft and the token after it.

        Returns:
          `[B, G + 1]` int32, and the number of known tokens among the first G, `[B]` int32.
        """
        place, step = state.match.places[:, None], jnp.arange(self.max_draft + 1, dtype=jnp.int32)
        left = jnp.maximum(state.lengths[:, None] - place, 1)
        matching = self.match_lengths(state)[:, None]
        ahead = jnp.broadcast_to(step[None], (tokens.size, step.size))
        if self.copy_factor is None:
            follows = jnp.broadcast_to(matching > 0, ahead.shape)
        else:
            most = jnp.ceil(matching.astype(jnp.float32) * self.copy_factor)
            follows = ahead < most.astype(jnp.int32)
        if self.overlap:
            ahead = ahead % left
        else:
            follows &= ahead < left
        copied = jnp.take_along_axis(state.context, place + ahead, axis=1, mode="clip")
        successors = params.successors if isinstance(params, NGrams) else params
        successors = None if isinstance(successors, tuple) else successors
        fits = successors is None or successors.shape == (self.vocab_size,)
        assert fits, f"Lookup: the table must have {self.vocab_size} entries"
        # The last tokens that the table needs, the last first; -1 for missing tokens.
        ending = tokens[:, None]
        if isinstance(params, NGrams):
            # The caller gives the last token: an encoder-decoder's start token is in no context.
            back = jnp.arange(1, params.contexts.shape[1], dtype=jnp.int32)[None]
            at, begins = state.lengths[:, None] - 1 - back, state.begins[:, None]
            before = jnp.take_along_axis(state.context, jnp.maximum(at, 0), axis=1)
            before = jnp.where(at == begins - 1, params.start, jnp.where(at >= begins, before, -1))
            ending = jnp.concatenate([ending, before], axis=1)
        last, going, chain, count = tokens, jnp.ones(tokens.shape, bool), [], jnp.zeros_like(tokens)
        for i in range(self.max_draft + 1):
            after = jnp.full_like(last, -1)
            if isinstance(params, NGrams):
                after = follower(params, ending)
            elif successors is not None:
                after = successors[last]
            after = jnp.where(follows[:, i], copied[:, i], after)
            going &= after >= 0
            last = jnp.where(going, after, last)
            ending = jnp.concatenate([last[:, None], ending[:, :-1]], axis=1)
            chain.append(last)
            count += going.astype(jnp.int32)
        return jnp.stack(chain, axis=1), jnp.minimum(count, self.max_draft)


def _after_predictions(
    context: Int32[Array, "B C"], lengths: Int32[Array, " B"], predictions: Int32[Array, "B K E"]
) -> tuple[Int32[Array, "B D"], int]:
    """Puts predicted texts before the context, and says how many tokens now precede the context.

    The context's ending stands before each prediction, so that it matches there at first, as
    -2 - token: it is not copied, or it would count as often as there are predictions. -1, which
    also fills rows without a prediction, matches nothing.
    """
    place = lengths[:, None] - _TAIL + jnp.arange(_TAIL, dtype=jnp.int32)[None]
    tail = jnp.take_along_axis(context, jnp.maximum(place, 0), axis=1)
    tail = jnp.where((place >= 0)[:, None] & (predictions[:, :, :1] >= 0), -2 - tail[:, None], -1)
    end = jnp.full_like(tail[:, :, :1], -1)
    texts = jnp.concatenate([tail, predictions.astype(jnp.int32), end], axis=2)
    texts = texts.reshape(len(context), -1)
    return jnp.concatenate([texts, context], axis=1), texts.shape[1]


def longest_matches(
    context: Int32[Array, "B C"],
    lengths: Int32[Array, " B"],
    count: int,
    ahead: int,
    *,
    most: int | None = None,
    latest: bool = False,
) -> Match:
    """Finds the longest endings that occur earlier, with different tokens after them.

    Returns `count` matches, each field `[B, K]`, the longest first; their length is 0 if there are
    fewer. `ahead` tokens after them are compared; longer matches than `most` count as that long.
    """
    real, agreeing = _agreement(context, lengths, most)
    place = jnp.arange(context.shape[1], dtype=jnp.int32)[None]
    matches = []
    for _ in range(count):
        best = _longest(real, jnp.where(real, agreeing, 0), latest)
        matches.append(best)
        same = real
        for i in range(ahead):
            theirs, ours = place + i, best.places[:, None] + i
            token = jnp.take_along_axis(context, ours, axis=1, mode="clip")
            equal = (jnp.roll(context, -i, axis=1) == token) & (ours < lengths[:, None])
            same &= equal | (theirs >= lengths[:, None])
        real &= ~same
    return Match(*(jnp.stack(each, axis=1) for each in zip(*matches, strict=True)))


def _agreement(context: Array, lengths: Array, most: int | None) -> tuple[Array, Array]:
    """The places that a token can be copied from, and `_agreeing` there; both `[B, C]`."""
    width = context.shape[1]
    place = jnp.arange(width, dtype=jnp.int32)[None]
    real = (place >= 1) & (place < lengths[:, None]) & (context >= 0)
    context = jnp.where(context < -1, -2 - context, context)  # see `_after_predictions`
    return real, _agreeing(context, lengths, real, width if most is None else most)


def _longest(real: Array, agreeing: Array, latest: bool) -> Match:
    width = real.shape[1]
    place = jnp.arange(width, dtype=jnp.int32)[None]
    longest = jnp.max(agreeing, axis=1)
    best = real & (agreeing == longest[:, None])
    if latest:
        return Match(longest, jnp.max(jnp.where(best, place, 0), axis=1))
    return Match(longest, jnp.min(jnp.where(best, place, width - 1), axis=1))


def _agreeing(context: Array, lengths: Array, real: Array, most: int) -> Array:
    """For each place, the number of tokens before it that equal the context's end; `[B, C]`."""
    width = context.shape[1]

    def shift(text: Array) -> Array:
        return jnp.pad(text[:, :width], ((0, 0), (_AT_ONCE, 0)), constant_values=-1)

    def step(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        done, shifted, count = carry  # shifted[:, j + _AT_ONCE] is context[:, j - done]
        at = lengths[:, None] - 1 - done - jnp.arange(_AT_ONCE, dtype=jnp.int32)[None]
        end = jnp.take_along_axis(context, jnp.maximum(at, 0), axis=1)
        # Where there is no token, before the start or between texts, the two sides differ.
        end = jnp.where((at >= 0) & (end >= 0), end, -2)
        same = real & (count == done)
        for i in range(_AT_ONCE):
            before = shifted[:, _AT_ONCE - 1 - i :][:, :width]
            same &= (before == end[:, i : i + 1]) & (done + i < most)
            count += same.astype(jnp.int32)
        return done + _AT_ONCE, shift(shifted), count

    def unfinished(carry: tuple[Array, Array, Array]) -> Array:
        return (carry[0] < most) & jnp.any(real & (carry[2] == carry[0]))

    none = jnp.zeros(context.shape, jnp.int32)
    return lax.while_loop(unfinished, step, (jnp.int32(0), shift(context), none))[2]


@dataclasses.dataclass(frozen=True)
class LookupFirst(SeveralDrafters):
    """Copies in rows whose last `min_match` tokens match; another drafter drafts in the others.

    The choice depends only on committed tokens, so decoding is exact. A model makes no pass for
    rows that copy: it lags there, and catches up later. A draft head reads in every round what was
    committed. Its parameters: a tuple of the lookup's and the drafter's.

    Rules that read the drafter's confidence are not supported: copied tokens have none. G is the
    larger of the two.

    Attributes:
      lookup: copies from the text so far.
      drafter: any other drafter of chains.
      min_match: the least number of last tokens that occurred before.
    """

    lookup: Lookup
    drafter: Drafter
    min_match: int = 3

    _takes_states: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._check_parts(("lookup", "drafter"))
        if isinstance(self.drafter, EagleDrafter):
            drafter = dataclasses.replace(self.drafter, longest=self.lookup.max_draft)
            object.__setattr__(self, "drafter", drafter)
        low, high = self.lookup.min_ngram, self.lookup.max_ngram
        if self.min_match < low or (high is not None and self.min_match > high):
            raise UserError(
                f"min_match must be at least the lookup's min_ngram = {low} and at most its "
                f"max_ngram = {high}, got {self.min_match}"
            )

    @property
    def drafters(self) -> tuple[Drafter, ...]:
        return self.lookup, self.drafter

    @property
    def max_draft(self) -> int:
        return max(self.lookup.max_draft, self.drafter.max_draft)

    @property
    def traits(self) -> DraftTraits:
        return self.drafter.traits._replace(
            prefix_only=False,
            fixed_length=False,
            # Rows share passes: whether there is a pass depends on all rows.
            independent_rows=False,
            processes=False,
            predictions=self.lookup.traits.predictions,
        )

    def describe(self) -> Any:
        return super().describe() | {"min_match": self.min_match}

    def draft_limits(self, params: Sequence[Params], state: SeveralState, limits: Array) -> Array:
        copies = self.copies(state)
        drafting = jnp.where(copies, 0, jnp.minimum(limits, self.drafter.max_draft))
        drafted = self.drafter.draft_limits(params[1], state.drafters[1], drafting)
        return jnp.where(copies, jnp.minimum(limits, self.lookup.max_draft), drafted)

    def propose(
        self, params: Sequence[Params], state: SeveralState, inputs: DraftInputs
    ) -> tuple[DraftBlock, SeveralState]:
        copies = self.copies(state)
        drafting = inputs.active & ~copies
        uniforms = jnp.split(inputs.uniforms, [self.lookup.num_uniforms], axis=1)
        copied, lookup = self.lookup.propose(
            params[0],
            state.drafters[0],
            inputs._replace(uniforms=uniforms[0], active=inputs.active & copies),
        )
        limits = jnp.where(drafting, jnp.minimum(inputs.limits, self.drafter.max_draft), 0)
        drafted, drafter = self.drafter.propose(
            params[1],
            state.drafters[1],
            inputs._replace(limits=limits, uniforms=uniforms[1], active=drafting),
        )
        longest, count = self.max_draft, jnp.minimum(drafted.num_drafted, limits)
        block = DraftBlock(
            tokens=jnp.where(
                copies[:, None], _wide(copied.tokens, longest), _wide(drafted.tokens, longest)
            ),
            probs=jnp.where(
                copies[:, None, None],
                _wide(draft_probs(copied, self.vocab_size), longest + 1),
                _wide(draft_probs(drafted, self.vocab_size), longest + 1),
            ),
            confidences=None,
            num_drafted=jnp.where(copies, copied.num_drafted, count),
            calls=drafted.calls,
        )
        if inputs.with_sources:  # the lookup's is 0
            theirs = _wide(drafted_sources(drafted), longest) + 1
            block = block._replace(sources=jnp.where(copies[:, None], 0, theirs))
        return block, SeveralState((lookup, drafter), state.marks, drafting.astype(jnp.int32))

    def bonus(
        self, params: Sequence[Params], state: SeveralState, inputs: DraftInputs, block: DraftBlock
    ) -> tuple[Bonus, SeveralState]:
        copied, lookup = self.lookup.bonus(params[0], state.drafters[0], inputs, block)
        # The drafter has drafted nothing in rows that copied: its cache has other tokens there.
        drafting = state.note > 0
        drafted = jnp.where(drafting, block.num_drafted, 0)
        longest = self.drafter.max_draft
        mine = block._replace(
            tokens=block.tokens[:, :longest],
            probs=block.probs[:, : longest + 1],
            num_drafted=drafted,
        )

        def read(before: tuple[Bonus, Any]) -> tuple[Bonus, Any]:
            return self.drafter.bonus(params[1], before[1], inputs, mine)

        none = {name: jnp.int32(0) for name in self.model_names}
        nothing = Bonus(jnp.zeros_like(copied.probs), None, none)
        extra, drafter = when(jnp.any(drafting), read, (nothing, state.drafters[1]))
        probs = jnp.where(drafting[:, None], extra.probs, copied.probs)
        return Bonus(probs, None, extra.calls), state._replace(drafters=(lookup, drafter))

    def copies(self, state: SeveralState) -> Array:
        """The rows that copy in the next round, `[B]` bool."""
        return self.lookup.match_lengths(state.drafters[0]) >= self.min_match


def _wide(block: Array, width: int) -> Array:
    """`[B, n, ...]` padded to `width` places."""
    missing = width - block.shape[1]
    return jnp.pad(block, ((0, 0), (0, missing), *((0, 0),) * (block.ndim - 2)))


@dataclasses.dataclass(frozen=True)
class LookupTree(Widened):
    """Proposes the tokens after several earlier occurrences of the context's ending.

    The occurrences are those with the longest equal endings, among them the order of the lookup;
    one whose tokens are equal to those of an earlier one is passed over. The first copy is what
    the lookup drafts, its table included. Copies with a common beginning share its nodes.

    Its parameters are those of the lookup. Tokens are chosen, not drawn. Rules that read the
    drafter are refused, because a node has no single draft distribution.

    Attributes:
      drafter: copies a single occurrence, up to `drafter.max_draft` tokens of each.
      copies: K >= 1, the most occurrences.
    """

    drafter: Lookup
    copies: int

    @property
    def max_draft(self) -> int:
        return self.copies * self.drafter.max_draft

    @property
    def num_uniforms(self) -> int:
        return 0

    @property
    def traits(self) -> DraftTraits:
        # The lookup's; blocks are trees.
        return self.drafter.traits._replace(drafts_trees=True, has_distributions=False)

    def describe(self) -> Any:
        return {"lookup": self.drafter.describe(), "copies": self.copies}

    def prefill(self, params: Params, prompts: Prompts, max_length: int) -> LookupState:
        return self._with_matches(self.drafter.prefill(params, prompts, max_length))

    def propose(
        self, params: Params, state: LookupState, inputs: DraftInputs
    ) -> tuple[DraftBlock, LookupState]:
        limits, chains = jnp.where(inputs.active, inputs.limits, 0), []
        for i in range(self.copies):
            one = state._replace(match=Match(*(x[:, i] for x in state.match)))
            copied, count = self.drafter.chain(params, one, inputs.tokens)
            if i:  # without a match only the first copy continues, by the table
                count = jnp.where(self.drafter.match_lengths(one) > 0, count, 0)
            count = jnp.minimum(count, limits)
            chains.append(DraftBlock(copied[:, :-1], None, None, count, {}))
        return union_of(chains), state

    def bonus(
        self, params: Params, state: LookupState, inputs: DraftInputs, block: DraftBlock
    ) -> tuple[Bonus, LookupState]:
        raise NotImplementedError  # no rule reads it: see `DraftTraits.has_distributions`

    def commit(
        self, state: LookupState, tokens: Array, counts: Array, hidden: Array | None = None
    ) -> LookupState:
        return self._with_matches(self.drafter.commit(state, tokens, counts))

    def _with_matches(self, state: LookupState) -> LookupState:
        """With the matches of all copies, `[B, K]`, in the place of the lookup's own."""
        lookup = self.drafter
        matches = longest_matches(
            state.context,
            state.lengths,
            self.copies,
            lookup.max_draft,
            most=lookup.max_ngram,
            latest=lookup.latest,
        )
        return state._replace(match=matches)
