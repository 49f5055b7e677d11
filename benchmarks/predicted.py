"""Upper limits of tokens per second from bytes, operations and collectives, for large pairs.

docs/scaling.md describes the model. Nothing is allocated, compiled or measured.

Axes: B rows, T tokens of a pass, S cache positions, P prompt tokens, E width, V vocabulary.
"""

import argparse
import dataclasses
import functools
import math
import sys
from collections import Counter
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from benchmarks import command
from specjax.cli.report import Report
from specjax.models import (
    PRESETS,
    DecoderOnlyConfig,
    ModelConfig,
    T5Config,
    model_from_config,
    preset,
)
from specjax.models.config import Routing
from specjax.models.quantised import quantised_form
from specjax.models.weights import is_stack
from specjax.theory import expected_tokens

HELP = "predicted tokens per second of large pairs, from bytes, operations and collectives"


@dataclasses.dataclass(frozen=True)
class Chip:
    """The maker's figures, in operations (bfloat16, dense) or bytes a second, and bytes."""

    flops: float
    bandwidth: float
    memory: float
    link: float


CHIPS = {
    # cloud.google.com/tpu/docs/v5e: 197 TFLOPs, 819 GBps, 16 GB, 400 GBps in both directions.
    "v5e": Chip(197e12, 819e9, 16e9, 200e9),
    # cloud.google.com/tpu/docs/v5p: 459 TFLOPs, 2765 GBps, 95 GB, 1200 GBps in both directions.
    "v5p": Chip(459e12, 2765e9, 95e9, 600e9),
    # cloud.google.com/tpu/docs/v6e: 918 TFLOPs, 1638 GBps, 32 GB, 800 GBps in both directions.
    "v6e": Chip(918e12, 1638e9, 32e9, 400e9),
    # nvidia.com/en-us/data-center/h100, SXM: 1,979 TFLOPS with sparsity, which is twice that
    # without, 3.35 TB/s, 80 GB, NVLink of 900 GB/s in both directions.
    "h100": Chip(989.5e12, 3.35e12, 80e9, 450e9),
    # nvidia.com/en-us/data-center/h200, SXM: as the H100, but 4.8 TB/s and 141 GB.
    "h200": Chip(989.5e12, 4.8e12, 141e9, 450e9),
}
PAIRS = {
    "t5_v1_1_xxl": "t5_v1_1_small",
    "gemma2_27b": "gemma2_2b",
    "llama2_70b": "llama2_7b",
    "qwen3_30b_a3b": "qwen3_0.6b",
}
# Bytes of parameters, activations and caches (bfloat16), and of logits (float32).
_BYTES, _LOGIT_BYTES = 2, 4
# Logits are written once and read by the softmax, the verification and the draw.
LOGIT_TRIPS = 4
# Leaves room for programs and their temporary arrays.
_FILLED = 0.9


