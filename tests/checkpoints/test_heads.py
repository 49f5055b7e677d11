import shutil

import jax
import numpy as np
import pytest
from checkpoint_helpers import edit_json
from safetensors.numpy import load_file, save_file

from specjax import load_pair, load_text_model
from specjax.acceptance_head import Head, HeadConfig, init_head
from specjax.checkpoints import load_model, save_model
from specjax.checkpoints.attachments import load_head, save_head
from specjax.writing import write_checksums
from tests.tiny_pair import write_pair


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("pair"))["drafter"]


def make_head(drafter, **changes):
    config = HeadConfig(**{"width": 16, "blocks": 2, **changes})
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: rng.normal(size=x.shape).astype(np.float32), init_head(config, jax.random.key(0))
    )
    mark = load_text_model(drafter).weights_fingerprint
    return Head(config, params, mark, 6.0, {"rejection_weight": 6.0})


@pytest.fixture
def saved(drafter, tmp_path):
    place = tmp_path / "drafter"
    shutil.copytree(drafter, place)
    save_head(place, make_head(drafter))
    return place


def test_what_is_saved_is_loaded_with_its_drafter(drafter, saved):
    head, expected = load_text_model(saved).head, make_head(drafter)
    assert head.config == expected.config and head.rejection_weight == 6.0
    assert head.notes == {"rejection_weight": 6.0}
    jax.tree.map(np.testing.assert_array_equal, head.params, expected.params)
    assert sorted(path.name for path in (saved / "acceptance_head").iterdir()) == [
        "head.json",
        "head.safetensors",
        "specjax_checksums.json",
    ]
    modes = {path.stat().st_mode for path in (saved / "acceptance_head").iterdir()}
    assert len(modes) == 1  # who may read one may read all
    pair = load_pair(drafter=saved, verifier=drafter)
    assert pair.drafter.head is not None and pair.verifier.head is None
    assert load_pair(drafter=saved, verifier=drafter, head=False).drafter.head is None


def test_the_drafter_is_known_in_another_dtype(drafter, saved, tmp_path):
    """As loaded, and as written; other weights are others."""
    mark = load_text_model(drafter).weights_fingerprint
    assert load_text_model(saved, dtype="bfloat16").head.drafter_fingerprint == mark
    loaded = load_model(drafter)
    halves = tmp_path / "halves"
    save_model(
        halves, loaded.model, loaded.params, format="hf", dtype="bfloat16", tokenizer_from=drafter
    )
    save_head(halves, make_head(drafter))
    assert load_text_model(halves).head is not None
    params = jax.tree.map(lambda x: x * 1.01, loaded.params)
    save_model(saved, loaded.model, params, format="hf", tokenizer_from=drafter, replace=True)
    save_head(saved, make_head(drafter))
    with pytest.raises(ValueError, match="its acceptance head was trained for weights"):
        load_text_model(saved)


def test_a_head_of_another_width_is_refused(drafter, saved):
    save_head(saved, make_head(drafter, width=24))
    with pytest.raises(ValueError, match=r"has width 24, but the model's hidden states have 16: "):
        load_text_model(saved)
    assert load_text_model(saved, head=False).head is None


def test_a_head_replaces_a_head_and_nothing_else(drafter, saved, tmp_path):
    save_head(saved, make_head(drafter, blocks=1))
    assert load_head(saved).config.blocks == 1
    mine = tmp_path / "acceptance_head"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="is not an acceptance head: move it"):
        save_head(tmp_path, make_head(drafter))
    assert (mine / "notes.txt").exists()


def test_damage_is_told(saved):
    file = saved / "acceptance_head" / "head.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-4] + b"\0\0\0\0")
    with pytest.raises(ValueError, match="head.safetensors was changed after specjax wrote it"):
        load_text_model(saved)
    assert load_text_model(saved, check_weights=False).head is not None
    file.write_bytes(whole[:-4])
    with pytest.raises(ValueError, match=r"head.safetensors is cut short or damaged \(.*\): copy"):
        load_head(saved, check_weights=False)
    file.unlink()
    for place, message in (
        (saved, "head.safetensors: no such file: copy the head"),
        (saved / "absent", "acceptance_head: no such directory: train a head"),
    ):
        with pytest.raises(FileNotFoundError, match=message):
            load_head(place, check_weights=False)


WRONG = "params must be the float32 parameters of HeadConfig"


@pytest.mark.parametrize(
    ("values", "bias", "message"),
    [
        ({"version": 2}, None, "version=2 must be 1 for this specjax to read it"),
        ({"config": {"width": 16}}, None, WRONG),
        ({"config": {"width": 16, "blocks": 9}}, None, r"blocks must be .* in \[0, 4\], got 9"),
        ({"config": {"width": 16, "blocks": 3}}, None, WRONG),
        ({"drafter_fingerprint": 7}, None, "drafter_fingerprint must be TextModel.weights_f"),
        ({}, np.full(1, np.nan, np.float32), "out/bias has .* copy the checkpoint again"),
        ({}, np.ones(2, np.float32), WRONG),
        ({}, np.ones(1), WRONG),
    ],
)
def test_files_that_contradict_each_other_are_told(saved, values, bias, message):
    place = saved / "acceptance_head"
    edit_json(place / "head.json", **values)
    arrays = load_file(place / "head.safetensors")
    save_file(arrays if bias is None else {**arrays, "out/bias": bias}, place / "head.safetensors")
    write_checksums(place)
    with pytest.raises(ValueError, match=message) as error:
        load_text_model(saved)
    assert "\n" not in str(error.value) and str(place) in str(error.value)
