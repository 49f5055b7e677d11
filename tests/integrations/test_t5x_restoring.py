"""Checkpoints that do not fit a network of T5X: one line names the path and the parameter."""

import dataclasses
import gc

import jax
import numpy as np
import pytest

from tests.integrations.with_t5x import import_t5x

import_t5x()
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("as_t5x_runs"),
]

from t5x import checkpoints, partitioning, utils

from specjax.checkpoints import t5x as t5x_files
from specjax.integrations import t5x as specjax_t5x
from tests.integrations.t5x_networks import BATCH, t5, vocabulary

WORDS = vocabulary(), vocabulary()


@pytest.fixture(autouse=True, scope="module")
def nothing_left():
    """T5X leaves event loops open, whose warnings must not appear in later tests."""
    yield
    gc.collect()


def _state(model):
    """How T5X makes the state of a model."""
    return utils.TrainStateInitializer(
        optimizer_def=None,
        init_fn=model.get_initial_variables,
        input_shapes={name: value.shape for name, value in BATCH.items()},
        partitioner=partitioning.PjitPartitioner(model_parallel_submesh=(1, 1, 1, 1)),
    )


def _model(drafter=None, **sizes):
    large = t5(1)
    large.config = dataclasses.replace(large.config, **sizes)
    return specjax_t5x.EncoderDecoderModel(large, *WORDS, drafter_module=drafter)


@pytest.fixture(scope="module", params=["orbax", "msgpack"])
def checkpoint(request, tmp_path_factory):
    """A checkpoint of one network, and its parameters by name."""
    directory = tmp_path_factory.mktemp(request.param)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        initial = _state(_model())
        state = initial.from_scratch(jax.random.PRNGKey(0))
    params = t5x_files.flatten(state.params)
    if request.param == "orbax":
        manager = checkpoints.OrbaxCheckpointManagerInterface(
            str(directory), initial.global_train_state_shape, initial._partitioner
        )
        manager.save(state)
        manager.wait_until_finished()
    else:
        t5x_files.write_t5x(directory, params, step=0, dtype=np.dtype(np.float32))
    return str(directory / "checkpoint_0"), params


def _restored(model, path, drafter_path=None, **options):
    initial = _state(model)
    manager = specjax_t5x.PairCheckpointManager(
        path,
        initial.global_train_state_shape,
        initial._partitioner,
        drafter_path=drafter_path,
    )
    return manager.restore(path=path, **options)


def _refused(model, path, *parts, **options):
    with pytest.raises(ValueError) as error:
        _restored(model, path, **options)
    assert "\n" not in str(error.value)
    for part in parts:
        assert part in str(error.value), (part, str(error.value))


def test_a_checkpoint_that_fits_is_restored(checkpoint):
    path, params = checkpoint
    alone = _restored(_model(), path)
    pair = _restored(_model(t5(1)), path, drafter_path=path)
    for found in (alone.params, pair.params["verifier"], pair.params["drafter"]):
        jax.tree.map(np.testing.assert_array_equal, t5x_files.flatten(found), dict(params))


@pytest.mark.parametrize(
    ("sizes", "name", "shapes"),
    [
        ({"emb_dim": 12}, "decoder/decoder_norm/scale", ((8,), (12,))),
        ({"mlp_dim": 12}, "decoder/layers_0/mlp/wi_0/kernel", ((8, 16), (8, 12))),
        (
            {"num_heads": 4},
            "decoder/layers_0/encoder_decoder_attention/key/kernel",
            ((8, 8), (8, 16)),
        ),
    ],
    ids=["width", "mlp", "heads"],
)
def test_another_width_is_noticed_while_restoring(checkpoint, sizes, name, shapes):
    path, _ = checkpoint
    parts = [name, *map(str, shapes), "give the gin file that it was trained with"]
    _refused(_model(**sizes), path, f"the verifier's checkpoint {path}", *parts)


@pytest.mark.parametrize(
    ("sizes", "difference"),
    [
        (
            {"num_decoder_layers": 2},
            "it lacks decoder/layers_1/encoder_decoder_attention/key/kernel and 13 more",
        ),
        ({"logits_via_embedding": True}, "it also has decoder/logits_dense/kernel: give the gin"),
    ],
    ids=["missing", "unknown"],
)
def test_other_parameters_are_refused(checkpoint, sizes, difference):
    path, _ = checkpoint
    _refused(_model(**sizes), path, f"the verifier's checkpoint {path} does not fit", difference)


def test_what_a_transformation_leaves_over_is_ignored_as_in_t5x(checkpoint):
    path, _ = checkpoint
    model = _model(logits_via_embedding=True)
    found = _restored(model, path, state_transformation_fns=[lambda state, target: state])
    assert "logits_dense" not in found.params["decoder"]


def test_one_network_is_no_pair(checkpoint):
    path, _ = checkpoint
    pair = _model(t5(1))
    _refused(pair, path, f"the checkpoint {path} has one network", "give DRAFTER_CHECKPOINT_PATH")


def test_a_pair_is_not_one_network(checkpoint, tmp_path):
    _, params = checkpoint
    both = {f"{role}/{name}": x for role in ("verifier", "drafter") for name, x in params.items()}
    t5x_files.write_t5x(tmp_path, both, step=0, dtype=np.dtype(np.float32))
    path = str(tmp_path / "checkpoint_0")
    assert set(_restored(_model(t5(1)), path).params) == {"verifier", "drafter"}
    _refused(_model(), path, f"the verifier's checkpoint {path} has both networks")
    _refused(_model(t5(1)), path, "leave DRAFTER_CHECKPOINT_PATH out", drafter_path=path)
