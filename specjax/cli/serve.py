"""`specjax serve`: an endpoint with OpenAI's routes."""

import argparse
import asyncio
import contextlib
import json
import math
import os
import signal
import socket
from pathlib import Path
from typing import Any

from specjax.checks import one_number, whole_number
from specjax.cli.bench import add_weights, forms_of
from specjax.errors import MissingLibraryError, UserError, tell
from specjax.text import Decoder, Setting, load_pair

_KEY = "SPECJAX_API_KEY"
# The addresses that only this machine reaches.
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
# Lengths that prompts are padded to; each is a program to compile.
_SHORTEST, _TIMES = 64, 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    of_models = parser.add_argument_group("models and drafts")
    of_models.add_argument(
        "--verifier",
        help="the model whose texts are served (default: the built-in pair, which translates)",
    )
    of_models.add_argument("--drafter", help="the drafter's or draft head's directory")
    add_weights(of_models, "floats")
    of_models.add_argument("--drafting", help='how drafts are made, such as "Lookup(min_match=2)"')
    of_models.add_argument("--rule", help='the rule, such as "OPT(0.2)" (default: Lossless)')
    of_models.add_argument("--max-draft", type=int, help="tokens drafted per round (default: 5)")
    of_models.add_argument("--costs", help="a file of specjax bench --costs, for the length")
    limits = parser.add_argument_group("limits")
    limits.add_argument("--batch-size", type=int, default=8, help="rows decoded together")
    limits.add_argument("--prompt-length", type=int, default=1024, help="longest prompt, in tokens")
    limits.add_argument("--max-new-tokens", type=int, default=512, help="longest answer, in tokens")
    limits.add_argument("--queue", type=int, default=256, help="rows that may wait; then 429")
    limits.add_argument(
        "--prefixes",
        type=int,
        default=8,
        help="finished rows whose caches stay: what a prompt has in common with one of them, such "
        "as a system prompt, is not read again",
    )
    limits.add_argument("--timeout", type=float, default=600.0, help="most seconds of a request")
    limits.add_argument(
        "--warm-up",
        nargs="+",
        default=[],
        metavar="FIELDS",
        help="fields of requests whose programs are compiled before the first of them comes, such "
        """as '{"ignore_eos": true}'""",
    )
    network = parser.add_argument_group("network")
    network.add_argument("--host", default="127.0.0.1", help="the address to listen at")
    network.add_argument("--port", type=int, default=8000, help="the port; 0: any free one")
    network.add_argument(
        "--name", help="the model's name for clients (default: the verifier's file or directory)"
    )
    network.add_argument(
        "--without-key",
        action="store_true",
        help=f"listen beyond this machine although {_KEY} is not set, so that anyone may ask",
    )


def run(args: argparse.Namespace) -> int:
    """Serves until SIGTERM or Ctrl-C; after SIGTERM requests that run are finished."""
    try:
        import uvicorn

        from specjax.serving import Limits, make_app
        from specjax.serving.errors import RefusedError
    except ImportError as error:
        raise MissingLibraryError(
            f"specjax serve needs {error.name}: pip install 'specjax[serve]'"
        ) from None
    for name, low in {
        "batch_size": 1,
        "prompt_length": 1,
        "max_new_tokens": 1,
        "queue": 0,
        "prefixes": 0,
    }.items():
        whole_number(f"--{name.replace('_', '-')}", getattr(args, name), low=low)
    if not 0 <= args.port < 2**16:  # some systems take the rest of a larger one
        raise UserError(f"--port must be in 0 .. {2**16 - 1}, got {args.port}")
    one_number("--timeout", args.timeout, low=0.0, open_low=True, open_high=True)
    warm_up = [_fields(text) for text in args.warm_up]
    api_key = os.environ.get(_KEY) or None
    if args.host not in _LOOPBACK and api_key is None and not args.without_key:
        raise UserError(
            f"--host {args.host} can be reached from other machines: set {_KEY}, which clients "
            "then send, or give --without-key"
        )
    with _listen(args.host, args.port) as listening:
        decoder = _decoder(args)
        limits = Limits(
            args.prompt_length,
            waiting=args.queue,
            seconds=args.timeout,
            prefixes=args.prefixes,
        )
        name = args.name or Path(args.verifier or "built-in").name.removesuffix(".gguf")
        app = make_app(decoder, limits, name=name, api_key=api_key)

        def told(length: int) -> None:
            tell(f"compiling for prompts of up to {length} tokens ...")

        try:
            asyncio.run(app.state.warm_up(told, warm_up))
        except RefusedError as error:
            raise UserError(f"--warm-up: {error}") from None
        host = f"[{args.host}]" if ":" in args.host else args.host
        ready = _ready(decoder, name, f"http://{host}:{listening.getsockname()[1]}")

        class Server(uvicorn.Server):
            async def startup(self, sockets: Any = None) -> None:
                await super().startup(sockets=sockets)
                print(ready, flush=True)

        # uvicorn sends itself the signal again, once everything is finished.
        signal.signal(signal.SIGTERM, lambda *_: None)
        most = math.ceil(args.timeout)
        server = Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=most))
        server.run(sockets=[listening])
    return 0


def _fields(text: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        fields = json.loads(text)
        if isinstance(fields, dict):
            return fields
    raise UserError(f"""--warm-up must be fields such as '{{"ignore_eos": true}}', got {text!r}""")


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens before the models are read, which may take minutes."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise UserError(f"--host {host} --port {port} cannot be listened at: {error}") from None


def _decoder(args: argparse.Namespace) -> Decoder:
    from specjax.drafting import read_costs

    given = {"rule": args.rule, "drafting": args.drafting, "max_draft": args.max_draft}
    given = {name: value for name, value in given.items() if value is not None}
    costs = None if args.costs is None else read_costs(args.costs)
    setting = Setting(**given, costs=costs)  # checked before the models are read
    paths = {"verifier": args.verifier, "drafter": args.drafter}
    models = load_pair(**paths, weights=forms_of(args), dtype=args.dtype)
    lengths = [_SHORTEST]
    while lengths[-1] < args.prompt_length:
        lengths.append(lengths[-1] * _TIMES)
    return Decoder(
        models,
        setting,
        batch_size=args.batch_size,
        max_new_tokens=args.max_new_tokens,
        buckets=[x for x in lengths if x < args.prompt_length] + [args.prompt_length],
    )


def _ready(decoder: Decoder, name: str, address: str) -> str:
    """How to ask: a line to paste."""
    key = f" -H 'Authorization: Bearer '\"${_KEY}\"" if os.environ.get(_KEY) else ""
    if decoder.tokenizer.chat_template is None:
        route, body = "completions", '{"prompt": "A man rides a bicycle.", "max_tokens": 32}'
    else:
        route = "chat/completions"
        body = '{"messages": [{"role": "user", "content": "Why is the sky blue?"}]}'
    headers = f"-H 'Content-Type: application/json'{key}"
    return (
        f"Ready: {name} at {address}/v1. Try:\n\n"
        f"    curl {address}/v1/{route} {headers} \\\n      -d '{body}'\n"
    )
