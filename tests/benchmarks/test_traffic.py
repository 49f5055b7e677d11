"""What crosses the mesh in a round and in a refill: nothing of the vocabulary's or cache's size."""

import math

import pytest

from benchmarks.compiled import Collective, collectives
from benchmarks.shapes import Sizes, lower_programs, of_params
from specjax import decoding, drafting, rules
from specjax.models import Gemma2Config, LlamaConfig, T5Config, model_from_config
from specjax.partitioning import Partitioner, make_mesh

SIZES = Sizes(rows=32)
# Different sizes, to identify axes in a program.
VOCAB, WIDTH = 1024, 24
NUMBERS = {
    "vocab_size": VOCAB,
    "embed_dim": WIDTH,
    "num_heads": 8,
    "head_dim": 4,
    "mlp_dim": 40,
}
LAYERS = {"num_layers": 1, "num_kv_heads": 4}
TINY = {
    "t5": T5Config(**NUMBERS, num_encoder_layers=1, num_decoder_layers=1),
    "llama": LlamaConfig(**NUMBERS, **LAYERS),
    "gemma2": Gemma2Config(**NUMBERS, **LAYERS, sliding_window=4, query_pre_attn_scalar=4.0),
}
ALL = [(family, mesh) for family in TINY for mesh in ((8, 1), (4, 2), (2, 4))]
FAST = [("t5", (2, 4))]

PROGRAM = """HloModule jit__run

%sum (a: f32[], b: f32[]) -> f32[] {
  ROOT %add = f32[] add(%a, %b)
}

%draft (p: (s32[], bf16[4,16])) -> (s32[], bf16[4,16]) {
  %gathered = (bf16[4,16], bf16[4,64]{1,0}) all-gather-start(%x), channel_id=2, dimensions={1}
}

%more (p: (s32[], bf16[4,16])) -> pred[] {
  %any = pred[] all-reduce(%y), channel_id=3, to_apply=%sum
}

%body (p: (s32[], bf16[4,16])) -> (s32[], bf16[4,16]) {
  %joined = (f32[4,5]{1,0}, s32[4]{0}) all-reduce-start(%a, %b), channel_id=1, to_apply=%sum
  %inner = s32[] while(%t), condition=%more, body=%draft, bc={"known_trip_count":{"n":"3"}}
}

%condition (p: (s32[], bf16[4,16])) -> pred[] {
  ROOT %less = pred[] compare(%a, %b), direction=LT
}

ENTRY %main (p: bf16[4,16]) -> bf16[4,16] {
  %loop = (s32[], bf16[4,16]) while(%t), condition=%condition, body=%body
}
"""


def of_pair(family, data, ways, *, whole=False):
    """The collectives of a round and of a refill, for a pair of two models of the same shape."""
    part = Partitioner(make_mesh(data, ways))
    model = model_from_config(TINY[family])
    small = type(model)(TINY[family], split=not whole)
    drafter = drafting.Chain(small, SIZES.draft)
    method = decoding.Speculative(model, drafter, partitioner=part)
    given = decoding.MethodParams(
        of_params(model, part),
        drafting.chain.ChainParams(of_params(small, part)),
        rules.Lossless(),
    )
    programs = lower_programs(method, given, SIZES, ("step", "refill"))
    return {name: collectives(program.compile().as_text()) for name, program in programs.items()}


def test_collectives_are_read_with_their_loops():
    assert collectives(PROGRAM) == [
        Collective("all-reduce", ((4, 5), (4,)), 96, (None,)),
        Collective("all-gather", ((4, 64),), 512, (None, 3)),
        Collective("all-reduce", ((),), 1, (None, 3)),
    ]
    with pytest.raises(ValueError, match="has no ENTRY"):
        collectives("HloModule nothing")


@pytest.mark.parametrize(
    ("family", "mesh"),
    [pytest.param(*case, marks=[] if case in FAST else [pytest.mark.exhaustive]) for case in ALL],
)
def test_a_round_moves_no_vocabulary_and_no_cache(family, mesh):
    data, ways = mesh
    found = of_pair(family, data, ways)
    arrays = [shape for one in found["step"] for shape in one.shapes]
    assert arrays, "no collective is found: the test would see nothing"
    if ways == 1:
        # Whether all rows are finished, and the like.
        assert max(map(math.prod, arrays)) == 1
    # Of a token its width, of a draw a node of the vocabulary.
    local = SIZES.rows // data
    most = local * max((SIZES.draft + 1) * WIDTH, 128)
    of_vocabulary = {VOCAB // divided for divided in (1, 2, 4)}
    for shape in arrays:
        assert not of_vocabulary & set(shape), shape
        assert SIZES.cache not in shape, shape
        assert math.prod(shape) <= most, shape
    # A refill moves the new rows, and nothing of the others.
    for one in found["refill"]:
        for shape in one.shapes:
            assert math.prod(shape[:1]) <= SIZES.refill, shape
            assert not of_vocabulary & set(shape), shape


@pytest.mark.exhaustive
def test_a_whole_drafter_makes_its_passes_alone():
    """Its draws are spread with the verifier's: what it drew is compared along the vocabulary."""
    split, whole = (of_pair("t5", 2, 4, whole=whole)["step"] for whole in (False, True))

    def passes(found):
        """Those of a pass in the loop of the drafts: they have the network's width."""
        return [one for one in found if len(one.loops) > 1 and WIDTH in one.shapes[0]]

    assert passes(split)
    assert not passes(whole)
