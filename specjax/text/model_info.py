"""What a model is, and what two models need as a pair, without reading their arrays."""

import dataclasses
import difflib
import math
import os
import re
from collections import Counter
from typing import Any

import jax.numpy as jnp

from specjax.checkpoints.arrays import flatten
from specjax.checkpoints.heads import OpenedHead, is_draft_head, open_draft_head
from specjax.checkpoints.hf import longest_context
from specjax.checkpoints.loading import Opened, open_checkpoint
from specjax.errors import UserError
from specjax.memory import in_words
from specjax.models import PRESETS, Model, ModelConfig, model_from_config
from specjax.text.directories import real_path
from specjax.text.text_models import Words, check_vocabularies
from specjax.tokenizers import Tokenizer, load_tokenizer

# Longest texts, in tokens, for which the largest batch is computed.
CONTEXTS = (1_024, 4_096, 16_384, 65_536)
# The share of a device's memory for parameters and caches; the rest is for temporary arrays.
_USABLE = 0.9


@dataclasses.dataclass(frozen=True)
class Inspected:
    """A checkpoint whose arrays have not been read, or a published size.

    Attributes:
      path: its directory, or the name of the size.
      model: the model, with parameters and activations in `dtype`.
      dtype: of parameters, activations and cache.
      opened: the sizes of its arrays, and its special ids; None for a published size.
      tokenizer: its tokenizer, or None if the directory has none.
    """

    path: str
    model: Model
    dtype: Any
    opened: Opened | None = None
    tokenizer: Tokenizer | None = None

    @property
    def params(self) -> int:
        return self.model.num_params()

    @property
    def read_params(self) -> int:
        """The parameters that a pass of the decoder reads.

        Not the encoder, nor the kernels that only read the encoder's output, nor an embedding of
        which it reads a few rows.
        """
        sizes = {n: x.size for n, x in flatten(self.model.abstract_params()).items()}
        tied = self.model.config.tie_embeddings
        once = re.compile(
            r"encoder/|.*/encoder_decoder_attention/(key|value)/"
            + ("" if tied else "|token_embedder/")
        )
        return sum(size for name, size in sizes.items() if not once.match(name))

    @property
    def cache_bytes(self) -> int:
        """The bytes of the cache of one row per token; of an encoder-decoder, of either side."""
        config = self.model.config
        return (
            2 * len(config.style.windows) * config.kv_heads * config.head_dim * self.dtype.itemsize
        )

    def summary(self) -> dict[str, Any]:
        """The figures by name, as JSON values; sizes in bytes."""
        config, words = self.model.config, self.tokenizer
        on_disk: Counter[str] = Counter()
        context: int | None = None
        eos: tuple[int, ...] = ()
        if self.opened is not None:
            for spec in self.opened.reader.specs.values():
                on_disk[spec.label or spec.dtype.name] += spec.nbytes
            context = longest_context(self.opened.path)
            eos = self.opened.ids.eos
        return {
            "path": self.path,
            "family": type(config).__name__.removesuffix("Config"),
            "format": "published size" if self.opened is None else self.opened.format,
            "parameters": self.params,
            "bytes_on_disk": dict(on_disk),
            "bytes_in_memory": self.params * self.dtype.itemsize,
            "bytes_read_per_pass": self.read_params * self.dtype.itemsize,
            "rows_of_the_embedding": config.vocab_size,
            "tokens": None if words is None else words.vocab_size,
            "special_ids": {} if self.opened is None else self.opened.ids.to_json(),
            "eos": {str(i): None if words is None else words.token(i) for i in eos},
            "context": context,
            "cache_bytes_per_row_and_1000_tokens": 1_000 * self.cache_bytes,
            "chat_template": words is not None and words.chat_template is not None,
        }


@dataclasses.dataclass(frozen=True)
class InspectedHead:
    """A draft head whose arrays have not been read.

    Attributes:
      path: its directory.
      dtype: of parameters and cache.
      opened: its files.
    """

    path: str
    dtype: Any
    opened: OpenedHead

    @property
    def params(self) -> int:
        """The parameters of its own; those that it shares with the verifier do not count."""
        return sum(self._sizes.values())

    @property
    def read_params(self) -> int:
        """The parameters that a pass reads: no embedding, of which it reads a few rows."""
        rows = ("embed_tokens.weight", "markov_head.markov_w1.weight")
        return sum(size for name, size in self._sizes.items() if name not in rows)

    @property
    def cache_bytes(self) -> int:
        """The bytes of the cache of one row per token."""
        layers = self.opened.layers
        return 2 * layers.num_layers * layers.kv_heads * layers.head_dim * self.dtype.itemsize

    @property
    def _sizes(self) -> dict[str, int]:
        specs = self.opened.reader.specs
        return {n: math.prod(x.shape) for n, x in specs.items() if n not in ("d2t", "t2d")}

    def summary(self) -> dict[str, Any]:
        """The figures by name, as JSON values; sizes in bytes."""
        opened, on_disk = self.opened, Counter[str]()
        for spec in opened.reader.specs.values():
            on_disk[spec.label or spec.dtype.name] += spec.nbytes
        return {
            "path": self.path,
            "family": f"{opened.kind} head",
            "format": opened.format,
            "parameters": self.params,
            "bytes_on_disk": dict(on_disk),
            "bytes_in_memory": self.params * self.dtype.itemsize,
            "bytes_read_per_pass": self.read_params * self.dtype.itemsize,
            "rows_of_the_embedding": opened.layers.vocab_size,
            "tokens": opened.values.get("draft_vocab_size") or opened.layers.vocab_size,
            "verifier": {
                "name": opened.verifier,
                "width": opened.width,
                "layers": opened.num_layers,
            },
            "cache_bytes_per_row_and_1000_tokens": 1_000 * self.cache_bytes,
        }


