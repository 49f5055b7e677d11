"""Which prompts share slots, in how many shapes."""

import dataclasses
import types
import warnings

import numpy as np
import pytest

import specjax
from specjax.text import requests as prompts_lib
from specjax.text.engine import TURNS, groups_of
from tests import tiny_pair


@pytest.mark.parametrize(("batch_size", "shapes"), [(16, {1, 4, 16}), (6, {1, 4, 6}), (1, {1})])
def test_few_numbers_of_rows_are_compiled(batch_size, shapes):
    rows = {p.rows for n in range(1, 40) for p in groups_of([5] * n, (16,), batch_size)}
    assert rows == shapes
    # On a mesh a multiple of its devices.
    for p in groups_of([5] * 9, (16,), batch_size, 4):
        assert p.rows % 4 == 0 and p.refill % 4 == 0


def test_every_prompt_has_its_place_once():
    lengths = [3, 17, 9, 30, 2, 16, 31, 8] * 20
    for turns in (2, TURNS):
        groups = list(groups_of(lengths, (16, 32), 4, turns=turns))
        assert sorted(int(member) for p in groups for member in p.members) == list(range(160))
        assert max(len(p.members) for p in groups) == turns * 4
        assert all(lengths[int(p.members[0])] <= p.length for p in groups)


@pytest.mark.parametrize(
    ("side", "kept"), [("end", [7, 10, 11, 12, 1]), ("beginning", [7, 13, 14, 15, 1])]
)
def test_a_long_prompt_is_cut_between_its_special_tokens(side, kept):
    words = types.SimpleNamespace(add_bos=True, bos_id=7, add_eos=True, eos_ids=(1,))
    tokens = np.asarray([7, 10, 11, 12, 13, 14, 15, 1], np.int32)
    assert prompts_lib.shortened(words, tokens, 5, side).tolist() == kept
    assert prompts_lib.shortened(words, tokens, 8, side) is tokens
    assert len(prompts_lib.shortened(words, tokens, 1, side)) == 1
    plain = types.SimpleNamespace(add_bos=False, bos_id=None, add_eos=False, eos_ids=(1,))
    rest = prompts_lib.shortened(plain, tokens, 3, side).tolist()
    assert rest == (tokens[:3] if side == "end" else tokens[5:]).tolist()


@pytest.mark.parametrize(
    ("context", "more"),
    [
        (None, ()),
        (64, ()),
        (1024, ()),
        (1500, (1500,)),
        (4096, (2048, 4096)),
        (131_072, (2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)),
    ],
)
def test_buckets_go_on_to_the_models_context(context, more):
    model = dataclasses.replace(tiny_pair.tabular(1), context=context)
    decoder = specjax.Decoder(model)
    assert decoder.buckets[-1 - len(more) :] == (1024, *more)
    assert specjax.Decoder(model, buckets=(16, 20)).buckets == (16, 20)
    if more:
        assert len(decoder.encode(np.ones(context + 1, np.int32), truncate="end")) == context
    if context == 1500:
        longest = np.ones(context, np.int32)
        row = specjax.Decoder(model, max_new_tokens=2, batch_size=1)([longest])[0]
        assert len(row.tokens) == 2
    with pytest.raises(ValueError, match=rf"the longest bucket holds {max(context or 0, 1024)}"):
        decoder([np.ones(max(context or 0, 1024) + 1, np.int32)])


def test_a_model_knows_its_context():
    pair = specjax.load_pair("gsm8k")
    assert pair.verifier.context == pair.drafter.context == 4096
    assert specjax.load_pair().verifier.context is None  # relative positions


@pytest.mark.parametrize("use", ["call", "engine", "stream"])
@pytest.mark.parametrize("short", ["verifier", "drafter"])
def test_a_prompt_past_a_models_context_warns_once(use, short):
    models = {"verifier": tiny_pair.tabular(1), "drafter": tiny_pair.tabular(2)}
    models[short] = dataclasses.replace(models[short], context=20)
    decoder = specjax.Decoder(specjax.Pair(**models), max_new_tokens=2, buckets=(32,))
    engine = decoder.engine(prompt_length=32)

    def decode(*lengths):
        prompts = [np.ones(length, np.int32) for length in lengths]
        if use == "engine":
            return [engine.add(specjax.Request(prompt)) for prompt in prompts]
        return list((decoder if use == "call" else decoder.stream)(prompts))

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        decode(20, 3)
        assert not seen
        decode(21, 22, 23)
        decode(24)
    (warning,) = seen
    text = str(warning.message)
    assert f"tokens, but {short} was trained for 20 positions (max_position" in text
    assert "\n" not in text
