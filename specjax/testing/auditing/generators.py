"""Replaces the random generators of NumPy, PyTorch and JAX while a verifier runs.

Uniforms come from a list of coordinates. A draw by weights is a fork: its weights are noted, and
the script says which token it gives. Exponential and Gumbel noise is a race: the script says which
token is ahead, and by how much.

Axes: V the last axis of weights or noise.
"""

import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import numpy as np

from specjax.testing.auditing.calling import BadOutcomeError


@dataclasses.dataclass
class Script:
    """What the generators give in one run, and what was asked of them.

    Attributes:
      coordinates: uniforms, in order.
      choices: number of a fork -> the token; the most probable by default.
      noise: number of a race -> its exponential noise `[V]`; ones by default.
      asked: how many uniforms were drawn.
      forks: the weights of each draw `[V]`, normalised.
      races: V of each race.
    """

    coordinates: np.ndarray
    choices: Mapping[int, int] = dataclasses.field(default_factory=dict)
    noise: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)
    asked: int = 0
    forks: list[np.ndarray] = dataclasses.field(default_factory=list)
    races: list[int] = dataclasses.field(default_factory=list)
    by_key: dict[Any, np.ndarray] = dataclasses.field(default_factory=dict)

    def uniforms(self, shape: tuple[int, ...]) -> np.ndarray:
        """The next uniforms; 0.5 beyond the coordinates, of which a longer run is made."""
        count = int(np.prod(shape, dtype=int))
        known = self.coordinates[self.asked : self.asked + count]
        self.asked += count
        return np.append(known, np.full(count - known.size, 0.5)).reshape(shape)

    def chosen(self, weights: np.ndarray) -> np.ndarray:
        """A token per row of weights `[..., V]`."""
        rows = np.asarray(weights, np.float64).reshape(-1, weights.shape[-1])
        found = []
        for row in rows:
            if not (np.isfinite(row).all() and (row >= 0.0).all() and row.sum() > 0.0):
                raise ValueError(f"it draws by weights that are no distribution: {row[:8]}")
            found.append(self.choices.get(len(self.forks), int(np.argmax(row))))
            self.forks.append(row / row.sum())
        return np.array(found, np.int64).reshape(weights.shape[:-1])

    def exponential(self, shape: tuple[int, ...]) -> np.ndarray:
        """Exponential noise, a race per row."""
        rows = []
        for _ in range(int(np.prod(shape[:-1], dtype=int))):
            rows.append(self.noise.get(len(self.races), np.ones(shape[-1])))
            self.races.append(shape[-1])
        return np.array(rows, np.float64).reshape(shape)


def _several(name: str) -> ValueError:
    return ValueError(f"hooks know {name} for one sample per row: audit it as a black box")


def _size(args: Any) -> tuple[int, ...]:
    if (len(args) == 1 and isinstance(args[0], tuple | list)) or hasattr(args[:1], "numel"):
        args = args[0]
    return tuple(int(x) for x in args)


