"""The interface of rules: a rule gives the distribution that the output must follow."""

from typing import ClassVar, Protocol

from specjax.types.language_model import Array


class Rule(Protocol):
    """A target distribution pi = T(q, p): a pytree whose leaves are its strengths.

    `specjax.types.traced_dataclass` makes such a pytree of a class with fields.

    Attributes:
      reads_draft: whether pi depends on the drafter. If it does, the drafter also gives its
        distribution at the bonus position (only `Lossless` does without).
      reads_draft_confidence: whether pi depends on q_conf (drafters must then have it).
      reads_verifier_confidence: whether pi depends on p_conf.
    """

    reads_draft: ClassVar[bool]
    reads_draft_confidence: ClassVar[bool]
    reads_verifier_confidence: ClassVar[bool]

    def __call__(
        self, q: Array, p: Array, q_conf: Array | None = None, p_conf: Array | None = None
    ) -> Array:
        """The target distribution at one position.

        Args:
          q: `[V]` float32, the drafter's distribution.
          p: `[V]` float32, the verifier's distribution.
          q_conf: `[V]` float32, the drafter's confidence; may be None if it is not read.
          p_conf: `[V]` float32, the verifier's confidence; may be None if it is not read.

        Returns:
          pi: `[V]` float32, not negative; its sum is 1.

        Raises:
          ValueError: (at trace time) on other shapes or dtypes, a missing confidence, or a strength
            that is not a scalar.
        """
