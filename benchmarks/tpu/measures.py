"""The numbers of a compiled program, and their lower limits."""

from typing import Any

import jax
from flax.traverse_util import flatten_dict

from benchmarks.compiled import KINDS, collectives, parse
from benchmarks.predicted import CHIPS, LOGIT_TRIPS, Network, logit_bytes, pass_seconds
from benchmarks.tpu import estimates, waste
from benchmarks.tpu.cases import ALONE, METHODS, Case
from benchmarks.tpu.topologies import TPUS
from specjax.partitioning import Partitioner

MB = 1e6


def numbers_of(program: Any, name: str, case: Case) -> tuple[dict[str, float], dict[str, Any]]:
    """The numbers of a compiled program that grow with the layers; and facts that do not."""
    text = program.as_text()
    parsed = parse(text)
    kernels = estimates.Kernels(
        case.sizes.cache, CHIPS[case.chip].bandwidth / TPUS[case.chip].hertz, shares(case)
    )
    run = estimates.executed(parsed, case.sizes.draft, loop=name == "step", kernels=kernels)
    steps = [one.instruction for one in run]
    large = large_arrays(case)
    memory = program.memory_analysis()
    crossing = [one for one in run if one.instruction.opcode.removesuffix("-start") in KINDS]
    read = estimates.by_part(run, lambda one: one.times * one.reading)
    numbers = {
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "instructions": len(run),
        "host_transfers": waste.host_transfers(parsed),
        "float64": waste.doubles(parsed),
        "collectives": sum(one.times for one in crossing),
        **waste.copies(parsed, steps, large),
        **{f"part/{part}": n for part, n in estimates.by_part(run, lambda one: one.cycles).items()},
        **{f"reading/{part}": n for part, n in read.items()},
    }
    for region, (cycles, moved) in estimates.by_region(run).items():
        numbers |= {f"region/{region}": cycles, f"moved/{region}": moved}
    padding, maker, array = waste.worst_padding(steps, large)
    facts = {
        "widest_collective_MB": max((one.nbytes for one in collectives(text)), default=0) / 1e6,
        "padding": padding,
        "padded": None if maker is None else f"{array} {maker.op_name or maker.name}",
        "no_estimate": estimates.without_estimate(run),
        "dearest": sorted(run, key=lambda one: -one.cycles)[:100],
    }
    return {key: float(value) for key, value in numbers.items()}, facts


def shares(case: Case) -> dict[str, float]:
    """The share of its experts that the busiest device reads in a pass of each network."""
    ways = case.mesh.shape["model"]
    large, small = (Network.of(config, case.weights) for config in case.configs)
    return {
        "verifier_pass": large.share(_tokens(case), ways),
        "drafter_pass": small.share(_rows(case), ways),
    }


def expert_bytes(case: Case) -> float:
    """The bytes of experts that the busiest device reads in a verifier's pass."""
    ways = case.mesh.shape["model"]
    large = Network.of(case.configs[0], case.weights)
    return large.expert_bytes / ways * large.share(_tokens(case), ways)


def _rows(case: Case) -> int:
    return case.sizes.rows // case.mesh.shape["data"]


def _tokens(case: Case) -> int:
    return _rows(case) * (1 if case.method == ALONE else case.sizes.draft + 1)


def large_arrays(case: Case) -> waste.Large:
    """The sizes that count as large on a device."""
    part = Partitioner(case.mesh)
    ways, rows = case.mesh.shape["model"], _rows(case)
    layers, weights = [], set()
    for model in case.networks(case.layers):
        shapes = model.abstract_params()
        places = part.param_shardings(model, shapes)
        for leaf, where in zip(jax.tree.leaves(shapes), jax.tree.leaves(places), strict=True):
            weights.add(tuple(sorted(n for n in where.shard_shape(leaf.shape) if n > 1)))
        config = getattr(model.config, "layers", model.config)
        for layer in map(config.of_layer, config.style.cached):
            split = ways if layer.kv_heads % ways == 0 else 1
            layers.append(rows * case.sizes.cache * layer.kv_heads * layer.head_dim // split)
    vocab = Network.of(case.configs[0]).vocab
    vocab = vocab // ways if vocab % ways == 0 else vocab
    return waste.Large(rows, vocab, case.sizes.cache, min(layers), frozenset(weights))


def rooflines(case: Case) -> dict[str, float]:
    """The least seconds of each part of a step, by the model of docs/scaling.md.

    Collectives are excluded, for which the compiler gives no estimate either. Of the trips of the
    logits through memory, one (the write) belongs to the pass, one to the distribution, one to the
    draw and one to the verification. The draw after the verifier's pass is part of the
    verification; without verification, its trip is the draw's. "late" is what a head reads of the
    verifier's states; another drafter catches up in its first pass.
    """
    chip, sizes = CHIPS[case.chip], case.sizes
    ways, rows = case.mesh.shape["model"], _rows(case)
    large = Network.of(case.configs[0], case.weights)
    common: Any = {"rows": rows, "cached": sizes.cache, "prompt": sizes.prompt, "latency": 0.0}

    def pass_of(network: Network, tokens: int, split: int) -> tuple[float, float]:
        """The seconds of a pass, and of one trip of the logits."""
        least = pass_seconds(network, chip, tokens=tokens, ways=split, **common)
        whole = max(least.memory, least.compute)
        return whole, logit_bytes(network, rows, tokens, split) / chip.bandwidth

    alone = case.method == ALONE
    block, trip = pass_of(large, 1 if alone else sizes.draft + 1, ways)
    draft = small_trip = late = 0.0
    if case.has_head:
        small_trip = logit_bytes(large, rows, 1, ways) / chip.bandwidth
        read, late = (nbytes / chip.bandwidth for nbytes in _head_bytes(case, rows))
        draft = read / sizes.draft + LOGIT_TRIPS * small_trip
    elif not alone:
        small = Network.of(case.configs[1], case.weights)
        draft, small_trip = pass_of(small, 1, 1 if small.heads % ways else ways)
    drafts, trips = sizes.draft * draft, sizes.draft * small_trip
    return {
        "verifier_pass": block - (LOGIT_TRIPS - 1) * trip,
        "drafter_pass": drafts - (LOGIT_TRIPS - 1) * trips,
        "distribution": trip + trips,
        "draw": trips + 2 * trip * alone,
        "verification": 0.0 if alone else 2 * trip + trips,
        "draft step": draft,
        "late": late,
        "step": block + drafts + late,
    }


def _head_bytes(case: Case, rows: int) -> tuple[float, float]:
    """The bytes that a head reads for all tokens of a draft, and to catch up."""
    verifier, head = case.networks(case.layers)
    leaves = flatten_dict(head.abstract_params()["network"], sep="/")
    sizes, passes = head.config.layers, 1 if METHODS[case.method].head else case.sizes.draft
    late = sum(leaf.size for name, leaf in leaves.items() if name.startswith("fc"))
    read = sum(leaf.size for leaf in leaves.values()) - late
    read += verifier.config.vocab_size * verifier.config.embed_dim // case.mesh.shape["model"]
    places = case.sizes.cache + case.sizes.prompt * (head.config.cross_layer is not None)
    read += 2 * rows * places * sizes.num_layers * sizes.kv_heads * sizes.head_dim
    return 2.0 * passes * read, 2.0 * late
