"""Checks that a checkpoint has a published size."""

import os

from specjax.checkpoints.loading import read_config
from specjax.errors import UserError
from specjax.models import preset

# The fields of a size; a fine-tuned model may have another vocabulary or dropout.
_SIZES = (
    "embed_dim",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "mlp_dim",
    "num_layers",
    "num_encoder_layers",
    "num_decoder_layers",
)


def sized(directory: str | os.PathLike[str], size: str) -> str | os.PathLike[str]:
    """A checkpoint's directory, after a check that its network has this size.

    It reads no array. It prevents a run with other models than the run's name claims.

    Args:
      directory: see `read_config`.
      size: one of `specjax.models.PRESETS`, such as "gemma2_9b".

    Returns:
      `directory`.
    """
    wanted, found = preset(size), read_config(directory)
    pairs = {"": (found, wanted)}
    if found.encoder_config is not found:
        pairs["encoder's "] = (found.encoder_config, wanted.encoder_config)
    differences = [
        f"{whose}{name} {here} (not {there})"
        for whose, (ours, theirs) in pairs.items()
        for name in _SIZES
        if (here := getattr(ours, name, None)) != (there := getattr(theirs, name, None))
    ]
    if type(found) is not type(wanted):
        differences = [f"a {type(found).__name__}"]
    if differences:
        raise UserError(
            f"{os.fspath(directory)} is not {size}: it has {', '.join(differences)}: give another "
            "directory, or another size"
        )
    return directory
