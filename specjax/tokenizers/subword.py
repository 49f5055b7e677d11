"""Tokenizers with a trained vocabulary: SentencePiece models and `tokenizer.json` files."""

import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from specjax.errors import UserError
from specjax.tokenizers.model_files import no_panic
from specjax.tokenizers.tokenizer import Pieces, Tokenizer
from specjax.tokenizers.tokenizer_config import TokenizerSettings, added_tokens
from specjax.tokenizers.transformers_classes import (
    PLAIN,
    around_texts,
    class_of,
    differences,
    special_texts,
)


class SubwordTokenizer(Tokenizer):
    """A tokenizer that may add other ids than bos and eos around a text."""

    _others: tuple[list[int], list[int]] = ([], [])

    def _set_around(self, before: list[int], after: list[int]) -> None:
        self.add_bos = self.bos_id is not None and before == [self.bos_id]
        self.add_eos = self._own_eos is not None and after == [self._own_eos]
        self._others = [] if self.add_bos else before, [] if self.add_eos else after

    def _around(self) -> tuple[list[int], list[int]]:
        before, after = super()._around()
        return before or self._others[0], after or self._others[1]


class SentencePieceTokenizer(SubwordTokenizer):
    """A SentencePiece model, and the tokens that the directory of its settings adds to it.

    Without a directory, eos is appended if the model has no bos (T5), and else bos is added at the
    start (Llama, Gemma).
    """

    def __init__(self, file: Path, directory: Path | None = None) -> None:
        import sentencepiece

        try:
            self._sp = sentencepiece.SentencePieceProcessor(model_file=str(file))
        except (RuntimeError, OSError) as error:
            if is_tiktoken(file):
                raise UserError(
                    f"{file} is in tiktoken's format, which does not say how texts are split: put "
                    "tokenizer.json beside it (transformers.AutoTokenizer writes it)"
                ) from None
            raise UserError(f"{file} is no SentencePiece model ({error}); copy it again") from None
        settings = TokenizerSettings(directory)
        is_t5 = self._sp.bos_id() < 0 if settings.is_t5 is None else settings.is_t5
        self._ids, self._special = self._tokens_by_name(settings, is_t5)
        self._texts = {i: text for text, i in self._ids.items()}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._splitter = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        self._dummy_prefix = self._sp.Normalize("a") != "a"
        self._later = self._exact = self._sp
        if not is_t5 and not settings.config.get("legacy") and self._dummy_prefix:
            # After a special token the text gets no leading space.
            self._later = _with_normalizer(self._sp, add_dummy_prefix=False)
        if self._dummy_prefix or self._sp.Normalize(" a") not in (" a", "▁a"):
            exact = {"add_dummy_prefix": False, "remove_extra_whitespaces": False}
            self._exact = _with_normalizer(self._sp, **exact)
        self._own_eos = settings.id_of("eos_token", self._ids, self._sp.eos_id())
        self.bos_id = settings.id_of("bos_token", self._ids, self._sp.bos_id())
        pad = settings.id_of("pad_token", self._ids, self._sp.pad_id())
        self.eos_ids, self.pad_id = settings.eos_and_pad(self._own_eos, pad, file)
        self.chat_template = settings.chat_template
        self.unk_id = self._sp.unk_id()
        name = class_of(settings)
        self._set_around(*self._around_ids(settings, name, is_t5, file))
        texts = special_texts(settings, name)
        if name == PLAIN and not settings.tokenizer_json:
            ids = {"bos": self._sp.bos_id(), "eos": self._sp.eos_id(), "unk": self.unk_id}
            pieces = {f"{n}_token": self._sp.IdToPiece(i) for n, i in ids.items() if i >= 0}
            texts = {**pieces, **texts}
        self.special_tokens = texts

    def _around_ids(
        self, settings: TokenizerSettings, name: str, is_t5: bool, file: Path
    ) -> tuple[list[int], list[int]]:
        if settings.tokenizer_json:
            processor = settings.tokenizer_json.get("post_processor")
            return around_texts(settings, name, processor, self._ids)
        add_bos = settings.flag("add_bos_token", not is_t5)
        add_eos = is_t5 or settings.flag("add_eos_token", False)
        before = [self.bos_id] if add_bos and self.bos_id is not None else []
        after = [self._own_eos] if add_eos and self._own_eos is not None else []
        reasons = []
        if before and settings.config.get("add_bos_token") is None:
            reasons.append(
                "tokenizer_config.json does not set add_bos_token, so texts do not begin with "
                f"{self.token(before[0])} in transformers 5, but in specjax: set it"
            )
        if name == PLAIN and self._dummy_prefix and not is_t5:
            reasons.append("transformers 5 reads it without the space before texts; specjax has it")
        # transformers 5 does not read one without bos, except for T5.
        if reasons and settings.directory is not None and self._sp.bos_id() >= 0:
            warnings.warn(f"{file}: {'. And '.join(reasons)}", stacklevel=2)
        return before, after

    def _tokens_by_name(
        self, settings: TokenizerSettings, is_t5: bool
    ) -> tuple[dict[str, int], set[int]]:
        size = self._sp.GetPieceSize()
        added = added_tokens(settings, size, is_t5)
        # SentencePiece does not treat a control piece as text, but as text it means its id.
        ids = {
            self._sp.IdToPiece(i): i
            for i in range(size)
            if self._sp.IsControl(i) or self._sp.IsUnknown(i)
        }
        special = {*ids.values(), *(i for i, is_special in added.values() if is_special)}
        ids |= {text: i for text, (i, _) in added.items()}
        for text in settings.named_special():
            piece = self._sp.PieceToId(text)
            if text not in ids and not self._sp.IsUnknown(piece):
                ids[text] = piece
            # If a file declares a token not special, transformers follows it.
            if text in ids and added.get(text, (0, None))[1] is not False:
                special.add(ids[text])
        return ids, special

    @property
    def vocab_size(self) -> int:
        return max(self._sp.GetPieceSize(), *(i + 1 for i in self._texts), 1)

    def token(self, token_id: int) -> str | None:
        if token_id in self._texts:
            return self._texts[token_id]
        return self._sp.IdToPiece(token_id) if token_id < self._sp.GetPieceSize() else None

    def pieces(self) -> Pieces:
        later = [self._piece(i) for i in range(self.vocab_size)]
        if not self._dummy_prefix:
            return Pieces(later, later)
        first = [
            piece if i in self._texts else piece.removeprefix(b" ") for i, piece in enumerate(later)
        ]
        return Pieces(first, later)

    def _piece(self, token_id: int) -> bytes:
        if token_id in self._special or self.token(token_id) is None:
            return b""
        if token_id in self._texts:
            return self._texts[token_id].encode()
        piece = self._sp.IdToPiece(token_id)
        if self._sp.IsByte(token_id):
            return bytes.fromhex(piece[3:5])
        return piece.replace("▁", " ").encode()

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        processor = self._sp
        for part in self._splitter.split(text) if self._ids else [text]:
            if part in self._ids:
                ids.append(self._ids[part])
                processor = self._later
            elif part:
                ids += processor.EncodeAsIds(part)
                processor = self._later
        return ids

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        if skip_special_tokens:
            ids = [i for i in ids if i not in self._special]
        text = ""
        for spelt, run in groupby(ids, lambda i: i in self._texts or self.token(i) is None):
            if spelt:
                text += "".join(self._texts.get(i, "") for i in run)
            else:
                text += self._exact.DecodeIds([*run])
        # Only the space that encoding put before the text is removed, as in transformers.
        begins = self._dummy_prefix and ids and ids[0] not in self._texts
        return text.removeprefix(" ") if begins else text