def inspect(path: str | os.PathLike[str], *, dtype: Any = None) -> Inspected | InspectedHead:
    """Opens a checkpoint without reading its arrays.

    Args:
      path: the directory of a model or of a draft head; a name such as "built-in:gsm8k/drafter"; or
        one of `specjax.models.PRESETS`, such as "qwen3_8b", if there is no such directory.
      dtype: of parameters and activations when it is loaded; by default bfloat16.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      UserError: the checkpoint is unreadable or of an unknown family.
    """
    name = os.fspath(path)
    dtype = jnp.dtype("bfloat16" if dtype is None else dtype)

    def model(config: ModelConfig) -> Model:
        return model_from_config(config.replace(dtype=dtype, param_dtype=dtype))

    if name in PRESETS and not os.path.exists(name):
        return Inspected(name, model(PRESETS[name]), dtype)
    place = real_path(name)
    if not os.path.exists(place) and (near := _near_preset(name)):
        raise FileNotFoundError(f"{name}: no such directory or size; did you mean {near}?")
    if is_draft_head(place):
        return InspectedHead(name, dtype, open_draft_head(place))
    opened = open_checkpoint(place)
    try:
        words = load_tokenizer(place)
    except FileNotFoundError:
        words = None
    return Inspected(name, model(opened.config), dtype, opened, words)


def _near_preset(name: str) -> str | None:
    """A published size with a similar name, such as qwen3_0.6b for Qwen/Qwen3-0.6B."""
    plain = {re.sub(r"[^a-z0-9]", "", size): size for size in PRESETS}
    wanted = re.sub(r"[^a-z0-9]", "", name.rpartition("/")[2].lower())
    near = difflib.get_close_matches(wanted, plain, n=1)
    return plain[near[0]] if near else None


def as_pair(
    drafter: Inspected | InspectedHead,
    verifier: Inspected | InspectedHead,
    memory: float | None = None,
) -> dict[str, Any]:
    """Whether two models are a pair, what a draft costs, and what fits a device.

    `memory` is that of a device in bytes; None leaves out `batches`.

    Returns:
      JSON values: `pair` (True, the reason why not, or None for published sizes), `c` (the bytes
      that a drafter's pass reads, over those of a verifier's pass: the cost ratio where memory is
      the limit) and `batches` (the largest batch by the length of prompt and output together, in
      tokens; 0: none).
    """
    opened = drafter.opened is not None and verifier.opened is not None
    values: dict[str, Any] = {
        "pair": (_why_not(drafter, verifier) or True) if opened else None,
        "c": drafter.read_params / verifier.read_params,
    }
    if memory is not None:
        both = (drafter, verifier)
        left = _USABLE * memory - sum(each.params * each.dtype.itemsize for each in both)
        row = sum(each.cache_bytes for each in both)
        values["batches"] = {n: max(0, int(left // (row * n))) for n in CONTEXTS}
    return values


def _why_not(drafter: Inspected | InspectedHead, verifier: Inspected | InspectedHead) -> str | None:
    if isinstance(verifier, InspectedHead):
        return f"{verifier.path} is a draft head, which needs the model that it is for"
    if isinstance(drafter, InspectedHead):
        try:
            drafter.opened.config_for(verifier.model)
        except UserError as error:
            return str(error)
        return None
    words = {}
    for name, each in (("drafter", drafter), ("verifier", verifier)):
        if each.tokenizer is None:
            return f"{each.path} has no tokenizer: give its files to load_pair(tokenizer=...)"
        words[name] = Words.of(each.path, each.tokenizer, each.model.vocab_size)
    try:
        check_vocabularies(words)
    except ValueError as error:
        return str(error)
    return None


def lines(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """A summary as pairs of texts, for a table."""
    disk = ", ".join(f"{in_words(n)} {kind}" for kind, n in summary["bytes_on_disk"].items())
    cache = f"{in_words(summary['cache_bytes_per_row_and_1000_tokens'])} for 1,000 tokens"
    if (verifier := summary.get("verifier")) is not None:
        layers = "" if verifier["layers"] is None else f" and {verifier['layers']} layers"
        return [
            ("kind", f"{summary['family']} ({summary['format']})"),
            ("drafts for", f"{verifier['name'] or 'a model'} of width {verifier['width']}{layers}"),
            ("parameters", f"{summary['parameters']:,}"),
            ("on disk", disk),
            ("in memory", in_words(summary["bytes_in_memory"])),
            ("read per pass", in_words(summary["bytes_read_per_pass"])),
            ("vocabulary", f"{summary['tokens']:,} of {summary['rows_of_the_embedding']:,} tokens"),
            ("cache per row", cache),
        ]
    eos = ", ".join(f"{i} {token!r}" for i, token in summary["eos"].items())
    tokens = summary["tokens"]
    table = [
        ("family", f"{summary['family']} ({summary['format']})"),
        ("parameters", f"{summary['parameters']:,}"),
        ("on disk", disk),
        ("in memory", in_words(summary["bytes_in_memory"])),
        ("read per pass", in_words(summary["bytes_read_per_pass"])),
        ("vocabulary", f"{summary['rows_of_the_embedding']:,} rows, "
                       f"{'no tokenizer' if tokens is None else f'{tokens:,} tokens'}"),
        ("ends texts with", eos or "no token"),
        ("context", f"{summary['context']:,} tokens" if summary["context"] else "not stated"),
        ("cache per row", cache),
        ("chat template", "yes" if summary["chat_template"] else "no"),
    ]  # fmt: skip
    files = {"on disk", "ends texts with", "context", "chat template"}
    return [line for line in table if disk or line[0] not in files]
