"""Constraints: outputs that match a regular expression or a JSON schema.

Axes: B rows, V vocabulary, C classes of tokens.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from specjax.checks import check_number
from specjax.errors import UserError
from specjax.processors.byte_automata import FAR, byte_automaton
from specjax.processors.caches import Identity, bounded_cache
from specjax.processors.common import Unbound
from specjax.processors.json_schemas import schema_pattern, schema_text
from specjax.processors.token_automata import TokenAutomaton, token_automaton
from specjax.types import Params, Processor, PromptBatch, traced_dataclass


class _Progress(NamedTuple):
    """The states of the automaton, and the number of tokens that may still follow."""

    states: Int32[Array, " B"]
    left: Int32[Array, " B"]


@traced_dataclass
class Constraint(Processor):
    """Allows only tokens after which the output can still become a text of a language.

    An end-of-sequence token is allowed exactly where the text belongs to the language. Near a row's
    limit only tokens are allowed after which the text can be completed within it. `Regex` and
    `JsonSchema` make it for a model.

    Attributes:
      start: the first state of the row's language: a number, or `[B]`.
      shortest: the fewest tokens of a text of this language: a number, or `[B]`.
      source: what it was made from; of the host.
    """

    start: Array | int
    shortest: Array | int
    source: str = dataclasses.field(metadata={"host": True})

    order: ClassVar[int] = 5

    def init(
        self, params: TokenAutomaton, prompts: PromptBatch, vocab_size: int, room: int
    ) -> _Progress:
        return _Progress(jnp.broadcast_to(self.start, prompts.limits.shape), prompts.limits)

    def process(self, params: TokenAutomaton, state: _Progress, logits: Array) -> Array:
        following = params.table[state.states]  # [B, C]
        distances = jnp.where(following >= 0, params.distances[following], FAR)
        # Past the limit no token is emitted; a draft may still go there.
        allowed = distances < jnp.where(state.left > 0, state.left, FAR)[:, None]
        return jnp.where(jnp.take(allowed, params.classes, axis=1), logits, -jnp.inf)

    def advance(self, params: TokenAutomaton, state: _Progress, tokens: Array) -> _Progress:
        following = params.table[state.states, params.classes[tokens]]
        # Only an unprocessed draft has tokens that are not allowed. They are never accepted, so
        # any state will do: the last allows all.
        following = jnp.where(following < 0, params.table.shape[0] - 1, following)
        return _Progress(following, state.left - 1)

    def check_limit(self, limit: int) -> None:
        if limit < self.shortest:
            raise UserError(
                f"max_new_tokens must be at least {self.shortest}, the shortest text that the "
                f"constraint allows, got {limit}"
            )


@traced_dataclass
class Regex(Unbound):
    """Outputs that match a regular expression as a whole, as `re.fullmatch` decides.

    Needs the extra `constraints`.

    Attributes:
      pattern: an expression in Python's notation, or several; static. Back-references, look-around,
        inner anchors and the flags i, m and L are not supported.
      which: the expression of the row: a number, or `[B]`.
    """

    pattern: str | tuple[str, ...] = dataclasses.field(metadata={"static": True})
    which: Array | int = 0

    order: ClassVar[int] = Constraint.order

    def __post_init__(self) -> None:
        patterns = _several("pattern", self.pattern, "'[0-9]+'")
        for pattern in patterns:
            byte_automaton(pattern)
        object.__setattr__(self, "pattern", patterns)
        object.__setattr__(self, "which", _check_which(self.which, patterns))

    def bind(self, model: Any) -> tuple[Processor, Params]:
        patterns: Any = self.pattern  # a tuple now
        return _bind(f"Regex({_in_words(patterns)})", patterns, self.which, model)


@traced_dataclass
class JsonSchema(Unbound):
    """Outputs that are JSON of a schema. Needs the extra `constraints`.

    outlines-core turns a schema into a regular expression: the keys come in the schema's order, and
    a pattern matches the whole string. A keyword that a regular expression cannot follow, such as
    `minimum`, is refused. docs/processors.md has a table of the keywords, and the limits.

    Attributes:
      schema: a JSON schema as a dict or a text, or several; static.
      which: the schema of the row: a number, or `[B]`.
      whitespace: a regular expression for what is allowed between the tokens of JSON: spaces, tabs
        and ends of lines; None: at most one space. Static.
    """

    schema: Any = dataclasses.field(metadata={"static": True})
    which: Array | int = 0
    whitespace: str | None = dataclasses.field(default=None, metadata={"static": True})

    order: ClassVar[int] = Constraint.order

    def __post_init__(self) -> None:
        listed = self.schema if isinstance(self.schema, list | tuple) else (self.schema,)
        schemas = _several("schema", tuple(map(schema_text, listed)), "{'type': 'integer'}")
        for i, schema in enumerate(schemas):
            name = "schema" if len(schemas) == 1 else f"schema[{i}]"
            schema_pattern(schema, self.whitespace, name)
        object.__setattr__(self, "schema", schemas)
        object.__setattr__(self, "which", _check_which(self.which, schemas))

    def bind(self, model: Any) -> tuple[Processor, Params]:
        patterns = tuple(schema_pattern(schema, self.whitespace) for schema in self.schema)
        space = "" if self.whitespace is None else f", whitespace={self.whitespace!r}"
        source = f"JsonSchema({_in_words(self.schema)}{space})"
        return _bind(source, patterns, self.which, model)


def _several(name: str, value: Any, example: str) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(x, str) for x in texts):
        raise UserError(f"{name} must be like {example}, or a tuple of such, got {value!r}")
    if not texts:
        raise UserError(f"{name} must have at least one entry: leave the processor out")
    return tuple(texts)


def _in_words(texts: tuple[str, ...]) -> str:
    return repr(texts[0] if len(texts) == 1 else texts)


def _check_which(which: Any, languages: Sequence[str]) -> Any:
    return check_number("which", which, low=0, high=len(languages) - 1, dtype=jnp.int32)


def _bind(source: str, patterns: Any, which: Any, model: Any) -> tuple[Processor, Params]:
    """The constraint for the model's tokenizer; compiled once for equal arguments."""
    tokenizer, vocab_size = model.tokenizer, model.model.vocab_size
    if not tokenizer.eos_ids:
        raise UserError(
            f"{source} needs a tokenizer with an end-of-sequence token, because a text that is "
            "complete must end: give the tokenizer eos_ids"
        )
    try:
        table, starts, shortest = _compile(
            patterns, Identity(tokenizer), vocab_size, model.continues_prompts
        )
    except ValueError as error:
        raise UserError(f"{source[:80]}: {error}") from None
    return Constraint(starts[which], shortest[which], source), table


@bounded_cache(most_bytes=256 << 20)
def _compile(
    patterns: tuple[str, ...], of: Identity, vocab_size: int, goes_on: bool
) -> tuple[TokenAutomaton, np.ndarray, np.ndarray]:
    """The table of some languages, and for each its first state and its shortest text."""
    languages = [byte_automaton(pattern) for pattern in patterns]
    tokenizer = of.of
    table, starts = token_automaton(
        languages, tokenizer.all_pieces, vocab_size, tokenizer.eos_ids, goes_on=goes_on
    )
    return table, starts, table.distances[starts]