class HuggingFaceTokenizer(SubwordTokenizer):
    """A `tokenizer.json`, with the settings of a directory, by the `tokenizers` package."""

    def __init__(self, file: Path, directory: Path | None = None) -> None:
        import tokenizers

        self._file = file
        try:
            with no_panic(f"{file} cannot be read"):
                self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises plain Exceptions
            raise UserError(f"{file} is not a tokenizer ({error}); copy it again") from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        settings = TokenizerSettings(directory)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        # For tokens that tokenizer.json itself lists as added, its flag decides.
        listed = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        self._tokenizer.add_special_tokens(
            [
                tokenizers.AddedToken(text, special=True, **flags)
                for text, flags in settings.named_special().items()
                if text in vocabulary and text not in listed
            ]
        )
        self._vocab_size = max(vocabulary.values(), default=-1) + 1
        self._own_eos = settings.id_of("eos_token", vocabulary, -1)
        self.bos_id = settings.id_of("bos_token", vocabulary, -1)
        self.unk_id = settings.id_of("unk_token", vocabulary, -1)
        pad = settings.id_of("pad_token", vocabulary, -1)
        self.eos_ids, self.pad_id = settings.eos_and_pad(self._own_eos, pad, file)
        self.chat_template = settings.chat_template
        name = class_of(settings)
        self.special_tokens = special_texts(settings, name)
        steps = {part: self._step(part) for part in ("normalizer", "pre_tokenizer")}
        if difference := differences(name, **steps):
            warnings.warn(f"{file}: {difference}; specjax follows the file", stacklevel=2)
        processor = self._step("post_processor")
        self._set_around(*around_texts(settings, name, processor, vocabulary))

    def _step(self, name: str) -> Any:
        step = getattr(self._tokenizer, name)
        return None if step is None else json.loads(step.__getstate__())

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def token(self, token_id: int) -> str | None:
        return self._tokenizer.id_to_token(token_id)

    def pieces(self) -> Pieces:
        added = self._tokenizer.get_added_tokens_decoder()
        texts = [
            None if i in added and added[i].special else self.token(i)
            for i in range(self.vocab_size)
        ]
        return pieces_of(json.loads(self._tokenizer.to_str())["decoder"], texts)

    def _encode(self, text: str) -> list[int]:
        with no_panic(f"{self._file} cannot split the text"):
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        with no_panic(f"{self._file} cannot join the tokens"):
            return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


