"""Chat templates get what transformers 5 gives them: options, keys, files; feature by feature."""

import dataclasses
import enum
import json
import re

import numpy as np
import pytest
import tokenizers as tk

from specjax.tokenizers import load_tokenizer
from specjax.tokenizers.chat_template import render_chat
from specjax.tokenizers.model_files import copy_tokenizer_files

SPECIAL = ["<s>", "</s>", "<unk>", "<pad>", "<|im_start|>", "<|im_end|>", "<img>"]
USER = {"role": "user", "content": "Wie \u201ewarm\u201c <ist> es?"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": "K\u00f6ln", "n": 2}},
        }
    ],
}
ANSWER = {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": '{"degrees": 3}'}
REPLY = {"role": "assistant", "content": "Drei Grad. "}
THOUGHT = {"role": "assistant", "reasoning_content": "hm", "content": "ja"}
HISTORY = [{"role": "system", "content": "s"}, USER, CALL, ANSWER, REPLY]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather <now>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
DOCUMENTS = [{"title": "a", "text": "one"}, {"title": "b", "text": "two"}]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is defined %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}"
)
EVERY = "{{ messages | tojson }}|{{ tools | tojson }}|{{ documents | tojson }}"


class Kind(enum.StrEnum):
    USER = "user"


@dataclasses.dataclass
class City:
    name: str
    people: int


# Name: template, messages, options.
FEATURES = {
    "chatml": (CHATML, HISTORY, {"add_generation_prompt": True}),
    "thinking off": (CHATML, [USER], {"add_generation_prompt": True, "enable_thinking": False}),
    "all variables": (EVERY, HISTORY, {"tools": TOOLS, "documents": DOCUMENTS}),
    "no tools": (EVERY, [USER], {"tools": []}),
    "keys that are None": ("{{ messages | tojson }}", [{**CALL, "name": None}], {}),
    "reasoning": ("{{ messages | tojson }}", [THOUGHT, {**USER, "thinking": "t"}], {}),
    "other reasoning": ("{{ messages | tojson }}", [{**USER, "reasoning": "r"}], {}),
    "special tokens": (
        "{{ bos_token }},{{ eos_token }},{{ pad_token }},{{ unk_token }},{{ image_token }},"
        "{{ sep_token is defined }},{{ audio_token }}",
        [USER],
        {},
    ),
    "a special token replaced": ("{{ bos_token }}", [USER], {"bos_token": "<b>"}),
    "json": (
        "{{ messages | tojson }}{{ messages | tojson(indent=2) }}"
        "{{ messages | tojson(ensure_ascii=True) }}{{ tools | tojson(separators=(',', ':')) }}"
        "{{ tools[0] | tojson(sort_keys=True, indent=4) }}{{ '<&>' | tojson }}",
        HISTORY,
        {"tools": TOOLS},
    ),
    "blocks": ("{% if true %}\n  a\n  {%- endif %}\n   {% set x = 1 %}\nb{{ x }}\n", [USER], {}),
    "loops": (
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}"
        "{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}",
        HISTORY,
        {},
    ),
    "generation": (
        "{% for m in messages %}{% set r = m.role %}{%- generation -%} {{ r }}{{ loop.index }}"
        "{% set r = 'x' %}{% endgeneration %}{{ r }}{% endfor %}",
        HISTORY,
        {},
    ),
    "dict and namespace": (
        "{% set n = namespace(a=1, self=2) %}{% set n.b = 3 %}{{ n.a }}{{ n.b }}{{ n['self'] }}"
        "{{ dict(a=1) }}{{ dict.fromkeys([1], 2) }}",
        [USER],
        {},
    ),
    "the date": ("{{ strftime_now('%Y') }}", [USER], {}),
    "numbers": (
        "{{ 2 * 'ab' }} {{ 1700000000 * 1000 }} {{ 2 ** 3 }} {{ 2 ** -1 }} {{ 1.5 * 2 }}",
        [USER],
        {},
    ),
    "tuples and keys": ("{{ x }}{{ y }}", [USER], {"x": (1, (2,)), "y": {1: 2.5, None: True}}),
    "objects": (
        "{{ messages[0].role }}{{ x }}{{ y }}{{ z }}",
        [{"role": Kind.USER, "content": "c"}],
        {"x": City("K", 3), "y": np.float32(1.5), "z": [np.int64(3), np.bool_(False)]},
    ),
    "another template": (CHATML, [USER], {"chat_template": "{{ messages | length }} given"}),
    "continue": (CHATML, [USER, REPLY], {"continue_final_message": True}),
    "continue what is stripped": (
        "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}",
        [USER, REPLY],
        {"continue_final_message": True},
    ),
    "continue reasoning": (
        "{% for m in messages %}<think>{{ m.thinking }}</think>{{ m.content }}|{% endfor %}",
        [USER, THOUGHT],
        {"continue_final_message": "reasoning_content"},
    ),
    "continue parts": (
        "{% for p in messages[1].content %}{{ p.text }};{% endfor %}",
        [USER, {"role": "assistant", "content": [{"text": "a"}, {"text": "b"}]}],
        {"continue_final_message": True},
    ),
}
# What both refuse, with our words.
REFUSED = {
    "no messages": (CHATML, [], {}, "a chat has no messages"),
    "a template's own": ("{{ raise_exception('no tools') }}", [USER], {}, "no tools"),
    "private names": ("{% set n = namespace(_a=1) %}", [USER], {}, "begins with an underscore"),
    "attributes": ("{{ ''.__class__.__mro__ }}", [USER], {}, "unsafe|undefined|access"),
    "a change of messages": ("{{ messages.append(1) }}", [USER], {}, "chat template .*append"),
    "an error of Python": ("{{ 1 // 0 }}", [USER], {}, "chat template .*zero"),
    "no Jinja": ("{% if %}", [USER], {}, "the chat template rejects the messages, or is faulty"),
    "content that is None": (
        "{{ messages[0].content + '' }}",
        [{"role": "user", "content": None}],
        {},
        "chat template .*no attribute 'content'",
    ),
    "nothing to continue": (CHATML, [USER, CALL], {"continue_final_message": True}, "no 'content'"),
    "a field that is not read": (
        "{{ messages[0].content }}",
        [USER, {**REPLY, "extra": "x"}],
        {"continue_final_message": "extra"},
        "does not read 'extra'",
    ),
    "a message left out": (
        "{{ messages[0].content }}",
        [USER, REPLY],
        {"continue_final_message": True},
        "changes or leaves out the last message",
    ),
    "both": (
        CHATML,
        [USER],
        {"continue_final_message": True, "add_generation_prompt": True},
        "give one of them",
    ),
    "text as tools": (CHATML, [USER], {"tools": ["weather"]}, "tools must be a list of objects"),
    "text as documents": (
        CHATML,
        [USER],
        {"documents": ["page"]},
        "documents must be a list of objects",
    ),
}


