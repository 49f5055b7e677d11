"""Cascades that decode sequentially, made of the models that a decoder has.

decoder = specjax.Decoder(pair, method=text.TokenCascade(), rule=rules.Chow(alpha=0.3))
"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any

from specjax import decoding
from specjax.decoding import CascadeParams, PairMethod
from specjax.text.models import TextModel
from specjax.types import Method, Params


class MethodPlan(abc.ABC):
    """Says how a method is made of a decoder's models and its rule; hashable, arrays in `rule`."""

    @abc.abstractmethod
    def make(self, models: Mapping[str, TextModel], rule: Any) -> tuple[Method, Params]:
        """Makes the method.

        Args:
          models: the decoder's models, by name.
          rule: the decoder's rule, or None.

        Returns:
          The method and its parameters, in which the rule is the field `rule`.

        Raises:
          TypeError: if the rule is none for this method.
          ValueError: likewise, or if a model is missing.
        """


class _Cascade(MethodPlan):
    """A method over a verifier and a drafter."""

    @abc.abstractmethod
    def _method(self, **parts: Any) -> PairMethod:
        """The method over these models."""

    def make(self, models: Mapping[str, TextModel], rule: Any) -> tuple[Method, Params]:
        """See `MethodPlan`."""
        for name in ("verifier", "drafter"):
            if name not in models:
                raise ValueError(
                    f"method={self!r} needs a model called {name}, got {', '.join(models)}: give "
                    "a Pair, or Models with such a name"
                )
        large, small = models["verifier"], models["drafter"]
        method = self._method(
            verifier=large.model,
            drafter=small.model,
            eos_ids=tuple(large.tokenizer.eos_ids),
            partitioner=large.partitioner,
        )
        if rule is None:
            raise ValueError(f"rule= must be given: {self!r} decides by it, see docs/baselines.md")
        method.check_rule(rule)
        return method, CascadeParams(large.prepared, small.prepared, rule)


@dataclasses.dataclass(frozen=True)
class _FallbackCascade(_Cascade):
    limit: int = 10

    def __post_init__(self) -> None:
        decoding.check_limit(self.limit)


@dataclasses.dataclass(frozen=True)
class TokenCascade(_FallbackCascade):
    """The token cascade; its rule is `rules.Chow` or `rules.ChowLog`.

    See `specjax.decoding.TokenCascade`.

    Attributes:
      limit: so many tokens of the drafter at most between two passes of the verifier.

    Raises:
      ValueError: if `limit` is no whole number of at least 1.
    """

    def _method(self, **parts: Any) -> PairMethod:
        return decoding.TokenCascade(limit=self.limit, **parts)


@dataclasses.dataclass(frozen=True)
class BiLDCascade(_FallbackCascade):
    """BiLD with fallback and rollback; its rule is `rules.FallbackRollback`.

    See `specjax.decoding.BiLDCascade`. `rules.BiLD` is BiLD*, a rule for speculative decoding.

    Attributes:
      limit: so many tokens of the drafter at most between two passes of the verifier.

    Raises:
      ValueError: if `limit` is no whole number of at least 1.
    """

    def _method(self, **parts: Any) -> PairMethod:
        return decoding.BiLDCascade(limit=self.limit, **parts)


@dataclasses.dataclass(frozen=True)
class OracleCascade(_Cascade):
    """The oracle cascade; its rule is `rules.Diff`, `rules.DiffLog` or another deferral rule.

    See `specjax.decoding.OracleCascade`.
    """

    def _method(self, **parts: Any) -> PairMethod:
        return decoding.OracleCascade(**parts)


@dataclasses.dataclass(frozen=True)
class SequenceCascade(_Cascade):
    """The sequence cascade; its rule is `rules.SequenceChow` or `rules.SequenceChowLog`.

    See `specjax.decoding.SequenceCascade`.
    """

    def _method(self, **parts: Any) -> PairMethod:
        return decoding.SequenceCascade(**parts)


ALL_CASCADES = (TokenCascade, BiLDCascade, OracleCascade, SequenceCascade)
