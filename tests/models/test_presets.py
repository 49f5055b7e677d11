"""Published sizes, counted without memory."""

import pytest

from specjax.models import PRESETS, model_from_config, preset
from tests.variants import variants

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
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "gemma2_27b": 27_227_128_320,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3.2_1b": 1_235_814_400,
}


def test_every_preset_has_a_published_count():
    assert PRESETS.keys() == PUBLISHED.keys()


# Sizes of one family differ in numbers alone.
@pytest.mark.parametrize(
    "name",
    variants(
        PUBLISHED,
        "t5_v1_1_small",
        "byt5_small",
        "umt5_small",
        "gemma2_2b",
        "gemma2_27b",
        "llama2_7b",
        "llama3.2_1b",
    ),
)
def test_presets_have_the_published_parameter_counts(name):
    assert model_from_config(PRESETS[name]).num_params() == PUBLISHED[name]


def test_a_preset_can_be_changed():
    config = preset("gemma2_2b", dtype="bfloat16", param_dtype="bfloat16")
    assert config.dtype == config.param_dtype == "bfloat16"
    assert config == PRESETS["gemma2_2b"].replace(dtype="bfloat16", param_dtype="bfloat16")


def test_an_unknown_preset_is_named():
    with pytest.raises(ValueError, match=r"`name` must be one of t5_v1_1_small, .* got 't5_huge'"):
        preset("t5_huge")
