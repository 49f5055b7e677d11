"""What T5X's model classes refuse before anything is compiled, and how they lay arrays out."""

import re

import jax
import numpy as np
import pytest

from tests.integrations.with_t5x import import_t5x

import_t5x()
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("as_t5x_runs"),
]

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
    make = specjax_t5x.EncoderDecoderModel
    with pytest.raises(ValueError, match="the verifier's network, _Unknown, is not supported"):
        make(_Unknown(), *words)
    with pytest.raises(ValueError, match="the drafter's network, _Unknown, is not supported"):
        pair_of(_Unknown())
    with pytest.raises(ValueError, match="the drafter's vocabulary has 9 tokens, the verifier's"):
        pair_of(t5(1, vocab=9))
    with pytest.raises(ValueError, match="rule must be left out, because there is no"):
        make(t5(1), *words, setting=specjax_t5x.setting(rule=rules.OPT(0.2)))
    with pytest.raises(ValueError, match="GreedyBlock needs drafts of a fixed length"):
        pair_of(
            setting=specjax_t5x.setting(
                verification=GreedyBlock(), stopping=drafting.Confidence(0.4)
            ),
        )
    with pytest.raises(ValueError, match="decode_fn must be left out: bind specjax_t5x.setting"):
        pair_of(decode_fn=None)


def test_limits_and_strengths_of_a_call_are_checked():
    setting = specjax_t5x.setting(verification=GreedyBlock(), max_draft=2)
    pair = pair_of(setting=setting)
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


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"num_decodes": 0}, "num_decodes must be a whole number of at least 1, got 0"),
        ({"topk": -1}, "topk must be a whole number of at least 0, got -1"),
        ({"topk": 2.5}, "topk must be a whole number of at least 0, got 2.5"),
        ({"topp": 1.5}, r"topp must lie in \[0, 1\], got 1.5"),
        ({"topp": np.array([0.5, np.nan, 0.5])}, r"topp must lie in \[0, 1\], got nan in row 1"),
        ({"temperature": -1.0}, "temperature must be .*at least 0, got -1"),
        ({"max_decode_steps": -2}, "max_decode_steps must be a whole number of at least 0, got -2"),
        ({"draft_limit": -1}, r"draft_limit must be a whole number in \[0, 5\], got -1"),
        ({"draft_limit": np.array([1, 2, 9])}, r"in \[0, 5\], got 9 in row 2"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_numbers_of_a_call_that_are_out_of_range_are_refused(asked, message):
    pair = pair_of()
    n = asked.pop("num_decodes", None)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(
            lambda params: pair.predict_batch_with_aux(
                params, BATCH, KEY, decoder_params=asked, num_decodes=n
            ),
            shapes_of(pair),
        )


def test_no_filter_is_0_as_in_t5x():
    pair = pair_of()
    asked = {"topk": 0, "topp": 0.0, "max_decode_steps": 3, "draft_limit": 0}
    jax.eval_shape(
        lambda params: pair.predict_batch_with_aux(params, BATCH, KEY, decoder_params=asked),
        shapes_of(pair),
    )


def test_without_a_drafter_a_call_must_not_limit_drafts():
    # The gin files bind these, which are the defaults.
    decoding = specjax_t5x.setting(verification=None, max_draft=None, min_draft=0)
    words = (vocabulary(), vocabulary())
    alone = specjax_t5x.EncoderDecoderModel(t5(1), *words, setting=decoding)
    params = shapes_of(alone)
    with pytest.raises(ValueError, match="draft_limit must be left out, because there is no draf"):
        jax.eval_shape(
            lambda p: alone.predict_batch_with_aux(
                p, BATCH, KEY, decoder_params={"draft_limit": 2}
            ),
            params,
        )


def test_parameters_of_a_single_network_are_refused():
    pair = pair_of()
    params = shapes_of(pair)
    missing = r"params must be \{'verifier': ..., 'drafter': ...\}, but 'verifier' is missing \("
    batch = {**BATCH, "decoder_loss_weights": np.ones_like(BATCH["decoder_target_tokens"])}
    for call in (pair.predict_batch_with_aux, pair.score_batch):
        with pytest.raises(ValueError, match=missing) as error:
            jax.eval_shape(lambda p, call=call: call(p, batch), params["verifier"])
        assert str(error.value).endswith(
            "give the parameters of both networks, or drafter_module=None"
        )
    with pytest.raises(ValueError, match=r"'drafter' is missing \(they have 'verifier'\)"):
        jax.eval_shape(
            lambda p: pair.predict_batch_with_aux(p, BATCH), {"verifier": params["verifier"]}
        )


def test_parameters_of_another_width_name_the_remedy():
    pair = pair_of()
    params = shapes_of(pair)
    embedding = params["drafter"]["token_embedder"]
    embedding["embedding"] = jax.ShapeDtypeStruct((24, 9), np.float32)
    with pytest.raises(
        ValueError, match=r"embedding is \(24, 9\) but should be \(24, 8\). give the sizes that"
    ):
        jax.eval_shape(lambda p: pair.predict_batch_with_aux(p, BATCH), params)


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
            raise ValueError("pytree structure error: other children at key path\n    ['layers_2']")

    monkeypatch.setattr(restoring.checkpoints, "OrbaxCheckpointManagerInterface", _Fails)
    (tmp_path / "checkpoint").touch()
    told = {}
    for roles in ((), ("verifier", "drafter")):
        with pytest.raises(ValueError, match="cannot be restored into its network") as error:
            make(str(tmp_path), _state(*roles), None).restore(path=str(tmp_path))
        told[roles] = str(error.value)
    assert told[()].startswith("the verifier's checkpoint")
    assert "(pytree structure error: other children at key path ['layers_2'])" in told[()]
    assert told[()].endswith("that it was trained with")
    assert told["verifier", "drafter"].startswith("the pair's checkpoint")
    assert told["verifier", "drafter"].endswith("or give DRAFTER_CHECKPOINT_PATH")


def test_caches_are_laid_out_by_t5x_s_rules_on_its_mesh():
    pair = pair_of(setting=specjax_t5x.setting(max_draft=2))
    batch = {name: np.tile(value[:1], (8, 1)) for name, value in BATCH.items()}
    params = shapes_of(pair, batch)
    mesh = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("data", "model"))
    axis_rules = (("batch", "data"), ("heads", "model"))
    # Keys of 8 rows and 2 heads.
    cache = re.compile(r'sharding.*\[\{"data"\}, \{"model"\}, \{\}, \{\}\].*tensor<8x2x')

    def with_layout():
        run = jax.jit(lambda p, b: pair.predict_batch_with_aux(p, b))  # traced anew each time
        return bool(cache.search(run.lower(params, batch).as_text()))

    with mesh, flax_partitioning.axis_rules(axis_rules):
        assert with_layout()
    with mesh, flax_partitioning.axis_rules((("batch", "data"),)):
        assert not with_layout()
