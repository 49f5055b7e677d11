"""Imports tunix for a test module, or skips it."""

import importlib
import warnings

import pytest


def import_tunix():
    """Skips the calling module where tunix is absent; the warnings of its libraries pass."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(
            "tunix",
            reason="google-tunix is not installed (docs/rollouts.md says how to test with it)",
        )
        for name in ("gemma", "gemma3", "llama3", "qwen2", "qwen3"):
            importlib.import_module(f"tunix.models.{name}.model")
        importlib.import_module("tunix.rl.grpo.grpo_learner")
