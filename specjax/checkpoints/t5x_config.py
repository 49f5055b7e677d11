"""The configuration of a T5X checkpoint: from its arrays, and from a gin file if there is one.

The arrays tell every size, whether the head is tied and how many activations an MLP has. They do
not tell which activations: without a gin file these are T5 v1.1's `("gelu", "linear")`, or v1.0's
`("relu",)` where there is one. T5X fixes the rest: epsilon 1e-6, relative distances up to 128,
tied logits scaled.
"""

import ast
import dataclasses
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax.checkpoints.arrays import ArraySpec
from specjax.models import T5Config

GIN_FILES = ("config.gin", "operative_config.gin")

# T5X's field: ours. The arrays decide these, and a gin file must agree.
_SIZES = {
    "vocab_size": "vocab_size",
    "emb_dim": "embed_dim",
    "num_heads": "num_heads",
    "head_dim": "head_dim",
    "mlp_dim": "mlp_dim",
    "num_encoder_layers": "num_encoder_layers",
    "num_decoder_layers": "num_decoder_layers",
    "logits_via_embedding": "tie_embeddings",
}

# Fields that T5X's own T5Config lacks; networks made from it may have them.
_RELATIVE = {"num_buckets": "relpos_buckets", "max_distance": "relpos_max_distance"}

# What T5X's T5 computes, whatever its configuration.
BUCKETS = 32
MAX_DISTANCE = 128


def infer_config(specs: Mapping[str, ArraySpec], path: Path, gin: Path | None = None) -> T5Config:
    """Reads a configuration off the shapes of the arrays, and from a gin file what they lack.

    Args:
      specs: the arrays by unscanned name.
      path: of the checkpoint, for messages.
      gin: a T5X gin file, if there is one.

    Returns:
      The configuration; without a gin file, with T5 v1.1's activations or v1.0's.

    Raises:
      FileNotFoundError: where there is no such gin file.
      ValueError: if these are no T5's arrays, if they do not tell enough, or if the gin file says
        something else than they do.
    """
    fields = {} if gin is None else read_t5_fields(gin)
    sizes = _sizes(specs, path)
    distance = _max_distance(fields, sizes["relpos_buckets"], path, gin)
    try:
        found = T5Config(**sizes, relpos_max_distance=distance)
        return found if gin is None else _with_fields(found, fields, gin)
    except ValueError as error:
        prefix = "" if gin is not None and str(error).startswith(str(gin)) else f"{gin or path}: "
        raise ValueError(f"{prefix}{error}") from None


def _max_distance(fields: Mapping[str, Any], buckets: int, path: Path, gin: Path | None) -> int:
    """The largest relative distance, which no array tells."""
    stated = fields.get("max_distance")
    if stated is None and buckets != BUCKETS:
        raise ValueError(
            f"{path}: its relative position biases have {buckets} buckets, where T5X's T5 has "
            f"{BUCKETS}, so its largest distance is not known; give `config` (--config): a JSON "
            "file, or a gin file that binds T5Config.max_distance"
        )
    if stated is None:
        return MAX_DISTANCE
    if isinstance(stated, bool) or not isinstance(stated, int):
        raise ValueError(f"{gin}: T5Config.max_distance = {stated!r} must be a whole number")
    return stated


def _sizes(specs: Mapping[str, ArraySpec], path: Path) -> dict[str, Any]:
    """What the shapes tell, by field of `T5Config`.

    Sizes that many arrays show are decided by the majority, so that one array of a wrong shape is
    reported as such.
    """
    layers = {"encoder": 0, "decoder": 0}
    for name in specs:
        if match := re.match(r"(encoder|decoder)/layers_(\d+)/", name):
            layers[match[1]] = max(layers[match[1]], int(match[2]) + 1)
    votes = _votes(specs)
    lacking = [
        what
        for key, what in (
            ("vocab", "token_embedder/embedding"),
            ("joined", "layers_*/*attention/query/kernel"),
            ("mlp", "layers_*/mlp/wi*/kernel"),
            ("heads", "*/relpos_bias/rel_embedding"),
        )
        if key not in votes
    ]
    if lacking or not layers["decoder"] or not layers["encoder"]:
        raise ValueError(
            f"{path} does not hold a T5's parameters: it lacks "
            f"{', '.join(lacking) or 'encoder or decoder layers'}; of T5X's networks only the "
            "encoder-decoder T5 can be loaded"
        )
    best = {name: counter.most_common(1)[0][0] for name, counter in votes.items()}
    if best["joined"] % best["heads"]:
        raise ValueError(
            f"{path}: the width of the query kernels, {best['joined']}, must be a multiple of the "
            f"{best['heads']} heads of relpos_bias; copy the whole checkpoint"
        )
    single = any(name.endswith("/mlp/wi/kernel") for name in specs)
    return {
        "vocab_size": best["vocab"],
        "embed_dim": best["embed"],
        "num_heads": best["heads"],
        "head_dim": best["joined"] // best["heads"],
        "mlp_dim": best["mlp"],
        "num_encoder_layers": layers["encoder"],
        "num_decoder_layers": layers["decoder"],
        "mlp_activations": ("relu",) if single else ("gelu", "linear"),
        "relpos_buckets": best["buckets"],
        "relpos_per_layer": "encoder/relpos_bias/rel_embedding" not in specs,
        "tie_embeddings": "decoder/logits_dense/kernel" not in specs,
    }


