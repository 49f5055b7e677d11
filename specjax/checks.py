"""Checks of users' values, with uniform messages."""

import ast
import difflib
import functools
import importlib
import inspect
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from specjax.errors import MissingLibraryError, UnknownOptionError, UserError, shorten

_Called = TypeVar("_Called", bound=Callable[..., Any])
# The options of transformers, vLLM, OpenAI and others, as specjax writes them; {} is their value.
ELSEWHERE = {
    name: text.replace("{name}", name).replace("{Name}", name.title().replace("_", ""))
    for names, text in (
        ("temperature top_k top_p", "sampling=Sampling({name}={})"),
        ("do_sample", "sampling=Sampling(temperature=1.0), or 0.0 for False"),
        ("max_tokens max_length max_completion_tokens max_output_tokens n_predict max_gen_toks "
         "max_gen_len", "max_new_tokens={}"),
        ("num_assistant_tokens num_speculative_tokens num_draft_tokens num_draft gamma "
         "speculative_num_steps speculative_num_draft_tokens draft_length", "max_draft={}"),
        ("assistant_model draft_model drafter_model speculative_model", "drafter={}"),
        ("model model_path model_id model_name model_name_or_path target_model base_model "
         "main_model pretrained_model_name_or_path", "verifier={}"),
        ("inputs input_ids prompt_token_ids", "prompts={}"),
        ("tensor_parallel_size tp_size", "mesh=make_mesh(model={})"),
        ("assistant_tokenizer", "translate_drafter=True"),
        ("assistant_confidence_threshold", 'stopping="Confidence({})"'),
        ("prompt_lookup_num_tokens prompt_lookup_max", 'drafting="Lookup()"'),
        ("n num_return_sequences num_samples_per_prompt", "num_samples={}"),
        ("stop_strings stop_sequences stop_words stops until", "stop={}"),
        ("random_seed generator_seed", "seed={}"),
        ("logprobs output_scores return_logprob", "log_probs=True"),
        ("top_logprobs", "top_log_probs={}"),
        ("min_p repetition_penalty presence_penalty frequency_penalty typical_p epsilon_cutoff "
         "eta_cutoff min_new_tokens logit_bias suppress_tokens regex json_schema",
         "processors=(processors.{Name}({}),)"),
        ("no_repeat_ngram_size", "processors=(processors.NoRepeatNgram({}),)"),
        ("min_tokens", "processors=(processors.MinNewTokens({}),)"),
        ("guided_regex", "processors=(processors.Regex({}),)"),
        ("guided_json response_format", "processors=(processors.JsonSchema({}),)"),
        ("logits_processor logits_processors", "processors=({},)"),
        ("torch_dtype", "dtype={}"),
        ("quantization load_in_8bit", 'weights="int8"'),
        ("max_num_seqs max_batch_size", "batch_size={}"),
        ("max_model_len max_seq_len max_prompt_length", "buckets=(..., {})"),
        ("num_beams beam_width length_penalty early_stopping", ""),
    )
    for name in names.split()
}  # fmt: skip
# The callables whose options are checked by name.
_with_options: dict[str, Collection[str]] = {}


def options_of(name: str) -> Callable[[_Called], _Called]:
    """A decorator of what users call with options, `name` in messages: it refuses unknown ones.

    The message has what specjax writes for the options of other libraries, a similar option, or
    what else takes it.
    """

    def decorate(called: Any) -> Any:
        function = vars(called)["__init__"] if isinstance(called, type) else called
        known = [*inspect.signature(function).parameters]
        _with_options.setdefault(name, known)

        @functools.wraps(function)
        def checked_call(*args: Any, **options: Any) -> Any:
            for option, value in options.items():
                if option not in known:
                    told = f"{name}: unexpected keyword argument {option!r}"
                    raise UnknownOptionError(f"{told}{_suggestion(option, value, known)}")
            return function(*args, **options)

        if not isinstance(called, type):
            return checked_call
        setattr(called, "__init__", checked_call)  # noqa: B010  mypy refuses the plain form
        return called

    return decorate


