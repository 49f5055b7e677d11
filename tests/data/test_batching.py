import numpy as np
import pytest

from specjax.data.batching import (
    Batching,
    BucketedBatches,
    JoinedLayout,
    PairLayout,
    tokenize_pairs,
)
from specjax.data.examples import Example

PAD, EOS = 0, 1


def ended(text):
    return [*map(int, text.split()), EOS]


def make_pairs(count=57, seed=0, longest=14):
    rng = np.random.default_rng(seed)
    texts = [
        [" ".join(map(str, rng.integers(2, 90, rng.integers(1, longest)))) for _ in range(2)]
        for _ in range(count)
    ]
    examples = [Example(i, a, b) for i, (a, b) in enumerate(texts)]
    return tokenize_pairs(examples, ended, ended)


def batches(pairs, *, bucket_lengths=(4, 8, 15), tokens_per_batch=32, layout=None, **options):
    batching = Batching(bucket_lengths=bucket_lengths, tokens_per_batch=tokens_per_batch)
    return BucketedBatches(pairs, batching, layout, **({"seed": 3} | options))


def rows(batch):
    """The real rows of a batch, as hashable pairs."""
    keep = batch.targets[:, 0] != PAD
    return [
        (tuple(a[a != PAD].tolist()), tuple(b[b != PAD].tolist()))
        for a, b in zip(batch.inputs[keep], batch.targets[keep], strict=True)
    ]


def all_rows(pairs):
    return sorted((tuple(a.tolist()), tuple(b.tolist())) for a, b in (pairs[i] for i in range(57)))


def test_pairs_end_with_eos_and_keep_their_order():
    pairs = tokenize_pairs([Example(0, "5 6", "7"), Example(1, "", "8 9")], ended, ended)
    assert len(pairs) == 2
    assert [x.tolist() for x in pairs[0]] == [[5, 6, EOS], [7, EOS]]
    assert [x.tolist() for x in pairs[1]] == [[EOS], [8, 9, EOS]]
    assert pairs.lengths().tolist() == [[3, 2], [1, 3]]


def test_every_epoch_has_each_pair_once_in_a_new_order():
    pairs = make_pairs()
    data = batches(pairs)
    epochs = []
    for epoch in range(2):
        steps = range(epoch * data.batches_per_epoch, (epoch + 1) * data.batches_per_epoch)
        epochs.append([row for step in steps for row in rows(data.batch(step))])
        assert sorted(epochs[-1]) == all_rows(pairs)
    assert epochs[0] != epochs[1]


def test_a_batch_depends_on_its_step_alone():
    pairs = make_pairs()
    forward = batches(pairs)
    expected = [forward.batch(step) for step in range(2 * forward.batches_per_epoch + 3)]
    backward = batches(pairs)
    for step in reversed(range(len(expected))):
        got = backward.batch(step)
        np.testing.assert_array_equal(got.inputs, expected[step].inputs)
        np.testing.assert_array_equal(got.targets, expected[step].targets)
    other = batches(pairs, seed=4).batch(0)
    assert rows(other) != rows(expected[0])


def test_shapes_are_few_and_within_the_budget():
    data = batches(make_pairs(), row_multiple=2)
    shapes = {data.batch(step).inputs.shape for step in range(data.batches_per_epoch)}
    assert shapes <= {(8, 4), (4, 8), (2, 15)}
    assert len(shapes) == 3


def test_rows_without_a_pair_have_one_eos_and_no_targets():
    data = batches(make_pairs(count=1), bucket_lengths=(15,))
    batch = data.batch(0)
    assert len(rows(batch)) == 1
    assert batch.inputs[1:].tolist() == [[EOS] + [PAD] * 14] * (len(batch.inputs) - 1)
    assert not batch.targets[1:].any()


def test_inputs_without_a_token_have_one_eos():
    pairs = tokenize_pairs([Example(0, "", "7")], lambda _: [], ended)
    assert batches(pairs, bucket_lengths=(4,)).batch(0).inputs.tolist()[0] == [EOS, PAD, PAD, PAD]


