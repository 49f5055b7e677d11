"""Models of one vocabulary that end texts with different tokens."""

import json

import pytest

import specjax
from tests import tiny_pair


def test_other_special_ids_give_a_warning(tmp_path):
    paths = tiny_pair.write_pair(tmp_path)
    specjax.load_pair(**paths)  # the same: no warning
    path = paths["drafter"] / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"eos_token_id": [1, 5]}))
    generation = paths["drafter"] / "generation_config.json"
    if generation.exists():
        made = json.loads(generation.read_text())
        generation.write_text(json.dumps(made | {"eos_token_id": [1, 5]}))
    with pytest.warns(UserWarning, match="the drafter ends texts with .*5.*, the verifier with"):
        pair = specjax.load_pair(**paths)
    assert pair.verifier.tokenizer.eos_ids != pair.drafter.tokenizer.eos_ids
