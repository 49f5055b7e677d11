"""The small files beside a model's weights: JSON settings, special ids, tokenizer files."""

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specjax.checks import short_repr
from specjax.errors import MissingFileError, UserError

SPECJAX_FILE = "specjax.json"
GENERATION_FILE = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
# The directory of other chat templates.
MORE_CHAT_TEMPLATES = "additional_chat_templates"

# The files of a tokenizer, and of the end of a generation.
TOKENIZER_FILES = (
    "spiece.model",
    "tokenizer.model",
    "sentencepiece.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    CHAT_TEMPLATE,
    GENERATION_FILE,
)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MissingFileError(f"{path}: no such file") from None
    except OSError as error:
        raise OSError(f"{path} cannot be read ({error.strerror}); restore the file") from None
    except (ValueError, RecursionError) as error:  # not JSON, or thousands of digits or brackets
        raise UserError(f"{path} is not readable as JSON ({error}); restore the file") from None
    if not isinstance(value, dict):
        raise UserError(
            f"{path} must contain a JSON object, got a {type(value).__name__}; restore the file"
        )
    return value


def read_json_if_there(path: Path) -> dict[str, Any]:
    """Like `read_json`, but a missing file counts as an empty object."""
    return read_json(path) if path.is_file() else {}


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes a JSON object, indented, with a final newline."""
    path.write_text(json.dumps(dict(values), indent=2) + "\n", encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class SpecialIds:
    """The token ids that a decoder must know.

    Attributes:
      eos: ids that end a generation; empty if no file names them.
      pad: fills finished rows.
      bos: begins a prompt.
      decoder_start: the first token of an encoder-decoder's decoder.
    """

    eos: tuple[int, ...] = ()
    pad: int | None = None
    bos: int | None = None
    decoder_start: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The ids with the names of `generation_config.json`; ids that are None are left out."""
        values = {
            "bos_token_id": self.bos,
            "decoder_start_token_id": self.decoder_start,
            "eos_token_id": self.eos[0] if len(self.eos) == 1 else list(self.eos) or None,
            "pad_token_id": self.pad,
        }
        return {name: value for name, value in values.items() if value is not None}

    def or_else(self, other: "SpecialIds") -> "SpecialIds":
        """These ids, with missing ids from `other`."""
        missing = {name: x for name, x in vars(other).items() if vars(self)[name] in (None, ())}
        return dataclasses.replace(self, **missing)


def special_ids_from_json(values: dict[str, Any], source: Path) -> SpecialIds:
    """Reads `eos_token_id` (an id or a list), `pad_token_id`, ... of a JSON file's object."""

    def checked(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
            raise UserError(f"{source}: {name}={short_repr(value)} must be a token id")
        return value

    def single(name: str) -> int | None:
        value = values.get(name)
        # Some published files say -1 for "none".
        return None if value is None or value == -1 else checked(name, value)

    eos = values.get("eos_token_id")
    eos = () if eos is None else eos if isinstance(eos, list) else (eos,)
    return SpecialIds(
        eos=tuple(dict.fromkeys(checked("eos_token_id", e) for e in eos)),
        pad=single("pad_token_id"),
        bos=single("bos_token_id"),
        decoder_start=single("decoder_start_token_id"),
    )


def special_ids(directory: Path) -> SpecialIds:
    """The ids that a directory's files name.

    `generation_config.json` has priority over `specjax.json`, and that over `config.json`: only the
    first lists every id that ends a chat turn.
    """
    ids = SpecialIds()
    for name in (GENERATION_FILE, SPECJAX_FILE, "config.json"):
        path = directory / name
        ids = ids.or_else(special_ids_from_json(read_json_if_there(path), path))
    return ids


def copy_tokenizer_files(source: Path, destination: Path) -> None:
    """Copies a tokenizer's files, but no file that is there already."""
    more = sorted((source / MORE_CHAT_TEMPLATES).glob("*.jinja"))
    for name in (*TOKENIZER_FILES, *(f"{MORE_CHAT_TEMPLATES}/{file.name}" for file in more)):
        if (source / name).is_file() and not (destination / name).exists():
            (destination / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, destination / name)


@contextlib.contextmanager
def no_panic(what: str) -> Iterator[None]:
    """Raises a UserError for a panic of Rust code, which is no Exception."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{what} ({' '.join(str(error).split())[:200]})") from None
