"""The rollout engine in the real tunix (`make test-outside`).

Axes: B rows, N tokens of an output.
"""

import contextlib
import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.integrations.with_tunix import import_tunix

import_tunix()

import optax
from flax import nnx
from flax.traverse_util import flatten_dict
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import CacheConfig, RolloutConfig
from tunix.rl.rollout.vanilla_rollout import VanillaRollout

from benchmarks import updates
from specjax import UserError
from specjax.checkpoints import save_draft_head, save_model
from specjax.compilation import count_compilations
from specjax.integrations.tunix import SpecjaxRollout, rollout
from specjax.integrations.tunix.networks import network_of
from specjax.integrations.tunix.weights import NAMES, Weights, params_of
from specjax.models import LlamaConfig, model_from_config
from specjax.models.heads import draft_head
from specjax.training import DrafterRecipe, HeadRefresh
from tests.integrations.tunix_actors import (
    ACTORS,
    EOS,
    PAD,
    VOCAB,
    Numbers,
    as_tunix_runs,
    change,
    make_actor,
    mesh_of,
    scores,
)
from tests.models.tiny import random_params
from tests.xla_flags import quick_flags

NOTEBOOK = Path(__file__).parents[2] / "notebooks/rollouts.ipynb"

CONFIG = RolloutConfig(
    max_tokens_to_generate=6, max_prompt_length=8, kv_cache_size=16, temperature=1.0,
    return_logprobs=True,
)  # fmt: skip
PROMPTS = ["3 4 5 3 4"] * 4 + ["6 7"] * 4


def with_config(**changes):
    return dataclasses.replace(CONFIG, **changes)


def engine(actor, config=CONFIG, mesh=None, **options):
    return SpecjaxRollout(actor, Numbers(), mesh or mesh_of(), config, max_draft=3, **options)


def filled(outputs, length=CONFIG.max_tokens_to_generate):
    return np.stack([np.pad(output, (0, length - len(output))) for output in outputs])


def errors(ours, theirs, outputs):
    """The largest difference up to the first padding token, which tunix does not read."""
    ends = [([*output.tolist(), PAD].index(PAD) + 1) for output in outputs]
    rows = zip(ours, theirs, outputs, ends, strict=True)
    return max(np.abs(x[:end] - y[: len(z)][:end]).max(initial=0.0) for x, y, z, end in rows)


def known_tokens(model, params, tokens, start):
    """The log-probabilities of the tokens from `start` on."""
    logs = jax.nn.log_softmax(model.apply(params, tokens))[:, start - 1 : -1]
    return jnp.take_along_axis(logs, tokens[:, start:, None], axis=-1)[..., 0]


@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "adapters"])
@pytest.mark.parametrize("name", ACTORS)
def test_a_network_computes_what_tunix_computes(name, adapters):
    actor = make_actor(name, adapters=adapters)
    model = network_of(actor)
    weights = Weights(actor, model, mesh_of(), 1.5 if adapters else None)
    tokens = np.random.default_rng(1).integers(3, VOCAB, (2, 12)).astype(np.int32)
    theirs = scores(actor, tokens[:, :4], tokens[:, 4:])
    assert np.abs(known_tokens(model, weights.params, tokens, 4) - theirs).max() < 1e-5
    if adapters:
        change(actor, 5, nnx.LoRAParam)
        assert np.abs(scores(actor, tokens[:, :4], tokens[:, 4:]) - theirs).max() > 0.1
        weights.update(nnx.state(actor, nnx.LoRAParam))
        theirs = scores(actor, tokens[:, :4], tokens[:, 4:])
        assert np.abs(known_tokens(model, weights.params, tokens, 4) - theirs).max() < 1e-5


def test_every_number_of_a_network_has_one_place_and_every_name_is_used():
    used = set()
    for name in ACTORS:
        actor = make_actor(name)
        arrays = rollout_arrays(actor)
        used |= {".".join(x.split(".")[2 * x.startswith("layers.") :]) for x in arrays}
        ends = np.cumsum([x.size for x in arrays.values()])
        numbered = {
            key: jnp.arange(end - x.size, end, dtype=jnp.float32).reshape(x.shape)
            for (key, x), end in zip(arrays.items(), ends, strict=True)
        }
        ours = params_of(numbered, flatten_dict(network_of(actor).abstract_params(), sep="/"))
        found = np.concatenate([np.ravel(x) for x in jax.tree.leaves(ours)])
        np.testing.assert_array_equal(np.sort(found), np.arange(ends[-1]))
    assert used == set(NAMES)