def is_tiktoken(file: Path) -> bool:
    """Whether a vocabulary is in tiktoken's format: lines of a token in base64 and its rank."""
    with file.open("rb") as lines:
        first = lines.readline(1000)
    return re.fullmatch(rb"[A-Za-z0-9+/]+=* \d+\r?\n?", first) is not None


def _with_normalizer(processor: Any, **settings: bool) -> Any:
    import sentencepiece
    from sentencepiece.sentencepiece_model_pb2 import ModelProto, NormalizerSpec

    model = ModelProto.FromString(processor.serialized_model_proto())
    model.normalizer_spec.MergeFrom(NormalizerSpec(**settings))
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def pieces_of(decoder: Mapping[str, Any] | None, tokens: Sequence[str | None]) -> Pieces:
    """The text that each token adds, by the field "decoder" of a `tokenizer.json`.

    Tokens that are None are left out of texts.
    """
    whole: Any = {"type": "none"} if decoder is None else decoder
    steps = whole["decoders"] if whole["type"] == "Sequence" else [whole]
    # At the start of a text, and elsewhere.
    sides: tuple[list[Any], list[Any]] = list(tokens), list(tokens)
    drops_space = False
    for place, step in enumerate(steps):
        kind = step["type"]
        changes: list[Callable[[str], Any]] = []
        if kind == "Replace" and "String" in step["pattern"]:
            changes = [_replacing(step["pattern"]["String"], step["content"])] * 2
        elif kind == "Metaspace":
            # The first token loses all marks.
            rest = " " if step.get("prepend_scheme") == "never" else ""
            changes = [_replacing(step["replacement"], space) for space in (rest, " ")]
        elif kind == "ByteFallback":
            changes = [_byte] * 2
        elif kind == "ByteLevel":
            changes = [_byte_level] * 2
        elif (
            kind == "Strip"
            and (step["content"], step["stop"]) == (" ", 0)
            and step["start"] in (0, 1)
            and any(earlier["type"] == "Fuse" for earlier in steps[:place])  # it reads whole texts
        ):
            drops_space |= step["start"] == 1
        elif kind != "Fuse":
            raise UserError(
                f"the tokenizer's decoder ({kind}) does not join the texts of single tokens, so "
                "texts cannot be read token by token: cut the texts yourself"
            )
        for side, change in zip(sides, changes, strict=False):
            side[:] = [change(text) if isinstance(text, str) else text for text in side]
    first, later = (
        [text if isinstance(text, bytes) else (text or "").encode() for text in side]
        for side in sides
    )
    return Pieces([x.removeprefix(b" ") for x in first] if drops_space else first, later)


def _replacing(old: str, new: str) -> Any:
    return lambda text: text.replace(old, new)


def _byte(text: str) -> str | bytes:
    match = _BYTE_TOKEN.fullmatch(text)
    return bytes.fromhex(match[1]) if match else text


def _byte_level(text: str) -> bytes:
    if all(character in _BYTES for character in text):
        return bytes(_BYTES[character] for character in text)
    return text.encode()


# The characters that stand for bytes in byte-level vocabularies (GPT-2).
_PLAIN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PLAIN]
_BYTES = {chr(byte): byte for byte in _PLAIN}
_BYTES |= {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
