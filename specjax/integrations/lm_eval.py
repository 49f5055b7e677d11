"""A pair as a model of EleutherAI's lm-eval, whose command then has one model more.

Such as

    python -m specjax.integrations.lm_eval run --tasks gsm8k --batch_size 8 \
      --model specjax --model_args verifier=path/to/large,drafter=path/to/small
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.checks import check_number, options_of, whole_number
from specjax.compilation import enable_compilation_cache
from specjax.errors import MissingLibraryError
from specjax.text import Decoder, Setting, load_pair
from specjax.types import Sampling

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import Collator, normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise MissingLibraryError(
        f"specjax.integrations.lm_eval needs {error.name}: pip install lm_eval"
    ) from None


@register_model("specjax")
@options_of("lm-eval's model specjax")
class SpecjaxLM(TemplateLM):
    """Writes as a Decoder does, and scores with the verifier alone, whatever the rule is.

    Args:
      verifier, drafter, weights: those of `load_pair`; by default the built-in pair.
      rule, drafting, max_draft: those of `Setting`.
      max_length: the most tokens that are read of a context and its output; a longer context loses
        its beginning. By default those that the verifier was made for.
      max_gen_toks: the most tokens of an output, where a task does not say.
      batch_size: the number of rows that are decoded or scored together.
      seed: that of outputs above temperature 0.
    """

    def __init__(
        self,
        verifier: str | None = None,
        drafter: str | None = None,
        *,
        weights: str | None = None,
        rule: str = "Lossless",
        drafting: str | None = None,
        max_draft: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        batch_size: int | str = 8,
        seed: int = 0,
        device: str | None = None,  # lm-eval names one for torch, whether asked or not
    ) -> None:
        super().__init__()
        setting = Setting(rule=rule, drafting=drafting, max_draft=max_draft)
        # lm-eval's command line gives a text.
        rows: Any = int(batch_size) if str(batch_size).isdecimal() else batch_size
        self.max_gen_toks, self._seed = whole_number("max_gen_toks", max_gen_toks, low=1), seed
        models = load_pair(verifier=verifier, drafter=drafter, weights=weights)
        self._decoder = Decoder(models, setting, batch_size=rows)
        longest = self._decoder.buckets[-1]
        length = longest if max_length is None else max_length
        self.max_length = int(
            check_number("max_length", length, low=1, high=longest, dtype=np.int32)
        )
        if not self._decoder.main.continues_prompts:
            self.backend = "seq2seq"

    @property
    def eot_token_id(self) -> int:
        return self._decoder.tokenizer.eos_ids[0]

    @property
    def prefix_token_id(self) -> int:
        bos = self._decoder.tokenizer.bos_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return self._decoder.main.name

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        words = self._decoder.tokenizer
        bare = words.encode(string, add_special_tokens=False)
        # A chat template has written the first token itself.
        complete = add_special_tokens is False or bare[:1] == [words.bos_id]
        return bare if complete else words.encode(string)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self._decoder.tokenizer.render_chat(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def _end(self, context: list[int], more: int) -> list[int]:
        """What of a context is read if so many tokens of its output are."""
        room = self.max_length - (more if self.backend == "causal" else 0)
        return context[-max(1, room) :]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        order = Collator(requests, sort_fn=lambda request: -len(request[1]) - len(request[2]))
        found = []
        for chunk in order.get_batched(n=self._decoder.batch_size):
            outputs = [output for _, _, output in chunk]
            contexts = [self._end(context, len(output) - 1) for _, context, output in chunk]
            scores = self._decoder.score(contexts, outputs, top_log_probs=1)
            for total, best, output in zip(scores.totals, scores.top or (), outputs, strict=True):
                found.append((float(total), best.tokens[:, 0].tolist() == output))
        return order.get_original(found)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        totals = []
        for request in requests:
            windows = get_rolling_token_windows(
                self.tok_encode(request.args[0], add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pairs = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(total for total, _ in self._loglikelihood_tokens(pairs)))
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        order = Collator(
            [request.args for request in requests],
            sort_fn=lambda args: -len(args[0]),
            group_by="gen_kwargs",
        )
        texts: list[str] = []
        for chunk in order.get_batched(n=len(requests)):
            options = dict(normalize_gen_kwargs(chunk[0][1], self.max_gen_toks))
            stop, limit, _ = (options.pop(x) for x in ("until", "max_gen_toks", "do_sample"))
            decoder = Decoder(
                self._decoder.models,
                self._decoder.setting,
                stop=[string for string in stop if string],
                max_new_tokens=limit,
                batch_size=self._decoder.batch_size,
            )
            contexts = [self._end(self.tok_encode(text), limit) for text, _ in chunk]
            sampling = Sampling(**{"temperature": 0.0, **options})
            progress = not disable_tqdm
            texts += decoder(contexts, sampling=sampling, seed=self._seed, progress=progress).texts
        return order.get_original(texts)


if __name__ == "__main__":
    enable_compilation_cache()
    cli_evaluate()
