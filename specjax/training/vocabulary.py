"""A run's vocabulary: copied from a model, or trained on the text."""

import dataclasses
import io
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import sentencepiece

from specjax.runs.run_directory import RunDirectory
from specjax.tokenizers.load import keep_sentinels, load_tokenizer
from specjax.tokenizers.model_files import GENERATION_FILE, SpecialIds, copy_tokenizer_files
from specjax.tokenizers.settings import TokenizerSettings
from specjax.writing import new_directory

TOKENIZER_NAME = "tokenizer"
VOCABULARY_TYPES = ("unigram", "bpe")


@dataclasses.dataclass(frozen=True)
class _Kind:
    """How a family's published vocabularies are made.

    Attributes:
      file: the model's name in a Hugging Face directory.
      types: of SentencePiece models that transformers reads there, the usual one first: it takes
        every Llama's and Gemma's for BPE.
      options: of SentencePiece's trainer.
      settings: of `tokenizer_config.json`.
    """

    file: str
    types: tuple[str, ...]
    options: Mapping[str, Any]
    settings: Mapping[str, Any]


# Every character of the text can be written: spaces, newlines, and by bytes what is rare.
_VERBATIM = {
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "byte_fallback": True,
    "split_digits": True,
}
_MARKS = {"add_bos_token": True, "add_eos_token": False, "legacy": False}
_KINDS = MappingProxyType(
    {
        "t5": _Kind(
            "spiece.model",
            VOCABULARY_TYPES,
            {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
            {},
        ),
        "llama": _Kind(
            "tokenizer.model",
            ("bpe",),
            {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1, **_VERBATIM},
            {
                "tokenizer_class": "LlamaTokenizer",
                "unk_token": "<unk>",
                "bos_token": "<s>",
                "eos_token": "</s>",
                **_MARKS,
            },
        ),
        "gemma2": _Kind(
            "tokenizer.model",
            ("bpe",),
            {
                "pad_id": 0,
                "eos_id": 1,
                "bos_id": 2,
                "unk_id": 3,
                "eos_piece": "<eos>",
                "bos_piece": "<bos>",
                "add_dummy_prefix": False,
                **_VERBATIM,
            },
            {
                "tokenizer_class": "GemmaTokenizer",
                "pad_token": "<pad>",
                "eos_token": "<eos>",
                "bos_token": "<bos>",
                "unk_token": "<unk>",
                **_MARKS,
            },
        ),
    }
)


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
      texts: the training text, inputs and targets.
      vocab_size: pieces, special tokens included; fewer if the texts do not yield as many.
      model_type: "unigram" or "bpe"; by default unigram for T5 and BPE for the others, which
        transformers always reads as BPE.
      family: "t5", "llama" or "gemma2".

    Returns:
      The serialised model, as in a `spiece.model` file. The same texts give the same bytes.

    Raises:
      ValueError: SentencePiece cannot make that many pieces of the texts, or for an unknown type.

    Source: Kudo and Richardson 2018.
    """
    kind = _KINDS[family]
    model_type = kind.types[0] if model_type is None else model_type
    if model_type not in kind.types:
        raise ValueError(
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
        raise ValueError(
            f"vocab_size={vocab_size}: SentencePiece cannot train on this text "
            f"({' '.join(str(error).split())}); give more text, another vocab_size, or a vocabulary"
        ) from None
    return model.getvalue()


def write_vocabulary(
    directory: Path,
    source: str | os.PathLike[str] | None,
    texts: Iterable[str],
    *,
    vocab_size: int,
    model_type: str | None,
    family: str = "t5",
) -> None:
    """Writes the tokenizer files of a run.

    A model that is written with these files has the very vocabulary of `source`: what a model's
    directory says of it outside of these files, and a tokenizer would miss, goes with them.

    Args:
      directory: takes the files; it does not exist, or is empty.
      source: a model's directory, a SentencePiece model, a `tokenizer.json`, "bytes", or None to
        train a SentencePiece vocabulary.
      texts: to train on.
      vocab_size: rows of the network's embedding: pieces of a trained vocabulary.
      model_type: see `train_vocabulary`.
      family: see `train_vocabulary`.

    Raises:
      FileNotFoundError: there is no `source`, or no tokenizer in it.
      ValueError: it cannot be read or cannot be copied alone; or see `train_vocabulary`.
    """
    with new_directory(directory) as partial:
        if source is None:
            options: Any = {"vocab_size": vocab_size, "model_type": model_type, "family": family}
            kind = _KINDS[family]
            (partial / kind.file).write_bytes(train_vocabulary(texts, **options))
            if family == "t5":
                keep_sentinels(partial, 0)
            else:
                _write_json(partial / "tokenizer_config.json", kind.settings)
        elif source == "bytes":
            settings = {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 0}
            _write_json(partial / "tokenizer_config.json", settings)
        else:
            _copy(Path(source), partial)


def vocabulary_of_run(
    run: RunDirectory,
    source: str | os.PathLike[str] | None,
    texts: Iterable[str],
    scratch: Path,
    **options: Any,
) -> Path:
    """The tokenizer files of a run: those that it began with, or new ones in a scratch directory.

    A run may write only when it has claimed its directory, and the claim depends on the vocabulary;
    so new files come into the run's directory by `place_vocabulary`.

    Args:
      run: the run's directory.
      source: see `write_vocabulary`.
      texts: see `write_vocabulary`.
      scratch: an empty directory for new files.
      **options: see `write_vocabulary`.

    Returns:
      The directory with the files.

    Raises:
      FileNotFoundError: see `write_vocabulary`.
      ValueError: see `write_vocabulary`; or `source` is not what the run began with.
    """
    kept = run.path / TOKENIZER_NAME
    if not run.kept or not kept.exists():
        write_vocabulary(scratch, source, texts, **options)
        return scratch
    if source and load_tokenizer(source).fingerprint != load_tokenizer(kept).fingerprint:
        raise ValueError(
            f"vocabulary={source} is not the one that the run in {run.path} began with; choose "
            "another output_dir"
        )
    return kept


def place_vocabulary(run: RunDirectory, files: Path) -> None:
    """Copies new tokenizer files into the run's directory, which has been claimed.

    Args:
      run: the run's directory.
      files: what `vocabulary_of_run` has returned.

    Raises:
      OSError: they cannot be written.
    """
    if files != run.path / TOKENIZER_NAME:
        with run.replacing(TOKENIZER_NAME) as place:
            shutil.copytree(files, place, dirs_exist_ok=True)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(dict(values), indent=2) + "\n", encoding="utf-8")


def _copy(source: Path, directory: Path) -> None:
    tokenizer = load_tokenizer(source)
    if source.is_dir():
        copy_tokenizer_files(source, directory)
        settings = TokenizerSettings(source)
        if settings.is_t5 is not False:  # a Llama's or Gemma's has none
            keep_sentinels(directory, settings.rows)
    else:
        name = "tokenizer.json" if source.suffix == ".json" else "spiece.model"
        shutil.copyfile(source, directory / name)
        keep_sentinels(directory, tokenizer.vocab_size)  # a lone file has no others
    if not (directory / GENERATION_FILE).exists():
        ids = SpecialIds(tokenizer.eos_ids, tokenizer.pad_id, tokenizer.bos_id)
        (directory / GENERATION_FILE).write_text(json.dumps(ids.to_json()))
    if load_tokenizer(directory).fingerprint != tokenizer.fingerprint:
        raise ValueError(
            f"vocabulary={source} depends on files beside it; give the directory instead"
        )
