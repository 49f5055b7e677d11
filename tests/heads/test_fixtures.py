"""Published formats against what the projects' own code computed with the same tiny heads."""

import copy
import dataclasses
import functools
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import specjax
from specjax import Pair, TextModel, drafting
from specjax.checkpoints import load_model, save_draft_head
from specjax.checkpoints.heads import has_mtp, is_draft_head, load_draft_head
from specjax.cli.main import main
from specjax.errors import UserError
from specjax.models import model_from_config
from specjax.models.attention import block_bias
from specjax.partitioning import make_mesh
from specjax.types import DraftInputs, Prompts, Sampling
from tests.checkpoints.checkpoint_helpers import shared
from tests.models.hf_models import made
from tests.models.test_families import Words
from tests.models.tiny import error, quick_jit
from tests.variants import variants

G, V = 4, 160
TOLERANCE, OF_GEMMA = 1e-4, 3e-4  # of the fixtures' README
LLAMA, QWEN = "llama", "qwen3"
CASES = {
    "eagle3_official": LLAMA,
    **{
        f"speculators_eagle3/{name}": LLAMA
        for name in (
            *("plain", "norm_before_residual", "cli_defaults", "norm_output_only"),
            *("fc_norm_qwen3", "sliding"),
        )
    },
    "speculators_mtp/qwen3": QWEN,
    "speculators_mtp/qwen3_5": "qwen3_5",
    "dflash_zlab": QWEN,
    "speculators_dflash/full": QWEN,
    "speculators_dflash/sliding": QWEN,
    **{
        f"{name}/{kind}": QWEN
        for name in ("speculators_dspark", "dspark_deepspec")
        for kind in ("vanilla", "gated", "rnn")
    },
    "domino_specforge/shifted": QWEN,
    "domino_specforge/plain": QWEN,
    "speculators_peagle": QWEN,
    "speculators_dflash2": QWEN,
    **{f"gemma4_assistant/{name}": "gemma4" for name in ("dense", "ordered", "window6")},
}


OWN = Path(__file__).parent / "fixtures"
PLAN = {
    *("tokens", "prompt_len", "drafts", "accepted", "anchor_pos", "features", "verifier_logits"),
    *("verify_features", "verify_logits", "loss_mask", "anchors"),
}


def fixture(*parts):
    own = OWN.joinpath(*parts)
    return own if own.exists() else shared("fixtures", "heads", *parts)


def golden_of(name, part):
    """What a project's code computed; the heads of `OWN` read what DFlash's head reads."""
    golden = dict(np.load(fixture(name, f"{part}.npz")))
    if "tokens" in golden:
        return golden
    plan = np.load(fixture("dflash_zlab", f"{part}.npz"))
    return {**{x: plan[x] for x in PLAN & set(plan)}, **golden}


@functools.cache
def verifier(name):
    return load_model(fixture("verifiers", name), dtype="float32")


def opened(name):
    """The verifier, and the head with its parameters."""
    of = verifier(CASES[name])
    if name != "gemma4_assistant/window6":
        return of, *load_draft_head(fixture(name, "head"), of.model)
    # The arrays of `dense`, with other windows.
    with tempfile.TemporaryDirectory() as place:
        arrays = fixture("gemma4_assistant/dense", "head", "model.safetensors")
        shutil.copy(arrays, place)
        shutil.copy(fixture(name, "head", "config.json"), place)
        config = of.model.config.replace(sliding_window=6)
        of = dataclasses.replace(of, model=model_from_config(config))
        return of, *load_draft_head(place, of.model)


class Round(NamedTuple):
    """What a head and its verifier said in a round, and the cached keys of its first layer."""

    logits: np.ndarray
    odds: np.ndarray
    keys: list
    verified: np.ndarray
    states: np.ndarray


class Followed(NamedTuple):
    """The states of the prompt, and the rounds."""

    states: np.ndarray
    rounds: list