def _write(directory, name, values):
    (directory / name).write_text(json.dumps(values))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    place = tmp_path_factory.mktemp("chat")
    letters = sorted(tk.pre_tokenizers.ByteLevel.alphabet())
    made = tk.Tokenizer(tk.models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tk.decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    made.save(str(place / "tokenizer.json"))
    _write(place, "config.json", {"model_type": "llama"})
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "image_token": "<img>"}
    names |= {"extra_special_tokens": {"audio_token": "<pad>"}, "sep_token": None}
    _write(place, "tokenizer_config.json", names)
    return place


def _both(directory):
    from transformers import AutoTokenizer

    return load_tokenizer(directory), AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("name", FEATURES)
def test_a_template_renders_as_in_transformers(directory, name):
    template, messages, options = FEATURES[name]
    ours, theirs = _both(directory)
    ours.chat_template = theirs.chat_template = template
    expected = theirs.apply_chat_template(messages, tokenize=False, **options)
    options = {"add_generation_prompt": False, **options}
    assert ours.render_chat(messages, **options) == expected
    tokens = theirs.apply_chat_template(messages, return_dict=False, **options)
    assert ours.encode_chat(messages, **options) == tokens


@pytest.mark.parametrize("name", REFUSED)
def test_what_transformers_refuses_is_refused(directory, name):
    template, messages, options, message = REFUSED[name]
    ours, theirs = _both(directory)
    ours.chat_template = theirs.chat_template = template
    with pytest.raises(Exception):  # noqa: B017  of many kinds
        theirs.apply_chat_template(messages, tokenize=False, **options)
    with pytest.raises(ValueError, match=message) as caught:
        ours.render_chat(messages, **options)
    assert "\n" not in str(caught.value)


