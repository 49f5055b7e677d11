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
def directories(tmp_path_factory):
    """The shipped pair, and its drafter after a way through our own format."""
    root, drafter = tmp_path_factory.mktemp("written"), PAIR / "drafter"
    for source, format in ((drafter, "orbax"), (root / "orbax", "hf")):
        assert main(["convert", str(source), str(root / format), "--to", format]) == 0
    return {"drafter": drafter, "verifier": PAIR / "verifier", "written": root / "hf"}


@pytest.fixture(scope="module")
def our_texts():
    """What the shipped drafter writes greedily."""
    model = load_text_model(PAIR / "drafter")
    decoder = specjax.Decoder(model, sampling=Sampling(0.0), max_new_tokens=31, batch_size=4)
    return list(decoder(TEXTS).texts)


def _their_texts(directory):
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(directory))
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(str(directory)).float().eval()
    texts = []
    for text in TEXTS:
        ids = torch.tensor([tokenizer.encode(text)])
        out = model.generate(ids, max_new_tokens=31, do_sample=False, num_beams=1)[0]
        texts.append(tokenizer.decode(out, skip_special_tokens=True))
    return texts


@pytest.mark.parametrize("which", ["drafter", "verifier", "written"])
def test_transformers_sees_no_more_ids_than_the_embedding_has_rows(which, directories):
    directory = directories[which]
    theirs = transformers.AutoTokenizer.from_pretrained(str(directory))
    ours = load_tokenizer(directory)
    rows = json.loads((directory / "config.json").read_text())["vocab_size"]
    assert len(theirs) == ours.vocab_size == rows == 2048
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special_tokens=skip) == expected


def test_texts_agree_with_transformers_and_what_it_saves_again_loads(
    directories, our_texts, tmp_path
):
    written, again = directories["written"], tmp_path / "again"
    assert _their_texts(written) == our_texts
    transformers.AutoModelForSeq2SeqLM.from_pretrained(str(written)).save_pretrained(str(again))
    transformers.AutoTokenizer.from_pretrained(str(written)).save_pretrained(str(again))
    loaded = load_text_model(again)
    assert type(loaded.tokenizer) is not type(load_tokenizer(written))  # a tokenizer.json
    assert loaded.fingerprint == load_text_model(written).fingerprint


@pytest.mark.parametrize("which", ["drafter", "written"])
def test_texts_agree_with_ctranslate2(which, directories, our_texts, tmp_path):
    directory, place = str(directories[which]), str(tmp_path / "ct2")
    ctranslate2.converters.TransformersConverter(directory).convert(place)
    translator = ctranslate2.Translator(place, compute_type="float32", intra_threads=1)
    words = transformers.AutoTokenizer.from_pretrained(directory)
    pieces = [words.convert_ids_to_tokens(words.encode(text)) for text in TEXTS]
    results = translator.translate_batch(pieces, beam_size=1, max_decoding_length=31)
    ids = [words.convert_tokens_to_ids(result.hypotheses[0]) for result in results]
    assert [words.decode(each, skip_special_tokens=True) for each in ids] == our_texts


_SIZES = {"embed_dim": 8, "num_heads": 2, "head_dim": 4, "mlp_dim": 8}
_LAYERS = {"num_encoder_layers": 1, "num_decoder_layers": 1}


@pytest.mark.parametrize(
    ("source", "rows"),
    [(file, rows) for file in ("spiece.model", "tokenizer.json") for rows in (2048, 2304)]
    + [("bytes", 259)],
)
def test_a_model_trained_with_a_vocabulary_from_a_file(source, rows, tmp_path):
    file = source if source == "bytes" else PAIR / "drafter" / "spiece.model"
    if source == "tokenizer.json":
        made = transformers.T5Tokenizer.from_pretrained(str(PAIR / "drafter"))
        made.save_pretrained(str(tmp_path / "made"))
        file = tmp_path / "file" / "tokenizer.json"
        file.parent.mkdir()
        (tmp_path / "made" / "tokenizer.json").rename(file)
        (file.parent / "generation_config.json").write_text('{"eos_token_id": 1}')
    vocabulary, out = tmp_path / "vocabulary", tmp_path / "out"
    write_vocabulary(vocabulary, file, [], vocab_size=rows, model_type="unigram")
    config = T5Config(vocab_size=rows, **_SIZES, **_LAYERS)
    save_model(out, config, random_params(config), format="hf", tokenizer_from=vocabulary)
    ours, theirs = load_tokenizer(out), transformers.AutoTokenizer.from_pretrained(str(out))
    assert len(theirs) == ours.vocab_size <= rows
    for text in TEXTS[:2] if source == "bytes" else TEXTS:
        assert ours.encode(text) == theirs.encode(text)


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
