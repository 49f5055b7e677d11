"""Parts of a user's own, from public names alone, each decoded with `Decoder`."""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import decoding, drafting, rules, testing, types
from tests import tiny_pair
from tests.tables import prefix_tables

SHAPE = {"max_new_tokens": 8, "batch_size": 4, "buckets": (16,)}
PROMPTS = ["one", "two", "three"]


@pytest.fixture(scope="module")
def pair():
    return specjax.Pair(drafter=tiny_pair.tabular(2), verifier=tiny_pair.tabular(1))


# A rule: half of the drafter, half of the verifier, more or less.


@types.traced_dataclass
class Mixture:
    alpha: object

    reads_draft: ClassVar[bool] = True
    reads_draft_confidence: ClassVar[bool] = False
    reads_verifier_confidence: ClassVar[bool] = False

    def __call__(self, q, p, q_conf=None, p_conf=None):
        return self.alpha * q + (1.0 - self.alpha) * p


def test_a_rule(pair):
    testing.check_rule(Mixture(np.float32(0.5)))
    decoder = specjax.Decoder(pair, rule=Mixture(np.float32(0.0)), max_draft=2, **SHAPE)
    lossless = specjax.Decoder(pair, rule=rules.Lossless(), max_draft=2, **SHAPE)
    assert decoder(PROMPTS, seed=1).texts == lossless(PROMPTS, seed=1).texts
    # Its strengths are traced, per prompt too; at 1 all that is drafted stands.
    result = decoder(PROMPTS, seed=1, rule=Mixture(np.array([0.0, 1.0, 0.5], np.float32)))
    assert result[0].text == lossless(PROMPTS, seed=1)[0].text
    assert result[1].info.accepted == result[1].info.drafted


@types.traced_dataclass
class Doubled(Mixture):
    alpha: object

    def __call__(self, q, p, q_conf=None, p_conf=None):
        return 2.0 * p


def test_a_wrong_rule_is_told_in_one_line(pair):
    with pytest.raises(ValueError, match="Doubled must return distributions that sum to one, got"):
        specjax.Decoder(pair, rule=Doubled(np.float32(0.0)))

    @dataclasses.dataclass(frozen=True)
    class Plain:
        reads_draft: bool = False
        reads_draft_confidence: bool = False
        reads_verifier_confidence: bool = False

    with pytest.raises(TypeError, match="rule must be a pytree, got Plain: decorate the class"):
        specjax.Decoder(pair, rule=Plain())


# A stopping policy: stop where the drafter is unsure. It reads the confidence, which greedy
# decoding leaves as it is.


@dataclasses.dataclass(frozen=True)
class Unsure(types.Stopping):
    reads_confidence: bool = True

    def step(self, params, state, token, probs, confidences, hidden, index):
        return jnp.max(confidences, axis=-1) < params, state


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stopping_policy(pair, temperature):
    def decode(threshold):
        decoder = specjax.Decoder(
            pair,
            max_draft=4,
            stopping=Unsure(),
            stopping_params=jnp.float32(threshold),
            temperature=temperature,
            **SHAPE,
        )
        return decoder(PROMPTS, seed=2)

    eager, careful, always = decode(0.0), decode(0.15), decode(2.0)
    assert not eager.info.rows.drafted_lengths[:, 1:4].any()
    assert careful.info.rows.drafted_lengths[:, 1:4].any()
    assert not always.info.rows.drafted_lengths[:, 2:].any()
    if temperature == 0.0:
        assert eager.texts == careful.texts == always.texts


# A verification: accept nothing, draw from the target. Slow, and exact.


@dataclasses.dataclass(frozen=True)
class Never(types.Verification):
    def acceptance(self, tokens, draft_probs, target_probs, num_drafted, carry=(), still=None):
        # norm((inf * target - draft)_+) is the target itself.
        scales = jnp.full((tokens.size + 1,), 1e30, jnp.float32)
        return types.Acceptance(jnp.zeros(tokens.shape, jnp.float32), scales, target_probs)


def test_a_verification(pair):
    decoder = specjax.Decoder(pair, verification=Never(), max_draft=2, temperature=0.0, **SHAPE)
    alone = specjax.Decoder(pair.verifier, temperature=0.0, **SHAPE)
    result = decoder(PROMPTS)
    assert result.texts == alone(PROMPTS).texts
    assert result.info.acceptance_rate == 0.0
    q, p, _, _ = prefix_tables(3, 4)
    law = testing.emitted_law(Never(), q, p, 2, 2)
    assert testing.total_variation(law, testing.target_law(p, 2)) < 1e-5


# A language model: it counts upwards, most of the time.


@dataclasses.dataclass(frozen=True)
class Counter(types.LanguageModel):
    vocab_size: int

    def prompt_positions(self, input_lengths, prefix_lengths):
        return input_lengths + prefix_lengths

    def prefill(self, params, inputs, input_lengths, max_length, prefix=None, prefix_lengths=None):
        at = input_lengths.astype(jnp.int32) - 1
        last = jnp.take_along_axis(inputs, at[:, None], axis=1)[:, 0]
        return types.Prefilled(jnp.zeros((inputs.shape[0], max_length)), last, at)

    def score(self, params, cache, tokens, positions):
        logits = params * jax.nn.one_hot((tokens + 1) % self.vocab_size, self.vocab_size)
        return logits, logits, ()

    def write(self, cache, updates, positions):
        return cache


