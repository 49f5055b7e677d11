"""Renders chat templates with limited memory; a script that `chat_template` starts.

Standard input has values that `marshal` writes, which keeps the types of Python's plain values:
first `path` (of Python's modules), `memory` (bytes) and `longest` (characters), then for each
rendering `number`, `template` and `variables`. Each line of standard output answers one, as JSON:
its `number`, and `text` or `error`, with `full` if the memory is full.
"""

import datetime
import functools
import json
import marshal
import sys
from typing import Any

try:
    import resource
except ImportError:  # Windows; the time is still limited
    resource = None  # type: ignore[assignment]


def main() -> None:
    """Answers requests until standard input ends; nothing of specjax can be imported here."""
    settings = marshal.load(sys.stdin.buffer)
    sys.path[:] = settings["path"]
    _compile("")  # imports Jinja before memory is limited
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_AS, (settings["memory"], settings["memory"]))
    _answer(number=0, text="")
    while True:
        try:
            request = marshal.load(sys.stdin.buffer)
        except (EOFError, TypeError, ValueError):  # the other process has ended, perhaps meanwhile
            return
        try:
            pieces = _compile(request["template"]).generate(**request["variables"])
            answer: dict[str, Any] = {"text": _join(pieces, settings["longest"])}
        except MemoryError:
            needs = f"it needs more than {settings['memory'] >> 20} MiB of memory"
            answer = {"error": needs, "full": True}
        except Exception as error:  # a template may do anything to the messages
            why = " ".join(str(error).split())[:1000]
            answer = {"error": why or type(error).__name__}
        _answer(number=request["number"], **answer)


@functools.lru_cache(maxsize=4)  # a model has few
def _compile(template: str) -> Any:
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
            call = self.call_method("body")
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def body(self, caller: Any) -> Any:
            return caller()

    def fail(message: str) -> None:
        raise jinja2.TemplateError(message)

    extensions = [GenerationMarks, jinja2.ext.loopcontrols]
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    # Jinja's own tojson escapes HTML.
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": fail,
        "strftime_now": lambda text: datetime.datetime.now().strftime(text),
        **_types(),
    }
    return environment.from_string(template)


def _types() -> dict[str, Any]:
    import jinja2
    import jinja2.utils

    class Dict:
        """`dict` without its other attributes."""

        def __call__(self, *args: Any, **fields: Any) -> dict[Any, Any]:
            return dict(*args, **fields)

        def fromkeys(self, *args: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args)

    class Namespace(jinja2.utils.Namespace):
        """Without names that begin with an underscore."""

        def __init__(*args: Any, **fields: Any) -> None:  # a field may be named self
            instance, *values = args
            named = dict(*values, **fields)
            for name in named:
                _check(name)
            jinja2.utils.Namespace.__init__(instance, named)

        def __setitem__(self, name: str, value: Any) -> None:
            _check(name)
            super().__setitem__(name, value)

    def _check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(
                f"a namespace must have no name that begins with an underscore, got {name!r}"
            )

    return {"dict": Dict(), "namespace": Namespace}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _join(pieces: Any, longest: int) -> str:
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
