"""MaxText itself: its forward pass, and its files of published sizes. `make test-outside`."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from specjax.checkpoints import load_model
from specjax.checkpoints.maxtext_config import read_maxtext_config
from specjax.models import preset
from tests.checkpoints.checkpoint_helpers import logits
from tests.integrations.maxtext_checkpoints import CASES

_found = importlib.util.find_spec("maxtext")
if _found is None:
    pytest.skip("MaxText is not installed; make test-outside", allow_module_level=True)
MODELS = Path(_found.submodule_search_locations[0]) / "configs" / "models"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """In a process of its own: MaxText mixes dtypes and ranks."""
    directory = tmp_path_factory.mktemp("maxtext")
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    subprocess.run(
        [sys.executable, "-m", "tests.integrations.maxtext_checkpoints", str(directory)],
        check=True,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    return directory


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_maxtext(written, case):
    loaded = load_model(written / case)
    ours, theirs = logits(loaded.model, loaded.params), np.load(written / case / "logits.npy")
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


_SAME = {
    "llama2-7b": "llama2_7b",
    "llama2-13b": "llama2_13b",
    "llama2-70b": "llama2_70b",
    "llama3-8b": "llama3_8b",
    "llama3.1-8b": "llama3.1_8b",
    "llama3.1-70b": "llama3.1_70b",
    "mixtral-8x7b": "mixtral_8x7b",
    "mixtral-8x22b": "mixtral_8x22b",
    **{f"qwen3-{size}b": f"qwen3_{size}b" for size in (0.6, 1.7, 4, 8, 14, 32)},
    "gemma4-26b": "gemma4_26b_a4b",
    "gemma4-31b": "gemma4_31b",
    "gemma4-e2b": "gemma4_e2b",
    "gemma4-e4b": "gemma4_e4b",
}
# MaxText pads Gemma 2's vocabulary, leaves Gemma 3's tokens for images out, and has later sizes of
# Qwen 3 with experts, in which nothing is as wide as `mlp_dim`.
_DIFFERENT = {
    **{f"gemma2-{size}b": (f"gemma2_{size}b", {"vocab_size": 256_128}) for size in (2, 9)},
    **{f"gemma3-{size}b": (f"gemma3_{size}b", {"vocab_size": 262_144}) for size in (4, 12, 27)},
    "qwen3-30b-a3b": ("qwen3_30b_a3b", {"mlp_dim": 768, "rope_theta": 1e7}),
    "qwen3-235b-a22b": ("qwen3_235b_a22b", {"mlp_dim": 1_536, "rope_theta": 5e6}),
    "gemma2-27b": ("gemma2_27b", {"vocab_size": 256_128, "query_pre_attn_scalar": 128.0}),
}


@pytest.mark.parametrize("name", [*_SAME, *_DIFFERENT])
def test_published_sizes_are_ours(name):
    ours, changes = _DIFFERENT[name] if name in _DIFFERENT else (_SAME[name], {})
    assert read_maxtext_config(MODELS / f"{name}.yml") == preset(ours, **changes)
