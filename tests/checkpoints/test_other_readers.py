"""What we write, read by transformers and by CTranslate2: the same ids and the same texts."""

import json
from pathlib import Path

import ctranslate2
import pytest
import torch
import transformers
from checkpoint_helpers import random_params

import specjax
from specjax.checkpoints import save_model
from specjax.cli.main import main
from specjax.models import LlamaConfig, T5Config
from specjax.text import load_text_model
from specjax.tokenizers import load_tokenizer
from specjax.tokenizers.load import keep_sentinels
from specjax.training.vocabulary import write_vocabulary
from specjax.types import Sampling

PAIR = Path(specjax.__file__).parent / "pairs" / "multi30k_ende"
TEXTS = [
    "A man rides a bicycle.",
    "Two dogs play in the snow.",
    "A woman in a red <extra_id_0> sings.",
    "Zwei Hunde 日本 spielen ☃ im Schnee .",
]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The shipped drafter after a way through our own format."""
    root = tmp_path_factory.mktemp("written")
    for source, name, format in (
        (PAIR / "drafter", "orbax", "orbax"),
        (root / "orbax", "hf", "hf"),
    ):
        assert main(["convert", str(source), str(root / name), "--to", format]) == 0
    return root / "hf"


def _our_texts(directory):
    model = load_text_model(directory)
    decoder = specjax.Decoder(model, sampling=Sampling(0.0), max_new_tokens=31, batch_size=4)
    return list(decoder(TEXTS).texts)


@pytest.fixture(scope="module")
def our_texts():
    """What the shipped drafter writes greedily."""
    return _our_texts(PAIR / "drafter")


def _their_texts(directory):
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(directory))
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(str(directory)).float().eval()
    texts = []
    for text in TEXTS:
        ids = torch.tensor([tokenizer.encode(text)])
        out = model.generate(ids, max_new_tokens=31, do_sample=False, num_beams=1)[0]
        texts.append(tokenizer.decode(out, skip_special_tokens=True))
    return texts


@pytest.mark.parametrize("which", ["shipped drafter", "shipped verifier", "written"])
def test_transformers_sees_no_more_ids_than_the_embedding_has_rows(which, written):
    directory = {
        "shipped drafter": PAIR / "drafter",
        "shipped verifier": PAIR / "verifier",
        "written": written,
    }[which]
    theirs = transformers.AutoTokenizer.from_pretrained(str(directory))
    ours = load_tokenizer(directory)
    rows = json.loads((directory / "config.json").read_text())["vocab_size"]
    assert len(theirs) == ours.vocab_size == rows == 2048
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip
            )


def test_texts_agree_with_transformers_and_what_it_saves_again_loads(written, our_texts, tmp_path):
    assert _their_texts(written) == our_texts
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(str(written))
    model.save_pretrained(str(tmp_path / "again"))
    transformers.AutoTokenizer.from_pretrained(str(written)).save_pretrained(
        str(tmp_path / "again")
    )
    again = load_text_model(tmp_path / "again")
    assert type(again.tokenizer) is not type(load_tokenizer(written))  # a tokenizer.json
    assert again.fingerprint == load_text_model(written).fingerprint


@pytest.mark.parametrize("which", ["shipped", "written"])
def test_texts_agree_with_ctranslate2(which, written, our_texts, tmp_path):
    directory = PAIR / "drafter" if which == "shipped" else written
    converter = ctranslate2.converters.TransformersConverter(str(directory))
    converter.convert(str(tmp_path / "ct2"))
    translator = ctranslate2.Translator(
        str(tmp_path / "ct2"), compute_type="float32", intra_threads=1
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(directory))
    pieces = [tokenizer.convert_ids_to_tokens(tokenizer.encode(text)) for text in TEXTS]
    results = translator.translate_batch(pieces, beam_size=1, max_decoding_length=31)
    texts = [
        tokenizer.decode(
            tokenizer.convert_tokens_to_ids(result.hypotheses[0]), skip_special_tokens=True
        )
        for result in results
    ]
    assert texts == our_texts


_SIZES = {"embed_dim": 8, "num_heads": 2, "head_dim": 4, "mlp_dim": 8}
_LAYERS = {"num_encoder_layers": 1, "num_decoder_layers": 1}


@pytest.mark.parametrize("rows", [2048, 2304])
@pytest.mark.parametrize("source", ["spiece.model", "tokenizer.json"])
def test_a_model_trained_with_a_vocabulary_from_a_file(source, rows, tmp_path):
    file = PAIR / "drafter" / "spiece.model"
    if source == "tokenizer.json":
        made = transformers.T5Tokenizer.from_pretrained(str(PAIR / "drafter"))
        made.save_pretrained(str(tmp_path / "made"))
        file = tmp_path / "file" / "tokenizer.json"
        file.parent.mkdir()
        (tmp_path / "made" / "tokenizer.json").rename(file)
        (file.parent / "generation_config.json").write_text('{"eos_token_id": 1}')
    vocabulary = tmp_path / "vocabulary"
    write_vocabulary(vocabulary, file, [], vocab_size=rows, model_type="unigram")
    config = T5Config(vocab_size=rows, **_SIZES, **_LAYERS)
    out = tmp_path / "out"
    save_model(out, config, random_params(config), format="hf", tokenizer_from=vocabulary)
    ours, theirs = load_tokenizer(out), transformers.AutoTokenizer.from_pretrained(str(out))
    assert len(theirs) == ours.vocab_size <= rows
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)


def test_bytes_are_read_as_bytes(tmp_path):
    write_vocabulary(tmp_path / "vocabulary", "bytes", [], vocab_size=259, model_type="unigram")
    config = T5Config(vocab_size=259, **_SIZES, **_LAYERS)
    out = tmp_path / "out"
    save_model(
        out, config, random_params(config), format="hf", tokenizer_from=tmp_path / "vocabulary"
    )
    ours, theirs = load_tokenizer(out), transformers.AutoTokenizer.from_pretrained(str(out))
    assert len(theirs) == ours.vocab_size == 259
    assert ours.encode("über") == theirs.encode("über")


def test_other_vocabularies_get_no_sentinels(tmp_path):
    """A Llama's directory stays a Llama's, whoever asks."""
    (tmp_path / "spiece.model").write_bytes((PAIR / "drafter" / "spiece.model").read_bytes())
    config = LlamaConfig(vocab_size=2304, **_SIZES, num_layers=1, num_kv_heads=1)
    save_model(
        tmp_path / "llama", config, random_params(config), format="hf", tokenizer_from=tmp_path
    )
    keep_sentinels(tmp_path / "llama", 2304)
    assert not (tmp_path / "llama" / "tokenizer_config.json").exists()
    # What a file says already stays.
    (tmp_path / "tokenizer_config.json").write_text('{"extra_ids": 3}')
    keep_sentinels(tmp_path, 2304)
    assert (tmp_path / "tokenizer_config.json").read_text() == '{"extra_ids": 3}'


def test_what_the_model_card_says_of_transformers_cache():
    """Its decoder is deeper than its encoder. Where this fails, the card's remark can go."""
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(str(PAIR / "verifier")).float()
    inputs = torch.tensor([[9, 23, 776, 4, 415, 3, 1]])
    with pytest.raises(IndexError):
        model.generate(inputs, max_new_tokens=2)
    assert model.generate(inputs, max_new_tokens=2, use_cache=False).shape == (1, 3)
