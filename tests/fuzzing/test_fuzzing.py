"""Whatever its files and options are, a start succeeds, or refuses in one line and keeps all.

`make test` tries the same few cases each time; `make test-all` others each time, and a failure
prints the line `@reproduce_failure(...)` that repeats it.
"""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzzing import directories, gin_words, records
from tests.fuzzing.world import FORMATS, World

# A case runs the whole command: slower than what hypothesis expects of a test.
_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def few(count: int) -> settings:
    """The same cases in every run."""
    return settings(
        max_examples=count, derandomize=True, deadline=None, suppress_health_check=_SLOW
    )


def many(count: int) -> settings:
    """New cases in every run."""
    return settings(
        max_examples=count,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=_SLOW,
    )


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("world"))


def both(few_times, many_times, law, *case):
    """The tests of a law: a few cases, and many other cases."""

    def test(world, case):
        law(world, *case)

    given_case = given(case=st.tuples(*case))
    return few(few_times)(given_case(test)), pytest.mark.exhaustive(
        many(many_times)(given_case(test))
    )


MODEL = (st.sampled_from(FORMATS), st.sampled_from(["verifier", "drafter"]), st.data())

test_predictions, test_many_predictions = both(
    10, 500, directories.law_of_runs, *directories.PREDICTIONS_CASE
)
test_run_directories, test_many_run_directories = both(
    20, 500, directories.law_of_runs, *directories.DIRECTORY_CASE
)
test_models, test_many_models = both(20, 500, directories.law_of_models, *MODEL)
test_values, test_many_values = both(20, 250, gin_words.law_of_values, gin_words.VALUES_CASE)
test_files, test_many_files = both(15, 250, gin_words.law_of_files, gin_words.FILES_CASE)


@few(50)
@given(*records.QUICK_CASE)
def test_records(name, which, change):
    records.law(name, which, change)


@pytest.mark.exhaustive
@many(1000)
@given(*records.CASE)
def test_many_records(name, which, change):
    records.law(name, which, change)
