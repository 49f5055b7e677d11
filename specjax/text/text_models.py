"""Models with their tokenizers, and sets of models with the same vocabulary."""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.acceptance_head import Head
from specjax.checks import check_static
from specjax.errors import UserError
from specjax.fingerprints import digest
from specjax.models.model import Model, platforms_of
from specjax.models.weights import has_stored, is_stored
from specjax.partitioning import Partitioner
from specjax.tokenizers import Tokenizer, added_text
from specjax.types import LanguageModel, Params, Prompts

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
        if isinstance(self.model, Model):
            ways = 1 if self.partitioner is None else self.partitioner.ways("kv_heads")
            object.__setattr__(self, "model", self.model.for_devices(self.platform, ways))
        check_static("model", self.model)
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
    def partitioner(self) -> Partitioner | None:
        return None if self.mesh is None else Partitioner(self.mesh)

    @property
    def platform(self) -> str:
        """The platform of its parameters: "cpu", "gpu" or "tpu"."""
        return min(platforms_of(next(iter(jax.tree.leaves(self.params)), None)))

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


class Models:
    """Any number of named models with the same vocabulary; `verifier` is required.

    Args:
      **named: models by their names, such as `verifier=`, `middle=`, `drafter=`.

    Attributes:
      named: name -> model, in the order given.

    Raises:
      UserError: there is no verifier, or the vocabularies or meshes differ.
    """

    def __init__(self, **named: TextModel) -> None:
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
            check_vocabularies({name: model.words, "verifier": self.verifier.words})
            if model.mesh != self.verifier.mesh:
                raise UserError(
                    f"{name} and verifier have different meshes: load both with the same mesh"
                )
        drafter = named.get("drafter")
        if drafter is not None and drafter.size > self.verifier.size:
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

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={model.name}" for name, model in self.named.items())
        return f"{type(self).__name__}({shown})"


class Pair(Models):
    """A drafter and a verifier with the same vocabulary."""

    def __init__(self, drafter: TextModel, verifier: TextModel) -> None:
        super().__init__(drafter=drafter, verifier=verifier)

    @property
    def fingerprint(self) -> str:
        """The fingerprints of the drafter and the verifier."""
        return f"{self.drafter.fingerprint}+{self.verifier.fingerprint}"

    @property
    def drafter(self) -> TextModel:
        return self.named["drafter"]


def check_vocabularies(models: dict[str, Words]) -> None:
    """Refuses two models, given by name, whose vocabularies differ."""
    ours, theirs = models.values() if len(models) > 1 else 2 * [*models.values()]
    same = ours.tokenizer.fingerprint == theirs.tokenizer.fingerprint
    if same and ours.size == theirs.size:
        return
    described = ", ".join(f"{words.name} has {words.size} ids" for words in models.values())
    what, where, other = "vocabulary sizes", "", ""
    if not same:
        what, where = "tokenizers", f" ({_first_difference(ours.tokenizer, theirs.tokenizer)})"
        other = ", or load the pair with translate_drafter=True"
    raise UserError(
        f"{' and '.join(models)} have different {what}: {described}{where}; every id must have the "
        f"same meaning in both: choose models of the same family{other}"
    )


def _first_difference(ours: Tokenizer, theirs: Tokenizer) -> str:
    """The first token that two tokenizers do not share."""

    def token(words: Tokenizer, i: int) -> str:
        return repr(words.token(i)) if i < words.vocab_size else "absent"

    for i in range(max(ours.vocab_size, theirs.vocab_size)):
        if token(ours, i) != token(theirs, i):
            return f"token {i} is {token(ours, i)} and {token(theirs, i)}"
    return "their tokens are the same"  # not for tokenizers of this package


def _fits(tokenizer: Tokenizer, model: LanguageModel) -> bool:
    """Whether the ids of a tokenizer are in a model's vocabulary."""
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
