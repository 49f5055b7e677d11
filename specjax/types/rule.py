"""The interface of rules: a rule gives the distribution that the output must follow."""

from typing import ClassVar, Protocol

from jaxtyping import Array, Float32


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
        self,
        q: Float32[Array, " V"],
        p: Float32[Array, " V"],
        q_conf: Float32[Array, " V"] | None = None,
        p_conf: Float32[Array, " V"] | None = None,
    ) -> Float32[Array, " V"]:
        """The target distribution pi at one position: not negative, and its sum is 1.

        Args:
          q: the drafter's distribution.
          p: the verifier's distribution.
          q_conf: the drafter's confidence; may be None if it is not read.
          p_conf: the verifier's confidence; may be None if it is not read.
        """
