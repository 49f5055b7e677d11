"""The interface of all tokenizers, and the tokenizer that needs no file: bytes."""

import abc
import functools
import hashlib
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from itertools import groupby, takewhile
from typing import Any, NamedTuple

from specjax.errors import UserError
from specjax.tokenizers.chat_template import ChatTemplate, choose_template, render_chat


class Tokenizer(abc.ABC):
    """Text to token ids and back.

    Attributes:
      eos_ids: ids that end a generation; `encode` appends the first.
      pad_id: fills finished rows; the first eos if the vocabulary has no pad.
      bos_id: begins a prompt, or None.
      unk_id: for text that the vocabulary cannot write, or None.
      add_bos: whether `encode` adds `bos_id` at the start (Llama, Gemma).
      add_eos: whether `encode` adds the vocabulary's own eos at the end (T5's inputs).
      chat_template: Jinja source, several by name, or None.
      special_tokens: the texts for a chat template: `bos_token`, `eos_token`, ....
    """

    eos_ids: tuple[int, ...]
    pad_id: int
    bos_id: int | None = None
    unk_id: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    chat_template: ChatTemplate | None = None
    special_tokens: Mapping[str, str] = {}

    _own_eos: int | None = None

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """One more than the largest id; a model's embedding may have more rows."""

    @abc.abstractmethod
    def token(self, token_id: int) -> str | None:
        """The text of an entry of the vocabulary, `None` for an unused id."""

    @abc.abstractmethod
    def _encode(self, text: str) -> list[int]: ...

    @abc.abstractmethod
    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Special tokens in the text (`<extra_id_0>`, `<start_of_turn>`) become their ids, as in
        transformers. Bos and eos are added as the tokenizer's files say, if at all.
        """
        ids = self._encode(text)
        if not add_special_tokens:
            return ids
        before, after = self._around()
        ids = [*before, *ids, *after]
        warn_of_two_bos(
            self,
            ids,
            "the tokenizer adds it: remove it from the text, or give the messages of a chat "
            "instead of their text",
        )
        return ids

    def _around(self) -> tuple[list[int], list[int]]:
        before = [self.bos_id] if self.add_bos and self.bos_id is not None else []
        after = [self._own_eos] if self.add_eos and self._own_eos is not None else []
        return before, after

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids.

        Ids past the vocabulary, which a model with a padded embedding can draw, add no text. Bytes
        that are not UTF-8 are left out or replaced, depending on the tokenizer.
        """
        whole = [int(i) for i in ids]
        if any(i < 0 for i in whole):
            raise UserError(f"token id {min(whole)} is negative; cut the ids at their length")
        return self._decode([i for i in whole if i < self.vocab_size], skip_special_tokens)

    def pieces(self) -> "Pieces":
        """The bytes that each token adds to a text, if they do not depend on the others."""
        raise UserError(
            f"{type(self).__name__} does not define what each token adds to a text: give it a "
            "method pieces()"
        )

    @functools.cached_property
    def all_pieces(self) -> "Pieces":
        """`pieces()`, which takes long to read from a large vocabulary, read once."""
        return self.pieces()

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of the vocabulary: equal if every id means the same text.

        A drafter and a verifier may differ in everything else.
        """
        vocabulary = [self.token(i) for i in range(self.vocab_size)]
        return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:16]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        **options: Any,
    ) -> str:
        """Turns a conversation into a prompt, like `apply_chat_template` of transformers 5.

        Args:
          messages: dicts with `role` and `content`, and keys such as `tool_calls`.
          chat_template: the name of one of the tokenizer's templates, or Jinja; by default
            `tool_use` if there are `tools`, otherwise `default`.
          **options: any of

            - tools: a list of JSON schemas of functions.
            - documents: a list of dicts with `title` and `text`.
            - add_generation_prompt: whether the text ends at the start of the assistant's answer;
              by default unless the final message is continued.
            - continue_final_message: True, and the model continues the content of the last message;
              or another key of it, such as "reasoning_content".
            - variables of the template, such as `enable_thinking=False`.
        """
        if self.chat_template is None and chat_template is None:
            raise UserError(
                "this tokenizer has no chat template; give plain prompts, or put "
                "chat_template.jinja into the model's directory"
            )
        tools = options.get("tools")
        template = choose_template(self.chat_template or {}, chat_template, tools)
        if isinstance(messages, Sequence) and not messages:
            raise UserError("a chat has no messages: give at least one")
        return render_chat(template, messages, **{**self.special_tokens, **options})

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """The ids of `render_chat`'s text; the template itself places bos."""
        text = self.render_chat(messages, **options)
        ids = self.encode(text, add_special_tokens=False)
        warn_of_two_bos(self, ids, "the chat template writes it twice: correct the template")
        return ids


