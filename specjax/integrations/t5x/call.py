"""The settings of a call of `predict_batch_with_aux`, in T5X's names and in ours.

Axes: B rows of the batch, n decodes of each, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from t5x.decoding import MIN_TEMPERATURE

from specjax.checks import check_number, whole_number
from specjax.errors import UserError
from specjax.types import Array, Rule, Sampling

# Arguments of T5X's `temperature_sample` that have the same meaning here, and our own.
THEIRS = (
    "decode_rng",
    "eos_id",
    "temperature",
    "topk",
    "topp",
    "max_decode_steps",
    "max_decode_steps_hard_limit",
    "rescale_log_probs",
)
OURS = ("rule", "draft_limit")


class Call(NamedTuple):
    """The settings of a call.

    Attributes:
      num_decodes: n (static).
      return_all: whether all n are returned, or the most probable (static).
      eos_id: the token that ends an output (static).
      seed: uint32, the seed of the rows' random streams.
      sampling: fields scalar or `[B * n]`.
      max_steps: int32 scalar or `[B]`, the most tokens after a forced prefix; None: no limit.
      rescaled: whether scores use the distribution that is drawn from; else the verifier's plain
        softmax (static).
      rule: replaces gin's, or None.
      draft_limit: scalar or `[B]`, the longest draft of each row, or None.
    """

    num_decodes: int
    return_all: bool
    eos_id: int
    seed: Array
    sampling: Sampling
    max_steps: Any
    rescaled: bool
    rule: Rule | None
    draft_limit: Any

    def by_row(self, rule: Rule) -> Rule:
        """The rule; a strength per prompt becomes `[B * n]`."""

        def spread(strength: Any) -> Array:
            array = jnp.asarray(strength)
            return jnp.repeat(array, self.num_decodes) if array.ndim else array

        return jax.tree.map(spread, rule)

    def draft_limits(self, rows: int, longest: int) -> Array | None:
        """`[B]` int32 in 0 .. `longest`, or None."""
        if self.draft_limit is None:
            return None
        limits = check_number("draft_limit", self.draft_limit, low=0, high=longest, dtype=np.int32)
        limits = jnp.broadcast_to(limits, (rows,))
        return jnp.clip(limits, 0, longest)


def read_call(
    decoder_params: Mapping[str, Any] | None,
    rng: Array | None,
    *,
    defaults: Sampling,
    vocab_size: int,
    eos_id: int,
    num_decodes: int,
    return_all: bool,
) -> Call:
    """Reads the arguments that T5X passes.

    `decoder_params` has arguments of T5X's `temperature_sample` (see `THEIRS`), and our `rule` and
    `draft_limit`; values per row have B entries. `rng` None is T5X's default, key 0. `defaults` has
    the bindings of gin, and `eos_id` is that of the output vocabulary.
    """
    options = dict(decoder_params or {})
    if unknown := sorted(set(options) - {*THEIRS, *OURS}):
        raise UserError(
            f"decoder_params supports only {', '.join((*THEIRS, *OURS))}, got "
            f"{', '.join(unknown)}: specjax decodes instead of decode_fn"
        )
    decode_rng = options.get("decode_rng")
    if rng is not None and decode_rng is not None:
        raise UserError("rng and decoder_params['decode_rng'] exclude each other: give one")
    key = next((x for x in (rng, decode_rng) if x is not None), jax.random.PRNGKey(0))
    steps, hard = options.get("max_decode_steps"), options.get("max_decode_steps_hard_limit")
    if steps is not None:
        steps = check_number("max_decode_steps", steps, low=0, dtype=np.int32)
    if steps is not None and hard is not None and hard > 0:
        steps = jnp.minimum(steps, hard)
    return Call(
        num_decodes=whole_number("num_decodes", num_decodes, low=1),
        return_all=return_all,
        eos_id=int(options.get("eos_id", eos_id)),
        seed=jax.random.bits(key, (), jnp.uint32),
        sampling=_sampling(options, defaults, vocab_size, num_decodes),
        max_steps=None if steps is None else jnp.asarray(steps, jnp.int32),
        rescaled=bool(options.get("rescale_log_probs", True)),
        rule=options.get("rule"),
        draft_limit=options.get("draft_limit"),
    )


def _sampling(
    options: Mapping[str, Any], defaults: Sampling, vocab_size: int, num_decodes: int
) -> Sampling:
    temperature = options.get("temperature", defaults.temperature)
    temperature = jnp.asarray(check_number("temperature", temperature, low=0.0, open_high=True))
    # T5X treats smaller temperatures as greedy.
    temperature = jnp.where(temperature > float(MIN_TEMPERATURE), temperature, jnp.float32(0.0))
    top_k = _filter("topk", options.get("topk", defaults.top_k), vocab_size, np.int32)
    top_p = _filter("topp", options.get("topp", defaults.top_p), 1.0, np.float32)

    def spread(value: Any) -> Any:
        return jnp.repeat(value, num_decodes) if value is not None and value.ndim else value

    return Sampling(spread(temperature), spread(top_k), spread(top_p))


# T5X's 0 means no filter: None if this is known, else a value without effect.
def _filter(name: str, value: Any, off: Any, dtype: Any) -> Any:
    if value is None:
        return None
    value = check_number(name, value, low=0, high=1.0 if name == "topp" else np.inf, dtype=dtype)
    if not isinstance(value, jax.core.Tracer) and not np.any(value):
        return None
    return jnp.where(value > 0, value, jnp.asarray(off, dtype))
