"""Chat templates: Jinja text that turns a list of messages into a prompt."""

import datetime
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from specjax.tokenizers.model_files import read_json_if_there


def read_chat_template(directory: Path) -> str | None:
    """A directory's chat template.

    `chat_template.jinja` goes before the `chat_template` of `tokenizer_config.json`; of several
    named ones the one called `default` is taken.

    Args:
      directory: a model's directory.

    Returns:
      The Jinja source, or None where there is none.

    Raises:
      ValueError: for an unreadable file, or named templates without a default.
    """
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    config = directory / "tokenizer_config.json"
    template = read_json_if_there(config).get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        if "default" not in named:
            raise ValueError(
                f"{config}: none of its chat templates ({', '.join(map(str, named))}) is called "
                "'default'; rename the one to use"
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
    """Renders a conversation, in the sandbox and with the names that transformers gives templates.

    Args:
      template: Jinja source.
      messages: dicts with `role` and `content`.
      add_generation_prompt: whether the text ends where the assistant's answer begins.
      **variables: what else the template reads, such as `bos_token`.

    Returns:
      The prompt's text, its special tokens spelt out.

    Raises:
      ValueError: for a faulty template, or messages that it refuses.
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
    try:
        return _compiled(template).render(
            messages=[dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            **{"tools": None, "documents": None, **variables},
        )
    except Exception as error:  # a template may do anything to the messages
        told = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"the chat template refuses the messages, or is faulty: {told}") from None


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationMarks, jinja2.ext.loopcontrols],
    )
    # Jinja's own tojson escapes HTML.
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda text: datetime.datetime.now().strftime(text)
    return environment.from_string(template)


class _GenerationMarks(jinja2.ext.Extension):
    """`{% generation %}` ... `{% endgeneration %}`, which only training needs: the body stays."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
