"""Published sizes, counted without memory."""

import pytest

from specjax.models import PRESETS, model_from_config, preset
from tests.variants import variants

# Source: the totals of the checkpoints' safetensors files on their model cards; of tied networks
# without the copy of the embedding. Gemma 3 from 4B on: the totals, without the vision model of
# 416,866,032 parameters and the projector of 1,152 (E + 1). Qwen 3.5: what transformers makes of
# the published configurations, without the vision model and the MTP layer; with experts, and
# Qwen3-Next: the totals, without these. gpt-oss: what transformers makes of the published
# configurations; the files, in 4 bits, have no such total, and the model card says 20.91 and 116.83
# billion. Gemma 4: what transformers makes of the text networks' published sizes.
PUBLISHED = {
    "t5_v1_1_small": 76_961_152,
    "t5_v1_1_base": 247_577_856,
    "t5_v1_1_large": 783_150_080,
    "t5_v1_1_xl": 2_849_757_184,
    "t5_v1_1_xxl": 11_135_332_352,
    "byt5_small": 299_637_760,
    "byt5_base": 581_653_248,
    "byt5_large": 1_228_183_552,
    "byt5_xl": 3_737_801_728,
    "byt5_xxl": 12_906_899_328,
    "mt5_small": 300_176_768,
    "mt5_base": 582_401_280,
    "mt5_large": 1_229_581_312,
    "mt5_xl": 3_742_619_648,
    "mt5_xxl": 12_921_057_280,
    "umt5_small": 306_601_984,
    "umt5_base": 592_043_520,
    "umt5_xl": 3_768_356_864,
    "umt5_xxl": 12_972_531_712,
    "pile_t5_base": 247_586_304,
    "pile_t5_large": 783_173_632,
    "pile_t5_xl": 2_849_804_288,
    "pile_t5_xxl": 11_135_426_560,
    "t5gemma2_270m_270m": 368_424_832,
    "t5gemma2_1b_1b": 1_697_783_168,
    "t5gemma2_4b_4b": 7_089_112_576,
    "t5gemma_s_s": 312_517_632,
    "t5gemma_b_b": 591_490_560,
    "t5gemma_l_l": 1_241_761_792,
    "t5gemma_ml_ml": 2_200_345_344,
    "t5gemma_xl_xl": 3_766_980_608,
    "t5gemma_2b_2b": 5_596_853_760,
    "t5gemma_9b_2b": 12_292_375_296,
    "t5gemma_9b_9b": 20_333_401_088,
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "gemma2_27b": 27_227_128_320,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3.1_8b": 8_030_261_248,
    "llama3.1_70b": 70_553_706_496,
    "llama3.2_1b": 1_235_814_400,
    "llama3.2_3b": 3_212_749_824,
    "smollm2_135m": 134_515_008,
    "smollm2_360m": 361_821_120,
    "smollm2_1.7b": 1_711_376_384,
    "qwen2.5_0.5b": 494_032_768,
    "qwen2.5_1.5b": 1_543_714_304,
    "qwen2.5_3b": 3_085_938_688,
    "qwen2.5_7b": 7_615_616_512,
    "qwen2.5_14b": 14_770_033_664,
    "qwen2.5_32b": 32_763_876_352,
    "qwen2.5_72b": 72_706_203_648,
    "qwen3_0.6b": 596_049_920,
    "qwen3_1.7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "qwen3.5_0.8b": 752_393_024,
    "qwen3.5_2b": 1_881_825_088,
    "qwen3.5_4b": 4_205_751_296,
    "qwen3.5_9b": 8_953_803_264,
    "qwen3.5_27b": 26_895_998_464,
    "qwen3.5_35b_a3b": 35_951_822_704 - 446_571_248 - 844_640_768,
    "qwen3.5_122b_a10b": 125_086_497_008 - 451_290_864 - 2_523_679_232,
    "qwen3.5_397b_a17b": 403_397_928_944 - 456_010_480 - 6_595_568_128,
    "qwen3_next_80b_a3b": 81_324_862_720 - 1_650_471_424,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "mistral_7b_v0.1": 7_241_732_096,
    "mistral_7b_v0.3": 7_248_023_552,
    "mistral_nemo_12b": 12_247_782_400,
    "mistral_small_24b": 23_572_403_200,
    "mixtral_8x7b": 46_702_792_704,
    "mixtral_8x22b": 140_630_071_296,
    "olmo2_1b": 1_484_916_736,
    "olmo2_7b": 7_298_617_344,
    "olmo2_13b": 13_716_198_400,
    "olmo2_32b": 32_234_279_936,
    "olmoe_1b_7b": 6_919_161_856,
    "smollm3_3b": 3_075_098_624,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
    "phi3_mini": 3_821_079_552,
    "phi3_medium": 13_960_238_080,
    "phi4": 14_659_507_200,
    "gemma_2b": 2_506_172_416,
    "gemma_7b": 8_537_680_896,
    "gemma3_270m": 268_098_176,
    "gemma3_1b": 999_885_952,
    "gemma3_4b": 4_300_079_472 - 416_866_032 - 1_152 * 2_561,
    "gemma3_12b": 12_187_325_040 - 416_866_032 - 1_152 * 3_841,
    "gemma3_27b": 27_432_406_640 - 416_866_032 - 1_152 * 5_377,
    "gemma4_e2b": 4_628_569_379,
    "gemma4_e4b": 7_463_013_418,
    "gemma4_12b": 11_907_350_320,
    "gemma4_26b_a4b": 25_233_141_790,
    "gemma4_31b": 30_697_345_340,
}


def test_every_preset_has_a_published_count():
    assert PRESETS.keys() == PUBLISHED.keys()


# Sizes of one family differ in numbers alone.
@pytest.mark.parametrize(
    "name",
    variants(
        PUBLISHED,
        *("t5_v1_1_small", "byt5_small", "umt5_small", "gemma_2b", "gemma2_2b", "gemma3_270m"),
        *("llama2_7b", "llama3.2_1b", "qwen2.5_0.5b", "qwen3_0.6b", "qwen3_next_80b_a3b"),
        *("mistral_7b_v0.1", "olmo2_1b", "smollm3_3b", "phi3_mini"),
    ),
)
def test_presets_have_the_published_parameter_counts(name):
    assert model_from_config(PRESETS[name]).num_params() == PUBLISHED[name]


def test_a_preset_can_be_changed():
    config = preset("gemma2_2b", dtype="bfloat16", param_dtype="bfloat16")
    assert config == PRESETS["gemma2_2b"].replace(dtype="bfloat16", param_dtype="bfloat16")
    assert config != PRESETS["gemma2_2b"]
    with pytest.raises(ValueError, match=r"`name` must be one of t5_v1_1_small, .* got 't5_huge'"):
        preset("t5_huge")
