"""Tokenizers against SentencePiece, the tokenizers package and transformers, on tiny models."""

import json
import shutil

import numpy as np
import pytest
import sentencepiece as spm

from specjax.text.directories import built_in_pair
from specjax.tokenizers import added_text
from specjax.tokenizers.load import ByteTokenizer, load_tokenizer

SENTENCES = [
    "the quick brown fox jumps over the lazy dog",
    "a stitch in time saves nine",
    "we measured the acceptance rate of the draft model",
    "blocks of tokens are verified in parallel",
    "zwölf große Kisten stehen quer über den Weg",
    "prices rose by 3.5% in 2021, then fell",
    "she sells sea shells on the sea shore",
    "models that agree decode faster",
] * 8

TEXTS = [
    "the quick  fox 3.5% ",
    "a stitch\nin time",
    "über ☃ 日本",
    "x</s>y",
    "tab\there",
    "end.",
    "",
]

CHAT = [
    {"role": "user", "content": "hi <there>"},
    {"role": "assistant", "content": "a  stitch"},
    {"role": "user", "content": "the end"},
]

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {% if message['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}\n"
    "{{ '<start_of_turn>' + message['role'] + '\n' + message['content'] | trim }}"
    "<end_of_turn>\n{% generation %}{{ message | tojson }}{% endgeneration %}\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def _train(directory, name, **options):
    directory.mkdir()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_prefix=str(directory / "trained"),
        minloglevel=2,
        hard_vocab_limit=False,
        **options,
    )
    (directory / "trained.model").rename(directory / name)
    (directory / "trained.vocab").unlink()
    return directory


def _write(directory, name, values):
    (directory / name).write_text(json.dumps(values))


@pytest.fixture(scope="module")
def t5_dir(tmp_path_factory):
    directory = _train(
        tmp_path_factory.mktemp("tokenizers") / "t5",
        "spiece.model",
        vocab_size=150,
        model_type="unigram",
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        user_defined_symbols=["<mark>"],
    )
    _write(directory, "config.json", {"model_type": "t5", "vocab_size": 512})
    _write(directory, "tokenizer_config.json", {"tokenizer_class": "T5Tokenizer"})
    return directory


_BPE = {
    "vocab_size": 420,
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
}


@pytest.fixture(scope="module")
def llama_dir(tmp_path_factory):
    directory = _train(
        tmp_path_factory.mktemp("tokenizers") / "llama",
        "tokenizer.model",
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        user_defined_symbols=["<mark>"],
        **_BPE,
    )
    _write(directory, "config.json", {"model_type": "llama"})
    _write(
        directory,
        "tokenizer_config.json",
        {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": False},
    )
    return directory


@pytest.fixture(scope="module")
def gemma_dir(tmp_path_factory):
    directory = _train(
        tmp_path_factory.mktemp("tokenizers") / "gemma",
        "tokenizer.model",
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        add_dummy_prefix=False,
        user_defined_symbols=["<start_of_turn>", "<end_of_turn>"],
        **_BPE,
    )
    _write(directory, "config.json", {"model_type": "gemma2", "eos_token_id": 1})
    settings = {"chat_template": TEMPLATE, "add_bos_token": True, "bos_token": "<s>"}
    _write(directory, "tokenizer_config.json", settings)
    turn = load_tokenizer(directory).encode("<end_of_turn>")[-1]
    _write(directory, "generation_config.json", {"eos_token_id": [1, turn], "pad_token_id": 0})
    return directory


def _agree(ours, theirs, texts):
    for text in texts:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, text
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special_tokens=skip) == expected, (text, skip)


def test_t5_agrees_with_transformers(t5_dir):
    from transformers import T5Tokenizer

    ours, theirs = load_tokenizer(t5_dir), T5Tokenizer.from_pretrained(str(t5_dir))
    _agree(ours, theirs, [*TEXTS, "  leading", " ", "a <extra_id_0> b<extra_id_1>c"])
    assert ours.vocab_size == len(theirs)
    assert (ours.eos_ids, ours.pad_id, ours.bos_id) == ((1,), 0, None)
    assert ours.encode("time")[-1] == 1
    assert ours.encode("time", add_special_tokens=False)[-1] != 1
    assert ours.encode("<extra_id_0>") == [ours.vocab_size - 1, 1]


def test_llama_agrees_with_transformers(llama_dir):
    from transformers import LlamaTokenizer

    ours, theirs = load_tokenizer(llama_dir), LlamaTokenizer.from_pretrained(str(llama_dir))
    _agree(ours, theirs, [*TEXTS, "a</s> <s>b"])
    with pytest.warns(UserWarning, match="a prompt begins with <s> twice"):
        _agree(ours, theirs, ["<s>[INST] hi [/INST]"])
    assert ours.encode("time")[0] == ours.bos_id == 1
    assert (ours.eos_ids, ours.pad_id, ours.vocab_size) == ((2,), 2, len(theirs))


def test_tokenizer_json_agrees_with_transformers(llama_dir, tmp_path):
    from transformers import AutoTokenizer, LlamaTokenizer

    LlamaTokenizer.from_pretrained(str(llama_dir)).save_pretrained(str(tmp_path))
    (tmp_path / "tokenizer.model").unlink(missing_ok=True)
    _write(tmp_path, "config.json", {"model_type": "llama", "eos_token_id": 2})
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(str(tmp_path))
    assert type(ours).__name__ == "HuggingFaceTokenizer"
    _agree(ours, theirs, [*TEXTS, "  leading"])
    with pytest.warns(UserWarning, match="a prompt begins with <s> twice"):
        _agree(ours, theirs, ["<s>[INST] hi [/INST]"])
    assert (ours.bos_id, ours.eos_ids, ours.vocab_size) == (1, (2,), len(theirs))
    # The same vocabulary in either form, but another one from another model.
    assert ours.fingerprint == load_tokenizer(llama_dir).fingerprint


def test_special_tokens_that_only_tokenizer_config_names(t5_dir, llama_dir, gemma_dir, tmp_path):
    """transformers leaves them out of a decoded text, and so do we."""
    from transformers import AutoTokenizer, LlamaTokenizer

    t5, llama, json_only = (tmp_path / name for name in ("t5", "llama", "json_only"))
    shutil.copytree(t5_dir, t5)
    shutil.copytree(llama_dir, llama)
    LlamaTokenizer.from_pretrained(str(llama_dir)).save_pretrained(str(json_only))
    (json_only / "tokenizer.model").unlink(missing_ok=True)
    _write(json_only, "config.json", {"model_type": "llama", "eos_token_id": 2})
    as_saved = json.loads((json_only / "tokenizer.json").read_text())
    silent = [token for token in as_saved["added_tokens"] if token["content"] != "<mark>"]
    _write(json_only, "tokenizer.json", {**as_saved, "added_tokens": silent})
    for directory in (t5, llama, json_only):
        plain = load_tokenizer(directory).encode("a fox", add_special_tokens=False)
        assert load_tokenizer(directory).token(3) == "<mark>"
        config = json.loads((directory / "tokenizer_config.json").read_text())
        for key in ("additional_special_tokens", "extra_special_tokens"):
            settings = {**config, "additional_special_tokens": None, "extra_special_tokens": None}
            extra = {"extra_ids": 0} if directory == t5 else {}
            _write(directory, "tokenizer_config.json", {**settings, **extra, key: ["<mark>"]})
            ours, theirs = load_tokenizer(directory), AutoTokenizer.from_pretrained(str(directory))
            for ids in ([3, *plain], [*plain, 3, *plain], [*plain, 3]):
                for skip in (True, False):
                    expected = theirs.decode(ids, skip_special_tokens=skip)
                    assert ours.decode(ids, skip_special_tokens=skip) == expected, (ids, skip)
                assert "<mark>" not in ours.decode(ids)
            assert ours.encode("a <mark>fox") == theirs.encode("a <mark>fox")
    # A token that tokenizer.json lists as not special stays so, though it is named.
    _write(json_only, "tokenizer.json", as_saved)
    ours, theirs = load_tokenizer(json_only), AutoTokenizer.from_pretrained(str(json_only))
    assert ours.decode([3]) == theirs.decode([3], skip_special_tokens=True) == "<mark>"
    # added_tokens.json does not say whether its tokens are special.
    new = load_tokenizer(llama).vocab_size
    _write(llama, "added_tokens.json", {"<new>": new})
    assert load_tokenizer(llama).decode([new]) == "<new>"
    edited = {**json.loads((llama / "tokenizer_config.json").read_text()), "pad_token": "<new>"}
    _write(llama, "tokenizer_config.json", edited)
    assert load_tokenizer(llama).decode([new]) == ""
    # A piece of Gemma's own that is named in special_tokens_map.json, as 4.x writes it.
    gemma = tmp_path / "gemma"
    shutil.copytree(gemma_dir, gemma)
    turn = load_tokenizer(gemma).encode("<start_of_turn>")[-1]
    assert load_tokenizer(gemma).decode([turn]) == "<start_of_turn>"
    named = [{"content": "<start_of_turn>", "lstrip": False}, "<not in the vocabulary>"]
    _write(gemma, "special_tokens_map.json", {"additional_special_tokens": named})
    again = load_tokenizer(gemma)
    assert again.decode([turn]) == ""
    assert again.vocab_size == load_tokenizer(gemma_dir).vocab_size


@pytest.mark.parametrize("family", ["t5", "llama"])
def test_any_ids_decode_as_in_transformers(family, t5_dir, llama_dir):
    """Only the first token's space goes: the one after a skipped `<unk>` stays."""
    from transformers import LlamaTokenizer, T5Tokenizer

    directory, kind = {"t5": (t5_dir, T5Tokenizer), "llama": (llama_dir, LlamaTokenizer)}[family]
    ours, theirs = load_tokenizer(directory), kind.from_pretrained(str(directory))
    unknown = theirs.unk_token_id
    fox = theirs.encode("the fox", add_special_tokens=False)
    space = theirs.convert_tokens_to_ids("▁")
    if family == "t5":
        assert ours.decode([space, unknown, *fox]) == " the fox"
    rng = np.random.default_rng(0)
    cases = [[unknown, *fox], [space, unknown, *fox], [space, *fox], [*fox, unknown]]
    # Bytes that are no UTF-8 are left to SentencePiece, see below.
    drawn = [i for i in range(len(theirs)) if not ours.token(i).startswith("<0x")]
    cases += [rng.choice(drawn, rng.integers(1, 8)).tolist() for _ in range(300)]
    for ids in cases:
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special_tokens=skip) == expected, (ids, skip)


