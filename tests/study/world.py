"""A comparison of two tables, whose programs compile quickly."""

import functools
import json

import specjax
from specjax.data.examples import Example
from specjax.study import Grid, Measuring, Setting, Texts, compare
from tests import tiny_pair

TEXTS = tiny_pair.sentences(6, seed=1)
REFERENCES = [(text,) for text in tiny_pair.sentences(6, seed=2)]
EXAMPLES = [Example(i, text) for i, text in enumerate(TEXTS)]
COUNTS = {"num_samples": 2, "batch_size": 4, "latency_limit": 2, "repeats": 1}
OPTIONS = {"max_new_tokens": 8, "buckets": (32,)}
VERIFIER, DRAFTER = Setting(method="VerifierAlone"), Setting(method="DrafterAlone")


@functools.cache
def models():
    return specjax.Pair(tiny_pair.tabular(1), tiny_pair.tabular(2)).named


def measuring(**others):
    bootstrap = specjax.evaluation.Bootstrap(resamples=100)
    return Measuring(metrics=("chrf",), bootstrap=bootstrap, **{**COUNTS, **others})


def settings(methods, temperatures=(1.0,)):
    """The models alone, and methods with their strengths and drafts of two tokens."""
    grid = Grid(methods=methods, temperatures=temperatures, max_drafts=(2,))
    return grid.settings()


def run(output, asked, examples=EXAMPLES, references=REFERENCES, how=None, **others):
    make_models = others.pop("make_models", models)
    return compare(
        lambda settings: make_models(),
        asked,
        Texts(examples, references),
        measuring=how or measuring(),
        output_dir=output,
        **{"options": OPTIONS, "measured": "all", **others},
    )


def lines(output):
    records = map(json.loads, (output / "points.jsonl").read_text().splitlines())
    return [record | record["values"] for record in records]