# The sizes that the two axes of an array show, by its name.
_SHOWN = {
    r"token_embedder/embedding": ("vocab", "embed"),
    r".*/rel_embedding": ("heads", "buckets"),
    r".*/(query|key|value)/kernel": ("embed", "joined"),
    r".*/mlp/wi(_\d)?/kernel": (None, "mlp"),
}


def _votes(specs: Mapping[str, ArraySpec]) -> dict[str, Counter[int]]:
    """By size, how many arrays show which value."""
    votes: dict[str, Counter[int]] = {}
    for name, spec in specs.items():
        for pattern, shown in _SHOWN.items():
            if len(spec.shape) == 2 and re.fullmatch(pattern, name):
                for size, value in zip(shown, spec.shape, strict=True):
                    if size is not None:
                        votes.setdefault(size, Counter())[value] += 1
    return votes


def find_gin(directory: Path) -> Path | None:
    """The gin file that T5X leaves in a model directory, the checkpoint's parent."""
    for folder in (directory, directory.parent):
        for name in GIN_FILES:
            if (folder / name).is_file():
                return folder / name
    return None


def _with_fields(config: T5Config, fields: Mapping[str, Any], gin: Path) -> T5Config:
    """Takes what only a gin file says, and holds the rest against the arrays."""
    for theirs, ours in {**_SIZES, **_RELATIVE}.items():
        value = getattr(config, ours)
        if theirs in fields and fields[theirs] != value:
            raise ValueError(
                f"{gin}: T5Config.{theirs} = {fields[theirs]!r}, but the checkpoint's arrays have "
                f"{value!r}; give the gin file this checkpoint was trained with"
            )
    changes: dict[str, Any] = {}
    if "mlp_activations" in fields:
        named = fields["mlp_activations"]
        if not isinstance(named, list | tuple) or not all(isinstance(a, str) for a in named):
            raise ValueError(
                f"{gin}: T5Config.mlp_activations = {named!r} must be a tuple of names, such as "
                "('gelu', 'linear')"
            )
        changes["mlp_activations"] = tuple(named)
        if len(named) != len(config.mlp_activations):
            raise ValueError(
                f"{gin}: T5Config.mlp_activations = {fields['mlp_activations']!r}, but the "
                f"checkpoint's MLPs have {len(config.mlp_activations)} input projections; give the "
                "gin file this checkpoint was trained with"
            )
    if isinstance(fields.get("dropout_rate"), int | float):
        changes["dropout_rate"] = float(fields["dropout_rate"])
    return dataclasses.replace(config, **changes)


def read_t5_fields(gin: Path) -> dict[str, Any]:
    """The literal bindings of `T5Config` in a gin file.

    Reads `T5Config.field = value` under any module and scope, the block form, and `%MACRO`s bound
    to literals in the same file. `include`d files are not followed: the file that T5X leaves
    beside a checkpoint has none.

    Args:
      gin: the file.

    Returns:
      The values by T5X's field name; later ones win, and what is no literal is left out.

    Raises:
      FileNotFoundError: where there is no such file.
      ValueError: where it is no gin, or binds the activations or relative positions to what cannot
        be read here.
    """
    try:
        text = gin.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileNotFoundError(f"{gin}: no such gin file") from None
    except UnicodeDecodeError:
        raise ValueError(f"{gin} is not a gin file: it is not UTF-8 text") from None
    macros: dict[str, list[str]] = {}
    fields: dict[str, list[str]] = {}
    for name, value in _bindings(gin, text):
        if field := re.fullmatch(r"(?:.*[./])?T5Config\.(\w+)", name):
            fields[field[1]] = value
        elif re.fullmatch(r"(?:.*[./])?RelativePositionBiases\.(num_buckets|max_distance)", name):
            _check_stock(gin, name, value)
        elif "." not in name:
            macros[name] = value
    values = {}
    for name, value in fields.items():
        try:
            values[name] = ast.literal_eval(" ".join(_expanded(value, macros)))
        except (ValueError, SyntaxError, RecursionError):  # a @function, another file's %macro
            if name in ("mlp_activations", *_RELATIVE):
                example = "('gelu', 'linear')" if name == "mlp_activations" else "128"
                raise ValueError(
                    f"{gin}: T5Config.{name} = {' '.join(value)} cannot be read from this file "
                    f"alone; bind it to a value, such as {example}"
                ) from None
        if re.search("bucket|distance", name) and name not in _RELATIVE:
            raise ValueError(
                f"{gin}: T5Config.{name} is not a field that specjax knows; give a JSON file with "
                "relpos_buckets and relpos_max_distance"
            )
    return values


