"""Models with their tokenizers, and sets of models with the same vocabulary."""

import dataclasses
import functools
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int32

from specjax.acceptance_head import Head
from specjax.checks import check_static, join_names
from specjax.compilation import jit
from specjax.errors import UserError, tell
from specjax.fingerprints import digest
from specjax.models.model import Model, platforms_of
from specjax.models.weights import has_stored, is_stored
from specjax.partitioning import Partitioner
from specjax.tokenizers import Tokenizer, added_text
from specjax.types import (
    Array,
    Axes,
    Cache,
    CacheUpdates,
    LanguageModel,
    Params,
    Prefilled,
    Prompts,
)

# The most special tokens of a tokenizer that its model may lack.
_MOST_UNREAD = 16


class Words(NamedTuple):
    """The vocabulary of a model; its size leaves out rows of the embedding that are no tokens."""

    name: str
    tokenizer: Tokenizer
    size: int

    @classmethod
    def of(cls, name: str, tokenizer: Tokenizer, rows: int) -> "Words":
        """The vocabulary of a model whose embedding has so many rows."""
        return cls(name, tokenizer, min(tokenizer.vocab_size, rows))


@dataclasses.dataclass(frozen=True, eq=False)
class TextModel:
    """A language model that reads and writes text.

    Attributes:
      model: static; see `specjax.types.LanguageModel`.
      params: its parameters.
      tokenizer: its tokenizer.
      mesh: the mesh that the parameters are split over; None for one device.
      name: its name in messages, such as its path.
      head: its acceptance head, which predicts how likely drafts are accepted, or None.
      context: the most positions that it was trained for (`max_position_embeddings`); None if
        unknown.
      settings: of its generation, which no decoder applies by itself, such as repetition_penalty.

    A model with quantised weights has another fingerprint than the floats that its head was trained
    for, so only the width is compared.
    """

    model: LanguageModel
    params: Params = dataclasses.field(repr=False)
    tokenizer: Tokenizer = dataclasses.field(repr=False)
    mesh: jax.sharding.Mesh | None = None
    name: str = "the model"
    head: Head | None = None
    context: int | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        return f"TextModel({self.name})"

    def __post_init__(self) -> None:
        check_static("model", self.model)
        ways = None
        if self.partitioner is not None and self.partitioner.mesh.size > 1:
            ways = self.partitioner.ways("kv_heads")
        object.__setattr__(self, "model", self.model.for_devices(self.platform, ways))
        words = self.tokenizer.vocab_size
        if isinstance(self.model, Model) and words < self.model.vocab_size:
            # Embeddings are padded to different sizes, with rows that are no tokens.
            object.__setattr__(self, "model", dataclasses.replace(self.model, tokens=words))
        if not _fits(self.tokenizer, self.model):
            raise UserError(
                f"{self.name}: the tokenizer has {self.tokenizer.vocab_size} ids, but the model's "
                f"vocabulary has {self.model.vocab_size}: give the model's own tokenizer"
            )
        if self.head is not None:
            fingerprint = None if has_stored(self.params) else self.weights_fingerprint
            self.head.check_drafter(self.name, self.width, fingerprint)

    @property
    def is_head(self) -> bool:
        """Whether it is a draft head, which reads the states of its verifier."""
        return self.model.reads_verifier

    def check_alone(self) -> None:
        """Refuses a draft head where a model reads texts by itself."""
        model: Any = self.model
        if model.reads_verifier:
            raise model.refused()

    @property
    def partitioner(self) -> Partitioner | None:
        return None if self.mesh is None else Partitioner(self.mesh)

    @property
    def row_multiple(self) -> int:
        """The divisor of a batch: a mesh spreads rows over several devices."""
        return 1 if self.partitioner is None else self.partitioner.row_multiple

    @property
    def platform(self) -> str:
        """The platform of its parameters: "cpu", "gpu" or "tpu"."""
        return min(platforms_of(next(iter(jax.tree.leaves(self.params)), None)))

    def place(self, params: Params) -> Params:
        """Puts other parameters on its devices, whole on each."""
        where = self.partitioner
        return jax.device_put(params) if where is None else where.replicate(params)

    @property
    def words(self) -> Words:
        return Words(self.name, self.tokenizer, self.model.vocab_size)

    @functools.cached_property
    def size(self) -> int:
        """The number of its parameters."""
        leaves = jax.tree.leaves(self.params, is_leaf=is_stored)
        return sum(math.prod(np.shape(leaf)) for leaf in leaves)

    @functools.cached_property
    def prepared(self) -> Params:
        """The parameters prepared for fast decoding (see `specjax.models.Model.prepare`)."""
        return self.model.prepare(self.params)

    @functools.cached_property
    def continues_prompts(self) -> bool:
        """Whether outputs continue their prompt's text; not for an encoder-decoder."""
        short, long = (self.model.prompt_positions(n, 0) for n in (1, 2))
        return bool(short != long)

    @functools.cached_property
    def width(self) -> int:
        """D, the width of its last hidden states."""

        def read(params: Params) -> Any:
            token = jnp.ones((1, 1), jnp.int32)
            filled = self.model.prefill(params, Prompts(token, token[0]), 2)
            tokens = filled.tokens[:, None]
            return self.model.extend(params, filled.cache, tokens, filled.positions)

        return jax.eval_shape(read, self.params).hidden.shape[-1]

    @functools.cached_property
    def weights_fingerprint(self) -> str:
        """A hash of the weights in bfloat16, with which a head identifies its drafter.

        It is the same for a checkpoint loaded as float32 or bfloat16, or written as bfloat16.
        """
        return digest(self.params, as_bfloat16=True)

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of the model, its tokenizer's vocabulary and settings, and every parameter."""
        words = self.tokenizer
        marks = (words.eos_ids, words.bos_id, words.add_bos, words.add_eos, words.chat_template)
        return digest(self.params, f"{self.model.describe()}\n{words.fingerprint}\n{marks}")

    def decode(self, prompt: np.ndarray, output: np.ndarray) -> str:
        """Returns the text of an output, without the text of its prompt, from tokens."""
        return self.text_after(prompt)(output.tolist())

    def text_after(self, prompt: np.ndarray) -> Callable[[Sequence[int]], str]:
        """Returns `decode` for outputs of a prompt, without a reference to the weights."""
        before = prompt.tolist() if self.continues_prompts else ()
        return functools.partial(added_text, self.tokenizer, before)


