"""A run's vocabulary: copied from a model, or trained on the text."""

import io
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import sentencepiece

from specjax.checks import PathLike
from specjax.errors import UserError
from specjax.models import FAMILIES
from specjax.models.family import Vocabulary
from specjax.tokenizers.load import keep_sentinels, load_tokenizer
from specjax.tokenizers.model_files import (
    GENERATION_FILE,
    SpecialIds,
    copy_tokenizer_files,
    write_json,
)
from specjax.tokenizers.tokenizer_config import TokenizerSettings
from specjax.writing import new_directory

VOCABULARY_TYPES = ("unigram", "bpe")


def _kind(family: str) -> Vocabulary:
    if (kind := FAMILIES[family].vocabulary) is None:
        raise UserError(
            f"specjax cannot train a vocabulary for a {family}: give `vocabulary` (or a teacher)"
        )
    return kind


def train_vocabulary(
    texts: Iterable[str],
    *,
    vocab_size: int,
    model_type: str | None = None,
    family: str = "t5",
) -> bytes:
    """Trains a SentencePiece model with the special tokens of a family.

    T5 has pad 0, end of sequence 1 and unknown 2; Llama unknown 0, begin 1 and end of sequence 2;
    Gemma 2 pad 0, end of sequence 1, begin 2 and unknown 3. The vocabularies of the latter two
    keep each text as it is, newlines included, and split numbers into digits.

    Args:
      texts: the training texts, inputs and targets.
      vocab_size: the number of pieces, with special tokens; fewer if the texts do not suffice.
      model_type: "unigram" or "bpe"; by default unigram for T5 and BPE for the others, which
        transformers always reads as BPE.
      family: a name in `specjax.models.FAMILIES`, such as "t5", "llama" or "gemma2".

    Returns:
      The serialised model, as in a `spiece.model` file. The same texts give the same bytes.

    Source: Kudo and Richardson 2018.
    """
    kind = _kind(family)
    model_type = kind.types[0] if model_type is None else model_type
    if model_type not in kind.types:
        raise UserError(
            f"`vocabulary_type` of a {family} must be {' or '.join(kind.types)}, got {model_type!r}"
        )
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            character_coverage=1.0,
            num_threads=1,
            hard_vocab_limit=False,
            minloglevel=2,
            **kind.options,
        )
    except RuntimeError as error:
        raise UserError(
            f"vocab_size={vocab_size}: SentencePiece cannot train on this text "
            f"({' '.join(str(error).split())}); give more text, another vocab_size, or a vocabulary"
        ) from None
    return model.getvalue()


def write_vocabulary(
    directory: Path,
    source: PathLike | None,
    texts: Iterable[str],
    *,
    vocab_size: int,
    model_type: str | None,
    family: str = "t5",
) -> None:
    """Writes the tokenizer files of a run.

    A model that is written with these files has exactly the vocabulary of `source`: settings
    outside these files that a tokenizer would miss are copied too. The source is a model's
    directory, a SentencePiece model, a `tokenizer.json`, "bytes", or None to train a SentencePiece
    vocabulary.
    """
    with new_directory(directory) as partial:
        if source is None:
            options: Any = {"vocab_size": vocab_size, "model_type": model_type, "family": family}
            kind = _kind(family)
            (partial / kind.file).write_bytes(train_vocabulary(texts, **options))
            if kind.settings:
                write_json(partial / "tokenizer_config.json", kind.settings)
            else:
                keep_sentinels(partial, 0)
        elif source == "bytes":
            settings = {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 0}
            write_json(partial / "tokenizer_config.json", settings)
        else:
            _copy(Path(source), partial)


def _copy(source: Path, directory: Path) -> None:
    tokenizer = load_tokenizer(source)
    if source.is_dir():
        copy_tokenizer_files(source, directory)
        settings = TokenizerSettings(source)
        if settings.is_t5 is not False:  # Llama's and Gemma's have none
            keep_sentinels(directory, settings.rows)
    else:
        name = "tokenizer.json" if source.suffix == ".json" else "spiece.model"
        shutil.copyfile(source, directory / name)
        keep_sentinels(directory, tokenizer.vocab_size)  # a single file has no others
    if not (directory / GENERATION_FILE).exists():
        ids = SpecialIds(tokenizer.eos_ids, tokenizer.pad_id, tokenizer.bos_id)
        (directory / GENERATION_FILE).write_text(json.dumps(ids.to_json()))
    if load_tokenizer(directory).fingerprint != tokenizer.fingerprint:
        raise UserError(
            f"vocabulary={source} depends on files beside it; give the directory instead"
        )