@dataclasses.dataclass(frozen=True)
class Network:
    """The numbers of a whole network that determine a decoding pass.

    Attributes:
      stored: the parameters in memory.
      read: the parameters that a token is multiplied with.
      read_bytes: the bytes that a pass reads besides experts.
      routing: of the experts; None without any.
      expert_bytes: of all experts.
      layers: the decoder's layers.
      sums: the blocks of a layer whose results are summed over devices.
      heads: query heads.
      memories: for each layer that makes keys and values: their heads, the width of a head, and
        the number of layers that read them.
      width: E.
      vocab: V.
      cross: whether there are caches of the prompt too (in an encoder-decoder).
    """

    stored: int
    read: float
    read_bytes: float
    routing: Routing | None
    expert_bytes: float
    layers: int
    sums: int
    heads: int
    memories: tuple[tuple[int, int, int], ...]
    width: int
    vocab: int
    cross: bool

    @classmethod
    def of(cls, config: ModelConfig, weights: str | None = None) -> "Network":
        """The numbers of a configuration; `weights` as for `specjax.checkpoints.load_model`."""
        model = model_from_config(config)
        leaves = flatten_dict(model.abstract_params(), sep="/")
        cross = isinstance(config, T5Config)
        assert isinstance(config, T5Config | DecoderOnlyConfig)
        style = config.style
        readers = Counter(i if x.source is None else x.source for i, x in enumerate(style.layers))
        read = model.params_read(1)
        read_bytes = expert_bytes = 0
        for name in read:
            leaf = leaves[name]
            kind = quantised_form(name, leaf.shape, weights)
            arrays = [] if kind is None else jax.tree.leaves(kind.abstract(leaf.shape))
            nbytes = sum(x.size * x.dtype.itemsize for x in arrays) or leaf.size * _BYTES
            if is_stack(name, leaf.shape):
                expert_bytes += nbytes
            else:
                read_bytes += nbytes
        return cls(
            stored=model.num_params(),
            read=sum(read.values()),
            read_bytes=read_bytes,
            routing=next((x.routing for x in style.layers if x.routing), None),
            expert_bytes=expert_bytes,
            layers=config.num_decoder_layers if isinstance(config, T5Config) else config.num_layers,
            sums=3 if cross else 2,
            heads=config.num_heads,
            memories=tuple(
                (layer.kv_heads, layer.head_dim, readers[number])
                for number, layer in ((i, config.of_layer(i)) for i in style.cached)
            ),
            width=config.embed_dim,
            vocab=config.vocab_size,
            cross=cross,
        )

    def pass_bytes(self, tokens: int, ways: int = 1) -> float:
        """The bytes of parameters that a pass of so many tokens, of all rows, reads on a device."""
        return (self.read_bytes + self.expert_bytes * self.share(tokens, ways)) / ways

    def share(self, tokens: int, ways: int) -> float:
        """The share of its experts that the busiest device reads."""
        if self.routing is None:
            return 0.0
        local, cut = divmod(self.routing.experts, ways)
        if cut or ways == 1:  # each expert is split
            return self.routing.expected(tokens) / self.routing.experts
        return most_in_use(self.routing, tokens, ways) / local

    def cache_bytes(
        self, rows: int, cached: int, prompt: int, ways: int, read: bool = False
    ) -> float:
        """The bytes on one of `ways` devices, or those that a pass reads there.

        Heads that the devices do not divide are on all of them.
        """
        numbers = sum(
            heads * width * (readers if read else 1) / (ways if heads % ways == 0 else 1)
            for heads, width, readers in self.memories
        )
        return 2 * rows * (cached + prompt * self.cross) * numbers * _BYTES


@functools.cache
def most_in_use(routing: Routing, tokens: int, ways: int) -> float:
    """How many experts tokens use together on the device that has most, if all are as probable."""
    numbers, used = np.random.default_rng(0), np.zeros((500, routing.experts), bool)
    for _ in range(tokens):
        chosen = np.argpartition(numbers.random(used.shape), routing.per_token - 1, axis=1)
        np.put_along_axis(used, chosen[:, : routing.per_token], True, axis=1)
    return float(used.reshape(len(used), ways, -1).sum(axis=2).max(axis=1).mean())


@dataclasses.dataclass(frozen=True)
class Seconds:
    """The time of a pass by cause: memory, operations and collectives, in seconds."""

    memory: float
    compute: float
    collectives: float

    @property
    def total(self) -> float:
        """Memory and operations overlap; collectives do not."""
        return max(self.memory, self.compute) + self.collectives


def logit_bytes(network: Network, rows: int, tokens: int, ways: int) -> float:
    """The bytes of the logits `[B, T, V]` on one of `ways` chips."""
    return rows * tokens * network.vocab * _LOGIT_BYTES / ways