class Pair:
    """A verifier and a drafter with the same vocabulary, and any other models by their names.

    Attributes:
      named: name -> model.

    Raises:
      UserError: there is no verifier, or the vocabularies or meshes differ.
    """

    def __init__(
        self,
        drafter: TextModel | None = None,
        verifier: TextModel | None = None,
        **others: TextModel,
    ) -> None:
        given = {"drafter": drafter, "verifier": verifier}
        named = {name: model for name, model in given.items() if model is not None} | others
        for name, model in named.items():
            if not isinstance(model, TextModel):
                raise UserError(f"{name} must be a TextModel, got {type(model).__name__}")
        if "verifier" not in named:
            raise UserError(
                f"the verifier is missing, got {', '.join(named) or 'no models'}: name a model "
                "verifier"
            )
        self.named = named
        for name, model in named.items():
            check_vocabularies(name, model.words, self.verifier.words)
            if model.mesh != self.verifier.mesh:
                raise UserError(
                    f"{name} and verifier have different meshes: load both with the same mesh"
                )
        drafter = named.get("drafter")
        if drafter is not None and not drafter.is_head and drafter.size > self.verifier.size:
            # One place, so Python shows it once, though settings make pairs of these models again.
            warnings.warn(
                f"the drafter has {_millions(drafter.size)} parameters, the verifier "
                f"{_millions(self.verifier.size)}: are they swapped?",
                stacklevel=1,
            )

    @property
    def verifier(self) -> TextModel:
        """The verifier; its tokenizer and its end-of-sequence tokens are used."""
        return self.named["verifier"]

    @property
    def drafter(self) -> TextModel:
        """The model named drafter."""
        if "drafter" not in self.named:
            raise UserError(
                f"there is no drafter, only {join_names(self.named)}: load both models, or let the "
                'verifier draft for itself with drafting="Lookup()"'
            )
        return self.named["drafter"]

    @property
    def fingerprint(self) -> str:
        """The fingerprints of the drafter and the verifier."""
        return f"{self.drafter.fingerprint}+{self.verifier.fingerprint}"

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={model.name}" for name, model in self.named.items())
        return f"Pair({shown})"