def _suggestion(option: str, value: Any, known: Collection[str]) -> str:
    text = ELSEWHERE.get(option.lower(), f"{option}={{}}")
    if not text:
        return ": specjax has no beam search: leave it out"
    meant = text.partition("=")[0]
    takes = [name for name, options in _with_options.items() if meant in options]
    if not takes and (near := difflib.get_close_matches(option, known, n=1)):
        meant, text = near[0], f"{near[0]}={{}}"
    text = text.replace("{}", short_repr(value))
    if meant in known:
        return f"; did you mean {text}?"
    if takes:
        return f"; write {text} as an option of {' or '.join(takes)}"
    return f"; its options are {', '.join(name for name in known if name != 'self')}"


def short_repr(value: Any) -> str:
    """A value for a message: on one line, and not long."""
    # Spaces may be what is wrong with a text, whose repr is one line.
    text = repr(value) if isinstance(value, str) else " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def join_names(names: Iterable[Any]) -> str:
    """Names that a user gave, for a message: the first of many, and the number of the others."""
    texts = [*map(str, names)]
    count = next((n for n in range(1, len(texts)) if len(", ".join(texts[: n + 1])) > 150), None)
    more = "" if count is None else f" and {len(texts) - count:,} more"
    return ", ".join(texts[:count]) + more


def one_line(error: BaseException) -> str:
    """An error's message without line breaks and without gin's notes; long values are shortened."""
    try:
        text = str(error)
    except (Exception, SystemExit):  # of a stranger's class
        text = ""
    if isinstance(error, IsADirectoryError) and error.filename is not None:
        text = f"{error.filename} is a directory: give the path of a file"
    if isinstance(error, NotADirectoryError) and error.filename is not None:
        text = f"{error.filename}: a part of this path is a file: give a path in a directory"
    return shorten(" ".join(text.split("\n  In ")[0].split()))


def in_names(text: str, names: Mapping[str, str]) -> str:
    """Replaces Python's parameters in a message by the names of the surface that a user wrote in.

    `names` maps parameters to them, such as max_draft to MAX_DRAFT of gin files or to --max-draft.
    """
    # What follows a part's text is about the part: top_k of rule='TokenV2(0.3, top_k=0)'.
    if part := re.match(r"(\w+)=(['\"])\w+\(.*\)\2", text):
        return names.get(part[1], part[1]) + text[part.end(1) :]
    words = []
    for parameter in sorted(names, key=len, reverse=True):
        word = rf"(?<![-.\w]){re.escape(parameter)}\b"
        if "_" not in parameter:
            # It may also be an English word: only in the positions of a parameter.
            word = rf"(?:^|(?<=: )){word}(?= must\b| is\b)|(?<=`){word}(?=`)|{word}(?==)"
        words.append(word)
    return re.sub("|".join(words), lambda word: names[word[0]], text) if words else text


PathLike = str | os.PathLike[str]


def check_path(path: Any, what: str = "") -> None:
    """Raises UserError for an invalid path; `what` is "name=" in messages."""
    if not isinstance(path, str | os.PathLike):
        digits = isinstance(path, int) and not isinstance(path, bool)
        remedy = "put a path of digits in quotes" if digits else "give a text or a pathlib.Path"
        raise UserError(f"{what}{path!r} must be a path: {remedy}")
    if "\0" in str(os.fspath(path)):
        raise UserError(f"{what}{path!r} has a NUL character: remove it")
    if not os.fspath(path):  # it would mean the working directory
        raise UserError(f"{what.rstrip('=') or 'a path'} is empty: give a path")


def tuple_text(value: Any) -> str:
    """Returns the tuple that a user meant by a single value, or by a text with commas."""
    if not isinstance(value, str):
        return repr((value,))
    try:
        return repr(tuple(ast.literal_eval(f"({value},)")))
    except (ValueError, SyntaxError):
        return repr(tuple(part.strip() for part in value.split(",")))


