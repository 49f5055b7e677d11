"""How a verifier of another library is called: its arrays, its arguments and its outcome.

Axes: B rows, G padded block, V vocabulary, N = the sum of the rows' lengths.
"""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from specjax.checks import one_line
from specjax.errors import UserError
from specjax.testing.auditing.hard_cases import VerifyArguments
from specjax.testing.auditing.injected import LAST_UNIFORM

FORMS = ("arrays", "flat", "transformers")
ARRAYS = ("numpy", "torch", "jax")
DTYPES = ("float64", "float32")
INVALID = -1
# Names of arguments, and what they get.
_MEANINGS = {
    **dict.fromkeys(("tokens", "draft_tokens", "draft_token_ids"), "tokens"),
    **dict.fromkeys(("draft_probs", "q"), "draft_probs"),
    **dict.fromkeys(("target_probs", "p"), "target_probs"),
    "draft_logits": "draft_logits",
    "target_logits": "target_logits",
    **dict.fromkeys(("uniforms", "uniform_samples"), "uniforms"),
    "uniform_next": "uniform_next",
    **dict.fromkeys(("lengths", "num_draft_tokens"), "lengths"),
    **dict.fromkeys(("cu_lengths", "cu_num_draft_tokens"), "cu_lengths"),
    **dict.fromkeys(("generator", "rng", "key"), "generator"),
}
_ORDER = ("tokens", "draft_probs", "target_probs", "uniforms", "uniform_next", "lengths")
_SIZES = (1, 64, 1024, 8192)  # of JAX's batches: each compiles once


class BadOutcomeError(Exception):
    """A verifier raised, or returned what cannot be read; the message is for the report."""


class AuditLimitError(Exception):
    """The audit cannot judge a verifier this way; the message says why, and how it can."""


class Conversion(Protocol):
    """Makes a library's array of a NumPy array."""

    def __call__(self, array: np.ndarray) -> Any:
        """The array."""


@dataclasses.dataclass(frozen=True)
class Calling:
    """How to call a function.

    Attributes:
      function: the verifier.
      form: "arrays", "flat" (rows one after the other, as in vLLM) or "transformers" (the arguments
        of its `_speculative_sampling`, one row at a time).
      arrays: the library of its arrays.
      dtype: of probabilities and uniforms.
      logits: whether it gets logarithms of probabilities.
      certain: whether `draft_probs` is None: drafted tokens are certain.
      names: parameter -> meaning, if it is called by keywords; else None.
    """

    function: Callable[..., Any]
    form: str
    arrays: str
    dtype: str
    logits: bool
    certain: bool
    names: tuple[tuple[str, str], ...] | None

    @property
    def takes(self) -> frozenset[str]:
        """The meanings of the arguments that the function gets."""
        if self.form == "transformers":
            return frozenset({"tokens", "draft_probs", "target_probs", "lengths"})
        return frozenset(_ORDER if self.names is None else (m for _, m in self.names))

    @property
    def is_batched(self) -> bool:
        """Whether a call takes several rows."""
        return self.form != "transformers"

    @property
    def takes_padding(self) -> bool:
        """Whether a row may be shorter than the block."""
        return self.form == "flat" or (self.form == "arrays" and "lengths" in self.takes)

    def outcomes(self, rows: VerifyArguments, generator: Any = None) -> np.ndarray:
        """The rows' outcomes as codes: accepted * V + next token, or `INVALID`; `[B]`.

        Raises:
          BadOutcomeError: the function raised, or its result has other shapes or types.
          AuditLimitError: it draws in a way that hooks do not know.
        """
        count, vocab = len(rows.tokens), rows.target_probs.shape[-1]
        padded = rows
        if self.arrays == "jax" and self.is_batched:
            size = next((s for s in _SIZES if s >= count), count)
            padded = VerifyArguments(*(np.resize(x, (size, *x.shape[1:])) for x in rows))
        try:
            found = self._called(padded, generator)
        except (AuditLimitError, BadOutcomeError):
            raise
        except (Exception, SystemExit) as error:
            raise BadOutcomeError(f"it raised {_told(error)}") from error
        accepted, following = _read(found, padded, self.is_batched)
        n, y = _whole(accepted[:count]), _whole(following[:count])
        valid = (n >= 0) & (n <= rows.lengths) & (y >= 0) & (y < vocab)
        return np.where(valid, n * vocab + y, INVALID).astype(np.int64)

    def _called(self, rows: VerifyArguments, generator: Any) -> Any:
        to = functools.partial(_converted, arrays=self.arrays, dtype=self.dtype)
        draft = None if self.certain else rows.draft_probs
        values: dict[str, Any] = {"generator": generator}
        if self.form == "flat":
            values |= _flattened(rows, draft)
        else:
            values |= rows._asdict() | {"draft_probs": draft}
        for name in ("draft", "target"):
            probs = values[f"{name}_probs"]
            logits = None if probs is None else _logarithm(probs)
            values[f"{name}_logits"] = logits
            if self.logits:
                values[f"{name}_probs"] = logits
        values = {k: to(v) if isinstance(v, np.ndarray) else v for k, v in values.items()}
        if self.form == "transformers":
            prompt = to(np.zeros((1, 1), np.int32))
            library = importlib.import_module("torch")
            ids = library.cat([prompt, values["tokens"]], dim=1)
            length = int(rows.lengths[0])
            with library.no_grad():
                return self.function(ids, values["draft_logits"], length, values["target_logits"])
        if self.names is None:
            last = "cu_lengths" if self.form == "flat" else "lengths"
            return self.function(*(values[name] for name in (*_ORDER[:-1], last)))
        return self.function(**{name: values[meaning] for name, meaning in self.names})


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Keeps PyTorch, if it is imported, from sharing tiny arrays among threads."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def found_calling(
    function: Callable[..., Any],
    probe: VerifyArguments,
    *,
    form: str | None = None,
    arrays: str | None = None,
    dtype: str | None = None,
    logits: bool = False,
    certain: bool = False,
    generator: Callable[[str], Any] = lambda arrays: None,
) -> Calling:
    """Finds how a function is called, by its parameters and by what it accepts.

    Args:
      function: the verifier.
      probe: rows to try it with.
      form: one of `FORMS`; by the names of its parameters if None.
      arrays: one of `ARRAYS`; the first that works if None, its module's own library first.
      dtype: one of `DTYPES`; float64 if the function takes it.
      logits: whether it gets logarithms.
      certain: whether `draft_probs` is None.
      generator: makes the argument `generator` for a library.

    Returns:
      The `Calling`.

    Raises:
      ValueError: the parameters are not those of a verifier.
      BadOutcomeError: no library's arrays work; the message is about the likeliest.
    """
    names = _parameters(function)
    if form is None:
        form = _form_of(function, names)
    if form == "transformers" and names is not None and len(names) != 4:
        raise UserError(
            "form='transformers' is for (candidate_input_ids, candidate_logits, candidate_length, "
            f"new_logits), but the function takes ({', '.join(names)}): leave the form out"
        )
    bound = None if form == "transformers" else _bound(function, names)
    kinds = [arrays] if arrays else _likely(function, form)
    first: BadOutcomeError | None = None
    for kind in kinds:
        wide = kind != "jax" or _jax_is_wide()
        for width in [dtype] if dtype else DTYPES if wide else DTYPES[1:]:
            calling = Calling(function, form, kind, width, logits, certain, bound)
            try:
                rows = probe
                if not calling.is_batched:
                    rows = VerifyArguments(*(x[:1] for x in probe))
                calling.outcomes(rows, generator(kind))
            except BadOutcomeError as error:
                first = first or error
                continue
            return calling
    assert first is not None
    raise first