class ScriptedGenerator:
    """Stands for NumPy's `Generator`, and for the functions of `np.random`."""

    def __init__(self, script: Script) -> None:
        self._script = script

    def random(self, size: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Uniforms in [0, 1)."""
        return self.uniform(0.0, 1.0, size)

    random_sample = random

    def rand(self, *size: int) -> Any:
        """Uniforms in [0, 1)."""
        return self.random(size or None)

    def uniform(self, low: Any = 0.0, high: Any = 1.0, size: Any = None) -> Any:
        """Uniforms in [low, high)."""
        shape = () if size is None else tuple(np.atleast_1d(size))
        found = low + (high - low) * self._script.uniforms(shape)
        return float(found) if size is None else found

    def choice(self, a: Any, size: Any = None, replace: bool = True, p: Any = None) -> Any:
        """One element, by weights."""
        values = np.arange(a) if np.ndim(a) == 0 else np.asarray(a)
        if size is not None and int(np.prod(size, dtype=int)) != 1:
            raise _several("choice")
        weights = np.ones(len(values)) if p is None else np.asarray(p)
        found = values[self._script.chosen(weights)]
        return found if size is None else np.reshape(found, np.atleast_1d(size))

    def multinomial(self, n: int, pvals: Any, size: Any = None) -> Any:
        """One draw, as counts."""
        if n != 1 or size not in (None, 1):
            raise _several("multinomial")
        weights = np.asarray(pvals)
        counts = np.eye(weights.shape[-1], dtype=np.int64)[self._script.chosen(weights)]
        return counts if size is None else counts[None]

    def exponential(self, scale: float = 1.0, size: Any = None) -> Any:
        """Exponential noise."""
        return scale * self._script.exponential(tuple(np.atleast_1d(size)))

    def standard_exponential(self, size: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Exponential noise."""
        return self.exponential(1.0, size)

    def gumbel(self, loc: float = 0.0, scale: float = 1.0, size: Any = None) -> Any:
        """Gumbel noise."""
        return loc - scale * np.log(self.exponential(1.0, size))


def scripted_argument(arrays: str, script: Script) -> Any:
    """The argument `generator` of a verifier whose generators are replaced."""
    if arrays == "numpy":
        return ScriptedGenerator(script)
    library = importlib.import_module(arrays)
    return library.Generator() if arrays == "torch" else library.random.key(0)


@contextlib.contextmanager
def replaced(script_of: Callable[[], Script]) -> Iterator[None]:
    """Replaces the generators of the libraries that are imported.

    Args:
      script_of: gives the script of the run under way.

    Yields:
      While the generators are replaced.
    """
    with contextlib.ExitStack() as stack:
        _replace_numpy(stack, script_of)
        if "torch" in sys.modules:
            _replace_torch(stack, script_of)
        if "jax" in sys.modules:
            _replace_jax(stack, script_of)
        yield


def _put(stack: contextlib.ExitStack, owner: Any, **functions: Callable[..., Any]) -> None:
    for name, function in functions.items():
        if hasattr(owner, name):
            stack.enter_context(mock.patch.object(owner, name, function))


def _replace_numpy(stack: contextlib.ExitStack, script_of: Callable[[], Script]) -> None:
    names = (
        *("random", "random_sample", "rand", "uniform", "choice", "multinomial"),
        *("exponential", "standard_exponential", "gumbel"),
    )

    def of(name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: getattr(ScriptedGenerator(script_of()), name)(
            *args, **kwargs
        )

    _put(stack, np.random, **{name: of(name) for name in names})
    _put(stack, np.random, default_rng=lambda *args, **kwargs: ScriptedGenerator(script_of()))


def _replace_torch(stack: contextlib.ExitStack, script_of: Callable[[], Script]) -> None:
    torch = importlib.import_module("torch")

    def made(values: np.ndarray, like: Any = None, dtype: Any = None) -> Any:
        found = torch.from_numpy(np.array(values))
        wanted = dtype or (torch.get_default_dtype() if like is None else like.dtype)
        return found.to(wanted)

    def rand(*size: Any, dtype: Any = None, **kwargs: Any) -> Any:
        return made(script_of().uniforms(_size(size or kwargs["size"])), dtype=dtype)

    def rand_like(input: Any, *, dtype: Any = None, **kwargs: Any) -> Any:
        return made(script_of().uniforms(tuple(input.shape)), input, dtype)

    def uniform(self: Any, low: float = 0.0, high: float = 1.0, **kwargs: Any) -> Any:
        return self.copy_(low + (high - low) * made(script_of().uniforms(tuple(self.shape)), self))

    def exponential(self: Any, lambd: float = 1.0, **kwargs: Any) -> Any:
        return self.copy_(made(script_of().exponential(tuple(self.shape)) / lambd, self))

    def multinomial(input: Any, num_samples: int, *args: Any, **kwargs: Any) -> Any:
        if num_samples != 1:
            raise _several("multinomial")
        weights = input.detach().double().cpu().numpy()
        return torch.from_numpy(np.array(script_of().chosen(weights)))[..., None]

    _put(stack, torch, rand=rand, rand_like=rand_like, multinomial=multinomial)
    _put(
        stack,
        torch.Tensor,
        uniform_=uniform,
        exponential_=exponential,
        multinomial=multinomial,
    )


def _replace_jax(stack: contextlib.ExitStack, script_of: Callable[[], Script]) -> None:
    jax = importlib.import_module("jax")
    jnp = importlib.import_module("jax.numpy")

    def kept(key: Any, kind: str, shape: Any, make: Callable[..., np.ndarray]) -> np.ndarray:
        """Equal keys give equal numbers, as they do in JAX."""
        bits = key if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else None
        bits = jax.random.key_data(key) if bits is None else bits
        name = kind, np.asarray(bits).tobytes(), tuple(shape)
        known = script_of().by_key
        if name not in known:
            known[name] = make(tuple(shape))
        return known[name]

    def uniform(key: Any, shape: Any = (), dtype: Any = None, minval: Any = 0.0, maxval: Any = 1.0):
        values = kept(key, "uniform", shape, script_of().uniforms)
        return jnp.asarray(minval + (maxval - minval) * values, dtype or jnp.float32)

    def bernoulli(key: Any, p: Any = 0.5, shape: Any = None) -> Any:
        values = uniform(key, jnp.shape(p) if shape is None else shape)
        return values < jnp.asarray(p, values.dtype)

    def exponential(key: Any, shape: Any = (), dtype: Any = None) -> Any:
        values = kept(key, "exponential", shape, script_of().exponential)
        return jnp.asarray(values, dtype or jnp.float32)

    def gumbel(key: Any, shape: Any = (), dtype: Any = None, **kwargs: Any) -> Any:
        return -jnp.log(exponential(key, shape, dtype))

    def categorical(key: Any, logits: Any, axis: int = -1, shape: Any = None, **kwargs: Any) -> Any:
        scores = np.moveaxis(np.asarray(logits, np.float64), axis, -1)
        if shape is not None and tuple(shape) != scores.shape[:-1]:
            raise _several("categorical")
        with np.errstate(invalid="ignore"):
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        found = kept(key, "categorical", scores.shape, lambda _: script_of().chosen(weights))
        return jnp.asarray(found, jnp.int32)

    def choice(key: Any, a: Any, shape: Any = (), replace: bool = True, p: Any = None, **kw: Any):
        if tuple(shape):
            raise _several("choice")
        values = jnp.arange(a) if jnp.ndim(a) == 0 else jnp.asarray(a)
        weights = np.ones(len(values)) if p is None else np.asarray(p)
        found = kept(key, "choice", weights.shape, lambda _: script_of().chosen(weights))
        return values[int(found)]

    # Compiled programs would keep the numbers of the run in which they were traced.
    stack.enter_context(jax.disable_jit())
    _put(
        stack,
        jax.random,
        uniform=uniform,
        bernoulli=bernoulli,
        exponential=exponential,
        gumbel=gumbel,
        categorical=categorical,
        choice=choice,
    )


__all__ = ["BadOutcomeError", "Script", "ScriptedGenerator", "replaced", "scripted_argument"]