def rollout_arrays(actor):
    flat = flatten_dict(nnx.to_pure_dict(nnx.state(actor, nnx.Param)))
    return {".".join(map(str, path)): x for path, x in flat.items()}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 0.7, "top_k": 4},
        {"top_p": 0.8},
        {"temperature": 0.0, "top_p": None},
    ],
    ids=str,
)
def test_log_probabilities_are_those_of_the_policy_and_of_the_draws(changes):
    config = with_config(**changes)
    actor = make_actor("llama3")
    ours = engine(actor, config)
    output = ours.generate(PROMPTS, config)
    assert output is ours.output and output.info.rows == len(PROMPTS)
    prompts, whole = output.left_padded_prompt_tokens, filled(output.tokens)
    theirs = scores(actor, prompts, whole, config.temperature)
    assert errors(output.logprobs, theirs, output.tokens) < 1e-5
    again = np.asarray(ours.get_per_token_logps(jnp.asarray(prompts), jnp.asarray(whole)))
    assert errors(output.logprobs, again, output.tokens) < 1e-5
    with as_tunix_runs():
        vanilla = VanillaRollout(actor, Numbers(), CacheConfig(16, 2, 2, 8))
        sampled = vanilla.generate(PROMPTS, config)
    theirs = scores(actor, sampled.left_padded_prompt_tokens, filled(sampled.tokens),
                    config.temperature)  # fmt: skip
    rows = [np.asarray(x) for x in sampled.logprobs]
    assert errors(rows, theirs, sampled.tokens) < 1e-5, "the same quantity as tunix's"
    np.testing.assert_array_equal(sampled.left_padded_prompt_tokens, prompts)
    if not config.temperature:
        assert [x.tolist() for x in sampled.tokens] == [without_end(x) for x in output.tokens]
    elif "top_k" in changes or "top_p" in changes:
        sums = [(x - y).sum() for x, y in zip(output.drawn_logprobs, output.logprobs, strict=True)]
        assert min(sums) > -1e-5 and max(sums) > 0.01
    else:
        pairs = zip(output.drawn_logprobs, output.logprobs, strict=True)
        assert max(np.abs(x - y).max() for x, y in pairs) < 1e-5


def without_end(output):
    return [token for token in output.tolist() if token != EOS]


def law_of_two(actor, prompt, config):
    """The probability of each pair of first tokens, of pads and ends alone.

    They are computed from tunix's logits, cut as its sampler cuts them.
    """

    def cut(logs):
        order = np.argsort(-logs)
        kept = order[: config.top_k or VOCAB]
        probs = np.exp(logs[kept]) / np.exp(logs[kept]).sum()
        probs = np.where(np.cumsum(probs) - probs > config.top_p, 0.0, probs)
        law = np.zeros(VOCAB)
        law[kept] = probs / probs.sum()
        return law

    ids = np.array([2, *map(int, prompt.split())])
    every = np.arange(VOCAB)[:, None]
    first = cut(scores(actor, np.tile(ids, (VOCAB, 1)), every, config.temperature)[:, 0])
    law = {}
    for token, chance in enumerate(first):
        if token in (PAD, EOS):
            law[token,] = chance
            continue
        read = np.tile([*ids, token], (VOCAB, 1))
        second = cut(scores(actor, read, every, config.temperature)[:, 0])
        law |= {(token, other): chance * p for other, p in enumerate(second)}
    return law


def counted(outputs, law):
    counts = dict.fromkeys(law, 0)
    for output in outputs:
        key = tuple(output[:2].tolist()) or (EOS,)
        key = key[:1] if key[0] in (PAD, EOS) else (*key, EOS)[:2]
        counts[key] += 1
    return counts


def distance(counts, law):
    """Pearson's statistic, in standard deviations from its mean; rare outcomes count as one."""
    draws = sum(counts.values())
    assert not any(count for key, count in counts.items() if law[key] == 0.0)
    likely = [key for key in law if law[key] * draws >= 5]
    expected = np.array([law[key] * draws for key in likely])
    seen = np.array([counts[key] for key in likely])
    statistic = ((seen - expected) ** 2 / expected).sum()
    if (rest := draws - expected.sum()) >= 1:
        statistic += (draws - seen.sum() - rest) ** 2 / rest
    return (statistic - len(likely)) / np.sqrt(2 * len(likely))


