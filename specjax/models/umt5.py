"""UMT5 and Pile-T5: T5 v1.1 with relative position biases in every layer.

Source: Chung et al. 2023 (UMT5), Sutawika et al. 2024 (Pile-T5); `transformers/models/umt5`.
"""

import dataclasses
from typing import Any

from specjax.models.family import HFFields
from specjax.models.t5 import (
    T5Config,
    is_untied,
    t5_family,
    t5_from_hf,
    t5_names,
    t5_sizes,
    t5_to_hf,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UMT5Config(T5Config):
    """A UMT5; see `T5Config`."""

    relpos_per_layer: bool = True


# As in transformers 4, a head scales its input if the file calls it tied. transformers 5 scales the
# logits of every UMT5 by `d_model ** -0.5`, also those of untied heads, which were trained without.
def _from_hf(fields: HFFields) -> UMT5Config:
    scales = fields.flag("scale_decoder_outputs", fields.flag("tie_word_embeddings", True))
    version = str(fields.values.get("transformers_version") or "4").split(".")[0]
    # transformers 5 calls every head tied, and writes those that are not.
    rewritten = version.isdecimal() and int(version) >= 5 and fields.head == "separate"
    untied = True if rewritten else is_untied(fields)
    return t5_from_hf(fields, UMT5Config, "gated-gelu", untied, scales)


def _to_hf(config: UMT5Config) -> dict[str, Any]:
    # An equal head that does not scale is called untied.
    scales = config.tie_embeddings and config.scale_tied_logits
    return {**t5_to_hf(config, per_layer=True), "tie_word_embeddings": scales}


UMT5 = t5_family(
    "umt5",
    config=UMT5Config,
    architectures=("UMT5ForConditionalGeneration",),
    names=t5_names(per_layer=True),
    from_hf=_from_hf,
    to_hf=_to_hf,
    presets={
        **t5_sizes(UMT5Config, 256_384, "umt5", ("small", "base", "xl", "xxl")),
        **t5_sizes(UMT5Config, 32_128, "pile_t5", ("base", "large", "xl", "xxl")),
    },
)
