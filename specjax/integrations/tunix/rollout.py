"""The rollout engine: a policy of tunix writes with specjax's drafts.

Axes: B rows, P prompt length, N longest output, m tokens of an output.
"""

import dataclasses
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float32, Int32
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.generate.utils import next_power_of_2
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput

from specjax.checks import PathLike, short_repr
from specjax.errors import UserError
from specjax.integrations.tunix.networks import network_of
from specjax.integrations.tunix.weights import Weights
from specjax.text import Decoder, Pair, Setting, TextModel, load_text_model
from specjax.text.earlier import EarlierAnswers
from specjax.text.results import RunInfo
from specjax.text.teacher_forcing import KnownRows, KnownTexts, log_probs_of, rows_at_once
from specjax.tokenizers import Tokenizer
from specjax.types import Sampling

# The fields of a `RolloutConfig` that are obeyed; all others must keep their defaults.
_OBEYED = (
    *("max_tokens_to_generate", "temperature", "top_p", "top_k", "seed", "max_prompt_length"),
    *("kv_cache_size", "data_type", "eos_tokens", "return_logprobs"),
)


@dataclasses.dataclass
class SpecjaxRolloutOutput(RolloutOutput):
    """tunix's output, and what its trainer does not read.

    Attributes:
      logprobs: the logarithms of the policy's probabilities of the tokens at the temperature,
        without top-k and top-p (at temperature 0: of softmax(logits)), as tunix's own sampler gives
        them; None without `return_logprobs`.
      drawn_logprobs: those of the probabilities that the tokens were drawn with: after top-k, top-p
        and the rule; None without `return_logprobs`.
      info: the counts of drafts.
    """

    drawn_logprobs: list[Float32[np.ndarray, " m"]] | None = None
    info: RunInfo | None = None