def tuple_of_names(name: str, value: Any) -> tuple[str, ...]:
    """Checks a list or tuple of names; a text alone would be one of its letters."""
    if not isinstance(value, list | tuple):
        raise UserError(
            f"{name} must be a tuple of names, got {value!r}; write {tuple_text(value)}"
        )
    return tuple(value)


def check_count(name: str, value: Any, remedy: str, *, low: int = 1) -> None:
    """Raises UserError unless `value` is a whole number of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < low:
        raise UserError(
            f"{name} must be a whole number of at least {low}, got {short_repr(value)}: {remedy}"
        )


def check_part(name: str, value: Any, needed: Sequence[str], example: str) -> None:
    """Raises UserError unless `value` is an instance with the attributes `needed`.

    `example` is code for such a part, for the message.
    """
    if isinstance(value, type):
        raise UserError(
            f"{name} must be an instance, got the class {value.__name__}: write "
            f"{value.__name__}(...)"
        )
    missing = [attribute for attribute in needed if not hasattr(value, attribute)]
    if missing:
        plain = type(value).__module__ == "builtins"
        lacks = "" if plain else f": it has no {', '.join(missing)}"
        raise UserError(f"{name} must be like {example}, got {short_repr(value)}{lacks}")


def check_flag(name: str, value: Any) -> None:
    """Raises UserError unless it is True or False."""
    if not isinstance(value, bool):
        raise UserError(f"{name} must be True or False, got {short_repr(value)}")


def check_static(name: str, value: Any) -> None:
    """Raises UserError unless a part of a method is hashable, as a key of compiled programs."""
    try:
        hash(value)
    except TypeError as error:
        kind = type(value).__name__
        raise UserError(
            f"{name} must be hashable, got a {kind} ({' '.join(str(error).split())}): make {kind} "
            "a @dataclasses.dataclass(frozen=True) without lists and arrays in its fields; arrays "
            "are given beside it, as in WithParams(part, params)"
        ) from None


def require(module: str, extra: str) -> Any:
    """Imports a library that one of specjax's extras installs."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == module
        reason = "is not installed" if absent else f"cannot be imported ({error})"
        raise MissingLibraryError(
            f"{module} {reason}: run pip install '.[{extra}]' in the checkout"
        ) from None


def check_number(
    name: str,
    value: Any,
    *,
    low: float = -np.inf,
    high: float = np.inf,
    open_low: bool = False,
    open_high: bool = False,
    dtype: Any = np.float32,
) -> Any:
    """Checks a user's number, and fixes its dtype so that different values share a program.

    `name` is for the message. The value is a number or an array of one number per row; a traced
    value is not checked. `open_low` and `open_high` exclude the ends of the range.
    """
    if isinstance(value, jax.core.Tracer):
        return value.astype(dtype)
    if isinstance(value, np.ndarray) and not value.ndim:
        value = value[()]
    span = (low, high, open_low, open_high, dtype)
    # Every call of a Decoder checks the same few numbers.
    check = _memo if isinstance(value, int | float | np.number) else _checked
    return check(name, value, *span)


@functools.lru_cache(maxsize=1024, typed=True)
def _memo(*arguments: Any) -> np.ndarray:
    array = _checked(*arguments)
    array.setflags(write=False)  # callers share it
    return array


