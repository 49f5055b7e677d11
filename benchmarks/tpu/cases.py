"""The programs to compile: pairs of networks, methods, and few or all layers."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from benchmarks.shapes import Sizes, lower_programs, of_numbers, of_params
from benchmarks.tpu.topologies import GPU_OPTIONS, GPUS
from specjax import decoding, drafting, rules, verification
from specjax.models import (
    PRESETS,
    DecoderOnlyConfig,
    LlamaConfig,
    ModelConfig,
    T5Config,
    model_from_config,
    preset,
)
from specjax.models.heads import BlockConfig, EagleConfig, HeadConfig, draft_head
from specjax.partitioning import Partitioner

PAIRS = {
    "t5": ("t5_v1_1_base", "t5_v1_1_small"),
    "t5_xl": ("t5_v1_1_xl", "t5_v1_1_small"),
    "gemma2": ("gemma2_9b", "gemma2_2b"),
    "llama3": ("llama3_8b", "llama3.2_1b"),
}
ALONE = "alone"


@dataclasses.dataclass(frozen=True)
class Variant:
    """The settings of a pair.

    Attributes:
      rule: the rule; its numbers are traced.
      verification: the algorithm.
      stopping: the policy that ends drafts before G tokens.
      filtered: whether top-p filters both distributions.
      head: the layers of a block head (DFlash), or 0 for a recurrent head (EAGLE-3), which has one;
        None for the pair's drafter. A layer has the sizes of the verifier's.
    """

    rule: Any = rules.Lossless()  # noqa: RUF009  immutable
    verification: Any = verification.Block()  # noqa: RUF009  immutable
    stopping: Any = drafting.FixedLength()  # noqa: RUF009  immutable
    filtered: bool = False
    head: int | None = None


METHODS = {
    "block": Variant(),
    "token": Variant(verification=verification.Token()),
    "opt": Variant(rules.OPT(0.2)),
    "tokenv3": Variant(rules.TokenV3(0.2)),
    "confidence": Variant(stopping=drafting.Confidence(0.4)),
    "top_p": Variant(filtered=True),
    "eagle": Variant(head=0),
    "dflash_2": Variant(head=2),
    "dflash_3": Variant(head=3),
    "dflash_5": Variant(head=5),
    ALONE: Variant(),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A pair on a mesh.

    Attributes:
      pair: a name of `PAIRS`, or VERIFIER+DRAFTER with two presets.
      chip: a TPU or a GPU.
      mesh: its chips, the axes `data` and `model`.
      method: a name of `METHODS`; `ALONE` decodes with only the verifier, token by token.
      sizes: the shapes.
      depth: the layers of each network; None for all.
      weights: the form of the matrices; see `specjax.checkpoints.load_model`.
    """

    pair: str
    chip: str
    mesh: Mesh
    method: str
    sizes: Sizes
    depth: int | None = None
    weights: str | None = None

    @property
    def platform(self) -> str:
        """As `jax.Device.platform` names it."""
        return "gpu" if self.chip in GPUS else "tpu"

    @property
    def names(self) -> dict[str, Any]:
        """What a row of a table calls it."""
        return {
            "pair": self.pair,
            "chip": self.chip,
            "rows": self.sizes.rows,
            "cache": self.sizes.cache,
            "draft": self.sizes.draft,
            "weights": self.weights,
            "method": self.method,
        }

    @property
    def has_head(self) -> bool:
        """Whether a draft head drafts."""
        return METHODS[self.method].head is not None

    @property
    def configs(self) -> tuple[ModelConfig, ModelConfig]:
        """The configurations of verifier and drafter."""
        large, small = configs_of(self.pair)
        if self.depth is None:
            return large, small
        return _of_depth(large, self.depth), _of_depth(small, self.depth)

    @property
    def layers(self) -> tuple[int, int]:
        """The layers of the decoders of verifier and drafter."""
        large, small = self.configs
        return _depth_of(large), _depth_of(small)

    def networks(self, layers: tuple[int, int]) -> tuple[Any, ...]:
        """The verifier and the drafter, or a head, with these layers; a head keeps its own."""
        ways = Partitioner(self.mesh).ways("kv_heads") if self.mesh.size > 1 else None
        large, small = (
            model_from_config(_of_depth(config, depth)).for_devices(self.platform, ways)
            for config, depth in zip(self.configs, layers, strict=True)
        )
        count = METHODS[self.method].head
        if count is None:
            # Embeddings may be padded to different sizes, with rows that are no tokens.
            tokens = min(large.vocab_size, small.vocab_size)
            return tuple(
                x if x.vocab_size == tokens else dataclasses.replace(x, tokens=tokens)
                for x in (large, small)
            )
        config = _head(large.config, count, self.sizes.draft)
        return large, draft_head(config, large).for_devices(self.platform, ways)

    def compile(self, layers: tuple[int, int], programs: tuple[str, ...]) -> dict[str, Any]:
        """The compiled programs by name, with these layers of verifier and drafter.

        Raises ValueError if the compiler fails, for example because a program does not fit into
        memory.
        """
        part = Partitioner(self.mesh)
        large, small = self.networks(layers)
        variant = METHODS[self.method]
        method, params = (_alone if self.method == ALONE else _pair)(
            large, small, variant, self.sizes.draft, part, self.weights
        )
        made = lower_programs(method, params, self.sizes, programs, filtered=variant.filtered)
        options = GPU_OPTIONS if self.platform == "gpu" else None
        try:
            return {name: program.compile(options) for name, program in made.items()}
        except jax.errors.JaxRuntimeError as error:
            what = f"{self.pair} with {' + '.join(map(str, layers))} layers on {self.chip}"
            raise ValueError(f"{what} does not compile: {str(error).splitlines()[0]}") from error


