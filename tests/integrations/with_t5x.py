"""Imports T5X for a test module, or skips it."""

import os
import warnings

import pytest


def import_t5x():
    """Skips the calling module where T5X is absent; TensorFlow's and T5X's own warnings pass."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(
            "t5x.models",
            reason="T5X is not on the path (docs/t5x.md says how to get it)",
            exc_type=ImportError,
        )