def test_leading_spaces_of_llama_are_sentencepieces(llama_dir):
    """transformers 5 drops one of the spaces that begin a text; the model itself does not."""
    from transformers import LlamaTokenizer

    ours, theirs = load_tokenizer(llama_dir), LlamaTokenizer.from_pretrained(str(llama_dir))
    plain = spm.SentencePieceProcessor(model_file=str(llama_dir / "tokenizer.model"))
    for text in ("  leading", " a", "a  b"):
        assert ours.encode(text) == [1, *plain.EncodeAsIds(text)]
    assert ours.encode("  leading") != theirs.encode("  leading")


def test_added_tokens_that_only_tokenizer_json_names(llama_dir, tmp_path):
    """As transformers 5 saves them, the .model still beside."""
    from transformers import LlamaTokenizer

    theirs = LlamaTokenizer.from_pretrained(str(llama_dir))
    theirs.add_tokens(["<new>"])
    theirs.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    theirs.save_pretrained(str(tmp_path))
    _write(tmp_path, "config.json", {"model_type": "llama", "eos_token_id": 2})
    (tmp_path / "tokenizer.model").write_bytes((llama_dir / "tokenizer.model").read_bytes())
    ours = load_tokenizer(tmp_path)
    assert type(ours).__name__ == "SentencePieceTokenizer"
    assert ours.vocab_size == len(theirs)
    ids = ours.encode("a<turn>b<new>")
    assert ids == theirs.encode("a<turn>b<new>")
    assert theirs.convert_tokens_to_ids("<new>") in ids
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
            ids, skip_special_tokens=skip
        )