def test_both_engines_follow_the_law_of_the_policy():
    """60,000 draws of each; a wrong temperature is seen."""
    config = with_config(
        max_tokens_to_generate=2, temperature=1.5, top_k=8, top_p=0.9, return_logprobs=False
    )
    actor, prompt = make_actor("llama3"), "3 4 5 3 4"
    law = law_of_two(actor, prompt, config)
    assert sum(law.values()) == pytest.approx(1.0) and sum(p > 0 for p in law.values()) > 30
    ours, copies = engine(actor, config), engine(actor, config, drafting="Lookup(earlier=4)")
    with as_tunix_runs():
        vanilla = VanillaRollout(actor, Numbers(), CacheConfig(16, 2, 2, 8))
    drawn = {"ours": [], "copies": [], "vanilla": [], "another": []}
    prompts = [prompt] * 6000
    for seed in range(10):
        seeded = dataclasses.replace(config, seed=jax.random.key(seed))
        drawn["ours"] += ours.generate(prompts, seeded).tokens
        drawn["copies"] += copies.generate(prompts, seeded).tokens
        if seed < 2:
            other = dataclasses.replace(seeded, temperature=1.2)
            drawn["another"] += ours.generate(prompts, other).tokens
        with as_tunix_runs():
            drawn["vanilla"] += vanilla.generate(prompts, seeded).tokens
    far = {name: distance(counted(outputs, law), law) for name, outputs in drawn.items()}
    assert far.pop("another") > 10 and max(far.values()) < 4, far
    assert ours.output.info.accepted > 0 and copies.output.info.accepted > 0


def test_a_later_epoch_copies_earlier_answers():
    config = with_config(temperature=0.0)
    ours = engine(make_actor("llama3"), config, drafting="Lookup(earlier=2)")
    first, second = (ours.generate(PROMPTS, config) for _ in range(2))
    assert second.text == first.text
    per_pass = [output.info.tokens_per_verifier_call for output in (first, second)]
    assert per_pass[1] > per_pass[0] + 1, per_pass
    assert errors(second.logprobs, first.logprobs, second.tokens) < 1e-5


def test_equal_prompts_are_read_once(monkeypatch):
    calls = []

    class Watched(rollout.Decoder):
        def __call__(self, prompts, **options):
            calls.append((len(prompts), options["num_samples"]))
            return super().__call__(prompts, **options)

    monkeypatch.setattr(rollout, "Decoder", Watched)
    ours = engine(make_actor("llama3"))
    mixed = ["6 7", "3 4 5", "3 4 5", "6 7", "3 4 5", "3 4 5"]
    output = ours.generate(mixed, CONFIG)
    assert calls == [(3, 2)]
    ends = [" ".join(map(str, row[row != PAD][1:])) for row in output.left_padded_prompt_tokens]
    assert ends == mixed
    theirs = np.asarray(
        ours.get_per_token_logps(output.left_padded_prompt_tokens, filled(output.tokens))
    )
    assert errors(output.logprobs, theirs, output.tokens) < 1e-5, "each output has its own prompt"
    assert len({tuple(x) for x in map(tuple, output.tokens)}) > 2


def test_a_seed_repeats_and_none_draws_anew():
    ours = engine(make_actor("llama3"))

    def texts(seed):
        return ours.generate(PROMPTS, with_config(seed=seed)).text

    assert texts(jax.random.key(3)) == texts(jax.random.key(3)) != texts(jax.random.key(4))
    assert texts(jax.random.PRNGKey(3)) == texts(jax.random.key(3))
    assert texts(5) == texts(5) != texts(None) != texts(None)


def test_ends_and_batches():
    actor = make_actor("llama3")
    config = with_config(eos_tokens=[EOS, 9], seed=1)
    ended = engine(actor, config).generate(PROMPTS, config)
    assert any(x[-1] in (EOS, 9) for x in ended.tokens)
    assert not any(token in (EOS, 9) for x in ended.tokens for token in x[:-1])
    assert all(str(x) not in ("1", "9") for text in ended.text for x in text.split())
    bare = engine(actor, config, with_end=False, batch_size=4).generate(PROMPTS, config)
    assert [Numbers().encode(text) for text in ended.text] == [x.tolist() for x in bare.tokens]
    assert [len(x) for x in bare.logprobs] == [len(x) for x in bare.tokens]


