"""Renders chat templates with limited memory; a script that `chat_template` starts.

Each line of standard input is a JSON object: first `path` (of Python's modules), `memory` (bytes)
and `longest` (characters), then for each rendering `template` and `variables`. Each line of
standard output answers one: `text`, or `error`, with `full` if the memory is full.
"""

import datetime
import functools
import json
import sys
from typing import Any


def main() -> None:
    """Answers requests until standard input ends."""
    settings = json.loads(sys.stdin.buffer.readline())
    sys.path[:] = settings["path"]
    _compiled("")  # imports Jinja before memory is limited
    _limit(settings["memory"])
    _answer(text="")
    for line in sys.stdin.buffer:
        try:
            request = json.loads(line)
            pieces = _compiled(request["template"]).generate(**request["variables"])
            _answer(text=_joined(pieces, settings["longest"]))
        except MemoryError:
            _answer(error=f"it needs more than {settings['memory'] >> 20} MiB of memory", full=True)
        except Exception as error:  # a template may do anything to the messages
            why = " ".join(str(error).split())[:1000]
            _answer(error=why or type(error).__name__)


def _limit(memory: int) -> None:
    try:
        import resource
    except ImportError:  # Windows; the time is still limited
        return
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


@functools.cache
def _compiled(template: str) -> Any:
    """The template in transformers' environment."""
    import jinja2
    import jinja2.ext
    from jinja2 import nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationMarks(jinja2.ext.Extension):
        """`{% generation %}` ... `{% endgeneration %}`, only for training: keeps the body."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def fail(message: str) -> None:
        raise jinja2.TemplateError(message)

    extensions = [GenerationMarks, jinja2.ext.loopcontrols]
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    # Jinja's own tojson escapes HTML.
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = fail
    environment.globals["strftime_now"] = lambda text: datetime.datetime.now().strftime(text)
    return environment.from_string(template)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _joined(pieces: Any, longest: int) -> str:
    text, length = [], 0
    for piece in pieces:
        length += len(piece)
        if length > longest:
            raise ValueError(f"its text has more than {longest:,} characters")
        text.append(piece)
    return "".join(text)


def _answer(**answer: Any) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