def check_vocabularies(name: str, ours: Words, verifier: Words) -> None:
    """Refuses a model, the `name` of its verifier's set, whose vocabulary differs."""
    same = ours.tokenizer.fingerprint == verifier.tokenizer.fingerprint
    if same and ours.size == verifier.size:
        return
    described = ", ".join(f"{words.name} has {words.size} ids" for words in (ours, verifier))
    what, where, other = "vocabulary sizes", "", ""
    if not same:
        what, where = "tokenizers", f" ({_first_difference(ours.tokenizer, verifier.tokenizer)})"
        other = ", or load the pair with translate_drafter=True"
    raise UserError(
        f"{name} and verifier have different {what}: {described}{where}; every id must have the "
        f"same meaning in both: choose models of the same family{other}"
    )


def _first_difference(ours: Tokenizer, theirs: Tokenizer) -> str:
    def token(words: Tokenizer, i: int) -> str:
        return repr(words.token(i)) if i < words.vocab_size else "absent"

    for i in range(max(ours.vocab_size, theirs.vocab_size)):
        if token(ours, i) != token(theirs, i):
            return f"token {i} is {token(ours, i)} and {token(theirs, i)}"
    return "their tokens are the same"  # not for tokenizers of this package


def _fits(tokenizer: Tokenizer, model: LanguageModel) -> bool:
    size = model.vocab_size
    if tokenizer.vocab_size <= size:
        return True
    few = tokenizer.vocab_size <= size + _MOST_UNREAD
    return few and isinstance(model, Model) and not any(tokenizer.all_pieces.later[size:])


def any_float32(models: Iterable[TextModel]) -> bool:
    """Whether a model may have float32 products; a user's own network counts as float32."""
    configs = [getattr(model.model, "config", None) for model in models]
    return any(getattr(config, "dtype", np.float32) == np.float32 for config in configs)


def _millions(number: int) -> str:
    return f"{number / 1e6:.3g} M"


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
    """A model over W tokens that reads and predicts the V tokens of another vocabulary.

    Its parameters are the model's, and two tables: `ids [V]` int32, the model's token for each
    token of the other vocabulary (where no token has the same text: the first token of its text),
    and `shared [V]` bool, whether the texts are the same. Tokens that are not shared get
    probability 0.
    """

    model: LanguageModel
    vocab_size: int

    predicts_all = False

    @property
    def reads_trees(self) -> bool:  # type: ignore[override]  # as its model does
        return self.model.reads_trees

    @property
    def most_rollback(self) -> int | None:
        return self.model.most_rollback

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
        self, params: Params, cache: Cache, tokens: Array, positions: Array, tree: Any = None
    ) -> tuple[Array, Array, CacheUpdates]:
        given = params["model"], cache, params["ids"][tokens], positions
        read = self.model.score(*given) if tree is None else self.model.score_tree(*given, tree)
        # The model's logits `[B, T, W]` as those of the other vocabulary.
        taken = jnp.take(read[0], params["ids"], axis=-1, mode="clip")
        return jnp.where(params["shared"], taken, -jnp.inf), *read[1:]

    def score_tree(self, *given: Any) -> tuple[Array, Array, CacheUpdates]:
        return self.score(*given)

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


def translate(
    drafter: TextModel, verifier: TextModel, texts: Sequence[str] = (), *, least: float = ENOUGH
) -> TextModel:
    """Makes a drafter with another tokenizer read and draft the verifier's tokens.

    If the drafter's probability of shared tokens, on some texts, is less than `least`, a line on
    stderr says what to expect.

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
        tell(
            f"the acceptance head of {drafter.name} is not used: it was trained for its own tokens"
        )
    # An encoder-decoder writes answers to these texts, not their continuations.
    if texts and drafter.continues_prompts:
        share = shared_probability(drafter, ids[shared], texts)
        if share < least:
            tell(
                f"{drafter.name} and {verifier.name} share {int(shared.sum()):,} tokens, "
                f"with {share:.0%} of the drafter's probability: expect at most that share of the "
                "acceptance that a drafter with the verifier's tokenizer has"
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
    """The tables of a `TranslatedModel` with `ours`, for `theirs` in a vocabulary of V = `size`.

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