def configs_of(pair: str) -> tuple[ModelConfig, ModelConfig]:
    """The configurations of a pair in bfloat16."""
    names = PAIRS.get(pair) or tuple(pair.split("+"))
    if len(names) != 2 or not set(names) <= PRESETS.keys():
        raise ValueError(
            f"--pairs must be one of {', '.join(PAIRS)}, or VERIFIER+DRAFTER of "
            f"{', '.join(PRESETS)}, got {pair!r}"
        )
    large, small = (preset(name, dtype="bfloat16", param_dtype="bfloat16") for name in names)
    return large, small


def at_trial_sizes(large: ModelConfig, small: ModelConfig) -> tuple[ModelConfig, ModelConfig]:
    """Networks of a single narrow layer and few tokens, to try what takes a published size."""
    made = []
    for config in (large, small):
        sizes = {"vocab_size": 512, "embed_dim": 64, "mlp_dim": 64}
        sizes |= {"expert_dim": 32} if getattr(config, "expert_dim", None) else {}
        made.append(_of_depth(config, 1).replace(**sizes))
    return made[0], made[1]


def _depth_of(config: ModelConfig) -> int:
    """The layers of a network's decoder."""
    assert isinstance(config, T5Config | DecoderOnlyConfig)
    return config.num_decoder_layers if isinstance(config, T5Config) else config.num_layers


def _of_depth(config: ModelConfig, layers: int) -> ModelConfig:
    if isinstance(config, T5Config):
        return config.replace(num_encoder_layers=layers, num_decoder_layers=layers)
    changes = {"num_layers": layers}
    if types := getattr(config, "layer_types", ()):
        changes["layer_types"] = types[-layers:]
    return config.replace(**changes)


def _alone(
    large: Any, _: Any, variant: Variant, draft: int, part: Partitioner, weights: str | None
) -> tuple[Any, Any]:
    method = decoding.Autoregressive(large, partitioner=part)
    return method, decoding.MethodParams(of_params(large, part, weights))


def _pair(
    large: Any, small: Any, variant: Variant, draft: int, part: Partitioner, weights: str | None
) -> tuple[Any, Any]:
    policy, numbers = variant.stopping.bind()
    verifier, drafter = of_params(large, part, weights), None
    if variant.head is None:
        drafter = drafting.Chain(small, draft, policy, catches_up=True)
        network = of_params(small, part, weights)
    else:
        kind = drafting.heads.BlockDrafter if variant.head else drafting.heads.EagleDrafter
        drafter = kind(small, draft, policy)
        network = small.joined(of_params(small, part), verifier)
    method = decoding.Speculative(large, drafter, variant.verification, partitioner=part)
    own = drafting.chain.ChainParams(network, of_numbers(numbers, part))
    return method, decoding.MethodParams(verifier, own, of_numbers(variant.rule, part))


def _head(verifier: ModelConfig, layers: int, draft: int) -> HeadConfig:
    """The head of a verifier; of its states it reads as many as the published ones."""
    assert isinstance(verifier, T5Config | DecoderOnlyConfig)
    depth = _depth_of(verifier)
    sizes = LlamaConfig(
        vocab_size=verifier.vocab_size,
        embed_dim=verifier.embed_dim,
        num_heads=verifier.num_heads,
        num_kv_heads=verifier.kv_heads,
        head_dim=verifier.head_dim,
        mlp_dim=verifier.mlp_dim,
        num_layers=layers or 1,
        dtype=verifier.dtype,
        param_dtype=verifier.param_dtype,
    )
    states = 5 if layers > 2 else 3
    common: dict[str, Any] = {
        "layers": sizes,
        # Where they lie costs nothing.
        "boundaries": tuple(1 + i * (depth - 2) // (states - 1) for i in range(states)),
        "windows": (None,) * (layers or 1),
        "cross_layer": depth - 1 if isinstance(verifier, T5Config) else None,
    }
    if not layers:
        return EagleConfig(**common)
    return BlockConfig(**common, block_size=draft + 1, mask_token=None)


def at_depth(
    measure: Callable[[tuple[int, int]], Mapping[str, float]],
    few: tuple[int, int] | None,
    full: tuple[int, int],
    both: bool,
) -> dict[str, float]:
    """The numbers of a program with all layers, extrapolated from programs with few layers.

    `measure` takes the layers of the verifier and of the drafter. The difference between the two
    depths of `few` is the cost of a layer, for each network separately, and is multiplied by the
    number of missing layers; None measures all. `both`: the layers of the drafter are few, too.
    """
    if few is None:
        return dict(measure(full))
    low, high = few
    base = dict(measure((low, low)))
    numbers = dict(base)
    for i in range(1 + both):
        deeper = measure((high, low) if i == 0 else (low, high))
        times = (full[i] - low) / (high - low)
        for name, value in deeper.items():
            numbers[name] += times * (value - base[name])
    # If a compiler needs less for more layers, the line may fall below 0.
    return {name: max(0.0, value) for name, value in numbers.items()}
