"""What a run of `specjax infer` tells its user on stderr of the rows."""

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from specjax.runs.lines import Record
from specjax.text import Decoder


def tell_failed(failed: Mapping[int, str], rows: int, path: Path) -> None:
    """Names the first of the inputs that cannot be decoded, and counts the others."""
    if failed:
        first = next(iter(failed.values()))
        more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
        print(
            f"specjax: {len(failed)} of {rows} inputs cannot be decoded: {first}{more}; {path} "
            "gives the reason for each",
            file=sys.stderr,
        )


def tell_nan(records: list[Record]) -> None:
    """Warns of rows that were ended by NaN."""
    found = [record for record in records if "nan" in record]
    if found:
        print(
            f"specjax: warning: {len(found)} of {len(records)} rows were ended by NaN, the first "
            f"is {found[0]['id']}: {found[0]['nan']}: look at the weights",
            file=sys.stderr,
        )


def tell_unknown(decoder: Decoder, prompts: Mapping[int, np.ndarray], names: list[str]) -> None:
    """Warns of inputs of which the vocabulary knows nothing: they are perhaps another model's."""
    words = decoder.tokenizer
    special = (words.unk_id, words.bos_id, *words.eos_ids)

    def is_unknown(ids: list[int]) -> bool:
        # Of an unknown text, SentencePiece knows the space before it.
        known = [i for i in ids if i not in special]
        return words.unk_id in ids and not words.decode(known).strip()

    unknown = [i for i, ids in prompts.items() if is_unknown(ids.tolist())]
    if unknown:
        print(
            f"specjax: warning: {len(unknown)} of {len(prompts)} inputs have no token that the "
            f"vocabulary knows; the first is {names[unknown[0]]}: is it the model for this text?",
            file=sys.stderr,
        )
