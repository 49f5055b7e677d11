"""`Family`: everything that specjax has to know about a family of networks.

A family is a file (`llama.py`, `gemma2.py`, `t5.py`) with its configuration, its Hugging Face names
and fields, its published sizes and its vocabulary; and a line of `families.py`.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from specjax.models.config import ModelConfig
from specjax.models.hf_fields import HFFields
from specjax.models.model import Model

T = True  # in tables: stored transposed
# Names of kernels: Hugging Face's, and ours.
HEADS = {"q": "query", "k": "key", "v": "value", "o": "out"}
MLP = {"gate": "wi_0", "up": "wi_1", "down": "wo"}

# Options of SentencePiece's trainer that make every character of a text representable: spaces and
# newlines are kept, and rare characters become bytes.
VERBATIM = {
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "byte_fallback": True,
    "split_digits": True,
}


class Renaming(NamedTuple):
    """The names of a parameter: in a Hugging Face checkpoint and here.

    Attributes:
      hf: name in the checkpoint; `{i}` stands for a layer's number.
      path: path in the parameter tree; likewise.
      transposed: whether the two arrays are transposes of each other: PyTorch keeps `[out, in]`,
        Flax `[in, out]`.
      part: the checkpoint's array joins several parameters along its first axis, and this is their
        order; None if it has only this parameter.
    """

    hf: str
    path: str
    transposed: bool = False
    part: int | None = None


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """How a family's published vocabularies are made.

    Attributes:
      file: the SentencePiece model's name in a Hugging Face directory.
      types: of SentencePiece models that transformers reads there, the usual type first; it reads
        every Llama's and Gemma's as BPE.
      options: of SentencePiece's trainer.
      settings: of `tokenizer_config.json`.
    """

    file: str
    types: tuple[str, ...]
    options: Mapping[str, Any]
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Nested:
    """A larger Hugging Face network that has a network of the family inside, beside other parts.

    Attributes:
      model_type: of the larger network.
      architectures: of the larger network.
      field: the field of its `config.json` that has the inner fields; "" if they are its own.
      prefixes: beginnings of the inner arrays' names, and their replacements.
      others: a pattern of the names of arrays of other parts, which are left out.
    """

    model_type: str
    architectures: tuple[str, ...]
    field: str
    prefixes: Mapping[str, str]
    others: str


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of networks.

    Attributes:
      name: in specjax's files, and as Hugging Face's `model_type`.
      config: the class of its configurations.
      model: the class of its models: `CausalLM` or `Seq2SeqLM`.
      architectures: Hugging Face's names of its class, the usual one first.
      special_ids: the ids that transformers assumes if files have none, named as in `config.json`.
      names: Hugging Face's names of its parameters.
      from_hf: makes a configuration from the fields of a `config.json`.
      to_hf: makes these fields from a configuration; raises ValueError if transformers has no such
        network. Sizes of the vocabulary, dtypes and special ids are added to them.
      copies: names under which a checkpoint may hold the embedding a second time, or its only copy;
        of a tied network the head's name is one, too.
      second_copies: other arrays that a checkpoint may hold twice: name of the copy -> name of the
        array, which it must equal.
      unused: a pattern of the names of arrays in old checkpoints that no network reads.
      nested: the larger network that may contain it in a checkpoint, or None.
      presets: its published sizes.
      vocabulary: how its vocabularies are made; None if specjax cannot train them.
    """

    name: str
    config: type[ModelConfig]
    model: type[Model]
    architectures: tuple[str, ...]
    special_ids: Mapping[str, int]
    names: tuple[Renaming, ...]
    from_hf: Callable[[HFFields], ModelConfig]
    to_hf: Callable[[Any], dict[str, Any]]
    copies: tuple[str, ...] = ()
    second_copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unused: str = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
    nested: Nested | None = None
    presets: Mapping[str, ModelConfig] = dataclasses.field(default_factory=dict)
    vocabulary: Vocabulary | None = None

    def hf_name(self, path: str) -> Renaming:
        """The entry of `names` for a parameter, with its layer number filled in.

        Args:
          path: of the parameter, such as `decoder/layers_3/mlp/wo/kernel`.

        Returns:
          The entry for exactly this parameter.

        Raises:
          KeyError: if there is no such entry (an error in the family).
        """
        number = re.search(r"(?<=/layers_)\d+(?=/)", path)
        layer = number.group() if number else ""
        pattern = path.replace(f"/layers_{layer}/", "/layers_{i}/") if number else path
        for line in self.names:
            if line.path == pattern:
                return line._replace(hf=line.hf.replace("{i}", layer), path=path)
        raise KeyError(f"{self.name} has no Hugging Face name for the parameter {path}")


# Of most decoder-only families. Llama's post_attention_layernorm precedes the MLP.
LLAMA_NORMS = {
    "input_layernorm": "pre_self_attention_layer_norm",
    "post_attention_layernorm": "pre_mlp_layer_norm",
}


def fused(hf: str, *paths: str) -> tuple[Renaming, ...]:
    """The entries of kernels that a checkpoint joins into one array.

    Args:
      hf: the array's name in the checkpoint.
      *paths: of the kernels, in the order of the array.
    """
    return tuple(Renaming(hf, path, T, part) for part, path in enumerate(paths))


def decoder_only_names(norms: Mapping[str, str]) -> tuple[Renaming, ...]:
    """Llama's names, which most decoder-only families have; they differ in their norms.

    Args:
      norms: from Hugging Face's name of each norm of a layer to ours. The same name can mean
        different norms: Llama's post_attention_layernorm precedes the MLP.

    Returns:
      The entries; they include biases and norms of queries and keys, which not all networks have.
    """
    hf, layer = "model.layers.{i}", "decoder/layers_{i}"
    attention, ours = f"{hf}.self_attn", f"{layer}/self_attention"
    return (
        Renaming("model.embed_tokens.weight", "token_embedder/embedding"),
        *(
            line
            for a, b in HEADS.items()
            for line in (
                Renaming(f"{attention}.{a}_proj.weight", f"{ours}/{b}/kernel", T),
                Renaming(f"{attention}.{a}_proj.bias", f"{ours}/{b}/bias"),
                Renaming(f"{attention}.{a}_norm.weight", f"{ours}/{b}_norm/scale"),
            )
        ),
        *(
            Renaming(f"{hf}.mlp.{a}_proj.weight", f"{layer}/mlp/{b}/kernel", T)
            for a, b in MLP.items()
        ),
        *(Renaming(f"{hf}.{a}.weight", f"{layer}/{b}/scale") for a, b in norms.items()),
        Renaming("model.norm.weight", "decoder/decoder_norm/scale"),
        Renaming("lm_head.weight", "decoder/logits_dense/kernel", T),
    )
