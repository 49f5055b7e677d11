"""A drafter with another tokenizer than the verifier's: token-level intersection.

The drafter's distribution is restricted to the tokens that both vocabularies share, and
renormalised. Verification is exact for any distribution of the drafter, so outputs follow the same
law as with a drafter of the verifier's own tokenizer; only the acceptance is lower.

Source: Timor et al. 2025 (arXiv 2502.05202), token-level intersection.

Axes: B rows, T tokens, V the verifier's vocabulary, W the drafter's.
"""

import dataclasses
import re
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int32

from specjax.compilation import jit
from specjax.errors import UserError
from specjax.text.text_models import TextModel
from specjax.tokenizers import Tokenizer
from specjax.types import (
    Array,
    Axes,
    Cache,
    CacheUpdates,
    LanguageModel,
    Params,
    Prefilled,
    Prompts,
    TreeShape,
)

_PLAIN, _BYTE, _SPECIAL = "plain", "byte", "special"
_IS_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_TURN = re.compile(r"turn|im_end|eot|<\|end\|>")
# Texts that `load_pair` measures the share with.
SAMPLE = (
    "The train to the coast leaves at nine in the morning, and the next one at noon.",
    "Add two eggs and 200 g of flour, then stir until the dough is smooth.",
    "def area(width, height):\n    return width * height\n",
    "Der Hund schläft vor der Tür, weil es draußen regnet.",
    "If 3 apples cost 2 euros, how much do 12 apples cost? They cost 8 euros.",
)
# A smaller share of the drafter's probability on shared tokens is reported.
ENOUGH = 0.9


@dataclasses.dataclass(frozen=True)
class TranslatedModel(LanguageModel):
    """A model that reads and predicts the tokens of another vocabulary.

    Its parameters are the model's, and two tables: `ids [V]` int32, the model's token for each
    token of the other vocabulary (where no token has the same text: the first token of its text),
    and `shared [V]` bool, whether the texts are the same. Tokens that are not shared get
    probability 0.

    Attributes:
      model: the model, over W tokens.
      vocab_size: V.
    """

    model: LanguageModel
    vocab_size: int

    @property
    def reads_trees(self) -> bool:  # type: ignore[override]  # as its model does
        return self.model.reads_trees

    def prompt_positions(self, input_lengths: Any, prefix_lengths: Any) -> Any:
        return self.model.prompt_positions(input_lengths, prefix_lengths)

    def prefill(self, params: Params, prompts: Prompts, max_length: int) -> Prefilled:
        ids = params["ids"]
        prefix = None if prompts.prefix is None else ids[prompts.prefix]
        prompts = prompts._replace(inputs=ids[prompts.inputs], prefix=prefix)
        filled = self.model.prefill(params["model"], prompts, max_length)
        # The token with this meaning here.
        tokens = jnp.argmax(ids[None] == filled.tokens[:, None], axis=1).astype(jnp.int32)
        return filled._replace(tokens=tokens)

    def score(
        self, params: Params, cache: Cache, tokens: Array, positions: Array
    ) -> tuple[Array, Array, CacheUpdates]:
        ids = params["ids"][tokens]
        logits, *others = self.model.score(params["model"], cache, ids, positions)
        return _translated(params, logits), *others

    def score_tree(
        self, params: Params, cache: Cache, tokens: Array, positions: Array, tree: TreeShape
    ) -> tuple[Array, Array, CacheUpdates]:
        ids = params["ids"][tokens]
        logits, *others = self.model.score_tree(params["model"], cache, ids, positions, tree)
        return _translated(params, logits), *others

    def keep(self, cache: Cache, positions: Array, nodes: Array) -> Cache:
        return self.model.keep(cache, positions, nodes)

    def write(self, cache: Cache, updates: CacheUpdates, positions: Array) -> Cache:
        return self.model.write(cache, updates, positions)

    def prepare(self, params: Params) -> Params:
        return {**params, "model": self.model.prepare(params["model"])}

    def describe(self) -> str:
        return f"{self.model.describe()} for {self.vocab_size} other tokens"

    def param_axes(self, params: Params) -> Axes:
        whole = {"ids": (None,), "shared": (None,)}
        return {"model": self.model.param_axes(params["model"]), **whole}

    def cache_axes(self, cache: Cache) -> Axes:
        return self.model.cache_axes(cache)

    def axis_units(self) -> Any:
        return self.model.axis_units()


def _translated(params: Params, logits: Array) -> Array:
    """Logits `[B, T, W]` of the model as logits `[B, T, V]` of the other vocabulary."""
    taken = jnp.take(logits, params["ids"], axis=-1, mode="clip")
    return jnp.where(params["shared"], taken, -jnp.inf)


