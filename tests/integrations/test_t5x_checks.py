"""What T5X's model classes refuse before anything is compiled, and how they lay arrays out."""

import re

import jax
import numpy as np
import pytest

from tests.integrations.with_t5x import import_t5x

import_t5x()
pytestmark = pytest.mark.filterwarnings("ignore")

from flax.linen import partitioning as flax_partitioning
from jax.sharding import Mesh
from t5x import models, train_state
from t5x.contrib.gpu.t5 import network as gpu

from specjax import drafting, rules
from specjax.integrations import t5x as specjax_t5x
from specjax.integrations.t5x import restoring
from specjax.integrations.t5x.model_classes import forced_tokens
from specjax.integrations.t5x.networks import read_config
from specjax.verification import GreedyBlock
from tests.integrations.t5x_networks import BATCH, KEY, L, params_of, t5, vocabulary


@pytest.fixture(autouse=True)
def as_t5x_runs():
    """T5X's code mixes dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def pair_of(drafter=None, **options):
    words = (vocabulary(), vocabulary())
    small = t5(1) if drafter is None else drafter
    return specjax_t5x.EncoderDecoderModel(t5(1), *words, drafter_module=small, **options)


def shapes_of(pair, batch=BATCH):
    return jax.eval_shape(lambda: params_of(pair, batch))


def test_a_field_that_specjax_does_not_compute_must_have_its_default():
    sizes = {"vocab_size": 9, "emb_dim": 8, "num_heads": 2, "head_dim": 4, "mlp_dim": 8}
    for scaled in (False, True):
        module = gpu.Transformer(config=gpu.T5Config(**sizes, scale_attn_logits=scaled))
        if scaled:
            with pytest.raises(ValueError, match="T5Config has scale_attn_logits = True"):
                read_config("drafter", module)
        else:
            assert read_config("drafter", module).config.vocab_size == 9


class _Unknown:
    """A network whose configuration is of another kind."""

    config = object()


def test_what_does_not_go_together_is_refused_when_the_model_is_made():
    words = (vocabulary(), vocabulary())
    make, decoding = specjax_t5x.EncoderDecoderModel, specjax_t5x.Decoding
    with pytest.raises(ValueError, match="the verifier's network, _Unknown, is not supported"):
        make(_Unknown(), *words)
    with pytest.raises(ValueError, match="the drafter's network, _Unknown, is not supported"):
        pair_of(_Unknown())
    with pytest.raises(ValueError, match="the drafter's vocabulary has 9 tokens, the verifier's"):
        pair_of(t5(1, vocab=9))
    with pytest.raises(ValueError, match="rule must be left out, because there is no"):
        make(t5(1), *words, decoding=decoding(rule=rules.OPT(0.2)))
    with pytest.raises(ValueError, match="GreedyBlock needs drafts of a fixed length"):
        pair_of(
            decoding=decoding(verification=GreedyBlock(), stopping=drafting.Confidence(0.4)),
        )
    with pytest.raises(ValueError, match="decode_fn must be left out: bind specjax_t5x.Decoding"):
        pair_of(decode_fn=None)


def test_limits_and_strengths_of_a_call_are_checked():
    decoding = specjax_t5x.Decoding(verification=GreedyBlock(), max_draft=2)
    pair = pair_of(decoding=decoding)
    params = shapes_of(pair)

    def shapes(**asked):
        return jax.eval_shape(
            lambda p: pair.predict_batch_with_aux(p, BATCH, KEY, decoder_params=asked), params
        )

    with pytest.raises(ValueError, match=r"draft_limit must be left out, or 2 in every row, got"):
        shapes(draft_limit=np.array([2, 1, 2]))
    with pytest.raises(ValueError, match="got a traced value: GreedyBlock needs drafts of a fixed"):
        jax.eval_shape(lambda x: shapes(draft_limit=x), np.int32(2))
    with pytest.raises(ValueError, match=r"rule.* must be scalar or \[B\] = \(3,\), got shape \(2"):
        shapes(rule=rules.OPT(np.array([0.1, 0.2], np.float32)))


def test_default_decoder_params_are_read():
    pair = pair_of(default_decoder_params=models.DecoderParams(True, 2))
    out, aux = jax.eval_shape(
        lambda params: pair.predict_batch_with_aux(params, BATCH, KEY), shapes_of(pair)
    )
    assert out.shape == (3, 2, L) and aux["scores"].shape == (3, 2)


def test_what_follows_an_end_in_a_forced_beginning_moves_up():
    shifted = np.array([[0, 7, 1, 5, 0], [0, 1, 4, 3, 2], [0, 0, 0, 0, 0]], np.int32)
    tokens, lengths = forced_tokens(shifted, 1)
    np.testing.assert_array_equal(tokens, [[7, 5, 0, 0], [4, 3, 2, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(lengths, [2, 3, 0])


def _state(*roles):
    arrays = {"encoder": np.zeros(2)}
    params = dict.fromkeys(roles, arrays) if roles else arrays
    return train_state.InferenceState(step=0, params=params)


def test_a_drafter_s_checkpoint_goes_with_a_drafter(monkeypatch, tmp_path):
    make = specjax_t5x.PairCheckpointManager
    with pytest.raises(
        ValueError, match="has no drafting network: leave DRAFTER_CHECKPOINT_PATH o"
    ):
        make(str(tmp_path), _state(), None, drafter_path="/small")

    class _Fails:
        def __init__(self, **options):
            pass

        def restore(self, **options):
            raise ValueError("other arrays\nand more")

    monkeypatch.setattr(restoring.checkpoints, "OrbaxCheckpointManagerInterface", _Fails)
    (tmp_path / "checkpoint").touch()
    told = {}
    for roles in ((), ("verifier", "drafter")):
        with pytest.raises(ValueError, match="cannot be restored into its network") as error:
            make(str(tmp_path), _state(*roles), None).restore(path=str(tmp_path))
        told[roles] = str(error.value)
    assert told[()].startswith("the verifier's checkpoint")
    assert told[()].endswith("that it was trained with")
    assert told["verifier", "drafter"].startswith("the pair's checkpoint")
    assert told["verifier", "drafter"].endswith("or give DRAFTER_CHECKPOINT_PATH")


def test_caches_are_laid_out_by_t5x_s_rules_on_its_mesh():
    pair = pair_of(decoding=specjax_t5x.Decoding(max_draft=2))
    batch = {name: np.tile(value[:1], (8, 1)) for name, value in BATCH.items()}
    params = shapes_of(pair, batch)
    mesh = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("data", "model"))
    axis_rules = (("batch", "data"), ("heads", "model"))
    # Keys of 8 rows and 2 heads.
    cache = re.compile(r'sharding.*\[\{"data"\}, \{"model"\}, \{\}, \{\}\].*tensor<8x2x')

    def laid_out():
        run = jax.jit(lambda p, b: pair.predict_batch_with_aux(p, b))  # traced anew each time
        return bool(cache.search(run.lower(params, batch).as_text()))

    with mesh, flax_partitioning.axis_rules(axis_rules):
        assert laid_out()
    with mesh, flax_partitioning.axis_rules((("batch", "data"),)):
        assert not laid_out()