def test_prompt_and_target_share_a_row_and_only_the_target_is_learnt():
    # A prompt begins as its tokenizer says, and only the target ends.
    pairs = tokenize_pairs(
        [Example(0, "5 6", "7 8"), Example(1, "", "9")], lambda t: ended(t)[:-1], ended
    )
    batch = batches(pairs, layout=JoinedLayout(pad_id=EOS), bucket_lengths=(8,), seed=None).batch(0)
    assert batch.tokens.tolist()[:2] == [
        [5, 6, 7, 8, EOS, EOS, EOS, EOS],
        [9, EOS, EOS, EOS, EOS, EOS, EOS, EOS],
    ]
    assert batch.is_target.astype(int).tolist() == [
        [0, 0, 1, 1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [0] * 8,
        [0] * 8,
    ]


def test_joined_rows_are_bucketed_by_the_sum_of_both_lengths():
    pairs = make_pairs()
    lengths = pairs.lengths().sum(axis=1)
    data = batches(pairs, layout=JoinedLayout(), bucket_lengths=(8, 16))
    assert data.num_left_out == int((lengths > 16).sum()) > 0
    for batch in map(data.batch, range(data.batches_per_epoch)):
        used = (batch.tokens != PAD).sum(axis=1)
        assert used.max() > 8 or batch.tokens.shape[1] == 8


def test_describe_has_everything_that_determines_the_batches():
    pairs = make_pairs()
    told = batches(pairs).describe()
    assert told == batches(make_pairs()).describe()
    others = (
        batches(make_pairs(seed=1)),
        batches(pairs, seed=4),
        batches(pairs, row_multiple=3),
        batches(pairs, tokens_per_batch=64),
        batches(pairs, layout=JoinedLayout(), bucket_lengths=(4, 8, 15)),
        batches(pairs, layout=PairLayout(pad_id=2)),
    )
    assert all(other.describe() != told for other in others)


def test_without_a_seed_the_order_is_that_of_the_data():
    pairs = make_pairs()
    data = batches(pairs, seed=None, bucket_lengths=(15,))
    found = [row for step in range(data.batches_per_epoch) for row in rows(data.batch(step))]
    assert found == [tuple(tuple(x.tolist()) for x in pairs[i]) for i in range(57)]


def test_longer_pairs_are_left_out_and_counted():
    pairs = make_pairs()
    data = batches(pairs, bucket_lengths=(4, 8))
    found = [row for step in range(data.batches_per_epoch) for row in rows(data.batch(step))]
    fitting = [row for row in all_rows(pairs) if max(map(len, row)) <= 8]
    assert sorted(found) == fitting
    assert data.num_left_out == 57 - len(fitting) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bucket_lengths": (8, 4)}, r"bucket_lengths=\(8, 4\) must be increasing"),
        ({"bucket_lengths": ()}, "bucket_lengths must be a number or one number per"),
        ({"bucket_lengths": 8}, r"bucket_lengths=8 must be increasing lengths, such as"),
        ({"bucket_lengths": (0, 4)}, r"bucket_lengths must be .* got 0 in row 0"),
        ({"bucket_lengths": (4, 8.5)}, r"bucket_lengths must be .* got 8.5 in row 1"),
        ({"bucket_lengths": "8"}, "bucket_lengths must be a number, got '8'"),
        ({"bucket_lengths": (1,)}, "all 57 pairs are longer than 1 tokens"),
        ({"tokens_per_batch": 0}, "tokens_per_batch must be a whole number .* got 0"),
        ({"tokens_per_batch": "x"}, "tokens_per_batch must be a number, got 'x'"),
    ],
)
def test_impossible_batches_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        batches(make_pairs(), **options)


def test_batching_accepts_lists_and_floats_from_gin():
    batching = Batching(bucket_lengths=[4, 8.0], tokens_per_batch=1e3)
    assert batching == Batching(bucket_lengths=(4, 8), tokens_per_batch=1000)
    assert hash(batching) == hash(Batching(bucket_lengths=(4, 8), tokens_per_batch=1000))


def test_every_batch_has_at_least_one_row_per_device():
    data = batches(make_pairs(), tokens_per_batch=1, row_multiple=3)
    assert data.rows == [3, 3, 3]
    found = [row for step in range(data.batches_per_epoch) for row in rows(data.batch(step))]
    assert sorted(found) == all_rows(make_pairs())
