"""A sweep over two tables, whose programs compile quickly."""

import functools

import specjax
from specjax import rules, text
from specjax.data import Example
from specjax.sweeping import Measuring, Point, sweep
from specjax.text import Decoder
from tests import tiny_pair

TEXTS = tiny_pair.sentences(6, seed=1)
REFERENCES = [(text,) for text in tiny_pair.sentences(6, seed=2)]
EXAMPLES = [Example(i, text) for i, text in enumerate(TEXTS)]
RULES = {"opt": rules.OPT, "lossy": rules.Lossy}
COUNTS = {"seeds": 2, "batch_size": 4, "latency_texts": 2, "repeats": 1}


@functools.cache
def pair():
    return specjax.Pair(tiny_pair.tabular(1), tiny_pair.tabular(2))


def measuring(**others):
    bootstrap = specjax.evaluation.Bootstrap(resamples=100)
    return Measuring(metrics=("chrf",), bootstrap=bootstrap, **{**COUNTS, **others})


class Toys:
    """Makes decoders over the tables.

    Args:
      new_tokens: the longest output.
    """

    def __init__(self, new_tokens=8):
        self.made = []
        self._new_tokens = new_tokens

    def __call__(self, point, batch_size):
        self.made.append(point)
        shape = {"temperature": point.temperature, "batch_size": batch_size}
        shape |= {"max_new_tokens": self._new_tokens, "buckets": (32,)}
        if point.method == "verifier_alone":
            return Decoder(pair().verifier, **shape)
        if point.method == "drafter_alone":
            return Decoder(pair().drafter, **shape)
        if point.method == "token_cascade":
            rule = rules.Chow(point.strength)
            return Decoder(pair(), method=text.TokenCascade(), rule=rule, **shape)
        rule = RULES[point.method](point.strength)
        return Decoder(pair(), rule=rule, max_draft=point.max_draft, **shape)

    def command(self, point):
        return [f"--gin.ALPHA={point.strength}"]


def points(*methods, temperatures=(1.0,)):
    """The models alone, and (method, strength) with drafts of two tokens."""
    made = []
    for temperature in temperatures:
        alone = [Point(method=name, temperature=temperature) for name in ALONE]
        others = [
            Point(
                method=method,
                strength=strength,
                temperature=temperature,
                max_draft=None if method == "token_cascade" else 2,
            )
            for method, strength in methods
        ]
        made += alone + others
    return made


ALONE = ("verifier_alone", "drafter_alone")


def run(output, asked, make=None, examples=EXAMPLES, references=REFERENCES, how=None, **others):
    return sweep(
        make or Toys(),
        asked,
        examples=examples,
        references=references,
        measuring=how or measuring(),
        output_dir=output,
        **others,
    )