def follow(name, *, change=lambda states: states, boundaries=None, kept=0, platform="cpu"):
    """Runs the prescribed rounds; the options are for controls."""
    golden = golden_of(name, "rounds")
    of, head, own = opened(name)
    head, model = head.for_devices(platform), of.model.for_devices(platform)
    params = drafting.chain.ChainParams(head.joined(own, of.params))
    kind = drafting.heads.BlockDrafter if head.most_drafts else drafting.heads.EagleDrafter
    drafter = kind(head, G)
    reader = model.reading(boundaries or head.config.boundaries)
    tokens, size = golden["tokens"], int(golden["prompt_len"]) + 1
    prompts = Prompts(jnp.asarray(tokens[None, :size]), jnp.array([size]))
    filled = quick_jit(reader.prefill, static_argnums=2)(of.params, prompts, 40)
    filled = filled._replace(states=change(filled.states))
    begin = quick_jit(functools.partial(drafter.prefill, max_length=40))
    state = begin(params, prompts, verifier=filled)
    cache, rounds = filled.cache, []
    catch_up, extend, verify = map(quick_jit, (head.catch_up, head.extend, reader.extend))
    read = quick_jit(head.block, static_argnums=4) if kind is drafting.heads.BlockDrafter else None
    for anchor, drafts, accepted in zip(
        *(golden[x] for x in ("anchor_pos", "drafts", "accepted")), strict=True
    ):
        at = state.positions
        assert int(at[0]) == anchor
        state = state._replace(cache=catch_up(params.model, state.cache, at))
        block = np.concatenate([tokens[anchor : anchor + 1], drafts])[None]
        if read is not None:
            outputs = read(params.model, state.cache, jnp.asarray(block[:, 0]), at, G)
            state = state._replace(cache=state.cache._replace(outputs=outputs))
        logits, odds = [], []
        for step in range(G):
            token = jnp.asarray(block[:, step : step + 1])
            reading = head.with_memory(state.cache, cache)
            out = extend(params.model, reading, token, at + step)
            state = state._replace(cache=out.cache)
            logits.append(np.asarray(out.logits[0, 0]))
            odds.append(np.asarray(out.hidden[0, 0, -1]))
        seen = verify(of.params, cache, jnp.asarray(block), at)
        keys = [np.asarray(x[0]) for x in state.cache.entries.keys[:1]]
        cache = seen.cache
        rounds.append(Round(*map(np.stack, (logits, odds)), keys, seen.logits[0], seen.hidden[0]))
        committed = np.resize(tokens[anchor + 1 :][: accepted + 1], G + 1)[None]
        counts = jnp.array([accepted + 1])
        # With `kept`, the newest state is a rejected token's.
        states = jnp.roll(change(seen.hidden), -kept, axis=1)
        state = drafter.commit(state, jnp.asarray(committed), counts, states)
    return golden, Followed(np.asarray(filled.states[0]), rounds)


def farthest(golden, followed):
    """The largest difference of a draft's logit; infinite off the map."""
    full = "draft_logits_full" in golden
    wanted = golden["draft_logits_full" if full else "draft_logits"]
    found = np.stack([each.logits for each in followed.rounds])
    there = np.isfinite(wanted)
    np.testing.assert_array_equal(np.isfinite(found), there)
    return np.abs(found[there] - wanted[there]).max()


# Those that differ in more than a flag; the others in `make test-all`.
QUICK = (
    *("eagle3_official", "speculators_eagle3/cli_defaults", "speculators_eagle3/fc_norm_qwen3"),
    *("speculators_mtp/qwen3", "dflash_zlab", "speculators_dflash/sliding"),
    *("speculators_dspark/gated", "dspark_deepspec/rnn", "gemma4_assistant/ordered"),
    *("gemma4_assistant/window6", "domino_specforge/shifted", "speculators_peagle"),
    "speculators_dflash2",
)


@pytest.mark.parametrize("name", variants(CASES, *QUICK))
def test_every_step_of_every_round(name):
    golden, followed = follow(name)
    tolerance = OF_GEMMA if CASES[name] == "gemma4" else TOLERANCE
    assert farthest(golden, followed) < tolerance
    size = int(golden["prompt_len"])
    np.testing.assert_allclose(followed.states, golden["features"][:size], atol=tolerance)
    for i, each in enumerate(followed.rounds):
        np.testing.assert_allclose(each.verified, golden["verify_logits"][i], atol=tolerance)
        np.testing.assert_allclose(each.states, golden["verify_features"][i], atol=tolerance)
        if "confidence_logits" in golden:
            np.testing.assert_allclose(each.odds, golden["confidence_logits"][i], atol=TOLERANCE)
        if f"round{i + 1}_cache_k" in golden:
            wanted = golden[f"round{i + 1}_cache_k"]
            keys = each.keys[0][:, 1 : 1 + wanted.shape[1]]  # the token at position 0 has none
            np.testing.assert_allclose(keys, wanted, atol=TOLERANCE)


SOME = variants(
    ["eagle3_official", "dflash_zlab", "gemma4_assistant/dense"],
    *("eagle3_official", "gemma4_assistant/dense"),
)


