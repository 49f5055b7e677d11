"""Whatever its files and options are, a start succeeds, or refuses in one line and keeps all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzzing import gin_words, models, records, runs
from tests.fuzzing.profiles import few, many
from tests.fuzzing.world import FORMATS, World


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

test_predictions, test_many_predictions = both(10, 500, runs.law, *runs.PREDICTIONS_CASE)
test_run_directories, test_many_run_directories = both(20, 500, runs.law, *runs.DIRECTORY_CASE)
test_models, test_many_models = both(20, 500, models.law, *MODEL)
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
