"""Replaces the random generators of NumPy, PyTorch and JAX while a verifier runs.

Uniforms come from a list of coordinates. A draw by weights is a fork: its weights are noted, and
the script says which token it gives. Exponential and Gumbel noise is a race: the script says which
token is ahead, and by how much.

Axes: V the last axis of weights or noise.
"""

import contextlib
import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

import numpy as np

from specjax.checks import shown
from specjax.testing.auditing.calling import AuditLimitError, BadOutcomeError

MOST_UNIFORMS = 64  # of one run
# Its draws are not used; it checks the arguments as NumPy does.
_NUMPY = np.random.Generator(np.random.PCG64(0))


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
      by_key: what each key of JAX was used for, and what it gave.
    """

    coordinates: np.ndarray
    choices: Mapping[int, int] = dataclasses.field(default_factory=dict)
    noise: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)
    asked: int = 0
    forks: list[np.ndarray] = dataclasses.field(default_factory=list)
    races: list[int] = dataclasses.field(default_factory=list)
    by_key: dict[bytes, tuple[tuple[Any, ...], np.ndarray]] = dataclasses.field(
        default_factory=dict
    )

    def uniforms(self, shape: tuple[int, ...], epsilon: float = 2.0**-52) -> np.ndarray:
        """The next uniforms; 0.5 beyond the coordinates.

        They are below 1 also in a type with this epsilon, as those of its own generator.
        """
        count = int(np.prod(shape, dtype=int))
        known = self.coordinates[self.asked : self.asked + count]
        self.asked += count
        if self.asked > MOST_UNIFORMS:
            raise _unknown(f"more than {MOST_UNIFORMS} uniforms of one run")
        found = np.append(known, np.full(count - known.size, 0.5)).reshape(shape)
        return np.minimum(found, 1.0 - 0.5 * epsilon)

    def chosen(self, weights: np.ndarray) -> np.ndarray:
        """A token per row of weights `[..., V]`."""
        rows = np.asarray(weights, np.float64).reshape(-1, weights.shape[-1])
        found = []
        for row in rows:
            if not (np.isfinite(row).all() and (row >= 0.0).all() and row.sum() > 0.0):
                raise BadOutcomeError(
                    f"it draws by weights that are no distribution: {shown(row[:8])}"
                )
            found.append(self.choices.get(len(self.forks), int(np.argmax(row))))
            self.forks.append(row / row.sum())
        return np.array(found, np.int64).reshape(weights.shape[:-1])

    def kept(
        self, key: bytes, kind: str, argument: np.ndarray, make: Callable[..., np.ndarray]
    ) -> np.ndarray:
        """`make(argument)`; equal keys of JAX give equal numbers."""
        use = kind, argument.shape, argument.tobytes()
        if key not in self.by_key:
            self.by_key[key] = use, make(argument)
        first, values = self.by_key[key]
        if first == use:
            return values
        if kind == "weights" and first[:2] == use[:2]:
            raise _unknown("a key of two draws by other weights")
        raise BadOutcomeError("a key is used twice: split it")

    def exponential(self, shape: tuple[int, ...]) -> np.ndarray:
        """Exponential noise, a race per row."""
        if not shape:
            raise _unknown("exponential noise number by number")
        rows = []
        for _ in range(int(np.prod(shape[:-1], dtype=int))):
            rows.append(self.noise.get(len(self.races), np.ones(shape[-1])))
            self.races.append(shape[-1])
        return np.array(rows, np.float64).reshape(shape)


def _unknown(name: str) -> AuditLimitError:
    return AuditLimitError(f"hooks do not know {name}: audit it as a black box")


def _several(name: str) -> AuditLimitError:
    return _unknown(f"{name} with several samples per row")


def _size(args: Any) -> tuple[int, ...]:
    if len(args) == 1 and isinstance(args[0], tuple | list):
        args = args[0]
    return tuple(int(x) for x in args)


def _shape(size: Any, *like: Any) -> tuple[int, ...]:
    """The shape of NumPy's draws."""
    if size is None:
        return np.broadcast_shapes(*map(np.shape, like))
    return tuple(np.atleast_1d(size))


