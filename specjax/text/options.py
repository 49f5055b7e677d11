"""The options of a `Decoder` and of its calls."""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specjax.checks import whole_number
from specjax.errors import UserError
from specjax.text.groups import check_buckets
from specjax.text.requests import DRAWN
from specjax.text.stops import check_stops
from specjax.types import Params

# Whole numbers and their minima; the lengths of drafts may be None.
_COUNTS = ("max_new_tokens", 1), ("batch_size", 1)
_LENGTHS = ("max_draft", 1), ("min_draft", 0)
CHECKED = ("stop", "buckets", *(name for name, _ in (*_COUNTS, *_LENGTHS)))
# Unknown option -> the right way to give its value.
_INSTEAD = {
    **{name: f"sampling=Sampling({name}=...)" for name in DRAWN},
    "min_p": "processors=(processors.MinP(...),)",
    "typical_p": "processors=(processors.TypicalP(...),)",
    "repetition_penalty": "processors=(processors.RepetitionPenalty(...),)",
    "presence_penalty": "processors=(processors.PresencePenalty(...),)",
    "frequency_penalty": "processors=(processors.FrequencyPenalty(...),)",
    "no_repeat_ngram_size": "processors=(processors.NoRepeatNgram(...),)",
    "logit_bias": "processors=(processors.LogitBias(...),)",
    "min_new_tokens": "processors=(processors.MinNewTokens(...),)",
    **dict.fromkeys(
        (
            "num_speculative_tokens",
            "num_draft_tokens",
            "num_assistant_tokens",
            "gamma",
            "lookahead",
        ),
        "max_draft=...",
    ),
    "prompt_lookup_num_tokens": "drafting=Lookup(), max_draft=...",
    "strength": "rule=rules.OPT(strength=...), or another rule",
    "alpha": "rule=rules.OPT(strength=...), or another rule",
    "drafter": "drafting=Own(drafter, params)",
    "drafter_params": "drafting=Own(drafter, params)",
    "stopping_params": "stopping=Own(policy, params)",
    "costs": "stopping=drafting.CostAware(costs=...)",
    "params": "method=Own(method, params)",
    "processor": "processors=(...,)",
    "num_samples": "decoder(prompts, num_samples=...)",
    "top_log_probs": "decoder(prompts, top_log_probs=...)",
    "progress": "decoder(prompts, progress=...)",
    "stream": "decoder.stream(prompts), or decoder.stream_tokens(prompts)",
    "best_of": "decoder(prompts, num_samples=..., best_of=...)",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Own:
    """A user's own part with its parameters, for a `Decoder`.

        Decoder(verifier, drafting=Own(MyDrafter(), params))
        Decoder(pair, stopping=Own(MyPolicy(), params))
        Decoder(verifier, method=Own(MyMethod(), params))

    Attributes:
      part: a drafter, a stopping policy or a method; see `specjax.types`.
      params: its parameters, a pytree of arrays; for a method a NamedTuple.
    """

    part: Any
    params: Params = ()


def check_options(unknown: Iterable[str], known: Sequence[str]) -> None:
    """Raises TypeError for an unknown option, with a similar option."""
    for name in unknown:
        if name in _INSTEAD:
            raise UserError(f"there is no option {name}: write {_INSTEAD[name]}")
        close = difflib.get_close_matches(name, known, n=1)
        hint = f": did you mean {close[0]}?" if close else "."
        raise UserError(f"there is no option {name}{hint} The options are {', '.join(known)}")


def check_decoding(options: Mapping[str, Any]) -> None:
    """Checks stop strings, buckets and whole numbers before the models are read.

    Args:
      options: arguments of `Decoder` by name; only those in `CHECKED` are checked.

    Raises:
      TypeError: a value has a wrong type.
      ValueError: a value is out of range.
    """
    check_stops(options.get("stop"))
    if options.get("buckets") is not None:
        check_buckets(options["buckets"])
    for name, low in _COUNTS:
        whole_number(name, options.get(name, low), low=low)
    for name, low in _LENGTHS:
        if options.get(name) is not None:
            whole_number(name, options[name], low=low)
