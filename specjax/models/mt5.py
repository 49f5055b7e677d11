"""mT5: T5 v1.1 with a vocabulary of 101 languages.

Source: Xue et al. 2021; `transformers/models/mt5`.
"""

import dataclasses
from typing import Any

from specjax.errors import UserError
from specjax.models.family import HFFields
from specjax.models.t5 import (
    SCALED_UNTIED,
    T5Config,
    t5_family,
    t5_from_hf,
    t5_names,
    t5_sizes,
    t5_to_hf,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MT5Config(T5Config):
    """An mT5; see `T5Config`."""


# Only a head that differs from the embedding is untied. transformers 4 scales the input of a head
# that the file calls tied, and transformers 5 never scales: a file that does not say is refused.
def _from_hf(fields: HFFields) -> MT5Config:
    untied = fields.head == "separate"
    said_tied = fields.flag("tie_word_embeddings", True)
    if fields.head is None and not said_tied:
        raise UserError(
            "tie_word_embeddings is false, but lm_head.weight is absent; set it to true if the "
            "head is tied"
        )
    scales = fields.flag("scale_decoder_outputs")
    version = str(fields.values.get("transformers_version") or "4")
    if scales is None and not untied and said_tied and version.split(".")[0] == "4":
        raise UserError(
            "tie_word_embeddings is true; transformers 4 scales the logits of a tied mT5 and "
            "transformers 5 does not; set scale_decoder_outputs to true or false"
        )
    if untied and scales:
        raise UserError(SCALED_UNTIED)
    return t5_from_hf(fields, MT5Config, "gated-gelu", untied, bool(scales))


def _to_hf(config: MT5Config) -> dict[str, Any]:
    if config.tie_embeddings and config.scale_tied_logits:
        raise UserError(
            "this model scales the logits of a tied head (scale_tied_logits), which transformers' "
            "mT5 does not do; convert it to orbax"
        )
    # A tied head is written as an equal one: 4.x would scale a tied one.
    return {**t5_to_hf(config, per_layer=False), "tie_word_embeddings": False}


MT5 = t5_family(
    "mt5",
    config=MT5Config,
    architectures=("MT5ForConditionalGeneration",),
    names=t5_names(),
    from_hf=_from_hf,
    to_hf=_to_hf,
    presets=t5_sizes(MT5Config, 250_112, "mt5", ("small", "base", "large", "xl", "xxl")),
)
