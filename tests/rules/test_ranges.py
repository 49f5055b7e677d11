"""The numbers that each rule may have: useful ones are silent, others warn once, or are refused."""

import dataclasses
import re
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import rules
from specjax.rules import target

INF, NAN = np.inf, np.nan
SHARE = (0.0, 0.3, 1.0), (), (-0.1, 1.1, INF, NAN)
MARGIN = (-0.9, 0.0, 0.2, 1.0, INF, -INF), (-1.0, -2.0, 1.1, 2.0), (NAN,)
ALLOWANCE = (0.0, 1.0, 100.0, INF), (100.5, 1e9), (-0.1, -INF, NAN)
APART = (-100.0, 0.5, 100.0, INF, -INF), (-100.5, 101.0), (NAN,)
INNER = rules.OPT(0.2)


# (a rule of one number, the number's name) -> useful numbers, numbers that warn, refused ones.
TABLE = {
    (rules.Chow, "strength"): SHARE,
    (rules.ChowLog, "strength"): ALLOWANCE,
    (rules.Diff, "strength"): MARGIN,
    (rules.DiffLog, "strength"): APART,
    (rules.OPT, "strength"): MARGIN,
    (rules.OPTLog, "strength"): APART,
    (rules.BiLD, "strength"): ALLOWANCE,
    (rules.TokenV1, "strength"): MARGIN,
    (rules.TokenV2, "strength"): ((0.0, 0.5, 1.0, INF), (-0.1, 1.1), (NAN,)),
    (rules.TokenV3, "strength"): ((0.0, 0.5, 1.0, INF), (-0.1, 1.1), (NAN,)),
    (rules.Typical, "epsilon"): SHARE,
    (rules.Typical, "alpha"): SHARE,
    (rules.Lossy, "strength"): ((0.0, 0.9), (), (-0.1, 1.0, NAN)),
    (rules.Lossy, "beta"): ((0.6, 1.0), (), (0.0, 0.4, 1.1, NAN)),
    (rules.LossyTuned, "strength"): ((0.0, 0.9), (), (-0.1, 1.0, NAN)),
    (rules.Mentored, "strength"): ALLOWANCE,
    (rules.KLBall, "nats"): ALLOWANCE,
    (rules.KLPrice, "strength"): ALLOWANCE,
    (rules.Mixture, "weight"): SHARE,
    (rules.AcceptThreshold, "single"): SHARE,
    (rules.AcceptThreshold, "acc"): ((0.1, 1.0), (), (0.0, 1.1, NAN)),
    (rules.Cactus, "delta"): ALLOWANCE,
    (rules.Budgeted, "nats_per_token"): ALLOWANCE,
    (rules.SequenceChow, "strength"): SHARE,
    (rules.SequenceChowLog, "strength"): ((0.0, 900.0, INF), (1001.0,), (-0.1, NAN)),
    (rules.Quantile, "level"): SHARE,
}
WITHOUT = {rules.Lossless, rules.FallbackRollback, rules.Sum, rules.Mean}


def make(kind, name, number):
    others = {
        rules.Budgeted: {"rule": INNER},
        rules.Lossy: {"strength": 0.5},
    }
    return kind(**{**others.get(kind, {}), name: number})


def test_the_table_has_every_number_of_every_rule():
    kinds = {*rules.ALL_RULES, *rules.SEQUENTIAL_RULES, *rules.ALL_AGGREGATIONS}
    assert {kind for kind, _ in TABLE} | WITHOUT == kinds | {rules.Budgeted}
    for kind in kinds - WITHOUT:
        fields = [x for x in dataclasses.fields(kind) if not x.metadata.get("static")]
        numbers = {field.name for field in fields} - {"rule", "aggregation"}
        assert {name for one, name in TABLE if one is kind} == numbers == set(kind.spans)


def told(kind, name, number):
    target._warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            made = make(kind, name, number)
    return made, [str(each.message) for each in caught]


@pytest.mark.parametrize(("kind", "name"), TABLE, ids=lambda x: getattr(x, "__name__", x))
def test_useful_numbers_are_silent_others_warn_once_and_senseless_ones_are_refused(kind, name):
    useful, useless, refused = TABLE[kind, name]
    for number in (*useful, np.array(useful)):
        assert told(kind, name, number)[1] == []
    for number in (*useless, np.array([useful[0], *useless])[: 2 * len(useless)]):
        if np.size(number):
            (message,) = told(kind, name, number)[1]
            bad = number if np.ndim(number) == 0 else number[1]
            shown = f"{kind.__name__}: {name} should lie in "
            assert message.startswith(shown) and f", got {np.float32(bad)}" in message
    for number in refused:
        with pytest.raises(ValueError, match=rf"\b{name}\b must .*got"):
            make(kind, name, number)


@pytest.mark.parametrize(("kind", "name"), TABLE, ids=lambda x: getattr(x, "__name__", x))
def test_traced_numbers_are_not_checked(kind, name):
    def number(x):
        return getattr(make(kind, name, x), name) * 1.0

    for given in (-50.0, 0.5, 1e6):
        other = jax.jit(number)(jnp.float32(given))
        if kind is not rules.Lossy:  # which raises beta to 1 - strength
            assert float(other) == given


def test_the_page_of_methods_has_the_ranges():
    page = (Path(__file__).parents[2] / "docs" / "methods.md").read_text(encoding="utf-8")
    table, rows = page.partition("## Ranges of the strengths")[2], {}
    for numbers, ranges in re.findall(r"^\| ([^|]*`[^|]*) \| ([^|]+ \| [^|]+) \|$", table, re.M):
        for group in numbers.split("; "):
            shared, of, kinds = group.partition(" of ")
            for name in re.findall(r"`([\w.]+)`", kinds if of else shared):
                rows[f"{name}.strength" if of else name] = ranges
    assert rows == {
        f"{kind.__name__}.{name}": f"{shown(kind.spans[name].valid)} | "
        f"{shown(kind.spans[name].useful or kind.spans[name].valid)}"
        for kind, name in TABLE
    }


def shown(span):
    low = "(" if span.open_low or span.low == -INF else "["
    high = ")" if span.open_high else "]"
    if span.high == INF:
        anything = "finite" if span.open_low else "any"
        return anything if span.low == -INF else f"at least {span.low:g}"
    return f"{low}{span.low:g}, {span.high:g}{high}"