def test_byte_level_tokenizer_json_with_its_own_post_processor(tmp_path):
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    built = tokenizers.Tokenizer(tokenizers.models.BPE())
    built.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = tokenizers.decoders.ByteLevel()
    built.train_from_iterator(
        SENTENCES,
        tokenizers.trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=["<|begin|>", "<|end|>", "<|turn|>"],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    built.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    built.save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"}}
    _write(tmp_path, "tokenizer_config.json", settings)
    _write(tmp_path, "generation_config.json", {"eos_token_id": [1, 2]})
    ours = load_tokenizer(tmp_path)
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<|begin|>", eos_token="<|end|>"
    )
    _agree(ours, theirs, [*TEXTS, "  leading", "a<|end|>b"])
    assert ours.encode("a")[0] == ours.bos_id == 0
    assert (ours.eos_ids, ours.pad_id) == ((1, 2), 1)
    # Flags in tokenizer_config.json have no effect beside a tokenizer.json.
    _write(tmp_path, "tokenizer_config.json", {**settings, "add_eos_token": True})
    assert load_tokenizer(tmp_path).encode("a") == ours.encode("a")


def test_gemma_agrees_with_sentencepiece(gemma_dir):
    ours = load_tokenizer(gemma_dir)
    plain = spm.SentencePieceProcessor(model_file=str(gemma_dir / "tokenizer.model"))
    for text in [t for t in TEXTS if "</s>" not in t] + ["  leading", "<start_of_turn>user\nhi"]:
        ids = plain.EncodeAsIds(text)
        assert ours.encode(text) == [2, *ids]
        assert ours.decode(ours.encode(text)) == plain.DecodeIds(ids) == text
    assert len(ours.eos_ids) == 2
    assert ours.eos_ids[0] == 1