def _checked(
    name: str, value: Any, low: float, high: float, open_low: bool, open_high: bool, dtype: Any
) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError as error:
        got = short_repr(value)
        raise UserError(f"{name} must be a number or one number per row, got {got}") from error
    if array.dtype.kind not in "iuf" and array.dtype != jax.numpy.bfloat16:
        raise UserError(f"{name} must be a number, got {short_repr(array.tolist())}")
    if array.ndim > 1 or not array.size:
        raise UserError(f"{name} must be a number or one number per row, got shape {array.shape}")
    whole = np.dtype(dtype).kind == "i"
    exact = array.astype(np.float64)
    if whole:
        limit = np.iinfo(dtype).max
        good = (np.trunc(exact) == exact) & (np.abs(exact) <= limit)
    else:
        with np.errstate(over="ignore"):
            used = exact.astype(dtype).astype(np.float64)
        # Also checks the rounded value: float32(1 - 1e-9) is 1, and float32(1e39) is infinite.
        good = _within(used, low, high, open_low, open_high)
        good &= np.isfinite(used) | ~np.isfinite(exact)
    good &= _within(exact, low, high, open_low, open_high)
    if not np.all(good):
        row = f" in row {int(np.argmin(good))}" if array.ndim else ""
        bad = array.reshape(-1)[np.argmin(good)]
        wanted = _range_in_words(low, high, open_low, open_high, np.dtype(dtype), float(bad))
        raise UserError(f"{name} must {wanted}, got {bad}{row}")
    return array.astype(dtype)


def whole_number(name: str, value: Any, *, low: int) -> int:
    """Checks a single whole number of at least `low`, see `check_number`; 1e3 is valid."""
    array = check_number(name, value, low=low, dtype=np.int32)
    if array.ndim:
        raise UserError(f"{name} must be a single whole number, got {short_repr(value)}")
    return int(array)


def whole_fields(of: Any, names: str = "", **lows: int) -> None:
    """Makes fields of a frozen dataclass whole numbers of at least `lows`; see `whole_number`.

    `names` begins their names in messages. None stays where it is the default.
    """
    for field, low in lows.items():
        value = getattr(of, field)
        if value is not None or getattr(type(of), field, 0) is not None:
            object.__setattr__(of, field, whole_number(f"{names}{field}", value, low=low))


def one_number(name: str, value: Any, **span: Any) -> float:
    """Checks a single number; `span` has the range, see `check_number`."""
    array = check_number(name, value, **span)
    if array.ndim:
        raise UserError(f"{name} must be a single number, got {short_repr(value)}")
    return float(array)


def _range_in_words(
    low: float, high: float, open_low: bool, open_high: bool, dtype: Any, bad: float
) -> str:
    """A range in words: "lie in [0, 1]", "be at least 0", "be a whole number of at least 1"."""
    whole = dtype.kind == "i"
    limit = float(np.iinfo(dtype).max if whole else np.finfo(dtype).max)
    if low > -limit and high < limit:
        span = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
        return f"{'be a whole number in' if whole else 'lie in'} {span}"
    ends = []
    if low > -limit:
        ends.append(f"{'above' if open_low else 'at least'} {low:g}")
    if high < limit:
        ends.append(f"{'below' if open_high else 'at most'} {high:g}")
    if limit < abs(bad) < np.inf:
        ends.append(f"small enough for {dtype}")
    if whole:
        return f"be a whole number{' of ' * bool(ends)}{' and '.join(ends)}"
    if high == limit or (high > limit and open_high):
        ends.insert(0, "finite")
    return f"be {' and '.join(ends)}" if ends else "be a number, not NaN"


def _within(x: Any, low: float, high: float, open_low: bool, open_high: bool) -> Any:
    return (x > low if open_low else x >= low) & (x < high if open_high else x <= high)


def check_scores(model: Any, returned: Any, tokens: Any) -> Any:
    """The result of `LanguageModel.score` for `tokens [B, T]`; asserts hold its author to it."""
    where = f"{type(model).__name__}.score"
    is_triple = isinstance(returned, tuple) and len(returned) == 3
    assert is_triple, f"{where} must return (logits, hidden, updates)"
    logits, shape = returned[0], [*tokens.shape, model.vocab_size]
    is_float = jax.numpy.issubdtype(logits.dtype, jax.numpy.floating)
    assert is_float and [*logits.shape] == shape, (
        f"{where}: logits must be floats {shape}, got {logits.dtype}{[*logits.shape]}"
    )
    return returned