def pass_seconds(
    network: Network,
    chip: Chip,
    *,
    rows: int,
    tokens: int,
    cached: int,
    prompt: int,
    ways: int,
    latency: float,
) -> Seconds:
    """The least time of a pass of T tokens, with each layer split over `ways` chips.

    Attention reads `cached` positions, and `prompt` positions of an encoder's output. `latency` is
    the seconds of an empty all-reduce.
    """
    logits = LOGIT_TRIPS * logit_bytes(network, rows, tokens, ways)
    memory = network.pass_bytes(rows * tokens, ways) + logits
    memory += network.cache_bytes(rows, cached, prompt, ways, read=True)
    places = cached + prompt * network.cross
    widths = sum(width * readers for _, width, readers in network.memories)
    attention = 4 * rows * tokens * places * network.heads * widths
    flops = (2 * rows * tokens * network.read + attention) / ways
    reduces = (network.sums * network.layers + 1) if ways > 1 else 0
    moved = 2 * (ways - 1) / ways * rows * tokens * network.width * _BYTES
    return Seconds(
        memory / chip.bandwidth, flops / chip.flops, reduces * (latency + moved / chip.link)
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the pairs, the chips and the command."""
    parser.add_argument("--verifiers", nargs="+", default=list(PAIRS), choices=list(PRESETS))
    parser.add_argument("--drafter", choices=list(PRESETS), help="for all pairs; else their own")
    parser.add_argument("--chips", nargs="+", default=["v5e", "h100"], choices=list(CHIPS))
    parser.add_argument("--ways", type=int, help="chips; by default as few as possible")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16], help="B")
    parser.add_argument("--draft", type=int, default=5, help="G")
    parser.add_argument("--acceptance", type=float, default=0.7, help="rate of drafted tokens")
    parser.add_argument("--cached", type=int, default=1024, help="S; for a T5 the output so far")
    parser.add_argument("--prompt", type=int, default=512, help="P, for a T5")
    parser.add_argument(
        "--latency-us", type=float, default=5.0, help="assumed latency of an all-reduce"
    )
    parser.add_argument("--output", type=int, default=256, help="output tokens of a prompt")


def run(args: argparse.Namespace) -> Report:
    """Predicts for each pair, chip and number of rows."""
    given = ["ways"] if args.ways is not None else []
    command.check_positive(args, "draft", "cached", "prompt", "rows", "output", *given)
    if not 0.0 <= args.acceptance <= 1.0:
        raise ValueError(f"--acceptance must lie in [0, 1], got {args.acceptance}")
    if not 0.0 <= args.latency_us < math.inf:
        raise ValueError(f"--latency-us must be at least 0, got {args.latency_us}")
    rows = [
        _row(verifier, args.drafter or PAIRS.get(verifier), chip, batch, args)
        for verifier in args.verifiers
        for chip in args.chips
        for batch in args.rows
    ]
    notes = (
        f"Upper limits, for {args.draft} drafted tokens, acceptance {args.acceptance:g} and "
        f"{args.latency_us:g} us per all-reduce. ways: chips; bound: the largest part of a round; "
        f"chip_hours: of a million outputs of {args.output} tokens, without reading prompts.",
    )
    return Report(rows, list(rows[0]), notes)


def _row(
    verifier: str, drafter: str | None, chip_name: str, batch: int, args: argparse.Namespace
) -> dict[str, Any]:
    if drafter is None:
        raise ValueError(f"--drafter is needed, because {verifier} has no default drafter")
    chip = CHIPS[chip_name]
    large, small = Network.of(preset(verifier)), Network.of(preset(drafter))
    sizes = {"rows": batch, "cached": args.cached, "prompt": args.prompt}

    def drafter_ways(ways: int) -> int:
        # A network is not split if the chips do not divide its heads (REPLICATE_DRAFTER).
        return 1 if small.heads % ways else ways

    def held(ways: int) -> float:
        own = drafter_ways(ways)
        weights = (large.stored / ways + small.stored / own) * _BYTES
        caches = large.cache_bytes(batch, args.cached, args.prompt, ways)
        return weights + caches + small.cache_bytes(batch, args.cached, args.prompt, own)

    if args.ways and large.heads % args.ways:
        raise ValueError(
            f"--ways must divide the {large.heads} heads of {verifier}, got {args.ways}: choose a "
            "divisor"
        )
    possible = [w for w in (2**i for i in range(10)) if large.heads % w == 0]
    ways = args.ways or next((w for w in possible if _fits(held(w), chip)), 0)
    if not ways:
        raise ValueError(
            f"{batch} rows of {verifier} do not fit on {possible[-1]} {chip_name}, the most chips "
            f"that divide its {large.heads} heads: give fewer --rows or less --cached"
        )
    own = drafter_ways(ways)
    common = {**sizes, "latency": args.latency_us * 1e-6}
    alone = pass_seconds(large, chip, tokens=1, ways=ways, **common)
    block = pass_seconds(large, chip, tokens=args.draft + 1, ways=ways, **common)
    draft = pass_seconds(small, chip, tokens=1, ways=own, **common)
    parts = {
        name: getattr(block, name) + args.draft * getattr(draft, name)
        for name in ("memory", "compute", "collectives")
    }
    whole = block.total + args.draft * draft.total
    emitted = expected_tokens(args.acceptance, args.draft)
    return {
        "verifier": verifier,
        "drafter": drafter,
        "chip": chip_name,
        "ways": ways,
        "drafter_ways": own,
        "rows": batch,
        "GB_per_chip": held(ways) / 1e9,
        "fits": _fits(held(ways), chip),
        "alone_tokens_per_s": batch / alone.total,
        "tokens_per_s": batch * emitted / whole,
        "speedup": emitted * alone.total / whole,
        "c": draft.total / alone.total,
        "r": block.total / alone.total,
        "chip_hours": ways * 1e6 * args.output * whole / (batch * emitted) / 3600,
        "bound": max(parts, key=lambda name: parts[name]),
    }


def _fits(needed: float, chip: Chip) -> bool:
    return needed <= _FILLED * chip.memory


main = command.program(__file__, HELP, add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