@pytest.mark.parametrize("ways", [(1, 1), (2, 2)], ids=str)
def test_an_update_takes_the_buffers_of_the_old_weights(ways):
    actor = placed(make_actor("llama3"), mesh_of(*ways))
    ours = engine(actor, mesh=mesh_of(*ways))

    def buffers():
        leaves = jax.tree.leaves(ours._weights.params)
        shards = [shard.data for leaf in leaves for shard in leaf.addressable_shards]
        return {shard.unsafe_buffer_pointer() for shard in shards}

    before = buffers()
    change(actor, 7)
    state = nnx.state(actor, nnx.Param)
    with over_the_host() as seen:
        ours.update_params(state, (nnx.Param,))
    assert not seen and buffers() == before
    assert ours._weights._converted.num_programs() == 1
    prompts, outputs = np.array([[PAD, 2, 3, 4]] * 4), np.array([[5, 6, 7]] * 4)
    theirs = scores(actor, prompts, outputs)
    np.testing.assert_allclose(ours.get_per_token_logps(prompts, outputs), theirs, atol=1e-5)
    for leaf in jax.tree.leaves(state):  # as if the trainer had taken its own
        leaf.delete()
    assert len(ours.generate(PROMPTS, CONFIG).text) == len(PROMPTS)


@contextlib.contextmanager
def over_the_host():
    """Notes the arrays on several devices that the host reads."""
    kind, seen = type(jnp.zeros(())), []
    read = kind._value

    def noted(array):
        seen.append(array.shape)
        return read.fget(array)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(kind, "_value", property(noted))
        yield seen


def test_what_goes_over_the_host_is_seen():
    whole, halves = (
        jax.sharding.NamedSharding(mesh_of(2), spec) for spec in (jax.P(), jax.P("fsdp"))
    )
    array = jax.device_put(jnp.arange(4.0), halves)
    with over_the_host() as seen:
        jax.device_put(array, whole)
    assert seen == [(4,)]


