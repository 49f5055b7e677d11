"""Tokenizers behind one small interface: SentencePiece, bytes, and `tokenizer.json`.

No TensorFlow and no transformers; ids agree with those of transformers' tokenizers.
"""

import os
from pathlib import Path

from specjax.data.model_files import read_json_if_there
from specjax.data.subword_tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer
from specjax.data.tokenizer_base import ByteTokenizer, Tokenizer
from specjax.data.tokenizer_settings import TokenizerSettings

SENTENCEPIECE_FILES = ("spiece.model", "tokenizer.model", "sentencepiece.model")
HF_FILE = "tokenizer.json"


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Loads a tokenizer.

    Args:
      path: a model's directory, in which a SentencePiece model (`spiece.model`, `tokenizer.model`,
        `sentencepiece.model`) goes before a `tokenizer.json`; one of these files; or "bytes".

    Returns:
      The tokenizer, with the ids that the directory's `generation_config.json`, `config.json` and
      `tokenizer_config.json` name.

    Raises:
      FileNotFoundError: for a path that does not exist, or a directory without tokenizer.
      ValueError: for files that cannot be read.
    """
    if path == "bytes":
        return ByteTokenizer()
    path = Path(path)
    if path.is_file():
        kind = HuggingFaceTokenizer if path.suffix == ".json" else SentencePieceTokenizer
        alone = kind is SentencePieceTokenizer and not TokenizerSettings(path.parent).files
        return kind(path, None if alone else path.parent)
    if not path.is_dir():
        raise FileNotFoundError(
            f"{path}: no such file or directory; give a model's directory, a .model file, "
            "a tokenizer.json, or the word bytes"
        )
    config = read_json_if_there(path / "tokenizer_config.json")
    if str(config.get("tokenizer_class")).startswith("ByT5Tokenizer"):
        return ByteTokenizer(int(config.get("extra_ids", 125)))
    for name in SENTENCEPIECE_FILES:
        if (path / name).is_file():
            return SentencePieceTokenizer(path / name, path)
    if (path / HF_FILE).is_file():
        return HuggingFaceTokenizer(path / HF_FILE, path)
    raise FileNotFoundError(
        f"{path}: no tokenizer in it: none of {', '.join((*SENTENCEPIECE_FILES, HF_FILE))}; copy "
        "one beside the model, or give its path"
    )


__all__ = [
    "ByteTokenizer",
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "Tokenizer",
    "load_tokenizer",
]
