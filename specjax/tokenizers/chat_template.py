"""Chat templates: Jinja text that turns a list of messages into a prompt, as in transformers 5.

A template comes with a model, and may be hostile. Jinja's sandbox keeps it from files and modules.
A process of its own (`chat_renderer`) keeps it from the memory and the time of this one.
"""

import atexit
import contextlib
import dataclasses
import json
import marshal
import os
import queue
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax.errors import UserError
from specjax.tokenizers.model_files import CHAT_TEMPLATE, MORE_CHAT_TEMPLATES, read_json_if_there

# Far more than any conversation needs.
MOST_SECONDS = 10.0
MOST_MEMORY = 1 << 30
MOST_TEXT = 10_000_000
# Importing Jinja on a busy machine.
_START_SECONDS = 120.0
# How long a conversation waits for a renderer before another one starts, and how many stay.
_PATIENCE = 0.2
_MOST_IDLE = 4
_SCRIPT = Path(__file__).with_name("chat_renderer.py")
# The keys of a message's reasoning; templates read the first, those of gpt-oss the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Marks the end of the text that a model continues.
_END = "CONTINUE_FINAL_MESSAGE_TAG "

# A template, or several by name.
ChatTemplate = str | Mapping[str, str]


def read_chat_template(directory: Path) -> ChatTemplate | None:
    """A directory's chat template, or several by name.

    `chat_template.jinja` (the template `default`) and the files of `additional_chat_templates` have
    priority over the `chat_template` of `tokenizer_config.json`.
    """
    files = {"default": directory / CHAT_TEMPLATE} if (directory / CHAT_TEMPLATE).is_file() else {}
    files |= {file.stem: file for file in sorted((directory / MORE_CHAT_TEMPLATES).glob("*.jinja"))}
    texts = {}
    for name, file in files.items():
        try:
            texts[name] = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{file} is not UTF-8 ({error}); restore the file") from None
    if texts:
        return texts["default"] if list(texts) == ["default"] else texts
    config = directory / "tokenizer_config.json"
    template = read_json_if_there(config).get("chat_template")
    if template is None or isinstance(template, str):
        return template
    entries: Any = template
    if isinstance(template, dict):
        entries = [{"name": name, "template": text} for name, text in template.items()]
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and all(isinstance(entry.get(k), str) for k in ("name", "template"))
        for entry in entries
    ):
        raise UserError(
            f"{config}: chat_template must be text, or a list of objects with name and template; "
            "restore the file"
        )
    return {entry["name"]: entry["template"] for entry in entries}