def _parameters(function: Callable[..., Any]) -> list[str] | None:
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a built-in function
        return None
    if any(p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY) for p in found):
        return None
    needed = [p.name for p in found if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    taken = {_MEANINGS.get(name) for name in needed}
    # An option may have the short name of an argument: p of top-p.
    more = [p.name for p in found if p.default is not p.empty and p.name in _MEANINGS]
    return needed + [name for name in more if _MEANINGS[name] not in taken]


def _form_of(function: Callable[..., Any], names: list[str] | None) -> str:
    if names and names[0] == "candidate_input_ids":
        return "transformers"
    meanings = {_MEANINGS.get(name) for name in names or ()}
    return "flat" if "cu_lengths" in meanings else "arrays"


def _bound(
    function: Callable[..., Any], names: list[str] | None
) -> tuple[tuple[str, str], ...] | None:
    if names is None:
        return None
    if all(name in _MEANINGS for name in names):
        found = tuple((name, _MEANINGS[name]) for name in names)
        meanings = [meaning for _, meaning in found]
        target = {"target_probs", "target_logits"} & set(meanings)
        if "tokens" in meanings and target and len(set(meanings)) == len(meanings):
            return found
    if len(names) == len(_ORDER):
        return None
    title = getattr(function, "__name__", repr(function))
    raise UserError(
        f"{title} takes ({', '.join(names)}), but a verifier takes ({', '.join(_ORDER)}), or some "
        "of these by name (tokens and target_probs at least): wrap it in such a function, or give "
        "further arguments a value (--with NAME=VALUE, or functools.partial)"
    )


def _likely(function: Callable[..., Any], form: str) -> list[str]:
    """The libraries to try, likeliest first."""
    if form == "transformers":
        return ["torch"]
    inner = inspect.unwrap(getattr(function, "func", function))
    scope = getattr(inner, "__globals__", None)
    if scope is None:
        scope = getattr(type(inner).__call__, "__globals__", {})
    code = getattr(inner, "__code__", None)
    named = {name: scope[name] for name in getattr(code, "co_names", ()) if name in scope}
    # The libraries that its own code names, then those of its module.
    likely = [kind for part in (named, scope) for kind in _libraries(part)]
    likely = list(dict.fromkeys(likely))
    # A function that takes a library's arrays has imported it.
    rest = [k for k in ARRAYS if k not in likely and (k == "numpy" or k in sys.modules)]
    return [*likely, *rest]


def _libraries(scope: Mapping[str, Any]) -> list[str]:
    found = {x.__name__.split(".")[0] for x in scope.values() if inspect.ismodule(x)}
    return [kind for kind in ("torch", "jax", "numpy") if kind in found]


def _jax_is_wide() -> bool:
    return bool(importlib.import_module("jax").config.jax_enable_x64)


def _converted(array: np.ndarray, arrays: str, dtype: str) -> Any:
    if array.dtype.kind == "f":
        if dtype == "float32":
            narrow = array.astype(np.float32)
            array = narrow if array.ndim > 2 else np.minimum(narrow, np.float32(LAST_UNIFORM))
        array = np.ascontiguousarray(array)
    if arrays == "torch":
        # PyTorch's indices are of 64 bits.
        wide = array.astype(np.int64) if array.dtype.kind == "i" else array
        return importlib.import_module("torch").from_numpy(np.array(wide))
    if arrays == "jax":
        return importlib.import_module("jax.numpy").asarray(array)
    return np.array(array)  # its own: a function may write into its arguments


def _logarithm(probs: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(probs)


def _flattened(rows: VerifyArguments, draft: np.ndarray | None) -> dict[str, Any]:
    """Rows one after the other: `[N]` tokens, `[N, V]` q, `[N + B, V]` p, sums of lengths `[B]`."""
    inside = np.arange(rows.tokens.shape[1]) < rows.lengths[:, None]
    with_next = np.arange(rows.tokens.shape[1] + 1) <= rows.lengths[:, None]
    return {
        "tokens": rows.tokens[inside],
        "draft_probs": None if draft is None else draft[inside],
        "target_probs": rows.target_probs[with_next],
        "uniforms": rows.uniforms[inside],
        "uniform_next": rows.uniform_next,
        "lengths": rows.lengths,
        "cu_lengths": np.cumsum(rows.lengths).astype(np.int32),
    }


def _read(found: Any, rows: VerifyArguments, is_batched: bool) -> tuple[np.ndarray, np.ndarray]:
    """(accepted, next) `[B]` of what a function returned."""
    tokens, count = rows.tokens, len(rows.tokens)
    if not is_batched and isinstance(found, tuple):
        found = found[0]  # the tokens; their number is the other
    # A list of two may be two rows of tokens.
    if (
        isinstance(found, tuple | list)
        and len(found) == 2
        and (type(found) is not list or count != 2)
    ):
        accepted, following = (_numbers(x) for x in found)
        for name, array in (("accepted", accepted), ("next", following)):
            if array.size != count or array.ndim > 2:
                raise BadOutcomeError(
                    f"its {name} must have shape [B] = [{count}], got {list(array.shape)}"
                )
        return accepted.reshape(-1), following.reshape(-1)
    if isinstance(found, tuple):
        raise BadOutcomeError(f"it must return (accepted, next), got a tuple of {len(found)}")
    emitted = _numbers(found)
    needed = int(rows.lengths.max()) + 1 if is_batched else 1
    if emitted.ndim != 2 or len(emitted) != count or emitted.shape[1] < needed:
        raise BadOutcomeError(
            f"it must return (accepted [B], next [B]) or tokens [B, G + 1] padded with -1, B = "
            f"{count}, G + 1 = {tokens.shape[1] + 1}, got an array of shape {list(emitted.shape)}"
        )
    kept = (emitted >= 0).sum(axis=1)
    accepted = kept - 1
    following = emitted[np.arange(count), np.maximum(accepted, 0)]
    width = min(emitted.shape[1], tokens.shape[1])
    before = np.arange(width) < accepted[:, None]
    same = (emitted[:, :width] == tokens[:, :width]) | ~before
    gaps = (np.arange(emitted.shape[1]) < kept[:, None]) & ~(emitted >= 0)
    wrong = ~same.all(axis=1) | gaps.any(axis=1)
    return np.where(wrong, INVALID, accepted), following


def _numbers(value: Any) -> np.ndarray:
    try:
        array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    except (Exception, SystemExit) as error:
        raise BadOutcomeError(f"its result cannot be read as an array: {_told(error)}") from error
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


def _told(error: BaseException) -> str:
    text = one_line(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f" ({os.path.basename(frame.filename)}:{frame.lineno})"
    return f"{type(error).__name__}: {text[:200]}{where}" if text else type(error).__name__ + where
