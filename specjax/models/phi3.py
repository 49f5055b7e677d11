"""Phi 3 and 4: Llama with fused projections on disk, and perhaps a window.

Networks with stretched rotary positions (`longrope`), which change with the length of a text, are
refused.

Source: Abdin et al. 2024; `transformers/models/phi3`.
"""

import dataclasses
from typing import Any

from specjax.models.decoder_only import LLAMA_NAMES, RotaryConfig, decoder_only_family
from specjax.models.family import HFFields, Renaming, T
from specjax.models.mistral import mistral_from_hf, mistral_to_hf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phi3Config(RotaryConfig):
    """A Phi 3 or 4."""

    norm_eps: float = 1e-5


def _from_hf(fields: HFFields) -> Phi3Config:
    return Phi3Config(**mistral_from_hf(fields, None, rms_norm_eps=1e-5))


def _to_hf(config: Phi3Config) -> dict[str, Any]:
    longest = 4_096
    fields = mistral_to_hf(config, "Phi 3", longest)
    return {**fields, "original_max_position_embeddings": longest}


# Arrays that join kernels, in this order.
_JOINED = {
    "self_attn.qkv_proj": ("self_attention/query", "self_attention/key", "self_attention/value"),
    "mlp.gate_up_proj": ("mlp/wi_0", "mlp/wi_1"),
}

PHI3 = decoder_only_family(
    "phi3",
    config=Phi3Config,
    architectures=("Phi3ForCausalLM",),
    special_ids={"eos_token_id": 32_000, "pad_token_id": 32_000, "bos_token_id": 1},
    names=(
        *(
            Renaming(
                f"model.layers.{{i}}.{hf}.weight", f"decoder/layers_{{i}}/{ours}/kernel", T, part
            )
            for hf, kernels in _JOINED.items()
            for part, ours in enumerate(kernels)
        ),
        *LLAMA_NAMES,
    ),
    from_hf=_from_hf,
    to_hf=_to_hf,
    presets={
        "phi3_mini": Phi3Config.of(32_064, 3_072, 32, 32, 96, 8_192, 32, sliding_window=2_047),
        "phi3_medium": Phi3Config.of(32_064, 5_120, 40, 10, 128, 17_920, 40, sliding_window=2_047),
        "phi4": Phi3Config.of(100_352, 5_120, 40, 10, 128, 17_920, 40, rope_theta=250_000.0),
    },
)
