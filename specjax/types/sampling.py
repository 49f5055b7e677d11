"""How tokens are drawn."""

import jax
import jax.numpy as jnp

from specjax.checks import checked
from specjax.types.pytrees import traced_dataclass

_LARGEST = float(jnp.finfo(jnp.float32).max)


@traced_dataclass
class Sampling:
    """How tokens are drawn. Each field is one number, or an array of one number per row.

    A field that is None is left out of the compiled program, so an unfiltered run never looks for
    a threshold.

    Attributes:
      temperature: >= 0, finite; logits are divided by it. 0: greedy, one-hot at the first argmax.
      top_k: >= 1, or None; only the k largest logits stay. Ties with the k-th all stay.
      top_p: in (0, 1], or None; a token stays while the tokens strictly more probable than it
        (after temperature and top-k) hold less than this mass, so ties at the edge all stay.

    Raises:
      ValueError: if a concrete value is outside its range.
    """

    temperature: jax.Array | float = 1.0
    top_k: jax.Array | int | None = None
    top_p: jax.Array | float | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "temperature", checked("temperature", self.temperature, low=0.0, high=_LARGEST))
        if self.top_k is not None:
            put(self, "top_k", checked("top_k", self.top_k, low=1, dtype=jnp.int32))
        if self.top_p is not None:
            put(self, "top_p", checked("top_p", self.top_p, low=0.0, high=1.0, open_low=True))
