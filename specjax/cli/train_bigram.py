"""`specjax train bigram SRC --tokenizer DIR --output DIR`: the most frequent successors of tokens.

With `--order`, also the successors of longer contexts.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specjax.errors import UserError, tell


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "sources",
        metavar="SRC",
        nargs="+",
        help="text, TSV or JSONL files (also .gz) that resemble the outputs, or seqio:TASK",
    )
    parser.add_argument(
        "--tokenizer",
        required=True,
        help='the model\'s directory, its tokenizer file, or the word "bytes"',
    )
    parser.add_argument("--output", required=True, type=Path, help="a new or empty directory")
    parser.add_argument(
        "--format",
        choices=("text", "tsv", "jsonl"),
        help="format of the files (default: from their names)",
    )
    parser.add_argument(
        "--field",
        help="the field of the text. TSV: a column (from 0) or its name in the header; JSONL: a "
        "key; seqio: a feature (default: the first column, or inputs)",
    )
    parser.add_argument(
        "--order",
        type=int,
        choices=(2, 3, 4, 5),
        default=2,
        help="length of the longest n-gram: from 3 on, the successors of two and more tokens are "
        "also counted, and the texts are kept in memory (default: 2)",
    )
    parser.add_argument(
        "--min-count",
        type=int,
        metavar="N",
        default=2,
        help="the fewest occurrences of a context of two tokens or more (default: 2)",
    )


def run(args: argparse.Namespace) -> int:
    """Counts, writes the table, and prints a summary."""
    # Imported here so that `specjax --help` stays quick.
    import numpy as np

    from specjax.checks import check_count
    from specjax.drafting import Bigram
    from specjax.drafting.ngrams import frequent_contexts, most_frequent_successors
    from specjax.text.directories import save_bigram
    from specjax.tokenizers import load_tokenizer
    from specjax.writing import check_free

    check_count("--min-count", args.min_count, "give a number of occurrences")
    check_free(args.output)
    words = load_tokenizer(args.tokenizer)
    counts = {"texts": 0, "tokens": 0}
    texts: Any = _texts(args, words, counts)
    if args.order > 2:
        texts = [np.asarray(text, np.int32) for text in texts]  # read twice
    table = most_frequent_successors(texts, words.vocab_size)
    known = int((table >= 0).sum())
    if not known:
        raise UserError(
            f"{' '.join(args.sources)}: no text has two tokens: give files with more text"
        )
    notes, more = counts | {"known": known}, ""
    longer: tuple[np.ndarray, ...] = ()
    if args.order > 2:
        longer = frequent_contexts(texts, table, args.order, args.min_count)
        notes |= {"order": args.order, "min_count": args.min_count, "contexts": len(longer[1])}
        more = f"and of {len(longer[1]):,} contexts of up to {args.order - 1} tokens, "
    save_bigram(args.output, Bigram(table, words.fingerprint, notes, *longer))
    print(
        f"{args.output}: the successors of {known:,} of {table.size:,} tokens, {more}from "
        f"{counts['texts']:,} texts of {counts['tokens']:,} tokens"
    )
    tell(
        f'next: specjax infer --gin.DRAFTING="Lookup(bigram={str(args.output)!r})" '
        "--gin.MAX_DRAFT=10 --gin.VERIFIER=DIRECTORY --gin.INPUT=FILE --gin.OUTPUT_DIR=RUN"
    )
    return 0


def _texts(args: argparse.Namespace, words: object, counts: dict[str, int]) -> Iterator[list[int]]:
    from specjax.data.examples import read_examples
    from specjax.tokenizers import Tokenizer

    assert isinstance(words, Tokenizer)
    field = int(args.field) if (args.field or "").isdecimal() else args.field
    options: dict[str, Any] = {"format": args.format, "inputs_field": field, "option": "--field"}
    for source in args.sources:
        for example in read_examples(source, **options):
            ids = words.encode(example.inputs)
            counts["texts"] += 1
            counts["tokens"] += len(ids)
            # T5's decoder begins with the padding token.
            yield ids if words.add_bos else [words.pad_id, *ids]
