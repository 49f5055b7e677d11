"""Checkpoints that tunix 0.1.7 wrote, against the logits of its own forward pass.

`tests/integrations/tunix_checkpoints.py` made the archive.
"""

import shutil

import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoint_helpers import Archive, assert_logits, edit_json, one_line, unflatten

from specjax.checkpoints import load_model
from specjax.checkpoints.orbax import OrbaxReader
from specjax.cli.main import main

ARCHIVE = Archive("tunix.zip")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return ARCHIVE.unpack(tmp_path_factory.mktemp("tunix"))


@pytest.mark.parametrize("case", ARCHIVE.cases)
def test_logits_are_those_of_tunix(written, case):
    loaded = load_model(written / case)
    assert loaded.format == "tunix"
    assert_logits(loaded, written / case)


def test_a_converted_checkpoint_is_the_same(written, tmp_path):
    assert main(["convert", str(written / "gemma3"), str(tmp_path / "hf"), "--to", "hf"]) == 0
    assert_logits(load_model(tmp_path / "hf"), written / "gemma3")


def test_an_adapter_is_refused(written, tmp_path):
    llama = shutil.copytree(written / "llama3", tmp_path / "llama")
    reader = OrbaxReader(llama / "1" / "model_params")
    arrays = {name: reader.read(name) for name in reader.specs}
    arrays["layers/0/attn/q_proj/w_lora_a/value"] = np.zeros((8, 2), np.float32)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(llama / "2" / "model_params", unflatten(arrays))
    one_line(lambda: load_model(llama), llama, "unknown", "w_lora_a")
    shutil.rmtree(llama / "2")
    edit_json(llama / "config.json", num_hidden_layers=3)
    one_line(lambda: load_model(llama), llama, "missing", "layers_2")
