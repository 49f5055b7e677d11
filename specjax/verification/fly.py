"""FLy: accepts a token that fails, if the verifier is unsure and agrees with what follows.

Source: FLy, training-free loosely speculative decoding, as proposed for vLLM (pull request 53987).
"""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax

from specjax.checks import check_count, one_number
from specjax.errors import UserError
from specjax.sampling import TINY
from specjax.types import Acceptance, Array
from specjax.verification.token import Token
from specjax.verification.verify import ratios


@dataclasses.dataclass(frozen=True)
class FLy(Token):
    """Token verification that lets some failing tokens stand. It does NOT emit pi.

    A token x_i that fails its own test stands if the verifier is unsure (the entropy of the three
    most probable tokens of pi_i, normalised, is at least `threshold`), pi_i(x_i) > 0, and each of
    the next `window` tokens was drafted and passes its own test. So whether it stands depends on
    later tokens: no target distribution at its position describes it, and there is no bound on its
    distance from pi. `specjax.testing.emitted_law` enumerates its law.

    Attributes:
      threshold: in nats, at least 0.
      window: at least 1.
      allow_inexact: must be True, to say that you know.

    Raises:
      ValueError: `allow_inexact` is not True, or a number is out of range.
    """

    threshold: float
    window: int
    allow_inexact: bool = False

    needs_probs: ClassVar[bool] = False
    is_exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.allow_inexact is not True:
            raise UserError(
                "FLy does not emit the target distribution of the rule, and nothing bounds the "
                "distance: give allow_inexact=True, or use a rule such as rules.KLBall(0.05) with "
                "an exact verification"
            )
        one_number("threshold", self.threshold, low=0.0)
        check_count("window", self.window, "give the number of later tokens that must pass")

    def acceptance(
        self,
        tokens: Array,
        draft_probs: Any,
        target_probs: Array,
        num_drafted: Array,
        carry: Any = (),
        still_drafting: Array | None = None,
    ) -> Acceptance:
        found = super().acceptance(tokens, draft_probs, target_probs, num_drafted)
        highest, _ = lax.top_k(target_probs[:-1], min(3, target_probs.shape[-1]))
        few = highest / jnp.sum(highest, axis=1, keepdims=True)
        spread = -jnp.sum(few * jnp.log(jnp.maximum(few, TINY)), axis=1)
        possible = ratios(tokens, draft_probs, target_probs) > 0.0
        return found._replace(detail=(spread >= self.threshold) & possible)

    def stands(self, passes: Array, detail: Any) -> Array:
        follow = jnp.pad(passes, (0, self.window))
        later = [follow[k : k + passes.size] for k in range(1, self.window + 1)]
        return passes | (detail & jnp.all(jnp.stack(later), axis=0))
