"""Whether models share a vocabulary."""

import warnings

from specjax.tokenizers import Tokenizer

# A model's path, its tokenizer's fingerprint and its vocabulary's size.
Words = tuple[str, str, int]


def check_vocabularies(models: dict[str, Words]) -> None:
    """Compares the vocabularies of two models, given by name (or of one with itself)."""
    if len({words[1:] for words in models.values()}) == 1:
        return
    (_, first, _), (_, second, _) = models.values()
    described = [
        f"{path} has {size} ids (tokenizer {mark})" for path, mark, size in models.values()
    ]
    what = "tokenizers" if first != second else "vocabulary sizes"
    raise ValueError(
        f"{' and '.join(models)} have different {what}: {' but '.join(described)}; every id "
        "must have the same meaning in both: choose models of one family"
    )


def tell_special_ids(words: dict[str, Tokenizer]) -> None:
    """Warns if a model ends or pads texts with other tokens than the verifier."""
    own = words["verifier"]
    for name, other in words.items():
        for what, ours, theirs in (
            ("ends texts", own.eos_ids, other.eos_ids),
            ("pads prompts", own.pad_id, other.pad_id),
        ):
            if ours != theirs:
                warnings.warn(
                    f"the {name} {what} with {theirs}, the verifier with {ours}: the tokens of the "
                    "verifier are used",
                    stacklevel=4,
                )
