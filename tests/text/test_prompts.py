"""Which prompts share slots, in how many shapes."""

import types

import numpy as np
import pytest

from specjax.text import prompts as prompts_lib
from specjax.text.groups import TURNS, group


@pytest.mark.parametrize(("batch_size", "shapes"), [(16, {1, 4, 16}), (6, {1, 4, 6}), (1, {1})])
def test_few_numbers_of_rows_are_compiled(batch_size, shapes):
    rows = {p.rows for n in range(1, 40) for p in group([5] * n, (16,), batch_size)}
    assert rows == shapes


def test_every_prompt_has_its_place_once():
    lengths = [3, 17, 9, 30, 2, 16, 31, 8] * 20
    groups = list(group(lengths, (16, 32), 4))
    members = [int(member) for p in groups for member in p.members]
    assert sorted(members) == list(range(160))
    assert all(len(p.members) <= TURNS * p.rows for p in groups)
    assert max(len(p.members) for p in group(lengths, (16, 32), 4, turns=2)) == 8
    assert all(lengths[int(p.members[0])] <= p.length for p in groups)


def test_rows_are_a_multiple_of_what_a_mesh_needs():
    for p in group([5] * 9, (16,), 6, 4):
        assert p.rows % 4 == 0 and p.refill % 4 == 0


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
