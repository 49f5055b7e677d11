"""One T5X checkpoint of two networks, for `specjax.integrations.t5x`.

checkpoint_<step>/checkpoint              "target" is {"drafter": ..., "verifier": ...}
checkpoint_<step>/target.verifier.<name>/ one zarr array
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.checkpoints import t5x, t5x_config
from specjax.checkpoints.arrays import (
    NotFiniteError,
    Piece,
    check_floating,
    flatten,
    float_dtype,
    materialise,
    own_dtype,
)
from specjax.checkpoints.load import load_model, read_config, t5x_directory, t5x_reader
from specjax.checkpoints.save import check_format
from specjax.checksums import write_checksums
from specjax.models import T5Config
from specjax.tokenizers.model_files import SPECJAX_FILE, copy_tokenizer_files
from specjax.writing import new_directory

ROLES = ("verifier", "drafter")
PAIR_FILE = "pair.gin"


def save_t5x_pair(
    path: str | os.PathLike[str],
    *,
    verifier: str | os.PathLike[str],
    drafter: str | os.PathLike[str],
    dtype: Any = None,
    check_weights: bool = True,
) -> Path:
    """Writes the parameters of two checkpoints into one, as T5X restores it.

    The arrays of a T5X checkpoint are copied under their own names, whatever network they belong
    to (scanned layers stay scanned); a T5 of another format gets the names of T5X's minimal T5.
    `pair.gin`, where both are of the minimal T5, has the sizes for T5X.

    Args:
      path: a directory that does not exist, or is empty.
      verifier: the large network's checkpoint.
      drafter: the small network's.
      dtype: of the arrays on disk; by default their own, float32 where they differ.
      check_weights: see `load_model`.

    Returns:
      The path.

    Raises:
      FileNotFoundError: see `load_model`.
      ValueError: see `load_model`; or for a network that T5X does not have.
    """
    sources = dict(zip(ROLES, (Path(verifier), Path(drafter)), strict=True))
    steps = {}
    arrays: dict[str, Any] = {}
    configs = {}
    for role, source in sources.items():
        found, steps[role], configs[role] = _arrays(source, check_weights)
        arrays |= {f"{role}/{name}": value for name, value in found.items()}
    dtypes = {np.dtype(value.dtype) for value in arrays.values()}
    own = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)
    disk = own if dtype is None else float_dtype(dtype)
    with new_directory(Path(path)) as directory:
        copy_tokenizer_files(sources["verifier"], directory)
        t5x.write_t5x(directory, arrays, step=steps["verifier"], dtype=disk)
        minimal = {role: config for role, config in configs.items() if config is not None}
        if len(minimal) == len(ROLES):
            (directory / PAIR_FILE).write_text(_gin_text(minimal))
        checkpoint = next(directory.glob("checkpoint_*"))
        write_checksums(checkpoint, lambda name: "/" in name or name == "checkpoint")
    return Path(path)


def _arrays(source: Path, check: bool) -> tuple[dict[str, Any], int, T5Config | None]:
    """A checkpoint's arrays as T5X names them, its step, and a minimal T5's configuration."""
    checkpoint = None
    own = any((source / name).exists() for name in (SPECJAX_FILE, "config.json"))
    if source.is_dir() and not own:
        checkpoint = t5x_directory(source)
    if checkpoint is None:
        config = read_config(source)
        check_format(config, "t5x")
        loaded = load_model(source, shardings=_host(), check_weights=check)
        assert isinstance(loaded.config, T5Config)
        written, arrays = t5x_config.as_t5x(loaded.config, flatten(loaded.params))
        return arrays, loaded.step or 0, written
    reader = t5x_reader(checkpoint)
    check_floating(checkpoint, reader.specs)
    pieces = {name: Piece(name, lambda array: array) for name in reader.specs}
    try:
        params = materialise(
            reader,
            pieces,
            dtype=own_dtype(reader.specs.values()),
            shardings=dict.fromkeys(pieces, _host()),
            check_finite=check,
        )
    except NotFiniteError as error:
        raise ValueError(
            f"{checkpoint}: {error}: copy the checkpoint again, or convert it with "
            "--no-check-weights"
        ) from None
    minimal = "encoder/relpos_bias/rel_embedding" in pieces and not any(
        len(spec.shape) > 2 for spec in reader.specs.values()
    )
    return flatten(params), t5x.step_of(checkpoint) or 0, (_config(source) if minimal else None)


def _config(source: Path) -> T5Config | None:
    config = read_config(source)
    return config if isinstance(config, T5Config) else None


def _host() -> Any:
    return jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])


def _gin_text(configs: Mapping[str, T5Config]) -> str:
    """The sizes of both networks, to be read after gin_configs/t5x/models/encoder_decoder.gin."""
    lines = [
        "from __gin__ import dynamic_registration\n",
        "from t5x.examples.t5 import network\n\n",
        "include 't5x/models/encoder_decoder.gin'\n\n",
    ]
    for role, config in configs.items():
        lines += [
            f"{role}/network.T5Config.{name} = {value!r}\n"
            for name, value in t5x_config.t5x_fields(config).items()
        ]
    return "".join(lines)
