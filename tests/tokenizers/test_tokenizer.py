import numpy as np
import pytest

from specjax.tokenizers import ByteTokenizer


@pytest.mark.filterwarnings("ignore:This sequence already has")
def test_bytes_agree_with_transformers():
    from transformers import ByT5Tokenizer

    ours, theirs = ByteTokenizer(extra_ids=125), ByT5Tokenizer()
    for text in (
        "the quick  fox 3.5% ",
        "a stitch\nin time",
        "über ☃ 日本",
        "tab\there",
        "end.",
        "",
        "a<extra_id_0>b <extra_id_124> <extra_id_125>",
        "a </s> b<pad>c \n<unk>  d",
        "a</s> ",  # no second eos
        "a</s></s>",
    ):
        assert ours.encode(text) == theirs.encode(text)
        told = ours.decode(ours.encode(text))
        assert told == theirs.decode(theirs.encode(text), skip_special_tokens=True)
        assert told == text or "<" in text
    assert ByteTokenizer().encode("<pad>") == ours.encode("<")[:1] + ours.encode("pad>")
    assert ours.vocab_size == len(theirs) == 384
    assert (ours.eos_ids, ours.pad_id, ours.bos_id) == ((1,), 0, None)


def test_bytes_without_meaning_are_defined():
    bytes_ = ByteTokenizer()
    snowman = bytes_.encode("☃", add_special_tokens=False)
    assert bytes_.decode(snowman[:2]) == ""  # cut within a character
    assert bytes_.decode([*snowman[:2], *bytes_.encode("a")]) == "a"
    assert bytes_.decode([0, 2, 259, 10_000, 100]) == "a"
    assert bytes_.decode([100, 1, 0], skip_special_tokens=False) == "a</s><pad>"
    assert bytes_.decode(np.array([100, 101], np.int32)) == "ab"
    assert bytes_.decode(range(3, 131)) == bytes(range(128)).decode()
    assert bytes_.encode("\ud800") == [66, 1]  # a lone surrogate is no text: "?"
    with pytest.raises(ValueError, match="-1 is negative"):
        bytes_.decode([100, -1])
    with pytest.raises(ValueError, match="`extra_ids` must be at least 0, got -1"):
        ByteTokenizer(extra_ids=-1)