@pytest.mark.parametrize("name", SOME)
def test_the_layout_of_a_cache_on_tpus(name):
    assert farthest(*follow(name, platform="tpu")) < TOLERANCE


@pytest.mark.parametrize("wrong", ["the token before", "the next boundary", "rejected tokens"])
@pytest.mark.parametrize("name", SOME)
def test_control_states_of(wrong, name):
    others = {
        "eagle3_official": (3, 5, 6),
        "dflash_zlab": (0, 2, 4),
        "gemma4_assistant/dense": (6,),
    }
    options = {
        "the token before": {"change": lambda states: jnp.roll(states, 1, axis=1)},
        "the next boundary": {"boundaries": others[name]},
        "rejected tokens": {"kept": 1},
    }
    assert farthest(*follow(name, **options[wrong])) > 0.1


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name] != "gemma4"])
def test_a_head_that_is_written_again_is_the_same(name, tmp_path):
    of, place = verifier(CASES[name]), fixture(name, "head")
    head, params = load_draft_head(place, of.model)
    save_draft_head(tmp_path / "head", head, params, verifier_params=of.params)
    again, read = load_draft_head(tmp_path / "head", of.model, verifier_params=of.params)
    assert again == head
    jax.tree.map(np.testing.assert_array_equal, read, params)
    if name.startswith("speculators"):  # what other servers need is what the project writes
        save_draft_head(tmp_path / "x", head, params, verifier_params=of.params, portable=True)
        found, wanted = (load_file(x / "model.safetensors") for x in (tmp_path / "x", place))
        jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_the_head_inside_a_checkpoint_is_that_of_speculators():
    of, place = verifier("qwen3_5"), fixture("verifiers", "qwen3_5")
    assert has_mtp(place) and not is_draft_head(place)
    heads = [
        load_draft_head(x, of.model) for x in (place, fixture("speculators_mtp/qwen3_5", "head"))
    ]
    assert heads[0][0] == heads[1][0]
    jax.tree.map(np.testing.assert_array_equal, heads[0][1], heads[1][1])


def test_what_inspect_and_convert_say_of_inner_heads_and_assistants(tmp_path, capsys):
    of = str(fixture("verifiers", "qwen3_5"))
    assert main(["inspect", of]) == 0
    assert "MTP" in capsys.readouterr().out
    assert main(["convert", of, str(tmp_path / "mtp"), "--to", "speculators"]) == 0
    own = load_draft_head(tmp_path / "mtp", verifier("qwen3_5").model)[1]
    jax.tree.map(np.testing.assert_array_equal, own, opened("speculators_mtp/qwen3_5")[2])
    place = str(fixture("gemma4_assistant/ordered", "head"))
    capsys.readouterr()
    assert main(["inspect", place, str(fixture("verifiers", "gemma4"))]) == 0
    out = capsys.readouterr().out
    assert "after its last layer; its keys and values" in out and "a pair: " in out
    assert main(["inspect", place, of]) == 2
    assert "keys in layers with a window of 2 heads of 8, not none" in capsys.readouterr().out
    assert main(["convert", place, str(tmp_path / "x"), "--to", "speculators"]) == 2


def with_mtp(name, place, joined):
    """A model with an MTP head inside its files; returns the head's layer, as transformers has it.

    The experts of the head are in two arrays, or each in its own.
    """
    theirs, path = made(name)
    shutil.copytree(path, place, dirs_exist_ok=True)
    config = copy.deepcopy(theirs.config)
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    layer = type(theirs)(config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    with tempfile.TemporaryDirectory() as apart:
        layer.save_pretrained(apart, save_original_format=not joined)
        arrays = load_file(Path(apart) / "model.safetensors")
    inside = {
        "mtp" + key.removeprefix("model"): x
        for key, x in arrays.items()
        if key.startswith(("model.layers.0.", "model.norm."))
    }
    rng, width = np.random.default_rng(0), config.hidden_size
    inside["mtp.fc.weight"] = rng.normal(size=(width, 2 * width)).astype(np.float32)
    for x in ("embedding", "hidden"):
        inside[f"mtp.pre_fc_norm_{x}.weight"] = rng.normal(size=width).astype(np.float32)
    file = place / "model.safetensors"
    save_file({**load_file(file), **inside}, file, {"format": "pt"})
    return layer.model, inside


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe"])
def test_an_mtp_head_with_experts_is_a_layer_of_transformers(name, joined, tmp_path):
    theirs, inside = with_mtp(name, tmp_path / "model", joined)
    of = load_model(tmp_path / "model")
    head, own = load_draft_head(tmp_path / "model", of.model)
    rng = np.random.default_rng(1)
    states, embedded = rng.normal(size=(2, 1, 9, head.config.layers.embed_dim)).astype(np.float32)
    given = jnp.asarray(embedded), jnp.asarray(states), jnp.arange(9)[None], block_bias(9)
    step = functools.partial(head.network.apply, method="step")
    found, *_ = quick_jit(step)({"params": own["network"]}, *given)

    def normed(x, weight):
        scale = 1.0 + inside[f"mtp.pre_fc_norm_{weight}.weight"]
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + head.config.layers.norm_eps) * scale

    with torch.no_grad():
        pair = np.concatenate([normed(embedded, "embedding"), normed(states, "hidden")], -1)
        x = torch.tensor(pair @ inside["mtp.fc.weight"].T)
        expected = theirs(inputs_embeds=x).last_hidden_state.numpy()
    assert error(found, expected) <= 1e-5
    save_draft_head(tmp_path / "x", head, own, verifier_params=of.params, portable=True)
    again, read = load_draft_head(tmp_path / "x", of.model, verifier_params=of.params)
    assert again == head
    jax.tree.map(np.testing.assert_array_equal, read, own)


