"""The network in a T5X checkpoint: its parameter tree, and its configuration.

Trees. Unscanned, as ours: `encoder/layers_3/attention/query/kernel (E, H·D)`. With `scan_layers`
(T5X's scalable_t5) the layers are on axis 1 of a single array with separate heads,
`encoder/encoder/attention/query/kernel (E, L, H, D)`, and each layer has its own `relpos_bias`;
with `scan_layers=False` the names are unscanned and heads are separate.

Configuration. The arrays determine all sizes, whether the head is tied, and the number of an MLP's
activations, but not which: without a gin file these are T5 v1.1's `("gelu", "linear")`, or v1.0's
`("relu",)` if there is only one. T5X fixes the rest: epsilon 1e-6, relative distances up to 128,
tied logits scaled.
"""

import ast
import dataclasses
import io
import re
import tokenize
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specjax.checkpoints.arrays import ArrayReader, ArraySpec, Piece, same_values
from specjax.errors import MissingFileError, UserError
from specjax.models import ModelConfig, T5Config

GIN_FILES = ("config.gin", "operative_config.gin")

# T5X's field: our field. The arrays determine these, and a gin file must agree.
SIZES = {
    "vocab_size": "vocab_size",
    "emb_dim": "embed_dim",
    "num_heads": "num_heads",
    "head_dim": "head_dim",
    "mlp_dim": "mlp_dim",
    "num_encoder_layers": "num_encoder_layers",
    "num_decoder_layers": "num_decoder_layers",
    "logits_via_embedding": "tie_embeddings",
}

# Fields that T5X's own T5Config lacks; networks derived from it may have them.
_RELATIVE = {"num_buckets": "relpos_buckets", "max_distance": "relpos_max_distance"}

# Fixed in T5X's T5, whatever its configuration.
BUCKETS = 32
MAX_DISTANCE = 128
_FIXED = {
    "relpos_per_layer": False,
    "norm_eps": 1e-6,
    "relpos_buckets": BUCKETS,
    "relpos_max_distance": MAX_DISTANCE,
    "decoder_start_token": 0,
}

_SCANNED = re.compile(r"(encoder|decoder)/\1/(.+)")
_LAYER_BIAS = re.compile(r"(encoder|decoder)/layers_\d+/(relpos_bias/rel_embedding)")


class ParamTree:
    """The unscanned tree in a checkpoint of either form: each parameter's source and its shape."""

    def __init__(self, reader: ArrayReader) -> None:
        self._reader = reader
        self.pieces: dict[str, Piece] = {}
        self.specs: dict[str, ArraySpec] = {}
        for source, spec in reader.specs.items():
            match = _SCANNED.fullmatch(source)
            axis = _scan_axis(reader, match[1]) if match else 0
            if match is None or len(spec.shape) <= axis:
                # The array itself, which may be traced.
                self._add(source, source, spec.shape, lambda array: array)
                continue
            shape = spec.shape[:axis] + spec.shape[axis + 1 :]
            for i in range(spec.shape[axis]):

                def layer(array: Any, i: int = i, axis: int = axis) -> Any:
                    return np.moveaxis(array, axis, 0)[i]

                self._add(f"{match[1]}/layers_{i}/{match[2]}", source, shape, layer)

    def _add(
        self, name: str, source: str, shape: tuple[int, ...], take: Callable[[Any], Any]
    ) -> None:
        shape = merged_heads(name, shape)
        self.specs[name] = ArraySpec(shape, self._reader.specs[source].dtype)
        self.pieces[name] = Piece(source, lambda array: take(array).reshape(shape))

    def share_biases(self) -> None:
        """Replaces equal position biases of layers by one per stack, if both stacks allow it."""
        layers = [name for name in self.specs if _LAYER_BIAS.fullmatch(name)]
        wanted = list(dict.fromkeys(self.pieces[name].source for name in layers))
        arrays = {source: self._reader.read(source) for source in wanted}
        first: dict[str, np.ndarray] = {}
        for name in layers:
            piece = self.pieces[name]
            value = np.ascontiguousarray(piece.view(arrays[piece.source]))
            if not same_values(value, first.setdefault(name.split("/")[0], value)):
                return
        for name in layers:
            stack, bias = name.split("/")[0], "relpos_bias/rel_embedding"
            self.pieces.setdefault(f"{stack}/{bias}", self.pieces.pop(name))
            self.specs.setdefault(f"{stack}/{bias}", self.specs.pop(name))


