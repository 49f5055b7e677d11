"""How a verifier of another library is called: its arrays, its arguments and its outcome.

Axes: B rows, G padded block, V vocabulary.
"""

import dataclasses
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from specjax.checks import one_line
from specjax.errors import UserError
from specjax.testing.auditing.hard_cases import VerifyArguments

ARRAYS = ("numpy", "torch", "jax")
DTYPES = ("float64", "float32")
INVALID = -1
LAST_UNIFORM = 1.0 - 2.0**-24  # the largest float32 below 1
# Names of arguments, and what they get.
_MEANINGS = {
    **dict.fromkeys(("tokens", "draft_tokens", "draft_token_ids"), "tokens"),
    **{name: name for name in ("draft_probs", "target_probs", "draft_logits", "target_logits")},
    **dict.fromkeys(("uniforms", "uniform_samples"), "uniforms"),
    "uniform_next": "uniform_next",
    **dict.fromkeys(("lengths", "num_draft_tokens"), "lengths"),
    **dict.fromkeys(("generator", "rng", "key"), "generator"),
}
_ORDER = ("tokens", "draft_probs", "target_probs", "uniforms", "uniform_next", "lengths")
_SIZES = (1, 64, 1024, 8192)  # of JAX's batches: each compiles once


class BadOutcomeError(Exception):
    """A verifier raised, or returned what cannot be read; the message is for the report."""


@dataclasses.dataclass(frozen=True)
class Calling:
    """How to call a function.

    `dtype` is that of probabilities and uniforms. With `certain` its `draft_probs` is None: drafted
    tokens are certain. `names` has pairs of a parameter and its meaning, if it is called by
    keywords.
    """

    function: Callable[..., Any]
    arrays: str = "numpy"
    dtype: str = "float64"
    certain: bool = False
    names: tuple[tuple[str, str], ...] | None = None

    @property
    def takes(self) -> frozenset[str]:
        """The meanings of the arguments that the function gets."""
        return frozenset(_ORDER if self.names is None else (m for _, m in self.names))

    def outcomes(self, rows: VerifyArguments, generator: Any = None) -> np.ndarray:
        """The rows' outcomes `[B]` as codes: accepted * V + next token, or `INVALID`."""
        count, vocab = len(rows.tokens), rows.target_probs.shape[-1]
        padded = rows
        if self.arrays == "jax":
            size = next((s for s in _SIZES if s >= count), count)
            padded = VerifyArguments(*(np.resize(x, (size, *x.shape[1:])) for x in rows))
        try:
            result = self._call(padded, generator)
        except (Exception, SystemExit) as error:
            raise BadOutcomeError(f"it raised {_describe(error)}") from error
        accepted, following = _read(result, padded)
        n, y = _whole(accepted[:count]), _whole(following[:count])
        valid = (n >= 0) & (n <= rows.lengths) & (y >= 0) & (y < vocab)
        return np.where(valid, n * vocab + y, INVALID).astype(np.int64)

    def _call(self, rows: VerifyArguments, generator: Any) -> Any:
        values = rows._asdict()
        with np.errstate(divide="ignore"):
            values["draft_logits"] = np.log(rows.draft_probs)
            values["target_logits"] = np.log(rows.target_probs)
        values = {name: self._converted(array) for name, array in values.items()}
        values["generator"] = generator
        if self.certain:
            values["draft_probs"] = values["draft_logits"] = None
        if self.names is None:
            return self.function(*(values[name] for name in _ORDER))
        return self.function(**{name: values[meaning] for name, meaning in self.names})

    def _converted(self, array: np.ndarray) -> Any:
        if array.dtype.kind == "f" and self.dtype == "float32":
            narrow = array.astype(np.float32)
            array = narrow if array.ndim > 2 else np.minimum(narrow, np.float32(LAST_UNIFORM))
        if self.arrays == "jax":
            return importlib.import_module("jax.numpy").asarray(array)
        array = np.array(array, order="C")  # a copy: a function may write into its arguments
        if self.arrays == "numpy":
            return array
        # PyTorch's indices are of 64 bits.
        wide = array.astype(np.int64) if array.dtype.kind == "i" else array
        return importlib.import_module("torch").from_numpy(wide)


def find_calling(
    function: Callable[..., Any],
    probe: VerifyArguments,
    *,
    arrays: str | None,
    dtype: str | None,
    certain: bool,
    generator: Callable[[str], Any],
) -> Calling:
    """Finds how a function is called, by its parameters and by what it accepts.

    `probe` has rows to try it with, and `generator` makes a library's argument `generator`. Without
    `arrays` the first library that works is chosen, that of the function's module first. If none
    works, the error is about the likeliest.
    """
    names = _parameters(function)
    first: BadOutcomeError | None = None
    for kind in [arrays] if arrays else _likely_arrays(function):
        wide = kind != "jax" or importlib.import_module("jax").config.jax_enable_x64
        for width in [dtype] if dtype else DTYPES if wide else DTYPES[1:]:
            calling = Calling(function, kind, width, certain, names)
            try:
                calling.outcomes(probe, generator(kind))
            except BadOutcomeError as error:
                first = first or error
                continue
            return calling
    assert first is not None
    raise first


