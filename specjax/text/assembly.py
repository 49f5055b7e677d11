"""From models and parts to a decoding method with its parameters."""

import dataclasses

import numpy as np

from specjax.checks import check_part, checked
from specjax.decoding import Autoregressive, AutoregressiveParams, RoundParams, Speculative
from specjax.drafting import FixedLength, NeuralDrafter, NeuralDrafterParams
from specjax.rules import Lossless
from specjax.text.models import Models, TextModel
from specjax.types import Drafter, Method, Params, Rule, Stopping, Verification
from specjax.verification import Block


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """What a user may choose of a method; None where nothing was said. See `Decoder`."""

    rule: Rule | None = None
    verification: Verification | None = None
    max_draft: int | None = None
    stopping: Stopping | None = None
    stopping_params: Params = None
    drafter: Drafter | None = None
    drafter_params: Params = None
    widths: tuple[int, ...] | None = None
    method: Method | None = None
    params: Params = None

    def check_none(self, why: str, *, but: tuple[str, ...] = ()) -> None:
        """Raises ValueError if a part was given, unless it is among `but`."""
        for field in dataclasses.fields(self):
            if field.name not in but and getattr(self, field.name) is not None:
                raise ValueError(f"{field.name}= must be left out: {why}")


@dataclasses.dataclass(frozen=True, eq=False)
class Assembled:
    """Attributes: a method, its parameters, and the models whose fingerprints count, by name."""

    method: Method
    params: Params
    models: dict[str, TextModel]
    main: TextModel


def assemble(models: Models | TextModel, parts: Parts) -> Assembled:
    """Makes the method that models and parts ask for.

    Args:
      models: a pair or more models, or one to decode alone.
      parts: what was chosen.

    Returns:
      The method and its parameters.

    Raises:
      TypeError: if `models` is neither, or a part is not what it must be.
      ValueError: if the parts do not go together.
    """
    if isinstance(models, TextModel):
        named, main = {"model": models}, models
    elif isinstance(models, Models):
        named, main = models.named, models.verifier
    else:
        raise TypeError(
            f"models must be a Pair or a TextModel, got {type(models).__name__}: see load_pair"
        )
    if parts.method is not None:
        parts.check_none("the method has its own", but=("method", "params", "rule"))
        return _whole(named, main, parts)
    if parts.params is not None:
        raise ValueError("params= must be left out: it is for a method of your own, method=")
    if parts.drafter is None and "drafter" not in named:
        parts.check_none(f"{main.name} decodes alone; give a Pair, or drafter=")
        method = Autoregressive(
            main.model, eos_ids=tuple(main.tokenizer.eos_ids), partitioner=main.partitioner
        )
        return Assembled(method, AutoregressiveParams(main.prepared), named, main)
    return _speculative(named, main, parts)


def _whole(named: dict[str, TextModel], main: TextModel, parts: Parts) -> Assembled:
    """A method of the user's own."""
    method, params = parts.method, parts.params
    needed = ("init", "run", "describe", "cache_length", "model_names", "vocab_size")
    check_part("method", method, needed, "decoding.Speculative(...)")
    assert method is not None
    if parts.rule is not None:
        method.check_rule(parts.rule)
        params = params._replace(rule=parts.rule)
    return Assembled(method, params, named, main)


def _speculative(named: dict[str, TextModel], main: TextModel, parts: Parts) -> Assembled:
    drafter, drafter_params = parts.drafter, parts.drafter_params
    if drafter is None:
        max_draft = 5 if parts.max_draft is None else parts.max_draft
        max_draft = int(checked("max_draft", max_draft, low=1, dtype=np.int32))
        stopping = FixedLength() if parts.stopping is None else parts.stopping
        small = named["drafter"]
        drafter = NeuralDrafter(small.model, max_draft, stopping)
        own = () if parts.stopping_params is None else parts.stopping_params
        drafter_params = NeuralDrafterParams(small.prepared, own)
    else:
        for name in ("max_draft", "stopping", "stopping_params"):
            if getattr(parts, name) is not None:
                raise ValueError(f"{name}= must be left out: the drafter has its own")
        # A drafter of the user's own takes the place of the pair's.
        named = {name: model for name, model in named.items() if name != "drafter"}
    method = Speculative(
        main.model,
        drafter,
        Block() if parts.verification is None else parts.verification,
        parts.widths,
        eos_ids=tuple(main.tokenizer.eos_ids),
        partitioner=main.partitioner,
    )
    rule = Lossless() if parts.rule is None else parts.rule
    method.check_rule(rule)
    return Assembled(method, RoundParams(main.prepared, drafter_params, rule), named, main)
