"""The pairs that come with the package, and paths that name them: "built-in:gsm8k/drafter"."""

import os
from pathlib import Path

PAIRS = Path(__file__).parents[1] / "pairs"
DEFAULT_PAIR = "multi30k_ende"
PREFIX = "built-in:"
PathLike = str | os.PathLike[str]


def built_in_pairs() -> tuple[str, ...]:
    """The names of the pairs that this installation has."""
    return tuple(sorted(path.parent.parent.name for path in PAIRS.glob("*/verifier/config.json")))


def built_in_pair(name: str) -> Path:
    """The directory of a built-in pair.

    Args:
      name: of the pair.

    Raises:
      FileNotFoundError: this installation has no built-in pair.
      ValueError: there is no such pair.
    """
    names = built_in_pairs()
    if not names:
        raise FileNotFoundError(
            f"{PAIRS}: this installation has no built-in pair: call load_pair("
            "drafter=DIRECTORY, verifier=DIRECTORY), or give --gin.DRAFTER and "
            "--gin.VERIFIER; each directory needs config.json, safetensors and a tokenizer"
        )
    if name not in names:
        raise ValueError(f"there is no built-in pair {name!r}: choose from {', '.join(names)}")
    return PAIRS / name


def real_path(path: PathLike) -> PathLike:
    """The path itself, or the directory that "built-in:PAIR/PART" names.

    Args:
      path: of a model or a table.

    Raises:
      FileNotFoundError: this installation has no built-in pair.
      ValueError: there is no such pair, or the pair has no such part.
    """
    if not isinstance(path, str) or not path.startswith(PREFIX):
        return path
    name, _, part = path.removeprefix(PREFIX).partition("/")
    pair = built_in_pair(name)
    parts = sorted(found.name for found in pair.iterdir() if found.is_dir())
    if part not in parts:
        raise ValueError(f"{path}: the built-in pair {name} has {', '.join(parts)}: give one")
    return pair / part


def portable_path(path: PathLike) -> str:
    """The absolute path, or for a part of a built-in pair the name that `real_path` takes."""
    absolute = os.path.abspath(os.path.expanduser(real_path(path)))
    if not absolute.startswith(f"{PAIRS}{os.sep}"):
        return absolute
    return PREFIX + os.path.relpath(absolute, PAIRS).replace(os.sep, "/")


def built_in_table(model: PathLike) -> Path:
    """The bigram table of the built-in pair that a model is of; for others the default pair's.

    Args:
      model: the model's directory.
    """
    parts = Path(model).parts
    known = [name for name in built_in_pairs() if parts[:-1] == (PAIRS / name).parts]
    return built_in_pair(known[0] if known else DEFAULT_PAIR) / "bigram"