def merged_heads(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A kernel's shape with joined heads: `out` has them first, the others last."""
    if len(shape) == 3 and name.endswith("/kernel"):
        a, b, c = shape
        return (a * b, c) if name.endswith("/out/kernel") else (a, b * c)
    return shape


# T5X's `param_scan_axis` is 1, or 0, which a norm's scale (E, L) shows.
def _scan_axis(reader: ArrayReader, stack: str) -> int:
    embedding = reader.specs.get("token_embedder/embedding")
    norm = reader.specs.get(f"{stack}/{stack}/pre_mlp_layer_norm/scale")
    if embedding is None or norm is None or len(norm.shape) != 2:
        return 1
    return 1 if norm.shape[0] == embedding.shape[-1] else 0


def infer_config(specs: Mapping[str, ArraySpec], path: Path, gin: Path | None = None) -> T5Config:
    """The configuration that the shapes of the arrays, by unscanned name, and a gin file show.

    Without a gin file, the activations are T5 v1.1's or v1.0's.
    """
    fields = {} if gin is None else read_t5_fields(gin)
    sizes = _sizes(specs, path)
    distance = fields.get("max_distance", MAX_DISTANCE)
    if "max_distance" not in fields and sizes["relpos_buckets"] != BUCKETS:
        raise UserError(
            f"{path}: its relative position biases have {sizes['relpos_buckets']} buckets, where "
            f"T5X's T5 has {BUCKETS}, so its largest distance is not known; give `config` "
            "(--config): a JSON file, or a gin file that binds T5Config.max_distance"
        )
    remedy = "give the gin file this checkpoint was trained with"
    try:
        config = T5Config(**sizes, relpos_max_distance=distance)
        for theirs, ours in {**SIZES, **_RELATIVE}.items():
            value = getattr(config, ours)
            if theirs in fields and fields[theirs] != value:
                raise UserError(
                    f"T5Config.{theirs} = {fields[theirs]!r}, but the checkpoint's arrays have "
                    f"{value!r}; {remedy}"
                )
        if "mlp_activations" in fields:
            names, count = fields["mlp_activations"], len(config.mlp_activations)
            if not isinstance(names, list | tuple) or len(names) != count:
                raise UserError(
                    f"T5Config.mlp_activations = {names!r} must be a tuple of names, one for each "
                    f"of an MLP's {count} input projections; {remedy}"
                )
            config = dataclasses.replace(config, mlp_activations=tuple(names))
        if isinstance(rate := fields.get("dropout_rate"), int | float):
            config = dataclasses.replace(config, dropout_rate=float(rate))
        return config
    except UserError as error:
        raise UserError(f"{gin or path}: {error}") from None


# Arrays that show sizes, and the sizes of their two axes.
_SHOWN = {
    "token_embedder/embedding": ("vocab_size", "embed_dim"),
    "decoder/layers_0/self_attention/query/kernel": ("embed_dim", "joined"),
    r"decoder/layers_0/mlp/wi(_0)?/kernel": ("embed_dim", "mlp_dim"),
    r"decoder/(layers_0/)?relpos_bias/rel_embedding": ("num_heads", "relpos_buckets"),
}


def _sizes(specs: Mapping[str, ArraySpec], path: Path) -> dict[str, Any]:
    layers = {"encoder": 0, "decoder": 0}
    for name in specs:
        if match := re.match(r"(encoder|decoder)/layers_(\d+)/", name):
            layers[match[1]] = max(layers[match[1]], int(match[2]) + 1)
    sizes: dict[str, Any] = {}
    lacking = [f"{stack}/layers_0" for stack, count in layers.items() if not count]
    for pattern, axes in _SHOWN.items():
        shapes = [
            s.shape for n, s in specs.items() if re.fullmatch(pattern, n) and len(s.shape) == 2
        ]
        if shapes:
            sizes = dict(zip(axes, shapes[0], strict=True)) | sizes
        else:
            lacking.append(re.sub(r"\((.*?)\)\?", "", pattern))
    if lacking:
        raise UserError(
            f"{path} does not have a T5's parameters: it lacks {', '.join(lacking)}; of T5X's "
            "networks only the encoder-decoder T5 can be loaded"
        )
    joined = sizes.pop("joined")
    if joined % sizes["num_heads"]:
        raise UserError(
            f"{path}: the width of the query kernels, {joined}, must be a multiple of the "
            f"{sizes['num_heads']} heads of relpos_bias; copy the whole checkpoint"
        )
    single = any(name.endswith("/mlp/wi/kernel") for name in specs)
    return sizes | {
        "head_dim": joined // sizes["num_heads"],
        "num_encoder_layers": layers["encoder"],
        "num_decoder_layers": layers["decoder"],
        "mlp_activations": ("relu",) if single else ("gelu", "linear"),
        "relpos_per_layer": "encoder/relpos_bias/rel_embedding" not in specs,
        "tie_embeddings": "decoder/logits_dense/kernel" not in specs,
    }


def find_gin(directory: Path) -> Path | None:
    """The gin file that T5X leaves in a model directory, the checkpoint's parent."""
    places = (folder / name for folder in (directory, directory.parent) for name in GIN_FILES)
    return next((place for place in places if place.is_file()), None)


def read_t5_fields(gin: Path) -> dict[str, Any]:
    """The literal bindings of `T5Config` in a gin file.

    It reads `T5Config.field = value` under any module and scope, the block form, and `%MACRO`s
    bound to literals in the same file. It does not follow `include`: the file that T5X leaves
    beside a checkpoint has none. Later values win, and values that are not literals are left out.
    """
    bound = dict(_bindings(gin))
    values: dict[str, Any] = {}
    for name, value in bound.items():
        module, _, field = name.rpartition(".")
        if not re.fullmatch(r"(.*[./])?T5Config", module):
            continue
        try:
            values[field] = ast.literal_eval(_expand(value, bound))
        except (KeyError, ValueError, SyntaxError, RecursionError):
            # A @function, or a %macro of another file.
            if field in ("mlp_activations", *_RELATIVE):
                example = "('gelu', 'linear')" if field == "mlp_activations" else "128"
                raise UserError(
                    f"{gin}: T5Config.{field} = {value} cannot be read from this file alone; bind "
                    f"it to a value, such as {example}"
                ) from None
    return values


def _expand(value: str, macros: Mapping[str, str]) -> str:
    return re.sub(r"%([\w./]+)", lambda match: _expand(macros[match[1]], macros), value)


# The names that a gin file binds, with their values; blocks expanded, without spaces.
def _bindings(gin: Path) -> Iterator[tuple[str, str]]:
    left_out = (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT)
    block, line = "", []
    try:
        text = gin.read_text(encoding="utf-8")
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type not in (*left_out, tokenize.NEWLINE):
                line.append(token)
            elif token.type == tokenize.NEWLINE and line:
                statement, indented = "".join(t.string for t in line), line[0].start[1] > 0
                name, binds, value = statement.partition("=")
                block = block if indented else ""
                if binds:
                    yield (f"{block}.{name}" if block else name), value
                elif name.endswith(":"):
                    block = name[:-1]
                line = []
    except FileNotFoundError:
        raise MissingFileError(f"{gin}: no such gin file") from None
    except UnicodeDecodeError:
        raise UserError(f"{gin} is not a gin file: it is not UTF-8 text") from None
    except (tokenize.TokenError, SyntaxError) as error:
        raise UserError(
            f"{gin} is not readable as gin ({error.args[0]}); correct the file"
        ) from None


def as_t5x(config: T5Config, params: Mapping[str, Any]) -> tuple[T5Config, dict[str, Any]]:
    """The same network for T5X: a tied head that does not scale becomes an untied, equal head."""
    if not config.tie_embeddings or config.scale_tied_logits:
        return config, dict(params)
    head = np.asarray(params["token_embedder/embedding"]).T
    untied = dataclasses.replace(config, tie_embeddings=False, scale_tied_logits=True)
    return untied, {**params, "decoder/logits_dense/kernel": head}


def gin_text(configs: Mapping[str, T5Config], included: str | None = None) -> str:
    """Gin for T5X's minimal T5 (`t5x.examples.t5.network`), by gin's scope, "" for none."""
    lines = [
        "from __gin__ import dynamic_registration\n",
        "from t5x.examples.t5 import network\n\n",
        f"include '{included}'\n\n" if included else "",
    ]
    for scope, config in configs.items():
        values = {theirs: getattr(config, ours) for theirs, ours in SIZES.items()}
        values |= {n: getattr(config, n) for n in ("mlp_activations", "dropout_rate")}
        prefix = f"{scope}/" if scope else ""
        lines += [f"{prefix}network.T5Config.{name} = {v!r}\n" for name, v in values.items()]
    return "".join(lines)


def check_writable(config: ModelConfig) -> None:
    """Checks that T5X's T5, which has no field for some values, supports this configuration."""
    if not isinstance(config, T5Config):
        family = type(config).__name__.removesuffix("Config")
        raise UserError(f"T5X's format supports only T5, not {family}; convert it to hf or orbax")
    for name, value in _FIXED.items():
        if (actual := getattr(config, name)) != value:
            other = "orbax" if name == "relpos_per_layer" else "hf or orbax"
            raise UserError(
                f"{name}={actual} must be {value} for a T5X checkpoint, as in T5X's minimal "
                f"T5; convert it to {other}"
            )