def test_chat_template_agrees_with_transformers(gemma_dir, tmp_path):
    from transformers.utils.chat_template_utils import render_jinja_template

    ours = load_tokenizer(gemma_dir)
    assert ours.special_tokens["bos_token"] == plain_piece(gemma_dir, 2)
    for add_generation_prompt in (True, False):
        expected, _ = render_jinja_template(
            [CHAT],
            chat_template=TEMPLATE,
            add_generation_prompt=add_generation_prompt,
            **ours.special_tokens,
        )
        text = ours.render_chat(CHAT, add_generation_prompt=add_generation_prompt)
        assert text == expected[0]
        assert ours.encode_chat(CHAT, add_generation_prompt=add_generation_prompt) == ours.encode(
            text, add_special_tokens=False
        )
    # The template's bos is the only one, and turns are single tokens.
    ids = ours.encode_chat(CHAT)
    assert ids[0] == 2
    assert 2 not in ids[1:]
    assert ids.count(ours.eos_ids[1]) == 3
    with pytest.raises(ValueError, match="no system role"):
        ours.render_chat([{"role": "system", "content": "x"}])


def plain_piece(directory, token_id):
    file = str(directory / "tokenizer.model")
    return spm.SentencePieceProcessor(model_file=file).IdToPiece(token_id)


def test_chat_template_sources(t5_dir, tmp_path):
    (tmp_path / "spiece.model").write_bytes((t5_dir / "spiece.model").read_bytes())
    with pytest.raises(ValueError, match="no chat template"):
        load_tokenizer(tmp_path).render_chat(CHAT)
    named = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    _write(tmp_path, "tokenizer_config.json", {"chat_template": named})
    assert load_tokenizer(tmp_path).render_chat(CHAT) == "d"
    _write(tmp_path, "tokenizer_config.json", {"chat_template": named[:1]})
    with pytest.raises(ValueError, match="named 'default': choose one of tools"):
        load_tokenizer(tmp_path).render_chat(CHAT)
    assert load_tokenizer(tmp_path).render_chat(CHAT, chat_template="tools") == "t"
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content.upper() }}")
    assert load_tokenizer(tmp_path).render_chat(CHAT) == "HI <THERE>"
    (tmp_path / "chat_template.jinja").write_text("{{ messages.append(1) }}")
    with pytest.raises(ValueError, match="chat template"):  # the sandbox forbids it
        load_tokenizer(tmp_path).render_chat(CHAT)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content + 1 // 0 }}")
    with pytest.raises(ValueError, match="chat template .*zero"):
        load_tokenizer(tmp_path).render_chat(CHAT)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content + '' }}")
    for messages, told in (
        ([{"role": "user", "content": None}], "chat template .*no attribute 'content'"),
        (["hi"], r"chat messages must be a list of objects, .* got \['hi'\]"),
        ("hi", "chat messages must be a list of objects, .*, got 'hi'"),
        (None, "chat messages must be a list of objects, .*, got None"),
        ({"role": "user"}, "must be a list"),
    ):
        with pytest.raises(ValueError, match=told):
            load_tokenizer(tmp_path).render_chat(messages)
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ValueError, match="chat template"):
        load_tokenizer(tmp_path).render_chat(CHAT)