def test_a_language_model(pair):
    words = pair.verifier.tokenizer
    counter = specjax.TextModel(Counter(259), jnp.float32(50.0), words)
    result = specjax.Decoder(counter, temperature=0.0, **SHAPE)([[10, 20]])
    np.testing.assert_array_equal(result.tokens[0], np.arange(21, 29))
    both = specjax.Pair(drafter=counter, verifier=pair.verifier)
    alone = specjax.Decoder(pair.verifier, temperature=0.0, **SHAPE)
    assert specjax.Decoder(both, temperature=0.0, **SHAPE)(PROMPTS).texts == alone(PROMPTS).texts


# A drafter that lags and catches up: it proposes what followed the last token when it was last
# committed, from a table that `commit` fills. It takes part in every other round only.


class Bigrams(NamedTuple):
    following: jax.Array  # [B, V]
    last: jax.Array  # [B]
    rounds: jax.Array  # [B]


@dataclasses.dataclass(frozen=True)
class Remembered(types.Drafter):
    max_draft: int
    vocab_size: int

    @property
    def traits(self):
        return types.DraftTraits(prefix_only=False, fixed_length=False)

    def prefill(self, params, inputs, input_lengths, max_length, prefix=None, prefix_lengths=None):
        rows = inputs.shape[0]
        last = jnp.take_along_axis(inputs, input_lengths[:, None] - 1, axis=1)[:, 0]
        table = jnp.zeros((rows, self.vocab_size), jnp.int32)
        return Bigrams(table, last, jnp.zeros(rows, jnp.int32))

    def propose(
        self, params, state, tokens, limits, uniforms, sampling, active, *, with_confidence
    ):
        chain = [tokens]
        for _ in range(self.max_draft):
            chain.append(jnp.take_along_axis(state.following, chain[-1][:, None], axis=1)[:, 0])
        drafted = jnp.stack(chain[1:], axis=1)
        probs = jax.nn.one_hot(drafted, self.vocab_size, dtype=jnp.float32)
        probs = jnp.pad(probs, ((0, 0), (0, 1), (0, 0)))
        count = jnp.where(active & (state.rounds % 2 == 1), limits, 0)
        return types.DraftBlock(drafted, probs, None, count, {}), state

    def bonus(self, params, state, tokens, block, sampling, *, with_confidence):
        drafted = jnp.concatenate([tokens[:, None], block.tokens], axis=1)
        last = jnp.take_along_axis(drafted, block.num_drafted[:, None], axis=1)
        following = jnp.take_along_axis(state.following, last, axis=1)[:, 0]
        probs = jax.nn.one_hot(following, self.vocab_size, dtype=jnp.float32)
        return types.Bonus(probs, None, {}), state

    def commit(self, state, tokens, counts):
        def note(i, state):
            real = i < counts
            at = jnp.where(real, state.last, self.vocab_size)
            put = jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))
            table = put(state.following, at, tokens[:, i])
            return state._replace(following=table, last=jnp.where(real, tokens[:, i], state.last))

        state = jax.lax.fori_loop(0, tokens.shape[1], note, state)
        return state._replace(rounds=state.rounds + (counts > 0).astype(jnp.int32))


def test_a_drafter(pair):
    table = np.full((260, 259), -9.0, np.float32)
    table[np.arange(260), 10 + np.arange(260) % 3] = 9.0  # it repeats itself
    looping = specjax.TextModel(
        testing.TabularModel(259, 1), jnp.asarray(table), pair.verifier.tokenizer
    )
    alone = specjax.Decoder(looping, temperature=0.0, **(SHAPE | {"max_new_tokens": 24}))
    decoder = specjax.Decoder(
        looping,
        drafter=Remembered(3, 259),
        drafter_params=(),
        temperature=0.0,
        **(SHAPE | {"max_new_tokens": 24}),
    )
    result = decoder(PROMPTS)
    assert result.texts == alone(PROMPTS).texts
    assert result.info.rows.accepted.sum() > 0
    assert result.info.rows.rounds.max() < 24
    # It has no confidence: a rule that reads one is refused.
    with pytest.raises(ValueError, match="Chow reads the drafter's confidence, but Remembered has"):
        decoder(PROMPTS, rule=rules.Chow(0.5))


# A whole method: the verifier decodes, and every token is repeated once.


class EchoParams(NamedTuple):
    verifier: object


