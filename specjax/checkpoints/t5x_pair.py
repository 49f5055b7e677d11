"""A T5X checkpoint of two networks, for `specjax.integrations.t5x`.

checkpoint_<step>/checkpoint              "target" is {"drafter": ..., "verifier": ...}
checkpoint_<step>/target.verifier.<name>/ one zarr array
"""

import os
from pathlib import Path
from typing import Any

import jax

from specjax.checkpoints import t5x
from specjax.checkpoints.arrays import (
    NotFiniteError,
    Piece,
    check_floating,
    common_dtype,
    flatten,
    float_dtype,
    materialise,
)
from specjax.checkpoints.loading import load_model, read_config
from specjax.checkpoints.t5x_network import as_t5x, check_writable, gin_text
from specjax.checksums import write_checksums
from specjax.errors import UserError
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
    """Writes the parameters of two checkpoints into a single T5X checkpoint.

    The arrays of a T5X checkpoint are copied under their own names, whatever their network (scanned
    layers stay scanned); a T5 of another format gets the names of T5X's minimal T5. If both are
    T5X's minimal T5, `pair.gin` has their sizes for T5X.

    Args:
      path: a directory that does not exist, or is empty.
      verifier: the large network's checkpoint.
      drafter: the small network's.
      dtype: of the arrays on disk; by default their own, float32 if they differ.
      check_weights: see `load_model`.

    Returns:
      The path.
    """
    sources = dict(zip(ROLES, (Path(verifier), Path(drafter)), strict=True))
    steps = {}
    arrays: dict[str, Any] = {}
    configs = {}
    for role, source in sources.items():
        found, steps[role], configs[role] = _arrays(source, check_weights)
        arrays |= {f"{role}/{name}": value for name, value in found.items()}
    own = common_dtype(value.dtype for value in arrays.values())
    disk = own if dtype is None else float_dtype(dtype)
    with new_directory(Path(path)) as directory:
        copy_tokenizer_files(sources["verifier"], directory)
        t5x.write_t5x(directory, arrays, step=steps["verifier"], dtype=disk)
        if all(configs.values()):
            # For use after gin_configs/t5x/models/encoder_decoder.gin.
            included = "t5x/models/encoder_decoder.gin"
            (directory / PAIR_FILE).write_text(gin_text(configs, included))
        checkpoint = next(directory.glob("checkpoint_*"))
        write_checksums(checkpoint, lambda name: "/" in name or name == "checkpoint")
    return Path(path)


def _arrays(source: Path, check: bool) -> tuple[dict[str, Any], int, Any]:
    host = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    checkpoint = None
    if source.is_dir() and not any((source / n).exists() for n in (SPECJAX_FILE, "config.json")):
        checkpoint = t5x.t5x_directory(source)
    if checkpoint is None:
        check_writable(read_config(source))
        loaded: Any = load_model(source, shardings=host, check_weights=check)
        written, arrays = as_t5x(loaded.config, flatten(loaded.params))
        return arrays, loaded.step or 0, written
    reader = t5x.t5x_reader(checkpoint)
    check_floating(checkpoint, reader.specs)
    try:
        params = materialise(
            reader,
            {name: Piece(name) for name in reader.specs},
            dtype=common_dtype(spec.dtype for spec in reader.specs.values()),
            shardings=dict.fromkeys(reader.specs, host),
            check=check,
        )
    except NotFiniteError as error:
        raise UserError(
            f"{checkpoint}: {error}: copy the checkpoint again, or convert it with "
            "--no-check-weights"
        ) from None
    minimal = "encoder/relpos_bias/rel_embedding" in reader.specs and not any(
        len(spec.shape) > 2 for spec in reader.specs.values()
    )
    config = read_config(source) if minimal else None
    step = t5x.step_of(checkpoint) or 0
    return flatten(params), step, config if isinstance(config, T5Config) else None