def test_ids_past_the_vocabulary_add_no_text(t5_dir, llama_dir):
    for directory in (t5_dir, llama_dir):
        tokenizer = load_tokenizer(directory)
        ids = tokenizer.encode("the fox")
        assert tokenizer.decode([*ids, tokenizer.vocab_size, 10**6]) == "the fox"
        with pytest.raises(ValueError, match="-7 is negative"):
            tokenizer.decode([-7])
    # Byte pieces that are no UTF-8 become U+FFFD, SentencePiece's own rule.
    llama = load_tokenizer(llama_dir)
    broken = [i for i in range(llama.vocab_size) if llama.token(i) == "<0xE2>"]
    assert llama.decode(broken) == "�"


def test_t5_gets_sentinels_only_where_the_embedding_has_rows(t5_dir, tmp_path):
    (tmp_path / "spiece.model").write_bytes((t5_dir / "spiece.model").read_bytes())
    size = load_tokenizer(tmp_path).vocab_size
    _write(tmp_path, "config.json", {"model_type": "t5", "vocab_size": size + 8})
    assert load_tokenizer(tmp_path).vocab_size == size
    assert max(load_tokenizer(tmp_path).encode("<extra_id_0>")) < size
    _write(tmp_path, "tokenizer_config.json", {"extra_ids": 8})
    assert load_tokenizer(tmp_path).encode("<extra_id_0>") == [size + 7, 1]
    named = {str(size): {"content": "<new>", "special": False}}
    _write(tmp_path, "tokenizer_config.json", {"added_tokens_decoder": named, "extra_ids": 0})
    added = load_tokenizer(tmp_path)
    assert added.encode("a <new> b", add_special_tokens=False)[1] == size
    assert added.decode(added.encode("a <new> b")) == "a<new> b"


@pytest.mark.parametrize("model_type", ["mt5", "umt5", "t5gemma", "t5gemma2"])
def test_tokenizers_of_other_encoder_decoders(model_type, t5_dir, llama_dir, gemma_dir, tmp_path):
    """mT5's and UMT5's append eos and may have sentinels; T5Gemma's are Gemma's."""
    gemma = "gemma" in model_type
    directory = shutil.copytree(gemma_dir if gemma else t5_dir, tmp_path / "copy")
    _write(directory, "config.json", {"model_type": model_type, "vocab_size": 300})
    ours, same = load_tokenizer(directory), load_tokenizer(gemma_dir if gemma else t5_dir)
    text = "a stitch <extra_id_1> in time"
    assert ours.encode(text) == same.encode(text)
    assert (ours.add_bos, ours.add_eos) == (gemma, not gemma)
    # Pile-T5: a UMT5 with Llama's tokenizer.
    if model_type == "umt5":
        directory = shutil.copytree(llama_dir, tmp_path / "pile")
        _write(directory, "config.json", {"model_type": model_type, "vocab_size": 300})
        with pytest.warns(UserWarning, match="without the space before texts; specjax has it"):
            ours = load_tokenizer(directory)
        assert ours.encode(text) == load_tokenizer(llama_dir).encode(text)


