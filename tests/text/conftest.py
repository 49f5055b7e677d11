"""The tiny pair on disk, loaded once for all files that need no other."""

import pytest

import specjax
from tests import tiny_pair


@pytest.fixture(scope="session")
def paths():
    return tiny_pair.shared_pair()


@pytest.fixture(scope="session")
def pair(paths):
    return specjax.load_pair(**paths)
