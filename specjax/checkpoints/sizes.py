"""Whether a checkpoint is of a published size."""

import os
from typing import Any

from specjax.checkpoints.load import read_config
from specjax.models import preset

# A fine-tuned model may have another vocabulary or dropout; these make its size.
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
    """A checkpoint's directory, once it is known to hold a network of this size.

    No array is read. So a run that is said to be of one pair of models is of no other.

    Args:
      directory: see `read_config`.
      size: one of `specjax.models.PRESETS`, such as "gemma2_9b".

    Returns:
      `directory`.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      TypeError: `directory` is no path.
      ValueError: the size is unknown, the checkpoint unreadable, or its network another.
    """
    wanted, found = preset(size), read_config(directory)
    if type(found) is not type(wanted):
        raise ValueError(
            f"{os.fspath(directory)} has a {type(found).__name__[:-6]}, not {size}: give another "
            "directory, or another size"
        )

    def differs(name: str) -> tuple[Any, Any] | None:
        here, there = getattr(found, name, None), getattr(wanted, name, None)
        return None if here == there else (here, there)

    others = {name: pair for name in _SIZES if (pair := differs(name))}
    if others:
        told = ", ".join(f"{name} {here} (not {there})" for name, (here, there) in others.items())
        raise ValueError(
            f"{os.fspath(directory)} is not {size}: it has {told}: give another directory, or "
            "another size"
        )
    return directory