def _check_stock(gin: Path, name: str, value: list[str]) -> None:
    """Refuses a binding that only some networks obey, unless it is what T5X's T5 has."""
    stock = BUCKETS if name.endswith("num_buckets") else MAX_DISTANCE
    if value != [str(stock)]:
        raise ValueError(
            f"{gin}: {name} = {' '.join(value)} has no effect where the network passes its own, as "
            "T5X's T5 does; bind T5Config.num_buckets and T5Config.max_distance to what the "
            "checkpoint was trained with, or give a JSON file"
        )


def _bindings(gin: Path, text: str) -> Iterator[tuple[str, list[str]]]:
    """The names that a gin file binds, with the tokens of their values, blocks spelt out."""
    block = ""
    for indented, tokens in _logical_lines(gin, text):
        if not indented:
            block = ""
        if "=" not in tokens:
            block = "".join(tokens[:-1]) if tokens[-1] == ":" else ""
            continue
        equals = tokens.index("=")
        name = "".join(tokens[:equals])
        yield f"{block}.{name}" if block else name, tokens[equals + 1 :]


def _logical_lines(gin: Path, text: str) -> Iterator[tuple[bool, list[str]]]:
    """Whether a line is indented, and its tokens, comments left out and continuations joined."""
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    line: list[tokenize.TokenInfo] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type not in (*skipped, tokenize.NEWLINE):
                line.append(token)
            elif token.type == tokenize.NEWLINE and line:
                yield line[0].start[1] > 0, [part.string for part in line]
                line = []
    except (tokenize.TokenError, SyntaxError) as error:
        raise ValueError(
            f"{gin} is not readable as gin ({error.args[0]}); correct the file"
        ) from None


def _expanded(tokens: Sequence[str], macros: Mapping[str, list[str]]) -> list[str]:
    """Puts the values of `%MACRO`s in their places, those of macros bound to macros too."""
    out: list[str] = []
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        if token != "%":
            out.append(token)
            continue
        name = ""
        while rest and re.fullmatch(r"[\w./]+", rest[0]):
            name += rest.pop(0)
        if name not in macros:
            raise ValueError(f"%{name} is not bound in this file")
        out += _expanded(macros[name], macros)
    return out


def as_t5x(config: T5Config, params: Mapping[str, Any]) -> tuple[T5Config, dict[str, Any]]:
    """The same network as T5X can hold it: a tied head that does not scale becomes an equal one.

    Args:
      config: one that `check_writable` lets pass.
      params: its parameters by path.

    Returns:
      The configuration and the parameters of T5X's network.
    """
    if not config.tie_embeddings or config.scale_tied_logits:
        return config, dict(params)
    head = np.asarray(params["token_embedder/embedding"]).T
    untied = dataclasses.replace(config, tie_embeddings=False, scale_tied_logits=True)
    return untied, {**params, "decoder/logits_dense/kernel": head}


def t5x_fields(config: T5Config) -> dict[str, Any]:
    """A configuration in the words of T5X's `T5Config`."""
    values = {theirs: getattr(config, ours) for theirs, ours in _SIZES.items()}
    return values | {
        "mlp_activations": config.mlp_activations,
        "dropout_rate": config.dropout_rate,
    }


def gin_text(config: T5Config) -> str:
    """A `config.gin` for T5X's minimal T5 (`t5x.examples.t5.network`)."""
    values = t5x_fields(config)
    return "".join(
        [
            "from __gin__ import dynamic_registration\n",
            "from t5x.examples.t5 import network\n\n",
            *(f"network.T5Config.{name} = {value!r}\n" for name, value in values.items()),
        ]
    )


def check_writable(config: T5Config) -> None:
    """Asserts that T5X's T5, which has no field for some values, computes this configuration.

    Args:
      config: the configuration.

    Raises:
      ValueError: naming the first field that T5X has otherwise.
    """
    fixed = {
        "norm_eps": 1e-6,
        "relpos_buckets": BUCKETS,
        "relpos_max_distance": MAX_DISTANCE,
        "decoder_start_token": 0,
    }
    if config.relpos_per_layer:
        raise ValueError(
            "this model has a relative position bias per layer (relpos_per_layer), but T5X's "
            "minimal T5 has one per stack; convert it to orbax"
        )
    for name, value in fixed.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"{name}={getattr(config, name)} must be {value} for a T5X checkpoint, as it is in "
                "every T5 of T5X; convert it to hf or orbax"
            )
