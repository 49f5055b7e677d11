"""A run's vocabulary: copied from a model, or trained on the text."""

import io
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import sentencepiece

from specjax.checkpoints.save import replacing
from specjax.tokenizers.load import keep_sentinels, load_tokenizer
from specjax.tokenizers.model_files import GENERATION_FILE, SpecialIds, copy_tokenizer_files
from specjax.tokenizers.settings import TokenizerSettings


def train_vocabulary(
    texts: Iterable[str],
    *,
    vocab_size: int,
    model_type: str = "unigram",
) -> bytes:
    """Trains a SentencePiece model with T5's special tokens: pad 0, end of sequence 1, unknown 2.

    Args:
      texts: the training text, both languages.
      vocab_size: pieces, special tokens included; fewer if the texts do not yield as many.
      model_type: "unigram" or "bpe".

    Returns:
      The serialised model, as in a `spiece.model` file. The same texts give the same bytes.

    Raises:
      ValueError: SentencePiece cannot make that many pieces of the texts, or for an unknown type.

    Source: Kudo and Richardson 2018.
    """
    if model_type not in ("unigram", "bpe"):
        raise ValueError(f"vocabulary_type={model_type!r} is not one of unigram, bpe")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            character_coverage=1.0,
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            num_threads=1,
            hard_vocab_limit=False,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(
            f"vocab_size={vocab_size}: SentencePiece cannot train on this text "
            f"({' '.join(str(error).split())}); give more text, another vocab_size, or a vocabulary"
        ) from None
    return model.getvalue()


def provide_vocabulary(
    directory: Path,
    source: str | os.PathLike[str] | None,
    texts: Iterable[str],
    *,
    vocab_size: int,
    model_type: str,
    begun: bool,
) -> None:
    """Puts a run's tokenizer files into `directory`, unless an earlier start did.

    A model that is written with these files has the very vocabulary of `source`: what a model's
    directory says of it outside of these files, and a tokenizer would miss, goes with them.

    Args:
      directory: takes the files.
      source: a model's directory, a SentencePiece model, a `tokenizer.json`, "bytes", or None to
        train a SentencePiece vocabulary.
      texts: to train on.
      vocab_size: rows of the network's embedding: pieces of a trained vocabulary.
      model_type: see `train_vocabulary`.
      begun: whether the run began with the files that `directory` holds.

    Raises:
      FileNotFoundError: there is no `source`, or no tokenizer in it.
      ValueError: it cannot be read, cannot be copied alone, or is not what the run began with; or
        see `train_vocabulary`.
    """
    if begun and directory.exists():
        if source and load_tokenizer(source).fingerprint != load_tokenizer(directory).fingerprint:
            raise ValueError(
                f"vocabulary={source} is not the one that the run in {directory.parent} began "
                "with; choose another output_dir"
            )
        return
    # Left by a start that failed before the run began.
    shutil.rmtree(directory, ignore_errors=True)
    with replacing(directory) as partial:
        if source is None:
            model = train_vocabulary(texts, vocab_size=vocab_size, model_type=model_type)
            (partial / "spiece.model").write_bytes(model)
            keep_sentinels(partial, 0)
        elif source == "bytes":
            settings = {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 0}
            (partial / "tokenizer_config.json").write_text(json.dumps(settings))
        else:
            _copy(Path(source), partial)


def _copy(source: Path, directory: Path) -> None:
    tokenizer = load_tokenizer(source)
    if source.is_dir():
        copy_tokenizer_files(source, directory)
        keep_sentinels(directory, TokenizerSettings(source).rows)
    else:
        name = "tokenizer.json" if source.suffix == ".json" else "spiece.model"
        shutil.copyfile(source, directory / name)
    if not (directory / GENERATION_FILE).exists():
        ids = SpecialIds(tokenizer.eos_ids, tokenizer.pad_id, tokenizer.bos_id)
        (directory / GENERATION_FILE).write_text(json.dumps(ids.to_json()))
    if load_tokenizer(directory).fingerprint != tokenizer.fingerprint:
        raise ValueError(
            f"vocabulary={source} depends on files beside it; give the directory instead"
        )