class Pieces(NamedTuple):
    """The bytes that tokens add to a text, without special tokens.

    Attributes:
      first: for each id, its bytes at the start of a text: without the space that encoding put
        there.
      later: for each id, its bytes elsewhere; b"" for tokens that add nothing.
    """

    first: list[bytes]
    later: list[bytes]


# Special tokens in a text, with the spaces that they take.
_SPECIAL = re.compile(r"\s*(<pad>|</s>|<unk>)\s*|(<extra_id_\d+>)")


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes by T5's convention: pad 0, eos 1, unknown 2, byte b at b + 3.

    Ids of special tokens, and bytes that are not UTF-8, decode to nothing.

    Args:
      extra_ids: the number of sentinels (`<extra_id_0>`, ...) after the bytes; ByT5 has 125. With
        sentinels, special tokens in a text become their ids, and `<pad>`, `</s>` and `<unk>` take
        the spaces around them, as in transformers' ByT5; without, all text is bytes. A text that
        ends in `</s>` gets no second eos.
    """

    OFFSET = 3

    def __init__(self, extra_ids: int = 0) -> None:
        if extra_ids < 0:
            raise UserError(f"`extra_ids` must be at least 0, got {extra_ids}")
        self.eos_ids, self.pad_id, self.add_eos, self._own_eos = (1,), 0, True, 1
        self._vocab_size = self.OFFSET + 256 + extra_ids
        named = [*range(self.OFFSET), *range(self.OFFSET + 256, self._vocab_size)]
        self._named = {self.token(i): i for i in named} if extra_ids else {}

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def token(self, token_id: int) -> str:
        if token_id < self.OFFSET:
            return ("<pad>", "</s>", "<unk>")[token_id]
        byte = token_id - self.OFFSET
        return f"<0x{byte:02X}>" if byte < 256 else f"<extra_id_{byte - 256}>"

    def pieces(self) -> Pieces:
        alphabet = [bytes([i]) for i in range(256)]
        rest = self.vocab_size - self.OFFSET - len(alphabet)
        texts = [b""] * self.OFFSET + alphabet + [b""] * rest
        return Pieces(texts, texts)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = super().encode(text, add_special_tokens=add_special_tokens)
        added = add_special_tokens and self.add_eos
        return ids[:-1] if added and ids[-2:-1] == [self._own_eos] else ids

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        end = 0
        for match in _SPECIAL.finditer(text) if self._named else ():
            if (token_id := self._named.get(match[1] or match[2])) is not None:
                ids += [*self._bytes(text[end : match.start()]), token_id]
                end = match.end()
        return [*ids, *self._bytes(text[end:])]

    def _bytes(self, text: str) -> list[int]:
        return [byte + self.OFFSET for byte in text.encode("utf-8", errors="replace")]

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        parts = []
        for special, run in groupby(ids, lambda i: not self.OFFSET <= i < self.OFFSET + 256):
            if not special:
                parts.append(bytes(i - self.OFFSET for i in run).decode("utf-8", errors="ignore"))
            elif not skip_special_tokens:
                parts += [self.token(i) for i in run]
        return "".join(parts)


def added_text(tokenizer: Any, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """The text that ids add after the ids of a prompt.

    It may differ from their own decoded text: SentencePiece leaves out the space before the first
    word of a text, even if it indents a line of a program.
    """
    before, after = list(prompt), list(ids)
    whole = tokenizer.decode(before + after)
    text = tokenizer.decode(before) if before else ""
    # A character may have its first bytes in the prompt.
    return whole[len(common_prefix(text, whole)) :]


def warn_of_two_bos(tokenizer: Tokenizer, ids: Sequence[int], remedy: str) -> None:
    """Warns if a prompt begins with two bos."""
    if tokenizer.bos_id is not None and list(ids[:2]) == [tokenizer.bos_id] * 2:
        name = tokenizer.token(tokenizer.bos_id)
        warnings.warn(f"a prompt begins with {name} twice; {remedy}", stacklevel=3)


def common_prefix(text: str, other: str) -> str:
    """The longest beginning of both texts."""
    pairs = zip(text, other, strict=False)
    return "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
