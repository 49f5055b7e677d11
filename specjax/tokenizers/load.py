"""Loads tokenizers behind a small interface: SentencePiece, bytes, and `tokenizer.json`.

No TensorFlow and no transformers. The ids are those of transformers 5, or loading warns how they
differ; except in two cases in which SentencePiece decides: transformers 5 drops the first of
several leading spaces for a Llama model, and splits a text at user-defined pieces that no file
names.
"""

import json
import os
from pathlib import Path

from specjax.checks import PathLike
from specjax.errors import MissingFileError, UserError, download
from specjax.tokenizers.gguf_files import is_gguf, read_header
from specjax.tokenizers.model_files import read_json_if_there, write_json
from specjax.tokenizers.subword import HuggingFaceTokenizer, SentencePieceTokenizer, is_tiktoken
from specjax.tokenizers.tokenizer import ByteTokenizer, Tokenizer
from specjax.tokenizers.tokenizer_config import TokenizerSettings, implied_sentinels

SENTENCEPIECE_FILES = ("spiece.model", "tokenizer.model", "sentencepiece.model")
HF_FILE = "tokenizer.json"


def load_tokenizer(path: PathLike) -> Tokenizer:
    """Loads a tokenizer, with the ids that the files of its directory name.

    Args:
      path: a model's directory, in which a SentencePiece model (`spiece.model`, `tokenizer.model`,
        `sentencepiece.model`) has priority over a `tokenizer.json`, unless it is in tiktoken's
        format; one of these files; a GGUF file; or "bytes".

    Raises:
      FileNotFoundError: for a path that does not exist, or a directory without tokenizer.
      UserError: for files that cannot be read.
    """
    if path == "bytes":
        return ByteTokenizer()
    if not os.path.exists(path):  # also where a path is too long, unlike Path.exists
        raise MissingFileError(
            f"{path}: no such file or directory; give a model's directory, a .model file, "
            f"a tokenizer.json, or 'bytes'{download(path)}"
        )
    path = Path(path)
    if is_gguf(path):
        header = read_header(path)
        if header.fault is not None:
            raise header.fault
        path = header.directory
    if path.is_file():
        kind = HuggingFaceTokenizer if path.suffix == ".json" else SentencePieceTokenizer
        single = kind is SentencePieceTokenizer and not TokenizerSettings(path.parent).files
        return kind(path, None if single else path.parent)
    named = (
        read_json_if_there(path / name).get("tokenizer_class")
        for name in ("tokenizer_config.json", "config.json")
    )
    if str(next(filter(None, named), None)).startswith("ByT5Tokenizer"):
        settings = TokenizerSettings(path)  # checks the types of fields
        extra = settings.config.get("extra_ids")
        return ByteTokenizer(125 if extra is None else extra)
    if (model := _sentencepiece_file(path)) is not None:
        return SentencePieceTokenizer(model, path)
    if (path / HF_FILE).is_file():
        return HuggingFaceTokenizer(path / HF_FILE, path)
    raise MissingFileError(
        f"{path} has no tokenizer, none of {', '.join((*SENTENCEPIECE_FILES, HF_FILE))}: give its "
        "path, as a T5X directory needs it (tokenizer=PATH), or copy a tokenizer file into the "
        "directory"
    )


# The SentencePiece model that is read; none if it is tiktoken's beside a tokenizer.json.
def _sentencepiece_file(directory: Path) -> Path | None:
    files = (directory / name for name in SENTENCEPIECE_FILES)
    model = next((file for file in files if file.is_file()), None)
    skipped = model is not None and (directory / HF_FILE).is_file() and is_tiktoken(model)
    return None if skipped else model


def keep_sentinels(directory: Path, rows: int) -> None:
    """Writes the defaults that transformers must not assume into `tokenizer_config.json`.

    For a T5's SentencePiece model: the number of sentinels (`<extra_id_0>`, ...) after its pieces,
    because transformers adds 100 by default, for which the embedding may have no rows. For a single
    `tokenizer.json`: that it has all tokens. Fields in the file stay. Without sentinels, `rows` of
    the embedding are 0.
    """
    file = directory / "tokenizer_config.json"
    config = read_json_if_there(file)
    if "extra_ids" in config or "<extra_id_" in json.dumps(config):
        return
    model = _sentencepiece_file(directory)
    try:
        if model is not None:
            tokenizer: Tokenizer = SentencePieceTokenizer(model)
            is_t5 = TokenizerSettings(directory).is_t5
            if is_t5 or (is_t5 is None and tokenizer.bos_id is None):
                config.setdefault("tokenizer_class", "T5Tokenizer")
                config["extra_ids"] = implied_sentinels(rows, tokenizer.vocab_size)
        elif (directory / HF_FILE).is_file() and "tokenizer_class" not in config:
            # The class that uses tokenizer.json unchanged.
            tokenizer = HuggingFaceTokenizer(directory / HF_FILE, directory)
            ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_ids[0], "pad": tokenizer.pad_id}
            texts = {f"{n}_token": tokenizer.token(i) for n, i in ids.items() if i is not None}
            config |= {**texts, **tokenizer.special_tokens}
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
    except UserError:
        return  # Damaged before: loading it raises.
    if config != read_json_if_there(file):
        write_json(file, config)
