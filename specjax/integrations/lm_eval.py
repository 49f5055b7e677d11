"""specjax as a model of EleutherAI's lm-eval: `python -m specjax.integrations.lm_eval`.

The command is `lm_eval` itself, with the model `specjax`:

    python -m specjax.integrations.lm_eval run --model specjax \
      --model_args verifier=path/to/large,drafter=path/to/small --tasks gsm8k
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from specjax.errors import UserError
from specjax.text import Decoder, Setting, load_pair
from specjax.types import Sampling

_SAMPLING = ("temperature", "top_k", "top_p")
# What says nothing beside the temperature.
_IGNORED = ("do_sample", "until", "max_gen_toks")


@register_model("specjax")
class SpecjaxLM(TemplateLM):
    """A pair, or a single model, that writes and scores.

    Args:
      verifier, drafter, weights: those of `load_pair`.
      rule, drafting, max_draft: those of a `Setting`.
      max_length: the most tokens of a prompt; longer ones lose their beginning.
      max_gen_toks: the most tokens of an output, where the task does not say.
      batch_size: rows decoded together.
    """

    def __init__(
        self,
        verifier: str | None = None,
        drafter: str | None = None,
        *,
        weights: str | None = None,
        rule: str | None = None,
        drafting: str | None = None,
        max_draft: int | None = None,
        max_length: int = 2048,
        max_gen_toks: int = 256,
        batch_size: int | str = 8,
        seed: int = 0,
        **_: Any,
    ) -> None:
        super().__init__()
        setting = Setting(rule=rule, drafting=drafting, max_draft=max_draft)
        models = load_pair(verifier=verifier, drafter=drafter, weights=weights)
        self.max_length, self.max_gen_toks, self._seed = max_length, max_gen_toks, seed
        rows = 8 if batch_size == "auto" else int(batch_size)
        sizes = {"max_new_tokens": max_gen_toks, "batch_size": rows}
        self._decoder = Decoder(models, setting, **sizes)
        if not self._decoder.main.continues_prompts:
            self.backend = "seq2seq"

    @property
    def eot_token_id(self) -> int:
        return self._decoder.tokenizer.eos_ids[0]

    @property
    def tokenizer_name(self) -> str:
        return self._decoder.main.name

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        special = add_special_tokens is not False
        return list(self._decoder.tokenizer.encode(string, add_special_tokens=special))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self._decoder.tokenizer.render_chat(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        prompts = [np.asarray(context[-self.max_length :], np.int32) for _, context, _ in requests]
        outputs = [np.asarray(output, np.int32) for _, _, output in requests]
        scores = self._decoder.score(prompts, outputs, top_log_probs=1)
        assert scores.top is not None
        return [
            (float(np.sum(row, dtype=np.float64)), bool(np.all(best.tokens[:, 0] == output)))
            for row, best, output in zip(scores.log_probs, scores.top, outputs, strict=True)
        ]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        totals = []
        for request in requests:
            windows = get_rolling_token_windows(
                self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pairs = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(total for total, _ in self._loglikelihood_tokens(pairs)))
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        texts: list[str] = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(place)
        for places in groups.values():
            options = dict(requests[places[0]].args[1])
            stop, limit = options.get("until", ()), options.get("max_gen_toks", self.max_gen_toks)
            drawn = {name: options.pop(name) for name in _SAMPLING if name in options}
            if not options.get("do_sample", bool(drawn.get("temperature"))):
                drawn = {"temperature": 0.0}
            if unknown := set(options).difference(_IGNORED):
                raise UserError(f"gen_kwargs: {unknown.pop()} is unknown to specjax: leave it out")
            decoder = Decoder(
                self._decoder.models,
                self._decoder.setting,
                stop=tuple(x for x in ([stop] if isinstance(stop, str) else stop) if x),
                max_new_tokens=limit,
                batch_size=self._decoder.batch_size,
                buckets=self._decoder.buckets,
            )
            prompts = [
                decoder.encode(requests[place].args[0], truncate="beginning") for place in places
            ]
            result = decoder(
                prompts, sampling=Sampling(**drawn), seed=self._seed, ids=places,
                progress=not disable_tqdm,
            )  # fmt: skip
            for place, text in zip(places, result.texts, strict=True):
                texts[place] = text
        return texts


if __name__ == "__main__":
    cli_evaluate()
