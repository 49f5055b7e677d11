"""Results are kept as long as they fit, and an object's as long as it lives."""

import gc

import numpy as np

from specjax.processors.caches import Identity, bounded_cache


def test_the_results_used_last_are_kept():
    calls = []

    @bounded_cache(most_bytes=3000)
    def made(size):
        calls.append(size)
        return (np.zeros(size, np.int8),)

    for size in (1000, 1001, 1000, 1002, 1000, 1001):
        assert made(size)[0].size == size
    assert calls == [1000, 1001, 1002, 1001]  # the second was there longest unused
    made(5000)  # more than the limit: it is kept, and the others are not
    made(5000)
    assert calls[4:] == [5000] and len(made.kept) == 1


class Tokenizer:
    """Equal to each other, and without a hash, as dataclasses are."""

    def __eq__(self, other):
        return True


class Slots:
    __slots__ = ()


def test_a_cache_does_not_keep_a_tokenizer_alive():
    calls = []

    @bounded_cache(most_bytes=10**6)
    def made(of, size):
        calls.append(of.of)
        return np.zeros(size, np.int8)

    first, second, slots = Tokenizer(), Tokenizer(), Slots()
    for _ in range(2):
        for each in (first, second, slots):
            made(Identity(each), 10)
    assert [*map(id, calls)] == [*map(id, (first, second, slots))]
    calls.clear()
    del each, first
    gc.collect()
    assert sum(key[0].of is None for key in made.kept) == 1
    made(Identity(second), 20)
    assert all(key[0].of is not None for key in made.kept) and len(made.kept) == 3
    assert Identity(second) == Identity(second) != Identity(slots)
