"""The predictions, against sums by hand."""

import pytest

from benchmarks import predicted
from specjax.models import LlamaConfig, preset
from specjax.theory import expected_tokens


def test_published_sizes_are_counted():
    """Of Llama 2 and Gemma 2 their papers' numbers; a T5's decoder reads less than it stores."""
    assert predicted.Network.of(preset("llama2_7b")).stored == 6_738_415_616
    gemma = predicted.Network.of(preset("gemma2_2b"))
    assert gemma.stored == gemma.read == 2_614_341_888  # its embedding is also the projection
    llama = predicted.Network.of(preset("llama2_7b"))
    assert llama.stored - llama.read == 32_000 * 4_096  # a few rows of the embedding
    t5 = predicted.Network.of(preset("t5_v1_1_small"))
    layer = 2 * 512 * 384 + 4 * 512 * 384 + 3 * 512 * 1_024 + 3 * 512
    assert t5.read == 8 * layer + 512 * 32_128 + 512 + 32 * 6


def test_a_pass_takes_what_its_bytes_operations_and_sums_take():
    config = LlamaConfig(
        vocab_size=10, embed_dim=4, num_heads=2, num_kv_heads=2, head_dim=2, mlp_dim=5, num_layers=2
    )
    network = predicted.Network.of(config)
    layer = 4 * 4 * 4 + 3 * 4 * 5 + 2 * 4
    assert network.read == 2 * layer + 4 * 10 + 4
    chip = predicted.Chip(flops=1e3, bandwidth=1e2, memory=1e9, link=10.0)
    sizes = {"rows": 3, "tokens": 2, "cached": 7, "prompt": 100, "latency": 0.5}
    one = predicted.pass_seconds(network, chip, ways=1, **sizes)
    cache = 2 * 3 * 7 * 2 * 2 * 2 * 2
    assert one.memory == pytest.approx((2 * network.read + 4 * 3 * 2 * 10 * 4 + cache) / 1e2)
    attention = 4 * 3 * 2 * 7 * 2 * 2 * 2
    assert one.compute == pytest.approx((2 * 3 * 2 * network.read + attention) / 1e3)
    assert one.collectives == 0.0 and one.total == max(one.memory, one.compute)
    two = predicted.pass_seconds(network, chip, ways=2, **sizes)
    assert two.memory == pytest.approx(one.memory / 2)
    assert two.collectives == pytest.approx((2 * 2 + 1) * (0.5 + 3 * 2 * 4 * 2 / 10.0))
    # Three chips divide no heads: each reads all keys and values.
    three = predicted.pass_seconds(network, chip, ways=3, **sizes)
    assert three.memory == pytest.approx((one.memory * 1e2 - cache) / 3 / 1e2 + cache / 1e2)


def test_a_longer_block_reads_more_experts():
    config = preset("qwen3_30b_a3b")
    network = predicted.Network.of(config)
    expert = 3 * 2_048 * 768
    dense = network.stored - 151_936 * 2_048 - 48 * 128 * expert
    assert network.read == dense + 48 * 8 * expert  # 3 of the 30 billion
    # Of all draws of one of two tokens' experts, 1/16 are of the other's.
    used = {1: 8, 2: 16 - 0.5, 10_000: 128}
    for tokens, experts in used.items():
        assert network.pass_bytes(tokens) == pytest.approx(2 * (dense + 48 * experts * expert))
    quantised = predicted.Network.of(config, "int8")
    assert quantised.expert_bytes == pytest.approx(network.expert_bytes / 2, rel=5e-3)  # scales


def test_layers_that_share_keys_and_values_read_them_again():
    network = predicted.Network.of(preset("gemma4_e2b"))
    # 12 of 15 layers have heads of 256, the others of 512; 16 and 4 more layers read the last two.
    held, read = (
        network.cache_bytes(rows=1, cached=10, prompt=0, ways=1, read=read) for read in (0, 1)
    )
    assert held == 2 * 10 * (12 * 256 + 3 * 512) * 2
    assert read == 2 * 10 * (28 * 256 + 7 * 512) * 2


def test_rounds_and_speedups(rows):
    def rows_of(*words):
        assert predicted.main([*words]) == 0
        return rows()

    words = ["--verifiers", "llama2_70b", "--chips", "v5e", "--rows", "1"]
    [row] = rows_of(*words)
    assert row["fits"] and row["ways"] == 16
    ideal = expected_tokens(0.7, 5) / (5 * row["c"] + row["r"])
    assert row["speedup"] == pytest.approx(ideal)
    assert row["speedup"] == pytest.approx(row["tokens_per_s"] / row["alone_tokens_per_s"])
    [worse] = rows_of(*words, "--acceptance", "0")
    assert worse["speedup"] < 1.0
    # Half of the chips do not hold it.
    [small] = rows_of(*words, "--ways", "8")
    assert not small["fits"]
    # 6 heads on 4 chips: the drafter is not split.
    [t5] = rows_of("--verifiers", "t5_v1_1_xxl", "--chips", "v5e", "--ways", "4", "--rows=1")
    assert t5["drafter_ways"] == 1
