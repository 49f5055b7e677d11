"""What lies beside the weights and is not applied: an adapter, and settings of a generation."""

import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from specjax.checkpoints.hf import INDEX, SINGLE
from specjax.checks import short_repr
from specjax.errors import UserError
from specjax.tokenizers.model_files import GENERATION_FILE, SPECJAX_FILE, read_json_if_there

ADAPTER_FILE = "adapter_config.json"
_MERGE = "merge it with peft (merge_and_unload, then save_pretrained), and load the merged model"


def check_adapter(directory: Path) -> None:
    """Refuses a directory that has a PEFT adapter, and no weights of a model."""
    names = (SINGLE, INDEX, SPECJAX_FILE)
    if (directory / ADAPTER_FILE).is_file() and not any((directory / n).is_file() for n in names):
        base = read_json_if_there(directory / ADAPTER_FILE).get("base_model_name_or_path")
        raise UserError(
            f"{directory} is a PEFT adapter of {short_repr(base)}, not a model: {_MERGE}"
        )


def warn_of_adapter(directory: Path) -> None:
    """Warns of a PEFT adapter beside a model's weights."""
    if (directory / ADAPTER_FILE).is_file():
        warnings.warn(
            f"{directory}: the PEFT adapter ({ADAPTER_FILE}) is ignored: {_MERGE}", stacklevel=3
        )


# The settings of transformers' `generate` that change what a model writes, besides temperature,
# top-k and top-p; the values that change nothing; and the processor that does the same.
_Processor = Callable[[str, str], str]
_SETTINGS: dict[str, tuple[tuple[Any, ...], _Processor | None]] = {
    "repetition_penalty": ((1.0,), lambda x, over: f"RepetitionPenalty({x}{over})"),
    "no_repeat_ngram_size": ((0,), lambda x, over: f"NoRepeatNgram({x}{over})"),
    "suppress_tokens": (([],), lambda x, _: f"SuppressTokens({x})"),
    "begin_suppress_tokens": (([],), lambda x, _: f"SuppressTokens({x}, first=1)"),
    "forced_bos_token_id": ((), lambda x, _: f"ForcedTokens({{0: {x}}})"),
    "min_new_tokens": ((0,), lambda x, _: f"MinNewTokens({x})"),
    "min_p": ((0.0,), lambda x, _: f"MinP({x})"),
    "typical_p": ((1.0,), lambda x, _: f"TypicalP({x})"),
    "epsilon_cutoff": ((0.0,), lambda x, _: f"EpsilonCutoff({x})"),
    "eta_cutoff": ((0.0,), lambda x, _: f"EtaCutoff({x})"),
    "bad_words_ids": (([],), None),
    "sequence_bias": (({}, []), None),
    "encoder_repetition_penalty": ((1.0,), None),
    "encoder_no_repeat_ngram_size": ((0,), None),
    "exponential_decay_length_penalty": ((), None),
    "forced_eos_token_id": ((), None),
    "min_length": ((0,), None),
    "guidance_scale": ((1.0,), None),
    "num_beams": ((1,), None),
    "penalty_alpha": ((0.0,), None),
    "stop_strings": (([],), None),
}


def ignored_settings(directory: Path) -> dict[str, Any]:
    """The settings of `generation_config.json` that no decoder applies by itself."""
    values = read_json_if_there(directory / GENERATION_FILE)
    return {
        name: values[name]
        for name, (neutral, _) in _SETTINGS.items()
        if values.get(name) is not None and values[name] not in neutral
    }


def warn_of_settings(
    model: str, settings: Mapping[str, Any], *, has_encoder: bool, processors: Collection[str]
) -> None:
    """Warns of settings from `ignored_settings` that no processor of a decoder applies.

    If the model has an encoder, transformers' penalties count only the output.
    """
    over = ", over='output'" if has_encoder else ""
    named, same = [], []
    for name, value in settings.items():
        neutral, processor = _SETTINGS[name]
        numbers = value if [] in neutral else [value]
        usable = isinstance(numbers, list) and all(type(x) in (int, float) for x in numbers)
        code = processor(repr(value), over) if processor is not None and usable else ""
        if code and code.partition("(")[0] in processors:
            continue
        named.append(f"{name}={short_repr(value)}")
        if code:
            same.append(code)
    if named:
        remedy = f"give processors=({', '.join(same)},)" if same else "no processor does the same"
        file = Path(model) / GENERATION_FILE
        warnings.warn(f"{file}: {', '.join(named)}: not applied; {remedy}", stacklevel=3)
