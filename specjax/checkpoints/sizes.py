"""Whether a checkpoint is of a published size."""

import os

from specjax.checkpoints.loading import read_config
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
    differences = [
        f"{name} {here} (not {there})"
        for name in _SIZES
        if (here := getattr(found, name, None)) != (there := getattr(wanted, name, None))
    ]
    if type(found) is not type(wanted):
        differences = [f"a {type(found).__name__}"]
    if differences:
        raise ValueError(
            f"{os.fspath(directory)} is not {size}: it has {', '.join(differences)}: give another "
            "directory, or another size"
        )
    return directory