class Numbers(Words):
    vocab_size = V


@pytest.mark.parametrize(("name", "sizes"), [("dense", None), ("ordered", (2, 2))])
def test_an_assistant_drafts_what_the_verifier_writes_alone(name, sizes):
    mesh = None if sizes is None else make_mesh(*sizes)
    of = load_model(fixture("verifiers/gemma4"), dtype="float32", mesh=mesh)
    place = None if mesh is None else jax.sharding.NamedSharding(mesh, jax.P())
    path = fixture("gemma4_assistant", name, "head")
    texts = [
        TextModel(*each, Numbers(), mesh=mesh)
        for each in ((of.model, of.params), load_draft_head(path, of.model, sharding=place))
    ]
    options = {"max_new_tokens": 12, "batch_size": 4, "buckets": (12,)}
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 48, size).astype(np.int32) for size in (5, 1, 9, 3, 7)]
    decode = functools.partial(specjax.Decoder, sampling=Sampling(0.0), **options)
    alone = decode(texts[0])(prompts, progress=False)
    pair = Pair(verifier=texts[0], drafter=texts[1])
    together = decode(pair, max_draft=3)(prompts, progress=False)
    jax.tree.map(np.testing.assert_array_equal, together.tokens, alone.tokens)
    warm = specjax.Decoder(pair, max_draft=3, sampling=Sampling(1.5), **options)
    whole = warm(prompts, progress=False, seed=1)
    assert 0 < whole.info.accepted < whole.info.drafted
    each = [warm([x], progress=False, seed=1, ids=[i]).tokens[0] for i, x in enumerate(prompts)]
    jax.tree.map(np.testing.assert_array_equal, list(whole.tokens), each)
    with pytest.raises(UserError, match="tree"):
        specjax.Decoder(pair, drafting=specjax.drafting.Tree(depth=2, width=2), **options)


def test_a_tree_grows_as_in_eagles_code():
    golden, of = np.load(fixture("eagle3_official", "rounds.npz")), verifier(LLAMA)
    head, own = load_draft_head(fixture("eagle3_official", "head"), of.model)
    drafter = drafting.heads.EagleTree(3, 3, "top", beam=3, keep=7, model=head)
    params = drafting.chain.ChainParams(head.joined(own, of.params))

    @quick_jit
    def draft(params, verifier_params, prompts):
        filled = of.model.reading(head.config.boundaries).prefill(verifier_params, prompts, 40)
        state = drafter.prefill(params, prompts, 40, verifier=filled)
        one = jnp.ones(1)
        noise = jnp.zeros((1, drafter.num_uniforms))
        limits = jnp.full(1, drafter.max_draft, jnp.int32)
        inputs = DraftInputs(filled.tokens, limits, noise, Sampling(one), one > 0, False)
        return drafter.propose(params, state, inputs)[0]

    size = int(golden["prompt_len"]) + 1
    prompts = Prompts(jnp.asarray(golden["tokens"][None, :size]), jnp.array([size]))
    block = draft(params, of.params, prompts)
    paths = [[]]
    for token, parent in zip(block.tokens[0].tolist(), block.parents[0].tolist(), strict=True):
        paths.append([*paths[parent], token])
    tokens = golden["tree_draft_tokens"][0]
    wanted = [tokens[row > 0].tolist()[1:] for row in golden["tree_mask"][0, 0]]
    assert sorted(paths) == sorted(wanted)
