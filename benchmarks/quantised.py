"""What matrices in 8 bits cost and bring: bytes, time, logits, texts and quality."""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import command
from specjax.cli.report import Report
from specjax.compilation import jit
from specjax.data.examples import read_examples
from specjax.evaluation import METRICS
from specjax.memory import nbytes
from specjax.text import Decoder, Pair, TextModel, load_pair
from specjax.text.teacher_forcing import KnownTexts, batches, read
from specjax.types import Sampling

HELP = "bytes, time, errors of logits, equal texts and quality with matrices in 8 bits"

_COLUMNS = (
    "pair",
    "model",
    "weights",
    "MB",
    "rows",
    "time",
    "error",
    "best",
    "nats",
    "kl",
    "texts",
    "bleu",
    "per_call",
)
_FLOATS = "None"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the pair and its texts."""
    parser.add_argument("--pair", default="multi30k_ende", help="a built-in pair")
    parser.add_argument("--inputs", help="TSV or JSONL (default: the pair's samples)")
    parser.add_argument("--fields", nargs=2, help="the fields of inputs and references")
    parser.add_argument("--references", help="a text file instead of the second field")
    parser.add_argument("--prompts", type=int, default=64, help="number of prompts")
    parser.add_argument(
        "--weights", nargs="+", default=["int8", "int8+embedding"], help="compared with None"
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16], help="batch sizes B")
    parser.add_argument("--max-new", type=int, default=64, help="longest output, in tokens")
    parser.add_argument("--repeats", type=int, default=5, help="timings of each")


def run(args: argparse.Namespace) -> Report:
    """Decodes greedily and reads the references, with each form of the weights."""
    command.check_positive(args, "prompts", "rows", "max_new", "repeats")
    inputs, references = _texts(args)
    rows = []
    forms = [_FLOATS, *args.weights]
    pairs = {
        form: load_pair(args.pair, dtype="float32", weights=None if form == _FLOATS else form)
        for form in forms
    }
    for name in ("verifier", "drafter"):
        models = {form: pair.named[name] for form, pair in pairs.items()}
        print(f"{name} ...", flush=True)
        rows += _measure(name, models, pairs, inputs, references, args)
    return Report(
        rows,
        _COLUMNS,
        notes=[
            "time: of greedy decoding, over that of weights None; the medians of turns.",
            "error: root mean square of the differences of logits (each less its row's mean), over "
            "that of the logits. best: share of tokens with the same best logit.",
            "nats: -log p of the references per token. kl: KL(None || these weights), in nats per "
            "token. texts: share of equal greedy texts. bleu: of greedy texts.",
            "per_call: tokens per call of the verifier with the pair, greedily.",
        ],
    )


def _texts(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    from specjax.text.directories import built_in_pair

    source, fields = args.inputs, args.fields
    if source is None:
        (source,) = built_in_pair(args.pair).glob("samples.*")
        fields = ("en", "de") if source.suffix == ".tsv" else ("question", "answer")
    given = dict(zip(("inputs_field", "targets_field"), fields or (None, None), strict=True))
    examples = list(read_examples(source, **given))[: args.prompts]
    references = [example.targets for example in examples]
    if args.references is not None:
        references = [x.inputs for x in read_examples(args.references)][: args.prompts]
    if len(references) != len(examples) or not all(isinstance(x, str) for x in references):
        raise ValueError(f"{source}: there must be a reference per input: give --fields")
    return [example.inputs for example in examples], [str(x) for x in references]


def _measure(
    name: str,
    models: dict[str, TextModel],
    pairs: dict[str, Pair],
    inputs: list[str],
    references: list[str],
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    words = models[_FLOATS].tokenizer
    buckets = [max(len(words.encode(text)) for text in inputs)]

    def greedy(what: Any, size: int) -> Decoder:
        options: Any = {"max_new_tokens": args.max_new, "batch_size": size, "buckets": buckets}
        return Decoder(what, sampling=Sampling(0.0), **options)

    decoders = {
        (form, size): greedy(model, size) for form, model in models.items() for size in args.rows
    }
    seconds = command.time_interleaved(
        {key: _decodes(decoder, inputs, key[1]) for key, decoder in decoders.items()},
        repeats=args.repeats,
    )
    largest = max(args.rows)
    exact = _read(models[_FLOATS], inputs, references)
    texts: dict[str, list[str]] = {}
    table = []
    for form, model in models.items():
        found = exact if form == _FLOATS else _read(model, inputs, references)
        texts[form] = decoders[form, largest](inputs).texts
        row = {
            "pair": args.pair,
            "model": name,
            "weights": form,
            "MB": nbytes(model.params) / 1e6,
            "bleu": METRICS["bleu"](texts[form], references),
            "texts": _equal(texts[form], texts[_FLOATS]),
            **_compare(found, exact),
        }
        if name == "verifier":
            row["per_call"] = greedy(pairs[form], largest)(inputs).info.tokens_per_verifier_call
        table += [
            {**row, "rows": size, "time": seconds[form, size] / seconds[_FLOATS, size]}
            for size in args.rows
        ]
    return table


def _equal(ours: list[str], theirs: list[str]) -> float:
    return float(np.mean([a == b for a, b in zip(ours, theirs, strict=True)]))


def _decodes(decoder: Decoder, inputs: list[str], rows: int) -> Callable[[], Any]:
    few = inputs[: max(8, 2 * rows)]
    return lambda: np.asarray([len(x) for x in decoder(few).tokens])


def _read(
    model: TextModel, inputs: list[str], references: list[str]
) -> tuple[np.ndarray, np.ndarray]:
    """The logits of the references' tokens `[N, V]`, and the tokens `[N]`."""
    encode, eos_id = model.tokenizer.encode, model.tokenizer.eos_ids[0]
    outputs = [[*encode(text, add_special_tokens=False), eos_id] for text in references]
    texts = KnownTexts([np.asarray(encode(text)) for text in inputs], [*map(np.asarray, outputs)])
    logits, tokens = [], []
    for _, rows in batches(texts, 16):
        found = jit(read, static_argnums=0)(model.model, model.params, rows)
        logits.append(np.asarray(found.logits)[rows.real])
        tokens.append(rows.outputs[rows.real])
    return np.concatenate(logits), np.concatenate(tokens)


def _compare(
    found: tuple[np.ndarray, np.ndarray], exact: tuple[np.ndarray, np.ndarray]
) -> dict[str, float]:
    """The errors of logits, and the likelihood of the tokens."""
    centred = [x[0].astype(np.float64) - x[0].mean(-1, keepdims=True) for x in (found, exact)]
    log_p = [x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in centred]
    scale = np.sqrt(np.square(centred[1]).mean())
    kl = (np.exp(log_p[1]) * (log_p[1] - log_p[0])).sum(-1).mean()
    return {
        "error": float(np.sqrt(np.square(centred[0] - centred[1]).mean()) / scale),
        "best": float((centred[0].argmax(-1) == centred[1].argmax(-1)).mean()),
        "nats": float(-log_p[0][np.arange(len(found[1])), found[1]].mean()),
        "kl": float(max(kl, 0.0)),
    }


main = command.program(__file__, HELP, add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