class ScriptedGenerator(np.random.Generator):
    """Stands for NumPy's `Generator`, and for the functions of `np.random`."""

    def __init__(self, script: Script) -> None:
        super().__init__(_NUMPY.bit_generator)
        self._script = script

    def __getattribute__(self, name: str) -> Any:
        # What NumPy's class has beyond this one's methods.
        if not name.startswith("_") and name not in vars(ScriptedGenerator):
            raise _unknown(name)
        return super().__getattribute__(name)

    def random(self, size: Any = None, dtype: Any = np.float64, out: Any = None) -> Any:
        """Uniforms in [0, 1)."""
        shape = _shape(size, 0.0)
        found = self._script.uniforms(shape, np.finfo(dtype).eps).astype(dtype)
        return found if shape else found[()]

    random_sample = random

    def rand(self, *size: int) -> Any:
        """Uniforms in [0, 1)."""
        return self.random(size or None)

    def uniform(self, low: Any = 0.0, high: Any = 1.0, size: Any = None) -> Any:
        """Uniforms in [low, high)."""
        shape = _shape(size, low, high)
        found = low + (high - low) * self._script.uniforms(shape)
        return found if shape else float(found)

    def choice(
        self,
        a: Any,
        size: Any = None,
        replace: bool = True,
        p: Any = None,
        axis: int = 0,
        shuffle: bool = True,
    ) -> Any:
        """One element, by weights."""
        if axis:
            raise _unknown("choice along another axis")
        values = np.arange(a) if np.ndim(a) == 0 else np.asarray(a)
        if size is not None and int(np.prod(size, dtype=int)) != 1:
            raise _several("choice")
        _NUMPY.choice(values, size, replace, p)
        weights = np.ones(len(values)) if p is None else np.asarray(p)
        found = values[self._script.chosen(weights)]
        return found if size is None else np.reshape(found, np.atleast_1d(size))

    def multinomial(self, n: Any, pvals: Any, size: Any = None) -> Any:
        """One draw, as counts; the last weight is what the others leave, as NumPy's."""
        if n != 1 or size not in (None, 1):
            raise _several("multinomial")
        _NUMPY.multinomial(n, pvals)
        weights = np.array(pvals, np.float64)
        weights[..., -1] = np.maximum(1.0 - weights[..., :-1].sum(axis=-1), 0.0)
        counts = np.eye(weights.shape[-1], dtype=np.int64)[self._script.chosen(weights)]
        return counts if size is None else counts[None]

    def exponential(self, scale: Any = 1.0, size: Any = None) -> Any:
        """Exponential noise."""
        return scale * self._script.exponential(_shape(size, scale))

    def standard_exponential(self, size: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Exponential noise."""
        return self.exponential(1.0, size)

    def gumbel(self, loc: Any = 0.0, scale: Any = 1.0, size: Any = None) -> Any:
        """Gumbel noise."""
        return loc - scale * np.log(self._script.exponential(_shape(size, loc, scale)))


def scripted_argument(arrays: str, script: Script) -> Any:
    """The argument `generator` of a verifier whose generators are replaced."""
    if arrays == "numpy":
        return ScriptedGenerator(script)
    library = importlib.import_module(arrays)
    if arrays == "torch":
        return library.Generator()
    return library.random.wrap_key_data(np.zeros(2, np.uint32), impl="threefry2x32")


@contextlib.contextmanager
def replaced(script_of: Callable[[], Script]) -> Iterator[None]:
    """Replaces the generators of the libraries that are imported.

    Args:
      script_of: gives the script of the run under way.

    Yields:
      While the generators are replaced.
    """
    seeds: set[str] = set()

    def check_seed(seed: Any = None) -> None:
        """A seed of the run's own differs from those of all runs before."""
        if isinstance(seed, np.random.BitGenerator | np.random.RandomState):
            raise _unknown("a bit generator of its own")
        if repr(seed) in seeds:
            raise BadOutcomeError(f"it seeds its generator with a constant, {shown(seed)}")
        if seed is not None:
            seeds.add(repr(seed))

    with contextlib.ExitStack() as stack:
        _replace_numpy(stack, script_of, check_seed)
        if "torch" in sys.modules:
            _replace_torch(stack, script_of, check_seed)
        if "jax" in sys.modules:
            _replace_jax(stack, script_of, check_seed)
        yield


def _put(stack: contextlib.ExitStack, owner: Any, **functions: Callable[..., Any]) -> None:
    for name, function in functions.items():
        if hasattr(owner, name):
            stack.enter_context(mock.patch.object(owner, name, function))


def _put_unknown(stack: contextlib.ExitStack, owner: Any, names: Iterable[str]) -> None:
    def of(name: str) -> Callable[..., Any]:
        def unknown(*args: Any, **kwargs: Any) -> Any:
            raise _unknown(name)

        return unknown

    _put(stack, owner, **{name: of(name) for name in names})


def _replace_numpy(
    stack: contextlib.ExitStack, script_of: Callable[[], Script], check_seed: Callable[..., None]
) -> None:
    def of(name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: getattr(ScriptedGenerator(script_of()), name)(
            *args, **kwargs
        )

    def default_rng(seed: Any = None) -> Any:
        if isinstance(seed, ScriptedGenerator | np.random.Generator):
            return seed
        check_seed(seed)
        return ScriptedGenerator(script_of())

    names = [name for name in np.random.__all__ if inspect.isroutine(getattr(np.random, name))]
    _put(stack, np.random, **{name: of(name) for name in names})
    _put(stack, np.random, default_rng=default_rng, seed=check_seed)


def _replace_torch(
    stack: contextlib.ExitStack, script_of: Callable[[], Script], check_seed: Callable[..., None]
) -> None:
    torch = importlib.import_module("torch")

    class Generator(torch.Generator):  # type: ignore[name-defined]
        def manual_seed(self, seed: int) -> Any:
            check_seed(seed)
            return super().manual_seed(seed)

    def rand(*size: Any, dtype: Any = None, **kwargs: Any) -> Any:
        dtype = dtype or torch.get_default_dtype()
        values = script_of().uniforms(_size(size or kwargs["size"]), torch.finfo(dtype).eps)
        return torch.tensor(values, dtype=dtype)

    def rand_like(input: Any, *, dtype: Any = None, **kwargs: Any) -> Any:
        return rand(size=input.shape, dtype=dtype or input.dtype)

    def uniform(self: Any, low: float = 0.0, high: float = 1.0, **kwargs: Any) -> Any:
        return self.copy_(low + (high - low) * rand_like(self))

    def bernoulli(input: Any, p: Any = None, **kwargs: Any) -> Any:
        return (rand_like(input) < (input if p is None else p)).to(input.dtype)

    def bernoulli_(self: Any, p: Any = 0.5, **kwargs: Any) -> Any:
        return self.copy_(bernoulli(self, p))

    def exponential(self: Any, lambd: float = 1.0, **kwargs: Any) -> Any:
        return self.copy_(torch.tensor(script_of().exponential(tuple(self.shape)) / lambd))

    def multinomial(input: Any, num_samples: int, *args: Any, **kwargs: Any) -> Any:
        if num_samples != 1:
            raise _several("multinomial")
        weights = input.detach().double().cpu().numpy()
        return torch.from_numpy(np.array(script_of().chosen(weights)))[..., None]

    _put_unknown(stack, torch, ("randn", "randn_like", "randint", "randint_like", "randperm"))
    _put_unknown(stack, torch, ("normal", "poisson", "binomial"))
    _put_unknown(stack, torch.Tensor, ("random_", "normal_", "geometric_", "cauchy_"))
    _put(stack, torch, rand=rand, rand_like=rand_like, multinomial=multinomial)
    _put(stack, torch, bernoulli=bernoulli, manual_seed=check_seed, Generator=Generator)
    _put(stack, torch.Tensor, uniform_=uniform, exponential_=exponential, bernoulli_=bernoulli_)
    _put(stack, torch.Tensor, multinomial=multinomial, bernoulli=bernoulli)


def _jax_draws(script_of: Callable[[], Script]) -> dict[str, Callable[..., Any]]:
    jax = importlib.import_module("jax")
    jnp = importlib.import_module("jax.numpy")

    def kept(key: Any, kind: str, argument: Any, make: Callable[..., np.ndarray]) -> np.ndarray:
        is_new = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        bits = numbers(jax.random.key_data(key) if is_new else key).tobytes()
        return script_of().kept(bits, kind, np.asarray(argument), make)

    def numbers(array: Any) -> np.ndarray:
        if isinstance(array, jax.core.Tracer):
            raise _unknown("draws under vmap")
        return np.asarray(array)

    def chosen(key: Any, weights: np.ndarray) -> np.ndarray:
        return kept(key, "weights", weights, script_of().chosen)

    def uniform(
        key: Any, shape: Any = (), dtype: Any = float, minval: Any = 0.0, maxval: Any = 1.0
    ):
        dtype = jnp.result_type(dtype or float)
        epsilon = float(jnp.finfo(dtype).eps)
        values = kept(key, "uniform", shape, lambda x: script_of().uniforms(tuple(x), epsilon))
        return jnp.asarray(minval + (maxval - minval) * values, dtype)

    def bernoulli(key: Any, p: Any = 0.5, shape: Any = None) -> Any:
        values = uniform(key, jnp.shape(p) if shape is None else shape)
        return values < jnp.asarray(p, values.dtype)

    def exponential(key: Any, shape: Any = (), dtype: Any = None) -> Any:
        values = kept(key, "exponential", shape, lambda x: script_of().exponential(tuple(x)))
        return jnp.asarray(values, dtype or float)

    def gumbel(key: Any, shape: Any = (), dtype: Any = None, **kwargs: Any) -> Any:
        return -jnp.log(exponential(key, shape, dtype))

    def categorical(key: Any, logits: Any, axis: int = -1, shape: Any = None, **kwargs: Any) -> Any:
        scores = np.moveaxis(numbers(logits).astype(np.float64), axis, -1)
        if shape is not None and tuple(shape) != scores.shape[:-1]:
            raise _several("categorical")
        with np.errstate(invalid="ignore"):
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        # No largest weight is finite: JAX gives the first.
        first = np.eye(scores.shape[-1])[scores.argmax(axis=-1)]
        weights = np.where(np.isfinite(weights.sum(axis=-1, keepdims=True)), weights, first)
        return jnp.asarray(chosen(key, weights), jnp.int32)

    def choice(key: Any, a: Any, shape: Any = (), replace: bool = True, p: Any = None, **kw: Any):
        if tuple(shape):
            raise _several("choice")
        values = jnp.arange(a) if jnp.ndim(a) == 0 else jnp.asarray(a)
        weights = np.ones(len(values)) if p is None else numbers(p)
        return values[int(chosen(key, weights))]

    draws = (uniform, bernoulli, exponential, gumbel, categorical, choice)
    return {draw.__name__: draw for draw in draws}


def _replace_jax(
    stack: contextlib.ExitStack, script_of: Callable[[], Script], check_seed: Callable[..., None]
) -> None:
    jax = importlib.import_module("jax")

    def seeded(make: Callable[..., Any]) -> Callable[..., Any]:
        def key(seed: Any, **kwargs: Any) -> Any:
            check_seed(seed)
            return make(seed, **kwargs)

        return key

    # Compiled programs would keep the numbers of the run in which they were traced.
    stack.enter_context(jax.disable_jit())
    # With the one key of all runs these would give the same numbers in each.
    makes_keys = re.compile("_|.*key|clone|fold_in|split", re.IGNORECASE)
    _put_unknown(stack, jax.random, (x for x in dir(jax.random) if not makes_keys.match(x)))
    _put(stack, jax.random, **_jax_draws(script_of))
    _put(stack, jax.random, key=seeded(jax.random.key), PRNGKey=seeded(jax.random.PRNGKey))