def choose_template(templates: ChatTemplate, choice: str | None, tools: Any) -> str:
    """The template of a conversation, by its name among the tokenizer's, or as Jinja.

    By default it is `tool_use` if there are tools and it is there, otherwise `default`.
    """
    if not isinstance(choice, str | None):
        raise UserError(f"chat_template must be the name of a template, or Jinja, got {choice!r}")
    if isinstance(templates, str):
        templates = {"default": templates}
    if choice is not None:
        # A text without a brace is no template, but a name with a mistake.
        if choice not in templates and "{" not in choice:
            raise UserError(
                f"chat_template={choice!r} is neither Jinja nor the name of a chat template: "
                f"choose one of {', '.join(sorted(templates)) or '(the model has none)'}"
            )
        return templates.get(choice, choice)
    for name in ("default",) if tools is None else ("tool_use", "default"):
        if name in templates:
            return templates[name]
    raise UserError(
        f"none of the model's chat templates is named 'default': choose one of "
        f"{', '.join(sorted(templates))} as chat_template"
    )


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | str = False,
    **variables: Any,
) -> str:
    """Renders a conversation, like `apply_chat_template` of transformers 5.

    The template may use 10 seconds and 1 GiB of memory, and write 10,000,000 characters. It gets
    plain values: enumerations, numbers of NumPy, dataclasses and models of pydantic become these. A
    key of a message whose value is None counts as absent. `Tokenizer.render_chat` has the options.
    """
    chat = []
    for each in _objects("chat messages", messages, '{"role": "user", "content": "..."}'):
        message = {key: value for key, value in each.items() if value is not None}
        # Under the keys that templates read.
        reasoning = next((message[key] for key in _REASONING if key in message), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        chat.append(message)
    final = _left_open(chat, template, continue_final_message) if continue_final_message else None
    if add_generation_prompt is None:
        add_generation_prompt = final is None
    if add_generation_prompt and final is not None:
        raise UserError(
            "add_generation_prompt begins a new message, and continue_final_message continues the "
            "last: give one of them"
        )
    schema = '{"type": "function", ...} (transformers.utils.get_json_schema describes a function)'
    pages = '{"title": "...", "text": "..."}'
    values = {
        "messages": chat,
        "tools": None if tools is None else _objects("tools", tools, schema),
        "documents": None if documents is None else _objects("documents", documents, pages),
        "add_generation_prompt": plain("add_generation_prompt", add_generation_prompt),
        **plain("variables of a chat template", variables),
    }
    answer = _render({"template": plain("chat_template", template), "variables": values})
    if "text" not in answer:
        raise UserError(f"the chat template rejects the messages, or is faulty: {answer['error']}")
    text, mark = answer["text"], _END.strip()
    if final is None:
        return text
    if final.strip() not in text or mark not in text:
        raise UserError(
            "continue_final_message: the chat template changes or leaves out the last message"
        )
    place = text.rindex(mark)
    # Without the mark's space the template has stripped the message.
    return text[:place] if text.startswith(_END, place) else text[:place].rstrip()


def plain(name: str, value: Any) -> Any:
    """A copy of a value, `name` in messages, without objects that have methods of their own.

    Enumerations, NumPy's numbers, dataclasses and models of pydantic become JSON's types.
    """
    try:
        return _plain(value)
    except (UserError, RecursionError) as error:
        raise UserError(f"{name} must be JSON values: {error}") from None


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(map(_plain, value))
    if isinstance(value, np.generic):
        return _plain(value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if callable(getattr(value, "model_dump", None)):
        return _plain(value.model_dump())
    schema = "; transformers.utils.get_json_schema describes a function" if callable(value) else ""
    raise UserError(f"got a {type(value).__name__}{schema}")


def _objects(name: str, values: Any, example: str) -> list[dict[str, Any]]:
    listed = isinstance(values, Iterable) and not isinstance(values, str | Mapping)
    if listed:
        values = list(values)
    if not listed or not all(isinstance(value, Mapping) for value in values):
        raise UserError(f"{name} must be a list of objects, such as {example}, got {values!r}")
    return plain(name, values)


# The text of the last message, which the model continues; marks its end in the message.
def _left_open(chat: list[dict[str, Any]], template: str, field: bool | str) -> str:
    key = field if isinstance(field, str) else "content"
    last = chat[-1] if chat else {}
    text: Any = last.get(key)
    if text is None:
        raise UserError(f"continue_final_message: the last message has no {key!r} to continue")
    # A template may read the reasoning under any of its keys.
    keys = [k for k in _REASONING if last.get(k) == text] if key in _REASONING else [key]
    if not any(name in template for name in keys):
        raise UserError(f"continue_final_message: the chat template does not read {key!r}")
    block, place = last, keys
    if isinstance(text, list | tuple):
        blocks = [b for b in text if isinstance(b, dict) and isinstance(b.get("text"), str)]
        block, place = (blocks[-1], ["text"]) if blocks else ({}, [])
        text = block.get("text")
    if not isinstance(text, str):
        raise UserError("continue_final_message: the last message has no text to continue")
    block.update(dict.fromkeys(place, text + _END))
    return text


class _Renderer:
    """A process that renders templates, one at a time."""

    def __init__(self) -> None:
        # Not Popen's own pipe: one that an interrupt ends stays open, and its child waits.
        taking, giving = os.pipe()
        self._stdin = os.fdopen(giving, "wb")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_SCRIPT)],
                stdin=taking,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C ends this process, which then ends the other
            )
        except BaseException:
            self._stdin.close()
            raise
        finally:
            os.close(taking)
        self._number = -1
        try:
            settings = {"path": sys.path, "memory": MOST_MEMORY, "longest": MOST_TEXT}
            self.ask(settings, _START_SECONDS)
        except BaseException:
            self.close()
            raise

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        self.usable = False  # after an exception the pipe may have an answer that nobody has read
        stdout = self._process.stdout
        assert stdout is not None
        self._number += 1
        with contextlib.suppress(BrokenPipeError):  # its end is noticed below
            self._stdin.write(marshal.dumps({**request, "number": self._number}))
            self._stdin.flush()
        end, answer = time.monotonic() + seconds, bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while not answer.endswith(b"\n"):
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise TimeoutError
                if not (piece := os.read(stdout.fileno(), 1 << 20)):
                    raise EOFError
                answer += piece
        values = json.loads(answer.partition(b"\n")[0])
        if values["number"] != self._number:
            raise EOFError
        self.usable = not values.get("full")
        return values

    def close(self) -> None:
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        self._process.communicate()


class _Pool:
    """The renderers of this process; a template that loops holds one, and not the others."""

    def __init__(self) -> None:
        self.idle: queue.LifoQueue[_Renderer] = queue.LifoQueue()
        self.all: set[_Renderer] = set()
        self._taking = threading.Lock()

    def take(self, *, new: bool) -> _Renderer:
        with self._taking:  # one at a time, so that many threads start few
            with contextlib.suppress(queue.Empty):
                if self.all and not new:
                    return self.idle.get(timeout=_PATIENCE)
            renderer = _Renderer()
            self.all.add(renderer)
            return renderer

    def give_back(self, renderer: _Renderer) -> None:
        if renderer.usable and self.idle.qsize() < _MOST_IDLE:
            self.idle.put(renderer)
        else:
            self.all.discard(renderer)
            renderer.close()


# By process: a fork must not write into its parent's.
_pools: dict[int, _Pool] = {}


def _render(request: Mapping[str, Any]) -> dict[str, Any]:
    pool = _pools.setdefault(os.getpid(), _Pool())
    for again in (False, True):  # the system may have ended the process since the last request
        try:
            renderer = pool.take(new=again)
            try:
                return renderer.ask(request, MOST_SECONDS)
            finally:
                pool.give_back(renderer)
        except EOFError:
            continue
        except TimeoutError:
            return {"error": f"it has not ended after {MOST_SECONDS:g} seconds"}
    return {"error": "it ends the process that renders it"}


@atexit.register
def _close() -> None:
    if pool := _pools.pop(os.getpid(), None):
        for renderer in [*pool.all]:
            renderer.close()
