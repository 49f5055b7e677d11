"""UMT5 and Pile-T5: T5 v1.1 with relative position biases in every layer.

Source: Chung et al. 2023 (UMT5), Sutawika et al. 2024 (Pile-T5); `transformers/models/umt5`.
"""

import dataclasses
from typing import Any

from specjax.models.family import Family
from specjax.models.hf_fields import HFFields
from specjax.models.seq2seq_lm import Seq2SeqLM
from specjax.models.t5 import (
    EMBEDDINGS,
    SPECIAL_IDS,
    UNUSED,
    VOCABULARY,
    T5Config,
    is_untied,
    t5_from_hf,
    t5_names,
    t5_sizes,
    t5_to_hf,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UMT5Config(T5Config):
    """A UMT5; see `T5Config`."""

    relpos_per_layer: bool = True


def _from_hf(fields: HFFields) -> UMT5Config:
    """See `Family`; as in transformers 4, a head scales its input if the file calls it tied."""
    scales = fields.flag("scale_decoder_outputs", fields.flag("tie_word_embeddings", True))
    version = str(fields.values.get("transformers_version") or "4").split(".")[0]
    # transformers 5 calls every head tied, and writes those that are not.
    rewritten = version.isdecimal() and int(version) >= 5 and fields.head == "own"
    untied = True if rewritten else is_untied(fields)
    return t5_from_hf(fields, UMT5Config, "gated-gelu", untied, scales)


def _to_hf(config: UMT5Config) -> dict[str, Any]:
    # An equal head that does not scale is called untied.
    scales = config.tie_embeddings and config.scale_tied_logits
    return {**t5_to_hf(config, per_layer=True), "tie_word_embeddings": scales}


UMT5 = Family(
    name="umt5",
    config=UMT5Config,
    model=Seq2SeqLM,
    architectures=("UMT5ForConditionalGeneration",),
    special_ids=SPECIAL_IDS,
    names=t5_names(per_layer=True),
    from_hf=_from_hf,
    to_hf=_to_hf,
    copies=EMBEDDINGS,
    unused=UNUSED,
    presets={
        **t5_sizes(
            UMT5Config,
            256_384,
            names={size: f"umt5_{size}" for size in ("small", "base", "xl", "xxl")},
        ),
        **t5_sizes(
            UMT5Config,
            32_128,
            names={size: f"pile_t5_{size}" for size in ("base", "large", "xl", "xxl")},
        ),
    },
    vocabulary=VOCABULARY,
)
