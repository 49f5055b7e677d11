"""A conversation, in which each turn reads only the tokens that are new."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from specjax.checks import check_count, shown
from specjax.errors import UserError
from specjax.text.engine import Engine
from specjax.text.prefixes import Prefix
from specjax.text.requests import check_unicode, checked_template_kwargs
from specjax.text.results import Row, warn_of_nan
from specjax.text.streaming import Added

if TYPE_CHECKING:
    from specjax.text.decoder import Decoder


class Chat:
    """A conversation with a model; from `Decoder.chat`.

    A turn renders all messages with the tokenizer's chat template. It takes the caches of the last
    turn for the tokens with which both begin, and reads the others: see `Row.prefilled`. Its reply
    is that of `decoder([messages])`; only the last bits of the logits differ.

    Args:
      decoder: the decoder.
      system: the text of a first message with the role `system`; None for none.
      chat_template_kwargs: options of the chat template, besides those of the decoder.
    """

    def __init__(
        self,
        decoder: "Decoder",
        system: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if decoder.tokenizer.chat_template is None:
            raise UserError(
                "the tokenizer has no chat template: put chat_template.jinja into the model's "
                "directory, or give texts to the Decoder"
            )
        if decoder.uses_processes:
            raise UserError("a chat needs a mesh of a single process: load the models without it")
        self._decoder = decoder
        self._template_kwargs = _merged(decoder.chat_template_kwargs, chat_template_kwargs)
        self._messages = [] if system is None else [_message("system", system)]
        self._prefix: Prefix | None = None

    def __repr__(self) -> str:
        return f"Chat({len(self._messages)} messages)"

    @property
    def messages(self) -> list[dict[str, str]]:
        """A copy of the messages so far, with `role` and `content`."""
        return [dict(message) for message in self._messages]

    def __call__(self, text: str, **options: Any) -> Row:
        """Adds a message of the user, and returns the reply.

        Args:
          text: the message.
          **options: as in a call of the Decoder, except for several samples and prefixes.

        Returns:
          The reply. If an error is raised, the conversation stays as it was.
        """
        *_, last = self._turn(text, None, options)
        assert last.row is not None
        return last.row

    def stream(self, text: str, *, every: int = 1, **options: Any) -> Iterator[str]:
        """Like a call, but yields the texts that the reply gets; see `Decoder.stream_tokens`.

        The messages are added when the reply is finished; until then the conversation stays as it
        was.

        Args:
          text: the message.
          every: the most rounds between two texts.
          **options: as in a call, checked now.

        Yields:
          Texts that are not empty.

        Raises:
          UserError: another turn ended while this stream was read.
        """
        check_count("every", every, "give the number of rounds between two texts")
        turn = self._turn(text, every, options)
        return (added.text for added in turn if added.text)

    def _turn(self, text: str, every: int | None, options: dict[str, Any]) -> Iterator[Added]:
        """The texts and the row of a turn; arguments are checked now."""
        messages = [*self._messages, _message("user", text)]
        options = dict(options)
        template = _merged(self._template_kwargs, options.pop("chat_template_kwargs", None))
        tokens = self._decoder.encode(messages, "the conversation", chat_template_kwargs=template)
        engine = self._decoder._engine_of_turn(tokens, self._prefix, options)

        def steps() -> Iterator[Added]:
            for added in engine.added(every):
                if added.row is not None:
                    self._end(messages, tokens, added.row, engine)
                yield added

        return steps()

    def _end(
        self, messages: list[dict[str, str]], tokens: np.ndarray, row: Row, engine: Engine
    ) -> None:
        """Adds the messages of a turn, and keeps what the models have read."""
        if self._messages != messages[:-1]:
            raise UserError("another turn ended during this stream: read it to its end before")
        warn_of_nan(row)
        ended = [] if row.eos_id is None else [row.eos_id]
        read = np.concatenate([tokens, row.tokens, ended]).astype(np.int32)
        self._messages = [*messages, {"role": "assistant", "content": row.text}]
        can_share = self._decoder.can_share_prefix and row.error is None
        self._prefix = engine.prefix_of(read) if can_share else None


def _merged(options: Mapping[str, Any], more: Any) -> dict[str, Any]:
    """All options of the chat template."""
    merged = {**options, **checked_template_kwargs(more)}
    if merged.get("continue_final_message"):
        raise UserError(
            "continue_final_message must be left out of a chat: call decoder([messages])"
        )
    return merged


def _message(role: str, text: Any) -> dict[str, str]:
    name = "the message" if role == "user" else role
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{name} must be a text that is not empty, got {shown(text)}")
    check_unicode(text, name)
    return {"role": role, "content": text}
