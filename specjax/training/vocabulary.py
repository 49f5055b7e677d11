"""A SentencePiece vocabulary from the training text."""

import io
from collections.abc import Iterable

import sentencepiece


def train_vocabulary(
    texts: Iterable[str],
    *,
    vocab_size: int,
    model_type: str = "unigram",
    character_coverage: float = 1.0,
) -> bytes:
    """Trains a SentencePiece model with T5's special tokens: pad 0, end of sequence 1, unknown 2.

    Args:
      texts: the training text, both languages.
      vocab_size: pieces, special tokens included; fewer if the texts do not yield as many.
      model_type: "unigram" or "bpe".
      character_coverage: the share of characters that get a piece.

    Returns:
      The serialised model, as in a `spiece.model` file. The same texts give the same bytes.

    Raises:
      ValueError: SentencePiece cannot make that many pieces of the texts, or for an unknown type.

    Source: Kudo and Richardson 2018.
    """
    if model_type not in ("unigram", "bpe"):
        raise ValueError(f"model_type={model_type!r} is not one of unigram, bpe")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            character_coverage=character_coverage,
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
            f"({' '.join(str(error).split())})"
        ) from None
    return model.getvalue()