def _parameters(function: Callable[..., Any]) -> tuple[tuple[str, str], ...] | None:
    """The parameters with their meanings; None if the arguments are passed by their order."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a built-in function
        return None
    if any(p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY) for p in parameters):
        return None
    names = [
        p.name
        for p in parameters
        if (p.default is p.empty or p.name in _MEANINGS) and p.kind is not p.VAR_KEYWORD
    ]
    meanings = [_MEANINGS.get(name, "") for name in names]
    is_known = "tokens" in meanings and {"target_probs", "target_logits"} & set(meanings)
    if is_known and "" not in meanings and len(set(meanings)) == len(meanings):
        return tuple(zip(names, meanings, strict=True))
    if len(names) == len(_ORDER):
        return None
    title = getattr(function, "__name__", repr(function))
    raise UserError(
        f"{title} takes ({', '.join(names)}), but a verifier takes ({', '.join(_ORDER)}), or some "
        "of these by name (tokens and target_probs at least): wrap it in such a function"
    )


def _likely_arrays(function: Callable[..., Any]) -> list[str]:
    """The libraries that the function's code names, those of its module, then all imported ones."""
    inner = inspect.unwrap(getattr(function, "func", function))
    scope = getattr(inner, "__globals__", None)
    if scope is None:
        scope = getattr(type(inner).__call__, "__globals__", {})
    code = getattr(inner, "__code__", None)
    likely: list[str] = []
    for names in (getattr(code, "co_names", ()), scope):
        modules = [scope[name] for name in names if inspect.ismodule(scope.get(name))]
        libraries = {module.__name__.split(".")[0] for module in modules}
        likely += [kind for kind in ("torch", "jax", "numpy") if kind in libraries]
    # A function that takes a library's arrays has imported it.
    likely += [kind for kind in ARRAYS if kind == "numpy" or kind in sys.modules]
    return list(dict.fromkeys(likely))


def _read(result: Any, rows: VerifyArguments) -> tuple[np.ndarray, np.ndarray]:
    """(accepted, next) `[B]` of what a function returned."""
    tokens, count = rows.tokens, len(rows.tokens)
    if isinstance(result, tuple) and len(result) != 2:
        raise BadOutcomeError(f"it must return (accepted, next), got a tuple of {len(result)}")
    # A list of two may be two rows of tokens.
    if isinstance(result, tuple) or (isinstance(result, list) and len(result) == 2 and count != 2):
        accepted, following = (_numbers(x) for x in result)
        for name, array in (("accepted", accepted), ("next", following)):
            if array.size != count or array.ndim > 2:
                raise BadOutcomeError(
                    f"its {name} must have shape [B] = [{count}], got {list(array.shape)}"
                )
        return accepted.reshape(-1), following.reshape(-1)
    emitted = _numbers(result)
    needed = int(rows.lengths.max()) + 1
    if emitted.ndim != 2 or len(emitted) != count or emitted.shape[1] < needed:
        raise BadOutcomeError(
            f"it must return (accepted [B], next [B]) or tokens [B, G + 1] padded with -1, B = "
            f"{count}, G + 1 = {tokens.shape[1] + 1}, got an array of shape {list(emitted.shape)}"
        )
    kept = (emitted >= 0).sum(axis=1)
    accepted = kept - 1
    following = emitted[np.arange(count), np.maximum(accepted, 0)]
    width = min(emitted.shape[1], tokens.shape[1])
    after = np.arange(width) >= accepted[:, None]
    as_drafted = ((emitted[:, :width] == tokens[:, :width]) | after).all(axis=1)
    has_gap = ((np.arange(emitted.shape[1]) < kept[:, None]) & ~(emitted >= 0)).any(axis=1)
    return np.where(as_drafted & ~has_gap, accepted, INVALID), following


def _numbers(value: Any) -> np.ndarray:
    try:
        array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    except (Exception, SystemExit) as error:
        what = "its result cannot be read as an array"
        raise BadOutcomeError(f"{what}: {_describe(error)}") from error
    if array.dtype.kind not in "iufb":
        raise BadOutcomeError(
            "it must return (accepted [B], next [B]) or tokens [B, G + 1] padded with -1, got "
            f"{type(value).__name__}"
        )
    return array


def _whole(values: np.ndarray) -> np.ndarray:
    """As integers; `INVALID` for NaN, infinities and fractions."""
    if values.dtype.kind != "f":
        return values.astype(np.int64)
    whole = np.isfinite(values) & (np.abs(values) < 2.0**53)
    safe = np.where(whole, values, 0.0)
    return np.where(whole & (safe == np.round(safe)), safe, INVALID).astype(np.int64)


def _describe(error: BaseException) -> str:
    text = one_line(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f" ({os.path.basename(frame.filename)}:{frame.lineno})"
    return f"{type(error).__name__}: {text[:200]}{where}" if text else type(error).__name__ + where