def weather(city: str) -> str:
    return city


LIST = "chat messages must be a list of objects, .* got "
# What is no conversation, or no JSON.
NOT_JSON = [
    ([USER], [weather], "tools must be a list .*get_json_schema.*<func"),
    (
        [{"role": "user", "content": weather}],
        None,
        "chat messages must be JSON values: got a function; .*get_json_schema",
    ),
    (["hi"], None, rf"{LIST}\['hi'\]"),
    ("hi", None, f"{LIST}'hi'"),
    (None, None, f"{LIST}None"),
    ({"role": "user"}, None, LIST),
]


@pytest.mark.parametrize(("messages", "tools", "message"), NOT_JSON)
def test_what_is_no_conversation_is_refused(messages, tools, message):
    with pytest.raises(ValueError, match=message):
        render_chat(CHATML, messages, tools=tools)


# Files: where the templates are, and which is taken.
FILES = {
    "config": {"tokenizer_config.json": "c"},
    "list": {"tokenizer_config.json": [("default", "d"), ("tool_use", "t"), ("rag", "r")]},
    "dict": {"tokenizer_config.json": {"default": "d", "tool_use": "t"}},
    "no default": {"tokenizer_config.json": [("tool_use", "t")]},
    "jinja": {"chat_template.jinja": "j", "tokenizer_config.json": [("default", "d")]},
    "jinja and more": {
        "chat_template.jinja": "j",
        "additional_chat_templates/tool_use.jinja": "t",
        "tokenizer_config.json": "c",
    },
    "only more": {"additional_chat_templates/rag.jinja": "r"},
}


@pytest.mark.parametrize("files", FILES)
def test_a_template_is_chosen_as_in_transformers(directory, tmp_path, files):
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    settings = {"bos_token": "<s>", "eos_token": "</s>"}
    for name, content in FILES[files].items():
        if name == "tokenizer_config.json":
            if isinstance(content, list):
                content = [{"name": n, "template": t} for n, t in content]
            settings["chat_template"] = content
        else:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(content)
    _write(tmp_path, "tokenizer_config.json", settings)
    copied = tmp_path / "copied"
    copied.mkdir()
    copy_tokenizer_files(tmp_path, copied)
    ours, theirs = _both(tmp_path)
    named = ({"chat_template": name} for name in ("rag", "tool_use", "tooluse", "{{ 'x' }}"))
    for options in ({}, {"tools": TOOLS}, *named):
        choice = options.get("chat_template")
        try:
            expected = theirs.apply_chat_template([USER], tokenize=False, **options)
        except ValueError:
            with pytest.raises(ValueError, match="named 'default': choose one of"):
                ours.render_chat([USER], **options)
            continue
        for words in (ours, load_tokenizer(copied)):
            if expected == choice:  # transformers takes a name that is not there for the prompt
                with pytest.raises(ValueError, match=f"'{choice}' is neither Jinja nor the name"):
                    words.render_chat([USER], **options)
            else:
                assert words.render_chat([USER], **options) == expected


@pytest.mark.parametrize(
    ("templates", "names"),
    [("{{ 1 }}", "default"), ({"b": "b", "a": "a"}, "a, b"), (None, "(the model has none)")],
)
def test_a_mistyped_name_of_a_template_is_no_prompt(directory, templates, names):
    ours = load_tokenizer(directory)
    with pytest.raises(ValueError, match="this tokenizer has no chat template; give plain"):
        ours.render_chat([USER])
    ours.chat_template = templates
    with pytest.raises(ValueError, match=re.escape(f"choose one of {names}") + "$"):
        ours.render_chat([USER], chat_template="tool-use")


def test_two_bos_give_a_warning(directory):
    ours = load_tokenizer(directory)
    ours.chat_template, ours.add_bos = "{{ bos_token }}a", True
    assert ours.encode_chat([USER]) == [256, 64]
    with pytest.warns(UserWarning, match="begins with <s> twice; the tokenizer adds it"):
        assert ours.encode(ours.render_chat([USER])) == [256, 256, 64]
    ours.chat_template = "{{ bos_token }}<s>"
    with pytest.warns(UserWarning, match="twice; the chat template writes it twice"):
        ours.encode_chat([USER])
