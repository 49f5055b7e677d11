"""The three verifications: known values, extremes, errors. Laws: test_exactness.py."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import verification
from specjax.decoding.blocks import draw_after, judge
from specjax.types import DraftBlock, DraftTraits, ScoredBlock
from tests.tables import RULES, VERIFICATIONS, p_value, random_distributions


def expected_tokens(algorithm, q, pi, length):
    """E[number accepted] for draft tables q, pi indexed by the prefix: lists of `[V] * i + [V]`."""
    vocab = q[0].shape[-1]
    total = 0.0
    for block in itertools.product(range(vocab), repeat=length):
        rows = [np.stack([t[i][block[:i]] for i in range(length + 1)]) for t in (q, pi)]
        weight = np.prod([rows[0][i, x] for i, x in enumerate(block)], dtype=np.float64)
        thresholds = _acceptance(algorithm)(
            jnp.array(block, jnp.int32), rows[0], rows[1], jnp.int32(length)
        ).thresholds
        total += weight * float(verification.expected_accepted(algorithm, thresholds))
    return total


@functools.cache
def _acceptance(algorithm):
    def call(tokens, q, pi, length):
        block = ScoredBlock(tokens, q, pi, length)
        return algorithm.acceptance(block, algorithm.init_carry(tokens.size))

    return jax.jit(call)


def iid(row, length):
    row = np.asarray(row, np.float32)
    return [np.broadcast_to(row, (len(row),) * i + row.shape) for i in range(length + 1)]


def random_tree(seed, vocab, length, zeros=0.0):
    return [
        random_distributions(100 * seed + i, vocab**i, vocab, zeros).reshape((vocab,) * (i + 1))
        for i in range(length + 1)
    ]


@pytest.mark.parametrize(
    ("name", "want"), [("Token", 10 / 9), ("Block", 11 / 9), ("GreedyBlock", 12 / 9)]
)
def test_the_toy_example_of_the_paper(name, want):
    q, pi = iid([2 / 3, 1 / 3], 2), iid([1 / 3, 2 / 3], 2)
    assert expected_tokens(VERIFICATIONS[name], q, pi, 2) == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("vocab", "length"), [(2, 1), (3, 2), (2, 4)])
def test_greedy_is_optimal_and_block_beats_token(seed, vocab, length):
    q, pi = (random_tree(seed + s, vocab, length, zeros=0.2) for s in (0, 50))
    got = {n: expected_tokens(v, q, pi, length) for n, v in VERIFICATIONS.items()}
    best = 0.0
    for size in range(1, length + 1):
        for block in itertools.product(range(vocab), repeat=size):
            path = [
                np.prod([t[i][block[: i + 1]] for i in range(size)], dtype=np.float64)
                for t in (q, pi)
            ]
            best += min(path)
    assert got["GreedyBlock"] == pytest.approx(best, abs=1e-5)
    assert got["Token"] - 1e-6 <= got["Block"] <= got["GreedyBlock"] + 1e-6
    if length == 1:
        assert got["Block"] == pytest.approx(got["Token"], abs=1e-6)


def test_block_equals_token_for_a_deterministic_drafter():
    length, vocab = 3, 3
    q = [
        np.broadcast_to(np.eye(vocab, dtype=np.float32)[i % 2], t.shape)
        for i, t in enumerate(random_tree(0, vocab, length))
    ]
    pi = random_tree(1, vocab, length)
    got = [expected_tokens(VERIFICATIONS[n], q, pi, length) for n in ("Token", "Block")]
    assert got[0] == pytest.approx(got[1], abs=1e-6)


def law_of_rounds(algorithm, rule, q, p, length, rounds_key, draws):
    """Sampled: counts of (number accepted, emitted tokens) of `draws` first rounds."""
    pi = jax.vmap(rule)(q, p, q, p)

    @jax.jit
    def sample(keys):
        def one(key):
            draft_key, verify_key = jax.random.split(key)
            tokens = jax.random.categorical(draft_key, jnp.log(q[:-1])).astype(jnp.int32)
            block = ScoredBlock(tokens, q, pi, jnp.int32(length))
            carry = algorithm.init_carry(length)
            out = verification.verify(algorithm, verify_key, block, carry)
            return tokens, out.num_accepted, out.next_token

        return jax.vmap(one)(keys)

    tokens, accepted, following = map(np.asarray, sample(jax.random.split(rounds_key, draws)))
    vocab = q.shape[1]
    seen: dict[tuple[int, ...], float] = {}
    for row, n, token in zip(tokens, accepted, following, strict=True):
        outcome = (*row[:n].tolist(), int(token))
        seen[outcome] = seen.get(outcome, 0) + 1
    want: dict[tuple[int, ...], float] = {}
    following = jax.jit(verification.next_token_probs)
    for block in itertools.product(range(vocab), repeat=length):
        weight = float(np.prod([q[i, x] for i, x in enumerate(block)]))
        given = ScoredBlock(jnp.array(block, jnp.int32), q, pi, jnp.int32(length))
        acceptance = _acceptance(algorithm)(*given[:4])
        counts = np.asarray(verification.num_accepted_probs(algorithm, acceptance.thresholds))
        for n in range(length + 1):
            nxt = following(acceptance, given, jnp.int32(n))
            for token, chance in enumerate(np.asarray(nxt)):
                outcome = (*block[:n], token)
                want[outcome] = want.get(outcome, 0.0) + weight * counts[n] * float(chance)
    return seen, want


@pytest.mark.parametrize("name", VERIFICATIONS)
def test_sampled_rounds_follow_the_law(name):
    draws, length = 60_000, 3
    q, p = (jnp.asarray(random_distributions(s, length + 1, 4, 0.2)) for s in (11, 12))
    seen, want = law_of_rounds(
        VERIFICATIONS[name], RULES["Lossy"], q, p, length, jax.random.key(3), draws
    )
    assert p_value(seen, want, draws) > 1e-4
    # The control: the same draws against a law that is off by 2 % in total variation.
    ordered = sorted(want, key=want.__getitem__)
    wrong = dict(want)
    wrong[ordered[-1]] -= 0.02
    wrong[ordered[-2]] += 0.02
    assert p_value(seen, wrong, draws) < 1e-4


@pytest.mark.parametrize("name", VERIFICATIONS)
def test_a_token_without_target_probability_is_never_accepted(name):
    # Also at the edges of the uniforms: u < threshold is strict, the threshold is exactly 0 or 1.
    q = jnp.full((4, 3), 1 / 3, jnp.float32)
    pi = jnp.array([[0.5, 0.5, 0.0]] * 4, jnp.float32)
    for block in itertools.product(range(3), repeat=3):
        tokens = jnp.array(block, jnp.int32)
        thresholds = np.asarray(_acceptance(VERIFICATIONS[name])(tokens, q, pi, 3).thresholds)
        if 2 in block:
            first = block.index(2)
            last = first + 1 if name == "Token" else None  # Token stops there, Block goes on
            assert (thresholds[first:last] == 0.0).all()
        elif name == "Token":
            assert (thresholds == 1.0).all()


@pytest.mark.parametrize("name", VERIFICATIONS)
def test_extremes_stay_finite(name):
    eye = np.eye(3, dtype=np.float32)
    rows = [eye[0], eye[1], np.float32([0.5, 0.5, 0]), np.float32([1 / 3] * 3)]
    algorithm = VERIFICATIONS[name]
    step = jax.jit(jax.vmap(functools.partial(verification.verify, algorithm)))
    cases = list(itertools.product(rows, repeat=4))
    q = np.stack([np.stack([a, b, a]) for a, b, _, _ in cases])
    pi = np.stack([np.stack([c, d, c]) for _, _, c, d in cases])
    tokens = q[:, :2].argmax(-1).astype(np.int32)
    carry = jax.vmap(lambda _: algorithm.init_carry(2))(jnp.arange(len(cases)))
    for length in range(3):
        keys = jax.random.split(jax.random.key(length), len(cases))
        block = ScoredBlock(tokens, q, pi, jnp.full((len(cases),), length))
        out = step(keys, block, carry)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(out))
        assert (out.num_accepted <= length).all()
        at = np.arange(len(cases)), np.asarray(out.num_accepted), np.asarray(out.next_token)
        assert (pi[at] > 0).all()
        if name == "GreedyBlock":
            carry = out.carry


@pytest.mark.parametrize("name", VERIFICATIONS)
def test_padding_changes_nothing(name):
    algorithm, length = VERIFICATIONS[name], 2
    q, pi = random_distributions(0, 5, 4), random_distributions(1, 5, 4)
    tokens = jnp.array([1, 2, 3, 0], jnp.int32)
    long = _acceptance(algorithm)(tokens, q, pi, jnp.int32(length))
    short = _acceptance(algorithm)(tokens[:2], q[:3], pi[:3], jnp.int32(length))
    np.testing.assert_array_equal(long.thresholds[:2], short.thresholds)
    np.testing.assert_array_equal(long.scales[:3], short.scales)
    assert (long.thresholds[2:] == 0).all()
    # The padding is not read, and cannot make a NaN.
    poisoned = [
        np.concatenate([x[:3], np.full((2, 4), v, np.float32)]) for x, v in ((q, 0.0), (pi, np.inf))
    ]
    other = _acceptance(algorithm)(tokens.at[2:].set(99), *poisoned, jnp.int32(length))
    np.testing.assert_array_equal(other.thresholds, long.thresholds)


class FewScales(verification.Token):
    def acceptance(self, block, carry=()):
        judged = super().acceptance(block, carry)
        return judged._replace(scales=judged.scales[1:])


SHAPES = {"tokens": (3,), "draft_probs": (4, 5), "target_probs": (4, 5), "num_drafted": ()}
TOKEN, GREEDY = verification.Token(), verification.GreedyBlock()
NO_BLOCKS = [
    *(
        (TOKEN, change, (), "")
        for change in (
            {"target_probs": (4, 6)},
            {"draft_probs": (3, 5)},
            {"target_probs": (5, 5)},
            {"tokens": (2, 3)},
        )
    ),
    (FewScales(), {}, (), "FewScales.acceptance"),
    (GREEDY, {}, (), r"init_carry\(G\)"),
    (GREEDY, {}, GREEDY.init_carry(2), "another block length"),
]


@pytest.mark.parametrize(("algorithm", "change", "carry", "message"), NO_BLOCKS, ids=str)
def test_what_is_no_block_of_an_algorithm_is_refused(algorithm, change, carry, message):
    block = ScoredBlock(
        *(
            jax.ShapeDtypeStruct(shape, jnp.float32 if "probs" in name else jnp.int32)
            for name, shape in (SHAPES | change).items()
        )
    )
    call = functools.partial(verification.verify, algorithm, jax.random.key(0))
    with pytest.raises(AssertionError, match=message or None):
        jax.eval_shape(call, block, carry)


def test_a_length_beyond_the_block_is_refused():
    probs = jnp.full((4, 2), 0.5)
    block = ScoredBlock(jnp.zeros((3,), jnp.int32), probs, probs, jnp.int32(9))
    with pytest.raises(AssertionError, match="num_drafted must lie in 0"):
        verification.verify(verification.Token(), jax.random.key(0), block)


def test_greedy_block_refuses_drafters_for_which_it_is_not_exact():
    traits = DraftTraits(prefix_only=False)
    with pytest.raises(ValueError, match="GreedyBlock is not exact with .*: use Block or"):
        verification.GreedyBlock().check(5, traits)
    verification.GreedyBlock().check(5, DraftTraits())
    verification.Token().check(5, traits)
    verification.Block().check(5, traits)


@pytest.mark.parametrize("name", VERIFICATIONS)
@pytest.mark.parametrize("which", ["draft", "target"])
@pytest.mark.parametrize(("at", "token"), [(0, True), (2, True), (1, False)])
def test_nan_is_never_accepted(name, which, at, token):
    algorithm, length = VERIFICATIONS[name], 3
    tokens = jnp.zeros((length,), jnp.int32)
    probs = {key: np.full((length + 1, 4), 0.25, np.float32) for key in ("draft", "target")}
    uniforms = jnp.zeros((length,), jnp.float32)

    def accepted():
        carry = algorithm.init_carry(length) if algorithm.has_carry else ()
        given = (jnp.asarray(probs["draft"]), jnp.asarray(probs["target"]), jnp.int32(length))
        block = ScoredBlock(tokens, *given)
        return int(verification.accept(algorithm, uniforms, block, carry)[1])

    assert accepted() == length  # the control: without NaN all is accepted
    probs[which][at, 0 if token else 1] = np.nan
    # Token verification never reads the other entries; the loop ends such a row.
    assert accepted() <= at or (name == "Token" and not token)


CERTAIN = {"Token": verification.Token(), "Block": verification.Block()}


class ReadsProbs(verification.Block):
    """The control: it reads distributions also of certain tokens."""

    needs_probs = True


def certain_round(algorithm, uniforms, tokens, targets, count, bonus):
    """How many certain tokens of each row are accepted, and which token follows them."""
    block = DraftBlock(tokens, None, None, count, {})
    judged = judge(algorithm, uniforms[:, :-1], block, targets, ())
    return judged.accepted, draw_after(judged, uniforms[:, -1:], block, bonus)


@pytest.mark.parametrize("name", CERTAIN)
def test_certain_tokens_are_judged_as_by_one_hot_distributions(name):
    rows, longest, vocab = 200, 3, 5
    rng = np.random.default_rng(0)
    targets = rng.dirichlet(np.full(vocab, 0.4), (rows, longest + 1)).astype(np.float32)
    targets[:9] = np.eye(vocab, dtype=np.float32)[rng.integers(vocab, size=(9, longest + 1))]
    tokens = rng.integers(vocab, size=(rows, longest)).astype(np.int32)
    count = rng.integers(longest + 1, size=rows).astype(np.int32)
    hot = np.eye(vocab, dtype=np.float32)[np.pad(tokens, ((0, 0), (0, 1)))]

    @jax.jit
    @jax.vmap
    def both(tokens, hot, targets, count):
        give = CERTAIN[name].acceptance
        block = ScoredBlock(tokens, hot, targets, count)
        return give(block), give(block._replace(draft_probs=None))

    told, certain = both(tokens, hot, targets, count)
    np.testing.assert_allclose(certain.thresholds, told.thresholds, atol=2e-6)
    np.testing.assert_allclose(certain.scales, told.scales, atol=2e-6)
    uniforms = rng.random((rows, longest + 1), np.float32)
    judged = jax.jit(functools.partial(certain_round, CERTAIN[name]))
    accepted, token = judged(uniforms, tokens, targets, count, targets[:, 0])
    assert (np.asarray(accepted) <= count).all() and (np.asarray(accepted) > 0).any()
    # A token that has failed does not follow.
    failed = np.flatnonzero(np.asarray(accepted) < count)
    assert len(failed) > 20
    assert (token[failed] != tokens[failed, accepted[failed]]).all()


@pytest.mark.parametrize("algorithm", [*CERTAIN.values(), ReadsProbs()], ids=str)
def test_certain_tokens_need_no_array_of_distributions(algorithm):
    rows, longest, vocab = 2, 3, 97
    shapes = (rows, longest + 1), (rows, longest), (rows, longest + 1, vocab), (rows,)
    kinds = jnp.float32, jnp.int32, jnp.float32, jnp.int32
    given = [jax.ShapeDtypeStruct(*each) for each in zip(shapes, kinds, strict=True)]
    bonus = jax.ShapeDtypeStruct((rows, vocab), jnp.float32)
    program = jax.jit(functools.partial(certain_round, algorithm)).lower(*given, bonus).as_text()
    one_hot = f"tensor<{rows}x{longest + 1}x{vocab}xi1>"  # which entries are the tokens'
    assert (one_hot in program) == isinstance(algorithm, ReadsProbs)
