"""Sizes that cannot fit are refused before anything is allocated."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import errors, memory
from specjax.memory import nbytes
from specjax.text import engine as engine_lib
from specjax.types import PromptBatch, Sampling
from tests import tiny_pair


@pytest.fixture
def room(monkeypatch):
    def of(size):
        monkeypatch.setattr(memory, "host_bytes", lambda: size)

    return of


LARGE = [
    (
        {"max_new_tokens": 10**9},
        "1 row with prompts of 16, drafts of 5 and outputs of 10000",
        "max_new_tokens=1000000000, buckets=16 or max_draft=5",
    ),
    (
        {"max_new_tokens": 2**31 - 1},
        "outputs of 2147483647 tokens: this needs at least",
        "max_new_tokens=2147483647, buckets=16",
    ),
    (
        {"buckets": (2**31 - 1,)},
        "prompts of 2147483647, ",
        "buckets=2147483647, max_new_tokens=128 or max_draft=5",
    ),
    *(
        (options, "drafts of 1000000000", f"{name}=1000000000, max_new_tokens=128 or buckets=16")
        for name, options in (
            ("max_draft", {"max_draft": 10**9}),
            ("drafting", {"drafting": specjax.drafting.Cascade(((10**9,),))}),
        )
    ),
]


@pytest.mark.parametrize(("options", "sizes", "remedy"), LARGE)
def test_calls_that_cannot_fit_are_refused_at_once(pair, room, options, sizes, remedy):
    room(10**9)
    decoder = specjax.Decoder(pair, **options)
    message = f"{sizes}.* but the machine has 1 GB: choose a smaller {remedy}"
    for call in (decoder.rows, decoder):
        with pytest.raises(ValueError, match=message):
            call(["ba ki"])


@pytest.mark.parametrize(
    ("sizes", "memory", "message"),
    [
        ({"rows": 10**9}, 10**9, "memory, but the machine has.*choose a smaller rows=10"),
        ({"prompt_length": 2**70}, 10**9, "memory, but the machine.*a smaller prompt_len"),
        # More positions could not be told apart.
        ({"rows": 1}, sys.maxsize, "positions of the cache; the limit is 1073741824: "),
    ],
)
def test_engines_that_cannot_fit_are_refused_when_they_are_made(room, sizes, memory, message):
    room(memory)
    most = 2**30 if memory == sys.maxsize else 8
    decoder = specjax.Decoder(tiny_pair.tabular(1), max_new_tokens=most)
    with pytest.raises(ValueError, match=message):
        decoder.engine(**{"prompt_length": 16, **sizes})


def test_the_smallest_engine_names_no_size(pair):
    engine = specjax.Decoder(pair.verifier, max_new_tokens=1).engine(prompt_length=1, rows=1)
    assert engine._smaller() == "choose a smaller model"


@pytest.mark.parametrize("mesh", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_the_estimate_is_the_states_own_size(pair, mesh, monkeypatch):
    if mesh:
        mesh = specjax.partitioning.make_mesh(data=4, model=2)
        models = [tiny_pair.tabular(seed, mesh=mesh) for seed in (2, 1)]
        pair = specjax.Pair(*models)
    seen = []
    engine = specjax.Decoder(pair, max_new_tokens=8, batch_size=4).engine(prompt_length=16)
    init = type(engine.method).init
    monkeypatch.setattr(
        type(engine.method),
        "init",
        lambda self, params, prompts, copies, beginning, **sizes: (
            seen.append(self.least_memory(params, prompts, **sizes))
            or init(self, params, prompts, copies=copies, beginning=beginning, **sizes)
        ),
    )
    engine.add(specjax.Request(np.zeros(3, np.int32), max_new_tokens=4))
    engine.step()
    own = nbytes(engine.state, jax.tree.map(lambda x: x.sharding, engine.state))
    assert seen[0] == own + nbytes(engine.params) // (8 if mesh else 1)


def test_a_model_that_drafts_for_itself_is_counted_once():
    model = tiny_pair.tabular(1)
    asked = []
    for drafter in (model, tiny_pair.tabular(2)):
        engine = specjax.Decoder(specjax.Pair(drafter, model)).engine(prompt_length=16)
        ones = np.ones(1, np.int32)
        inputs = PromptBatch(np.ones((1, 16), np.int32), ones, ones.astype(np.uint32), ones)
        sizes = {"max_new": 8, "max_length": 64}
        asked.append(engine.method.least_memory(engine.params, inputs, **sizes))
    assert asked[1] - asked[0] == nbytes(model.prepared)


def test_calls_ask_once_for_each_shape(monkeypatch):
    decoder = specjax.Decoder(tiny_pair.tabular(1), max_new_tokens=4, buckets=(4, 8), batch_size=1)
    asked = []
    monkeypatch.setattr(engine_lib, "check_state_fits", lambda *_, **sizes: asked.append(sizes))
    for prompt in ([1], [2, 1], [1] * 8, [1] * 5):
        decoder([prompt])
    assert len(asked) == 2
    decoder([[1]], log_probs=True)
    decoder([[1]], sampling=Sampling(top_k=2))
    assert len(asked) == 4


def full(*args, **options):
    """What no machine has room for."""
    return jnp.zeros((2**20, 2**30), jnp.int8).block_until_ready()


@pytest.mark.parametrize("function", ["init", "run"])
def test_an_engine_without_room_says_so_in_one_line(monkeypatch, function):
    engine = specjax.Decoder(tiny_pair.tabular(1), max_new_tokens=8).engine(prompt_length=16)
    monkeypatch.setattr(type(engine.method), function, full)
    engine.add(specjax.Request(np.zeros(3, np.int32), max_new_tokens=4))
    message = r"rows? with prompts of 16 and outputs of 8 tokens: out of memory \(.*\): choose a"
    with pytest.raises(ValueError, match=message) as error:
        engine.step()
    assert isinstance(error.value, errors.REFUSALS)
