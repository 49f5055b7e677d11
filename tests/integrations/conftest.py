"""How T5X runs, and a server for clients."""

import jax
import pytest

from specjax.text import Decoder, load_pair


@pytest.fixture
def as_t5x_runs():
    """T5X's code mixes dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="session")
def client():
    """Asks a server of the built-in pair gsm8k, which here is given a chat template."""
    pytest.importorskip("uvicorn", reason="specjax serve is not installed: pip install '.[serve]'")
    from tests.serving.conftest import serving

    pair = load_pair("gsm8k")
    pair.verifier.tokenizer.chat_template = "{{ bos_token }}{{ messages[0].content }}"
    with serving(Decoder(pair, max_draft=3, max_new_tokens=24, buckets=(64,))) as client:
        yield client