def test_byt5_needs_no_vocabulary(tmp_path):
    for name in ("config.json", "tokenizer_config.json"):
        _write(tmp_path, name, {"tokenizer_class": "ByT5Tokenizer"})
        assert load_tokenizer(tmp_path).encode("a<extra_id_0>") == [100, 259, 1]
        assert load_tokenizer(tmp_path).vocab_size == 384
        (tmp_path / name).unlink()


def test_files_alone_and_flags(t5_dir, llama_dir, tmp_path):
    alone = tmp_path / "any.model"
    alone.write_bytes((t5_dir / "spiece.model").read_bytes())
    assert load_tokenizer(alone).encode("a")[-1] == 1
    alone.write_bytes((llama_dir / "tokenizer.model").read_bytes())
    tokenizer = load_tokenizer(alone)
    assert tokenizer.encode("a")[0] == 1
    assert tokenizer.encode("a") == load_tokenizer(llama_dir).encode("a")
    assert tokenizer.fingerprint == load_tokenizer(llama_dir).fingerprint
    assert tokenizer.fingerprint != load_tokenizer(t5_dir).fingerprint
    _write(tmp_path, "tokenizer_config.json", {"add_bos_token": False, "add_eos_token": True})
    with pytest.warns(UserWarning, match="without the space before texts; specjax has it"):
        ids = load_tokenizer(alone).encode("a")
    assert (ids[0], ids[-1]) != (1, 1)
    assert ids[-1] == 2
    assert isinstance(load_tokenizer("bytes"), ByteTokenizer)
    _write(tmp_path, "tokenizer_config.json", {"tokenizer_class": "ByT5Tokenizer"})
    assert load_tokenizer(tmp_path).vocab_size == 384


def test_bad_input_is_told_in_one_line(t5_dir, tmp_path):
    def message(path):
        with pytest.raises((ValueError, FileNotFoundError)) as caught:
            load_tokenizer(path)
        assert "\n" not in str(caught.value)
        assert str(tmp_path) in str(caught.value)
        return str(caught.value)

    assert "no such file or directory" in message(tmp_path / "absent")
    told = message(tmp_path)
    assert "has no tokenizer" in told and "(tokenizer=PATH)" in told
    (tmp_path / "tokenizer.json").write_text("{")
    assert "is not a tokenizer" in message(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    assert "no SentencePiece model" in message(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes((t5_dir / "spiece.model").read_bytes()[:200])
    assert "no SentencePiece model" in message(tmp_path)
    _write(tmp_path, "generation_config.json", {"eos_token_id": "</s>"})
    (tmp_path / "tokenizer.model").write_bytes((t5_dir / "spiece.model").read_bytes())
    assert "eos_token_id='</s>'" in message(tmp_path)
    (tmp_path / "generation_config.json").write_text("{,}")
    assert "not readable as JSON" in message(tmp_path)
    (tmp_path / "generation_config.json").write_text("[]")
    assert "JSON object" in message(tmp_path)


@pytest.mark.parametrize("kind", ["built-in", "llama_dir", "gemma_dir", "bytes"])
def test_what_is_added_to_a_prompt_keeps_its_first_space(kind, request):
    if kind == "bytes":
        words = ByteTokenizer()
    else:
        own = kind == "built-in"
        words = load_tokenizer(
            built_in_pair("gsm8k") / "verifier" if own else request.getfixturevalue(kind)
        )
    prompt, rest = "def same(x):\n", "    return x\n    # twelve"
    before, whole = (words.encode(text) for text in (prompt, prompt + rest))
    while before[-1] in words.eos_ids:
        before.pop()
    after = whole[len(before) :]
    assert whole[: len(before)] == before
    assert added_text(words, before, after) == rest
    # By themselves they lose it where encoding puts a space before a text.
    assert (words.decode(after) == rest) == (kind in ("gemma_dir", "bytes"))
    assert added_text(words, [], after) == words.decode(after)


def test_a_character_may_begin_in_the_prompt():
    words = ByteTokenizer()
    ids = words.encode("a☃b")
    assert [added_text(words, ids[:i], ids[i:-1]) for i in (1, 2, 4)] == ["☃b", "☃b", "b"]
