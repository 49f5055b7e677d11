"""The weights of GGUF files by Hugging Face's names, those in 2 to 8 bits as floats.

llama.cpp's converter changes some weights, which is undone here: the two halves of each rotation in
a Llama's queries and keys are interleaved, and a Gemma's norms include the 1 that the network adds.
"""

import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.checkpoints.arrays import ArrayReader, ArraySpec
from specjax.checkpoints.gguf_blocks import KINDS, QuantisedMatrix
from specjax.checkpoints.hf import open_hf
from specjax.checks import require
from specjax.errors import UserError
from specjax.models import LlamaConfig, ModelConfig
from specjax.models.position_encoding import rope_frequencies
from specjax.tokenizers.gguf_files import (
    DIVISORS,
    WHOLE,
    Header,
    read_header,
    rope_divisors,
)
from specjax.tokenizers.model_files import SpecialIds

_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OF_LAYERS = {
    "attn_norm": "input_layernorm",
    **{f"attn_{a}": f"self_attn.{a}_proj" for a in "qkv"},
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"ffn_{a}": f"mlp.{a}_proj" for a in ("gate", "up", "down")},
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)(\.weight|\.bias)")


class GGUFReader:
    """The tensors of a GGUF file; `directory` is the file."""

    def __init__(self, file: Path, header: Header) -> None:
        self.directory = file
        self._gguf = require("gguf", "gguf")
        self._metadata = header.metadata
        self._architecture = header.metadata["general.architecture"]
        self._places: dict[str, tuple[Any, int, tuple[int, ...]]] = {}
        self.specs: dict[str, ArraySpec] = {}
        quants = self._gguf.quants
        end = next((tensor.start for tensor in header.tensors.values()), 0)
        alignment = header.metadata.get("general.alignment", 32)
        for stored, tensor in header.tensors.items():
            if tensor.start != end + -end % alignment:
                raise UserError(
                    f"{file} is damaged ({stored} does not follow the tensor before it); download "
                    "or copy it again"
                )
            end = tensor.start + tensor.size
            kind, block = tensor.kind, self._gguf.GGML_QUANT_SIZES[tensor.kind][1]
            try:
                quants.dequantize(np.zeros((1, block), np.uint8), kind)
            except NotImplementedError as error:
                raise UserError(
                    f"{file}: the type of {stored} cannot be read ({error}); take a file of "
                    "another quantisation, such as Q8_0, Q4_K_M or F16"
                ) from None
            name = self._name(stored)
            if name in self.specs:
                raise UserError(f"{file}: {stored} and another tensor are both {name}")
            dtype = jnp.dtype(_FLOATS.get(kind.name, "float32"))
            rows = quants.quant_shape_to_byte_shape(tensor.shape, kind)
            self._places[name] = (kind, tensor.start, rows)
            self.specs[name] = ArraySpec(tensor.shape, dtype, kind.name, tensor.size)
        if self._architecture == "llama":
            self.specs.pop(DIVISORS, None)

    def _name(self, stored: str) -> str:
        match = _NAME.fullmatch(stored)
        if match is None:
            return stored
        layer, name, ending = match.groups()
        if layer is None:
            return f"{_WHOLE.get(name, name)}{ending}"
        inner = _OF_LAYERS.get(name, name)
        if name == "ffn_norm" and self._architecture in ("gemma2", "gemma3"):
            inner = "pre_feedforward_layernorm"
        return f"model.layers.{layer}.{inner}{ending}"

    def read(self, name: str) -> np.ndarray | QuantisedMatrix:
        """Maps an array of floats; any other becomes floats, some where they are placed."""
        kind, start, shape = self._places[name]
        array = np.asarray(np.memmap(self.directory, np.uint8, "r", start, shape))
        if self._architecture == "llama" and re.search("[qk]_proj", name):
            # Each head's rows are in pairs: the first of either half, then the second, ...
            heads = self._metadata["llama.attention.head_count"]
            if "k_proj" in name:
                heads = self._metadata.get("llama.attention.head_count_kv", heads)
            rows = array.reshape(heads, -1, 2, array.size // self.specs[name].shape[0])
            array = rows.swapaxes(1, 2).reshape(shape)
        if kind.name in _FLOATS:
            array = array.view(self.specs[name].dtype)
        elif kind.name in KINDS and array.ndim == 2:
            return QuantisedMatrix(array, kind.name)
        else:
            array = self._gguf.quants.dequantize(array, kind)
        if self._architecture.startswith("gemma") and name.endswith("norm.weight"):
            return array - 1
        return array


def open_gguf(
    file: Path, config: ModelConfig | None
) -> tuple[ArrayReader, ModelConfig, SpecialIds]:
    """A file's reader, its configuration (or `config` instead), and the ids that it may lack."""
    header = read_header(file)
    if header.read("split.count", WHOLE, 1) > 1:
        raise UserError(
            f"{header.wrong('split.count', '1')}; join the files: llama-gguf-split --merge"
        )
    reader = GGUFReader(file, header)
    _, read, ids = open_hf(header.directory, config, reader)
    stored = rope_divisors(header)
    if stored is not None and isinstance(read, LlamaConfig) and read.rope_scaling is not None:
        # Of a stretching only its divisors are stored; those of Llama 3.1 and later are known.
        plain = rope_frequencies(read.head_dim, read.rope_theta)
        known = plain / read.rope_scaling.frequencies(read.head_dim, read.rope_theta)
        if stored.shape != known.shape or not np.allclose(known, stored, rtol=1e-4):
            raise UserError(f"{file}: {DIVISORS} is not the stretching of Llama 3.1 and later")
    return reader, read, ids