class SpecjaxRollout(BaseRollout):
    """tunix's `BaseRollout` with drafts; texts follow the law of the policy.

        ClusterConfig(rollout_engine=functools.partial(SpecjaxRollout, max_draft=7), ...)

    tunix gives the first four arguments.

    Args:
      rollout_actor: the policy: a Llama 3, Qwen 2.5 or 3, or Gemma 2 or 3 of `tunix.models`.
      tokenizer: any that tunix takes.
      mesh: its devices; an axis named `tp` splits the network, all others the rows.
      rollout_config: tunix's `RolloutConfig` for training.
      drafter: the directory of a small model with the same token ids, or of a draft head. By
        default drafts are copies: drafting="Lookup()".
      refresh: trains the draft head before the first texts after an update of the weights, on the
        texts since the one before: such as `specjax.training.HeadRefresh()`.
      batch_size: the number of rows decoded together, of which finished ones are replaced; by
        default all rows of a call.
      lora_scale: alpha / rank of the policy's adapters, if it has some.
      with_end: whether an output includes the end-of-sequence token that ended it, so that the
        trainer sees it, as with tunix's vLLM engine; its vanilla engine leaves it out.
      approximate: whether a rule, a method or processors may change the law of the texts, which
        biases the gradient: see docs/rollouts.md.
      **setting: options of `specjax.Setting`, such as `drafting` and `max_draft`.

    Attributes:
      output: the last output; tunix hands on only its own fields.
      verifier: the policy, with its present weights; its texts are ids.

    Raises:
      UserError: an option is unknown, a field of the configuration cannot be obeyed, or the
        network is another.
    """

    def __init__(
        self,
        rollout_actor: Any,
        tokenizer: Any,
        mesh: Mesh,
        rollout_config: RolloutConfig,
        *,
        drafter: PathLike | None = None,
        refresh: Callable[[Pair, KnownTexts], TextModel] | None = None,
        batch_size: int | None = None,
        lora_scale: float | None = None,
        with_end: bool = True,
        approximate: bool = False,
        **setting: Any,
    ) -> None:
        if drafter is None and not {"drafting", "method"} & set(setting):
            setting["drafting"] = "Lookup()"
        self._options, self._approximate, self._config = setting, approximate, rollout_config
        self._setting(rollout_config)
        self._batch_size, self._with_end, self._calls = batch_size, with_end, 0
        is_adapter = isinstance(tokenizer, TokenizerAdapter)
        self._tokenizer = tokenizer if is_adapter else TokenizerAdapter(tokenizer)
        # An update takes the weights' buffers, so it waits for the texts.
        self._lock = threading.RLock()
        model = network_of(rollout_actor, rollout_config.data_type)
        self._weights = Weights(rollout_actor, model, mesh, lora_scale)
        params, own_mesh = self._weights.params, self._weights.mesh
        ids = _Ids(model.vocab_size, rollout_config.eos_tokens or [self.eos_id()], self.pad_id())
        self.verifier = TextModel(model, params, ids, own_mesh, "rollout_actor")
        self._drafter = None
        if drafter is not None:
            loading: Any = {"mesh": own_mesh, "tokenizer": ids, "verifier": self.verifier}
            self._drafter = load_text_model(drafter, **loading)
        if refresh is not None and not (self._drafter and self._drafter.is_head):
            raise UserError("`refresh` trains a draft head: give its directory as `drafter`")
        self._refresh, self._moved = refresh, False
        self._written: list[tuple[np.ndarray, np.ndarray]] = []
        self._earlier: EarlierAnswers | None = None
        self.output: SpecjaxRolloutOutput | None = None

    def generate(
        self, prompts: Sequence[str], rollout_config: RolloutConfig
    ) -> SpecjaxRolloutOutput:
        """Writes a text for each prompt; equal prompts are read once.

        With a seed, equal calls give equal texts; with `seed=None` each call draws anew. With
        `Lookup(earlier=8)` texts depend on the earlier answers, too.

        Raises:
          UserError: a field of the configuration cannot be obeyed.
        """
        config, setting = rollout_config, self._setting(rollout_config)
        places: dict[str, list[int]] = {}
        for place, prompt in enumerate(prompts):
            places.setdefault(prompt, []).append(place)
        tokens, bos = {}, self._tokenizer.bos_id()
        for prompt in places:  # as tunix's own sampler does it
            ids = [*([bos] if bos else []), *self._tokenizer.encode(prompt)]
            tokens[prompt] = np.asarray(self._tokenizer.dedup_bos_ids(ids), np.int32)
        longest, length = max(map(len, tokens.values())), config.max_prompt_length
        length = length if longest <= length else next_power_of_2(longest)
        padded = np.full((len(prompts), length), self.pad_id(), np.int32)
        for place, prompt in enumerate(prompts):
            padded[place, length - len(tokens[prompt]) :] = tokens[prompt]
        # The samples of a request, equally many of each.
        samples = math.gcd(*map(len, places.values()))
        groups = [
            (tokens[prompt], whose[first : first + samples])
            for prompt, whose in places.items()
            for first in range(0, len(whose), samples)
        ]
        with self._lock:
            # Not in `update_params`, during which tunix forbids transfers to the devices.
            if self._refresh is not None and self._moved:
                if self._written:
                    texts = KnownTexts(*zip(*self._written, strict=True))
                    self._drafter = self._refresh(Pair(self._drafter, self.verifier), texts)
                self._written, self._moved = [], False
            seed = self._calls if config.seed is None else config.seed
            if not isinstance(seed, int):
                seed = int(jax.random.bits(seed, dtype=jnp.uint32))
            self._calls += 1
            decoder = Decoder(
                Pair(self._drafter, self.verifier),
                setting,
                max_new_tokens=config.max_tokens_to_generate,
                batch_size=self._batch_size or len(prompts),
                buckets=(length,),
            )
            self._earlier = decoder.earlier = self._earlier or decoder.earlier
            result = decoder(
                [read for read, _ in groups],
                num_samples=samples,
                seed=seed,
                log_probs=config.return_logprobs,
                progress=False,
            )
            by_place = {groups[row.index][1][row.sample]: row for row in result}
            rows = [by_place[place] for place in range(len(prompts))]
            if self._refresh is not None:
                read = (tokens[prompt] for prompt in prompts)
                self._written += zip(read, (row.tokens_with_end for row in rows), strict=True)
            outputs = [row.tokens_with_end if self._with_end else row.tokens for row in rows]
            logs = drawn = None
            if config.return_logprobs:
                policy: Any = [row.log_probs for row in rows]
                if config.temperature not in (0.0, 1.0):
                    policy = [row.log_probs_processed for row in rows]
                    if setting.top_k or setting.top_p or setting.processors:
                        # The loop knows them at temperature 1, or after the cut.
                        whole = np.zeros((len(rows), config.max_tokens_to_generate), np.int32)
                        for place, output in enumerate(outputs):
                            whole[place, : len(output)] = output
                        policy = np.asarray(self._scores(padded, whole, config.temperature))
                logs = [own[: len(x)] for own, x in zip(policy, outputs, strict=True)]
                pairs = zip(rows, outputs, strict=True)
                drawn = [row.log_probs_target[: len(x)] for row, x in pairs]  # type: ignore[index]
        self.output = SpecjaxRolloutOutput(
            text=[self._tokenizer.decode(row.tokens.tolist()) for row in rows],
            logits=None,
            tokens=outputs,
            left_padded_prompt_tokens=padded,
            logprobs=logs,
            drawn_logprobs=drawn,
            info=result.info,
        )
        return self.output

    def get_per_token_logps(
        self, prompt_tokens: Int32[Any, "B P"], completion_tokens: Int32[Any, "B N"]
    ) -> Float32[jax.Array, "B N"]:
        """The policy's log-probabilities at training's temperature, without top-k and top-p.

        Args:
          prompt_tokens: padded on the left.
          completion_tokens: padded on the right; the results there mean nothing.
        """
        with self._lock:
            arrays = np.asarray(prompt_tokens), np.asarray(completion_tokens)
            return self._scores(*arrays, self._config.temperature)

    def update_params(self, params: Any, filter_types: Any = None) -> None:
        """Takes the policy's weights after a step of training: all, or all adapters."""
        with self._lock:
            self._weights.update(params)
            self.verifier = dataclasses.replace(self.verifier, params=self._weights.params)
            self._moved = True

    def pad_id(self) -> int:
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        return self._tokenizer.eos_id()

    def model(self) -> None:
        """None: the weights are no NNX module, so tunix calls `update_params` after each step."""

    def _setting(self, config: RolloutConfig) -> Setting:
        """The way to decode with a configuration, which is checked."""
        usual = vars(RolloutConfig())
        for name, value in vars(config).items():
            if name not in _OBEYED and value != usual[name]:
                raise UserError(
                    f"{name} must be left out, because specjax does not read it, got "
                    f"{short_repr(value)}"
                )
        for name in ("data_type", "eos_tokens"):
            value, first = (getattr(one, name) for one in (config, self._config))
            if value != first:
                raise UserError(f"{name} must be that of training, {first!r}, got {value!r}")
        if config.top_p is None and config.temperature:
            raise UserError(
                "top_p must be a number, because None makes tunix's own sampler greedy at any "
                "temperature: give top_p=1.0, or temperature=0.0"
            )
        needed = config.max_prompt_length + config.max_tokens_to_generate
        if config.kv_cache_size < needed:
            raise UserError(
                "kv_cache_size must be at least max_prompt_length + max_tokens_to_generate = "
                f"{needed}, got {config.kv_cache_size}"
            )
        setting = Setting(
            **self._options,
            temperature=config.temperature,
            top_k=config.top_k if config.top_k and config.top_k > 0 else None,
            top_p=config.top_p if config.top_p != 1.0 else None,
        )
        if not self._approximate and (setting.processors or not setting.is_lossless):
            raise UserError(
                f"{setting.described()} changes the law of the rollouts, which biases the gradient "
                "(docs/rollouts.md): choose parts that keep it, or give approximate=True"
            )
        return setting

    def _scores(
        self,
        prompts: Int32[np.ndarray, "B P"],
        outputs: Int32[np.ndarray, "B N"],
        temperature: float,
    ) -> Float32[jax.Array, "B N"]:
        main, sampling = self.verifier, Sampling(temperature)
        starts = np.argmax(prompts != self.pad_id(), axis=1)
        inputs = [np.roll(row, -start) for row, start in zip(prompts, starts, strict=True)]
        ends = np.full(len(outputs), outputs.shape[1])
        every = KnownRows(np.stack(inputs), prompts.shape[1] - starts, outputs, ends)
        most = rows_at_once(KnownTexts([*prompts], [*outputs]), main.model.vocab_size, 2)
        scores = []
        for first in range(0, len(outputs), most):
            rows = KnownRows(*(x[first : first + most].astype(np.int32) for x in every))
            if main.partitioner is not None:
                rows = main.partitioner.place_rows(rows)
            scores.append(log_probs_of(main.model, 0, main.prepared, rows, sampling)[0])
        return jnp.concatenate(scores)


class _Ids(Tokenizer):
    """A policy's ids; texts are read and written by tunix's tokenizer."""

    # The same for all models of a rollout: their ids mean the same.
    fingerprint = "tunix"

    def __init__(self, size: int, eos_ids: Sequence[int], pad_id: int) -> None:
        self._size, self.eos_ids, self.pad_id = size, tuple(eos_ids), pad_id

    @property
    def vocab_size(self) -> int:
        return self._size

    def token(self, token_id: int) -> str:
        return str(token_id)

    def _encode(self, text: str) -> list[int]:
        raise AssertionError("prompts are ids")

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return ""
