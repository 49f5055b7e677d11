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


MODEL = (st.sampled_from(FORMATS), st.sampled_from(["verifier", "drafter"]), st.data())


@few(15)
@given(*runs.PREDICTIONS_CASE)
def test_predictions(world, kind, made):
    runs.law(world, kind, made)


@few(20)
@given(*runs.DIRECTORY_CASE)
def test_run_directories(world, kind, made):
    runs.law(world, kind, made)


@few(20)
@given(*MODEL)
def test_models(world, format, which, draw):
    models.law(world, format, which, draw)


@few(20)
@given(gin_words.VALUES_CASE)
def test_values(world, bindings):
    gin_words.law_of_values(world, bindings)


@few(15)
@given(gin_words.FILES_CASE)
def test_files(world, lines):
    gin_words.law_of_files(world, lines)


@few(50)
@given(*records.QUICK_CASE)
def test_records(name, which, change):
    records.law(name, which, change)


@pytest.mark.exhaustive
@many(1000)
@given(*records.CASE)
def test_many_records(name, which, change):
    records.law(name, which, change)


@pytest.mark.exhaustive
@many(500)
@given(*runs.PREDICTIONS_CASE)
def test_many_predictions(world, kind, made):
    runs.law(world, kind, made)


@pytest.mark.exhaustive
@many(500)
@given(*runs.DIRECTORY_CASE)
def test_many_run_directories(world, kind, made):
    runs.law(world, kind, made)


@pytest.mark.exhaustive
@many(500)
@given(*MODEL)
def test_many_models(world, format, which, draw):
    models.law(world, format, which, draw)


@pytest.mark.exhaustive
@many(250)
@given(gin_words.VALUES_CASE)
def test_many_values(world, bindings):
    gin_words.law_of_values(world, bindings)


@pytest.mark.exhaustive
@many(250)
@given(gin_words.FILES_CASE)
def test_many_files(world, lines):
    gin_words.law_of_files(world, lines)