def translate(
    drafter: TextModel, verifier: TextModel, texts: Sequence[str] = (), *, least: float = ENOUGH
) -> TextModel:
    """Makes a drafter with another tokenizer read and draft the verifier's tokens.

    Args:
      drafter: the small model.
      verifier: the large model.
      texts: texts to measure the share of the drafter's probability on shared tokens; if it is
        small, a line on stderr says what to expect. Without texts it is not measured.
      least: the share below which the line is written.

    Returns:
      The drafter with the verifier's tokenizer; it shares the parameters.

    Raises:
      UserError: the vocabularies share no token but special tokens.
    """
    ids, shared = tables(drafter.tokenizer, verifier.tokenizer, verifier.model.vocab_size)
    start = [getattr(x.model, "config", None) for x in (drafter, verifier)]
    ours, theirs = (getattr(config, "decoder_start_token", None) for config in start)
    if ours is not None and theirs is not None:
        ids[theirs] = ours  # an encoder-decoder begins every output with it
    if shared.sum() <= len(verifier.tokenizer.eos_ids):
        raise UserError(
            f"{drafter.name} and {verifier.name} share no tokens: choose another drafter"
        )
    if drafter.head is not None:
        print(
            f"specjax: the acceptance head of {drafter.name} is not used: it was trained for its "
            "own tokens",
            file=sys.stderr,
        )
    # An encoder-decoder writes answers to these texts, not their continuations.
    if texts and drafter.continues_prompts:
        share = shared_probability(drafter, ids[shared], texts)
        if share < least:
            print(
                f"specjax: {drafter.name} and {verifier.name} share {int(shared.sum()):,} tokens, "
                f"with {share:.0%} of the drafter's probability: expect at most that share of the "
                "acceptance that a drafter with the verifier's tokenizer has",
                file=sys.stderr,
            )
    place = None if drafter.mesh is None else jax.sharding.NamedSharding(drafter.mesh, jax.P())
    placed = jax.device_put({"ids": ids, "shared": shared}, place)
    translated = TranslatedModel(drafter.model, verifier.model.vocab_size)
    return TextModel(
        translated,
        {"model": drafter.params, **placed},
        verifier.tokenizer,
        drafter.mesh,
        drafter.name,
    )


def tables(
    ours: Tokenizer, theirs: Tokenizer, size: int
) -> tuple[Int32[np.ndarray, " V"], Bool[np.ndarray, " V"]]:
    """The tables of a `TranslatedModel`, for a vocabulary of V = `size` entries.

    Args:
      ours: the tokenizer of the model, over W tokens.
      theirs: the other tokenizer.
      size: V, at least the ids of `theirs`.

    Raises:
      UserError: the texts of a tokenizer's tokens depend on their neighbours.
    """
    kinds = {}
    for whose, words, count in (("drafter", ours, ours.vocab_size), ("verifier", theirs, size)):
        try:
            kinds[whose] = _by_kind(words, count)
        except ValueError as error:
            raise UserError(
                f"the {whose}'s tokens cannot be translated, because their texts depend on their "
                f"neighbours ({error}): choose another {whose}"
            ) from None
    ids, shared = np.full(size, ours.pad_id, np.int32), np.zeros(size, bool)
    ids_of = {kind: {text: i for i, text in reversed(x)} for kind, x in kinds["drafter"].items()}
    taken: set[int] = set()

    def share(i: int, j: int) -> None:
        # Two tokens that share one of the model would each get its probability.
        ids[i], shared[i] = j, j not in taken
        taken.add(j)

    for kind, some in kinds["verifier"].items():  # plain texts before single bytes
        for i, text in some:
            other = {_PLAIN: _BYTE, _BYTE: _PLAIN}.get(kind, kind)
            same = ids_of[kind].get(text, ids_of[other].get(text))
            if same is not None:
                share(i, same)
            elif kind != _SPECIAL:
                cut = ours.encode(text.decode("utf-8", "replace"), add_special_tokens=False)
                ids[i] = cut[0] if cut else ours.pad_id
    if theirs.bos_id is not None and ours.bos_id is not None:
        ids[theirs.bos_id] = ours.bos_id
    ends = [(i, _ends_turns(theirs, i)) for i in theirs.eos_ids if i < size and not shared[i]]
    for i, of_turn in ends:
        like = [j for j in ours.eos_ids if _ends_turns(ours, j) == of_turn] or [*ours.eos_ids]
        share(i, next((j for j in like if j not in taken), like[0]))
    if theirs.pad_id not in theirs.eos_ids:
        shared[theirs.pad_id] = False  # is never drawn
    return ids, shared


def _by_kind(words: Tokenizer, size: int) -> dict[str, list[tuple[int, bytes]]]:
    """The ids and texts of plain tokens, of single bytes, and of special tokens by their names."""
    kinds: dict[str, list[tuple[int, bytes]]] = {_PLAIN: [], _BYTE: [], _SPECIAL: []}
    for i, text in enumerate(words.all_pieces.later[:size]):
        name = words.token(i)
        if name is not None:
            kind = _PLAIN if text else _SPECIAL
            kind = _BYTE if _IS_BYTE.fullmatch(name) else kind
            kinds[kind].append((i, text or name.encode()))
    return kinds


def _ends_turns(words: Tokenizer, token: int) -> bool:
    """Whether an end-of-sequence token ends a turn of a chat, by its name."""
    return bool(_TURN.search(words.token(token) or ""))


def shared_probability(model: TextModel, ids: np.ndarray, texts: Sequence[str]) -> float:
    """The mean probability of the tokens `ids` after each prefix of texts, in its own tokens."""
    rows = [tokens for text in texts if len(tokens := model.tokenizer.encode(text)) > 1]
    if not rows:
        return 1.0
    longest = max(map(len, rows))  # a single shape, so a single program
    counts = np.zeros(model.model.vocab_size, bool)
    counts[ids] = True

    @jit
    def total(params: Params, counts: Array, tokens: Array, length: Array) -> Array:
        filled = model.model.prefill(
            params, Prompts(tokens[:, :1], jnp.ones(1, jnp.int32)), longest + 1
        )
        block = jnp.concatenate([filled.tokens[:, None], tokens[:, 1:]], axis=1)
        logits, *_ = model.model.score(params, filled.cache, block, filled.positions)
        shares = jnp.where(counts, jax.nn.softmax(logits[0], axis=-1), 0.0).sum(axis=-1)
        return jnp.where(jnp.arange(longest) < length, shares, 0.0).sum()

    mass = 0.0
    for tokens in rows:
        padded = np.zeros((1, longest), np.int32)
        padded[0, : len(tokens)] = tokens
        mass += float(total(model.params, counts, padded, np.int32(len(tokens))))
    return mass / sum(map(len, rows))