def test_nothing_is_compiled_after_the_first_step():
    actor = make_actor("gemma2")
    config = with_config(temperature=0.8, top_k=5)
    ours = engine(actor, config)

    def step(seed):
        prompts = [" ".join(map(str, range(3, 4 + seed + i // 2))) for i in range(8)]
        output = ours.generate(prompts, config)
        ours.get_per_token_logps(output.left_padded_prompt_tokens, filled(output.tokens))
        change(actor, seed)
        ours.update_params(nnx.state(actor, nnx.Param), (nnx.Param,))

    step(0)
    with count_compilations() as counts:
        step(1)
        step(2)
    assert counts.compiled + counts.read == 0


def placed(actor, mesh):
    """The network, split as tunix splits it."""
    state = nnx.state(actor)
    places = jax.tree.map(
        lambda spec: jax.sharding.NamedSharding(mesh, spec),
        nnx.get_partition_spec(state),
        is_leaf=lambda x: isinstance(x, jax.P),
    )
    nnx.update(actor, jax.device_put(state, places))
    return actor


# The mesh of the policy, and that of the rollouts: the same, another of these devices, others.
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [((2, 2, 0), (2, 2, 0)), ((2, 2, 0), (4, 1, 0)), ((2, 2, 0), (2, 1, 4))],
    ids=str,
)
def test_meshes(theirs, ours):
    actor = placed(make_actor("llama3"), mesh_of(*theirs))
    ours = engine(actor, mesh=mesh_of(*ours))
    with over_the_host() as seen:
        change(actor, 3)
        ours.update_params(nnx.state(actor, nnx.Param), (nnx.Param,))
    assert not seen or ours._weights.mesh.size == 2
    output = ours.generate(PROMPTS, CONFIG)
    prompts, outputs = output.left_padded_prompt_tokens, filled(output.tokens)
    whole = make_actor("llama3")
    change(whole, 3)
    whole = scores(whole, prompts, outputs)
    assert errors(output.logprobs, whole, output.tokens) < 1e-5
    again = np.asarray(ours.get_per_token_logps(prompts, outputs))
    assert errors(output.logprobs, again, output.tokens) < 1e-5


def test_a_small_model_drafts(tmp_path):
    small = model_from_config(LlamaConfig.of(VOCAB, 16, 2, 2, 8, 16, 1))
    save_model(tmp_path / "small", small, random_params(small), format="hf")
    ours = engine(make_actor("llama3"), drafter=tmp_path / "small")
    output = ours.generate(PROMPTS, CONFIG)
    assert output.info.drafter_calls > 0 and output.info.accepted > 0
    theirs = scores(make_actor("llama3"), output.left_padded_prompt_tokens, filled(output.tokens))
    assert errors(output.logprobs, theirs, output.tokens) < 1e-5


def test_a_head_is_refreshed_once_for_each_update(tmp_path):
    actor, seen = make_actor("llama3"), []

    def refresh(pair, texts):
        seen.append((pair.verifier, list(texts.outputs)))
        return HeadRefresh(updates=1)(pair, texts)

    with pytest.raises(UserError, match="^`refresh` trains a draft head"):
        engine(actor, refresh=refresh)
    verifier = engine(actor).verifier
    head = draft_head(DrafterRecipe().head_for(verifier), verifier.model)
    save_draft_head(tmp_path / "head", head, head.init(jax.random.key(0)))
    ours = engine(actor, drafter=tmp_path / "head", refresh=refresh)
    outputs = [ours.generate(PROMPTS, CONFIG) for _ in range(2)]
    before = ours._drafter
    change(actor, 4)
    ours.update_params(nnx.state(actor, nnx.Param))
    assert not seen
    for _ in range(2):
        after = ours.generate(PROMPTS, CONFIG)
    ((verifier, texts),) = seen
    assert verifier is ours.verifier and ours._drafter is not before
    assert [x.tolist() for x in texts] == [x.tolist() for y in outputs for x in y.tokens]
    theirs = scores(actor, after.left_padded_prompt_tokens, filled(after.tokens))
    assert errors(after.logprobs, theirs, after.tokens) < 1e-5


_OTHERS = {
    "tensor_parallel_size": 4,
    "rollout_mapping_config": object(),
    "rollout_vllm_model_version": "some/model",
    "rollout_vllm_kwargs": {"seed": 1},
    "rollout_sglang_jax_page_size": 64,
}


def test_every_field_is_obeyed_or_refused_by_name():
    fields = {field.name for field in dataclasses.fields(RolloutConfig)}
    assert set(rollout._OBEYED) <= fields
    actor = make_actor("llama3")
    for name in fields - set(rollout._OBEYED):
        with pytest.raises(UserError, match=f"^{name} must be left out"):
            engine(actor, with_config(**{name: _OTHERS.get(name, "else")}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_p": None}, "^top_p must be a number"),
        ({"kv_cache_size": 13}, "^kv_cache_size must be at least .* = 14, got 13"),
        ({"temperature": -1.0}, "^temperature must be"),
        ({"data_type": jnp.bfloat16}, "^data_type must be that of training, None"),
        ({"eos_tokens": [4]}, "^eos_tokens must be that of training"),
    ],
    ids=str,
)
def test_a_call_refuses_what_it_cannot_obey(changes, message):
    ours = engine(make_actor("llama3"))
    with pytest.raises(UserError, match=message):
        ours.generate(PROMPTS, with_config(**changes))


@pytest.mark.parametrize("setting", [{"rule": "Lossy(0.3)"}, {"processors": ("MinP(0.1)",)}])
def test_what_changes_the_law_must_be_asked_for(setting):
    actor = make_actor("llama3")
    with pytest.raises(UserError, match="biases the gradient .* approximate=True"):
        engine(actor, **setting)
    prompts = PROMPTS * 250
    output = engine(actor, approximate=True, **setting).generate(prompts, CONFIG)
    theirs = scores(actor, output.left_padded_prompt_tokens, filled(output.tokens))
    assert errors(output.logprobs, theirs, output.tokens) < 1e-5, "still the policy's own"
    pairs = zip(output.logprobs, output.drawn_logprobs, strict=True)
    weights = np.exp([np.sum(own - drawn) for own, drawn in pairs])
    assert weights.std() > 0.05
    if "rule" in setting:  # which draws all that the policy may write
        assert abs(weights.mean() - 1.0) < 4 * weights.std() / np.sqrt(len(weights))


def test_other_networks_are_refused():
    with pytest.raises(UserError, match="must be one of tunix's Llama3, .* got Numbers"):
        engine(Numbers())
    actor = make_actor("qwen3_tied")
    actor.config = dataclasses.replace(actor.config, num_experts=4)
    with pytest.raises(UserError, match="must have num_experts=None, got 4"):
        engine(actor)
    with pytest.raises(UserError, match="^`lora_scale` must be given"):
        engine(make_actor("llama3", adapters=True))
    actor = make_actor("llama3")
    actor.extra = nnx.Param(jnp.zeros(2))
    with pytest.raises(UserError, match="`rollout_actor` has extra, which"):
        engine(actor)


def rewards_of(rollout_engine, seed, steps=20):
    """The mean reward of each step of GRPO, whose task is to write one token."""
    rewards, watch = [], contextlib.ExitStack()
    counts = None

    def reward(completions, **_):
        nonlocal counts
        shares = [text.split().count("7") / 8 for text in completions]
        rewards.append(np.mean(shares))
        if len(rewards) == 2:
            counts = watch.enter_context(count_compilations())
        elif len(rewards) == steps:
            watch.close()
        if rollout_engine is OURS:
            output, policy = cluster.rollout.output, cluster.actor_trainer.model
            theirs = scores(policy, output.left_padded_prompt_tokens, filled(output.tokens, 8))
            assert errors(output.logprobs, theirs, output.tokens) < 1e-5
        return shares

    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    config = RolloutConfig(
        max_tokens_to_generate=8, max_prompt_length=8, kv_cache_size=16, temperature=1.0,
        return_logprobs=True,
    )  # fmt: skip
    rng = np.random.default_rng(seed)

    def batches():
        for step in range(steps):
            config.seed = jax.random.key(1000 * seed + step)
            texts = [" ".join(map(str, rng.integers(3, VOCAB, 4))) for _ in range(4)]
            yield {"prompts": np.array(texts)}

    with as_tunix_runs():
        cluster = rl_cluster.RLCluster(
            actor=make_actor("llama3"),
            reference=make_actor("llama3"),
            tokenizer=Numbers(),
            cluster_config=rl_cluster.ClusterConfig(
                role_to_mesh=dict.fromkeys(roles, mesh_of()),
                rollout_engine=rollout_engine,
                training_config=rl_cluster.RLTrainingConfig(
                    actor_optimizer=optax.adam(5e-3), eval_every_n_steps=1000, max_steps=2 * steps
                ),
                rollout_config=config,
            ),
        )
        learner = GRPOLearner(
            rl_cluster=cluster,
            algo_config=GRPOConfig(num_generations=8, num_iterations=2, beta=0.01),
            reward_fns=reward,
        )
        learner.train(batches())
    assert counts.compiled + counts.read == 0
    return np.array(rewards)


OURS = functools.partial(SpecjaxRollout, max_draft=3, with_end=False)


class Stale(SpecjaxRollout):
    def update_params(self, params, filter_types=None):
        """It keeps the first weights."""


def test_grpo_learns_as_much_with_either_engine():
    """Three seeds; an engine that keeps the first weights is seen."""
    stale = functools.partial(Stale, max_draft=3, with_end=False)
    curves = {
        name: np.mean([rewards_of(kind, seed) for seed in range(3)], axis=0)
        for name, kind in (("ours", OURS), ("vanilla", "vanilla"), ("stale", stale))
    }
    far = {name: np.abs(curve - curves["vanilla"]).mean() for name, curve in curves.items()}
    assert far["ours"] < 0.08 < 0.2 < far["stale"], curves
    for name in ("ours", "vanilla"):
        assert curves[name][:3].mean() < 0.2 and curves[name][-5:].mean() > 0.6, curves


def test_the_notebook_runs():
    runner = [sys.executable, "-m", "tests.notebook_runner", str(NOTEBOOK)]
    env = os.environ | {"XLA_FLAGS": quick_flags(1)}
    done = subprocess.run(runner, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1])["figures"] == 2


def test_updates_are_timed_beside_copies(capsys):
    sizes = ["--layers=1", "--width=64", "--vocabulary=16", "--repeats=1"]
    with as_tunix_runs():
        assert updates.main(sizes) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["what"] for row in rows] == ["update", "copy", "copy into new memory"]
    assert all(row["ms"] > 0 for row in rows)
