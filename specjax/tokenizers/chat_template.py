"""Chat templates: Jinja text that turns a list of messages into a prompt.

A template comes with a model, and may be hostile. Jinja's sandbox keeps it from files and modules.
A process of its own (`chat_renderer`) keeps it from the memory and the time of this one.
"""

import atexit
import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax.tokenizers.model_files import read_json_if_there

# Far more than any conversation needs.
MOST_SECONDS = 10.0
MOST_MEMORY = 1 << 30
MOST_TEXT = 10_000_000
# Importing Jinja on a busy machine.
_START_SECONDS = 120.0
_SCRIPT = Path(__file__).with_name("chat_renderer.py")


def read_chat_template(directory: Path) -> str | None:
    """A directory's chat template.

    `chat_template.jinja` has priority over the `chat_template` of `tokenizer_config.json`; of
    several named templates, `default` is used.

    Args:
      directory: a model's directory.

    Returns:
      The Jinja source, or None if there is none.

    Raises:
      ValueError: for an unreadable file, or named templates without a default.
    """
    file = directory / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8 ({error}); restore the file") from None
    config = directory / "tokenizer_config.json"
    template = read_json_if_there(config).get("chat_template")
    if isinstance(template, list):
        if not all(isinstance(e, dict) and isinstance(e.get("name"), str) for e in template):
            raise ValueError(
                f"{config}: chat_template must be text, or a list of objects with name and "
                "template; restore the file"
            )
        named = {entry.get("name"): entry.get("template") for entry in template}
        if "default" not in named:
            raise ValueError(
                f"{config}: none of its chat templates ({', '.join(map(str, named))}) is named "
                "'default'; rename the template to use"
            )
        template = named["default"]
    if template is not None and not isinstance(template, str):
        raise ValueError(f"{config}: chat_template must be text, or a list of named texts")
    return template


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """Renders a conversation, with the names that transformers gives templates.

    The template may use 10 seconds and 1 GiB of memory, and write 10,000,000 characters.

    Args:
      template: Jinja source.
      messages: dicts with `role` and `content`.
      add_generation_prompt: whether the text ends at the start of the assistant's answer.
      **variables: other variables of the template, such as `bos_token`.

    Returns:
      The prompt's text, with special tokens as text.

    Raises:
      ValueError: for a faulty template, or messages that it rejects.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
        raise ValueError(f"chat messages must be a list of objects, got {messages!r}")
    messages = list(messages)
    for message in messages:
        if not isinstance(message, Mapping):
            raise ValueError(
                'a chat message must be an object, such as {"role": "user", "content": "..."}, '
                f"got {message!r}"
            )
    given = {
        "messages": [dict(message) for message in messages],
        "add_generation_prompt": add_generation_prompt,
        "tools": None,
        "documents": None,
        **variables,
    }
    try:
        request = json.dumps({"template": template, "variables": given})
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"chat messages must be JSON values: {error}") from None
    answer = _rendered(request)
    if "text" in answer:
        return answer["text"]
    raise ValueError(f"the chat template rejects the messages, or is faulty: {answer['error']}")


class _Renderer:
    """A process that renders templates, one at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C ends this process, which then ends the other
        )
        settings = {"path": sys.path, "memory": MOST_MEMORY, "longest": MOST_TEXT}
        self.ask(json.dumps(settings), _START_SECONDS)

    def ask(self, line: str, seconds: float) -> dict[str, Any]:
        """Returns the answer to a line.

        Raises:
          EOFError: the process has ended.
          TimeoutError: there is no answer after these seconds.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        with contextlib.suppress(BrokenPipeError):  # its end is noticed below
            stdin.write(line.encode() + b"\n")
            stdin.flush()
        end, answer = time.monotonic() + seconds, bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while not answer.endswith(b"\n"):
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise TimeoutError
                if not (piece := os.read(stdout.fileno(), 1 << 20)):
                    raise EOFError
                answer += piece
        return json.loads(answer)

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()


_lock = threading.Lock()
# The renderer of this process; a fork must not write into its parent's.
_renderers: dict[int, _Renderer] = {}


def _rendered(request: str) -> dict[str, Any]:
    """The answer to a request; the renderer is started if there is none."""
    answer: dict[str, Any] = {"error": "it ends the process that renders it"}
    with _lock:
        for _ in range(2):  # the system may have ended the process since the last request
            try:
                if os.getpid() not in _renderers:
                    _renderers[os.getpid()] = _Renderer()
                answer = _renderers[os.getpid()].ask(request, MOST_SECONDS)
            except TimeoutError:
                answer = {"error": f"it has not ended after {MOST_SECONDS:g} seconds", "full": True}
            except EOFError:
                _close()
                continue
            if answer.get("full"):
                _close()
            break
    return answer


@atexit.register
def _close() -> None:
    if renderer := _renderers.pop(os.getpid(), None):
        renderer.close()