@dataclasses.dataclass(frozen=True)
class Echo(decoding.LoopMethod):
    model: types.LanguageModel

    @property
    def vocab_size(self):
        return self.model.vocab_size

    @property
    def model_names(self):
        return ("verifier",)

    def prompt_positions(self, input_lengths, prefix_lengths):
        return self.model.prompt_positions(input_lengths, prefix_lengths)

    def prefill(self, params, prompts, max_length):
        return self.model.prefill(
            params.verifier, prompts.inputs, prompts.input_lengths, max_length
        )

    def step(self, params, state):
        tokens, at = state.inner.tokens, state.inner.positions
        out = self.model.extend(params.verifier, state.inner.cache, tokens[:, None], at)
        best = jnp.argmax(out.logits[:, 0], axis=-1).astype(jnp.int32)
        active = (~state.finished).astype(jnp.int32)
        pairs = jnp.stack([best, best], axis=1)
        new, _ = decoding.append(state, pairs, 2 * active, self.eos_ids)
        inner = types.Prefilled(out.cache, jnp.where(active > 0, best, tokens), at + active)
        calls = {"verifier": state.info.calls["verifier"] + active}
        info = new.info._replace(calls=calls)
        return new._replace(inner=inner, info=info, steps=state.steps + active)


def test_a_whole_method(pair):
    model = pair.verifier
    echo = specjax.Decoder(
        model,
        method=Echo(model.model, eos_ids=tuple(model.tokenizer.eos_ids)),
        params=EchoParams(model.params),
        **SHAPE,
    )
    plain = specjax.Decoder(model, temperature=0.0, **SHAPE)(PROMPTS)
    doubled = echo(PROMPTS)
    for one, two in zip(plain, doubled, strict=True):
        np.testing.assert_array_equal(np.repeat(one.tokens, 2)[: len(two.tokens)], two.tokens)
    assert doubled.info.tokens_per_verifier_call > 1.5
    with pytest.raises(ValueError, match="rule must be left out: Echo has none"):
        echo(PROMPTS, rule=rules.Lossless())
    with pytest.raises(ValueError, match="max_draft= must be left out: the method has its own"):
        specjax.Decoder(model, method=echo.method, params=(), max_draft=3)


def test_any_number_of_models_has_one_vocabulary(pair):
    models = specjax.Models(
        verifier=pair.verifier, middle=tiny_pair.tabular(3), drafter=pair.drafter
    )
    assert list(models.named) == ["verifier", "middle", "drafter"]
    decoder = specjax.Decoder(models, max_draft=2, **SHAPE)
    assert {"verifier", "middle", "drafter"} <= set(decoder.describe())
    assert set(decoder(PROMPTS)[0].info.calls) == {"verifier", "drafter"}
    with pytest.raises(ValueError, match="one of the models must be called verifier, got drafter"):
        specjax.Models(drafter=pair.drafter)
    with pytest.raises(TypeError, match="verifier must be a TextModel, got str"):
        specjax.Models(verifier="here")
    narrow = dataclasses.replace(pair.drafter, model=testing.TabularModel(300, 1))
    with pytest.raises(ValueError, match="middle and verifier have different vocabulary sizes"):
        specjax.Models(verifier=pair.verifier, middle=narrow)


def test_what_is_left_out_of_a_part_is_told():
    class Half(types.Drafter):
        max_draft = 2
        vocab_size = 259

        def prefill(self, *args):
            return ()

    with pytest.raises(TypeError, match="abstract .*Half.* (bonus|propose)"):
        Half()

    class Lazy(types.Stopping):
        pass

    with pytest.raises(TypeError, match="abstract .*Lazy.* step"):
        Lazy()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafter_params": ()}, "drafter_params= must be left out: it belongs to drafter="),
        ({"stopping_params": 0.5}, "stopping_params= must be left out: it belongs to stopping="),
        ({"params": ()}, "params= must be left out: it is for a method of your own"),
        ({"widths": (1, 2)}, r"widths must .* G \+ 1 = 6, got \(1, 2\)"),
        ({"widths": 3}, r"widths must .* G \+ 1 = 6, got \(3,\)"),
    ],
)
def test_parts_without_their_owner_are_refused(pair, options, message):
    with pytest.raises(ValueError, match=message):
        specjax.Decoder(pair, **options)


def test_descriptions_tell_own_parameters_apart(pair):
    def described(**options):
        return specjax.Decoder(pair, stopping=Unsure(), **options, **SHAPE).describe()

    one, two = (described(stopping_params=jnp.float32(x)) for x in (0.1, 0.2))
    assert one != two and one == described(stopping_params=jnp.float32(0.1))


@pytest.mark.parametrize(
    "count", [1, 18, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (2, 3, 5))]
)
def test_greedy_block_decodes_any_number_of_prompts(pair, count):
    decoder = specjax.Decoder(
        pair, verification=specjax.verification.GreedyBlock(), max_draft=3, temperature=0.0, **SHAPE
    )
    alone = specjax.Decoder(pair.verifier, temperature=0.0, **SHAPE)
    prompts = [f"p{i}" for i in range(count)]
    assert decoder(prompts).texts == alone(prompts).texts


def test_drafting_is_public():
    assert {"Drafter", "NeuralDrafter", "Stopping"} <= set(drafting.__all__)
