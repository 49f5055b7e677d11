"""The rollout engine: a policy of tunix writes with specjax's drafts.

Axes: B rows, P prompt length, N longest output.
"""

import dataclasses
import math
import os
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float32, Int32
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.generate.utils import next_power_of_2
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput

from specjax.checks import short_repr
from specjax.errors import UserError
from specjax.integrations.tunix.networks import network_of
from specjax.integrations.tunix.weights import Weights
from specjax.text import Decoder, Pair, Setting, TextModel, load_text_model
from specjax.text.results import Row, RunInfo
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
      logprobs: of each token the logarithm of the policy's probability at the temperature, without
        top-k and top-p (at temperature 0: of softmax(logits)), as tunix's own sampler returns; None
        without `return_logprobs`.
      drawn_logprobs: the logarithms of the probabilities with which the tokens were drawn: after
        top-k, top-p and the rule; None without `return_logprobs`.
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
      drafter: the directory of a small model with the same token ids, or of a draft head. Without
        it drafts are copies: drafting="Lookup()".
      batch_size: the number of rows decoded together, of which finished ones are replaced; by
        default all rows of a call.
      lora_scale: alpha / rank of the actor's adapters, if it has some.
      with_end: whether outputs include the end-of-sequence token that ended them, so that the
        trainer sees it, as with tunix's vLLM engine; its vanilla engine leaves it out.
      approximate: whether a rule, a method or processors may change the law of the texts, which
        biases the gradient: see docs/rollouts.md.
      **setting: options of `specjax.Setting`, such as `drafting` and `max_draft`.

    Attributes:
      output: the last output. tunix hands on only its own fields.

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
        drafter: str | os.PathLike[str] | None = None,
        batch_size: int | None = None,
        lora_scale: float | None = None,
        with_end: bool = True,
        approximate: bool = False,
        **setting: Any,
    ) -> None:
        if drafter is None and not {"drafting", "method"} & set(setting):
            setting["drafting"] = "Lookup()"
        self._own, self._approximate, self._config = Setting(**setting), approximate, rollout_config
        self._setting(rollout_config)
        self._batch_size, self._with_end, self._calls = batch_size, with_end, 0
        if not isinstance(tokenizer, TokenizerAdapter):
            tokenizer = TokenizerAdapter(tokenizer)
        self._tokenizer = tokenizer
        # An update takes the weights' buffers, so it waits for the texts.
        self._lock = threading.RLock()
        model = network_of(rollout_actor, rollout_config.data_type)
        self._weights = weights = Weights(rollout_actor, model, mesh, lora_scale)
        words = _Ids(model.vocab_size, rollout_config.eos_tokens or [self.eos_id()], self.pad_id())
        self._verifier = TextModel(model, weights.params, words, weights.mesh, "rollout_actor")
        self._drafter = None
        if drafter is not None:
            self._drafter = load_text_model(
                drafter, mesh=weights.mesh, tokenizer=words, verifier=self._verifier
            )
        self.output: SpecjaxRolloutOutput | None = None

    def generate(
        self, prompts: Sequence[str], rollout_config: RolloutConfig
    ) -> SpecjaxRolloutOutput:
        """Writes a text for each prompt; equal prompts are read once.

        With a seed, equal calls give equal texts; with `seed=None` each call draws anew.

        Raises:
          UserError: a field of the configuration cannot be obeyed.
        """
        config, setting = rollout_config, self._setting(rollout_config)
        tokens = {prompt: self._encode(prompt) for prompt in prompts}
        longest, length = max(map(len, tokens.values())), config.max_prompt_length
        length = length if longest <= length else next_power_of_2(longest)
        places: dict[str, list[int]] = {}
        for place, prompt in enumerate(prompts):
            places.setdefault(prompt, []).append(place)
        # The samples of a request, equally many of each.
        samples = math.gcd(*map(len, places.values()))
        groups = [
            (prompt, whose[first : first + samples])
            for prompt, whose in places.items()
            for first in range(0, len(whose), samples)
        ]
        with self._lock:
            seed = self._calls if config.seed is None else _seed(config.seed)
            self._calls += 1
            decoder = Decoder(
                Pair(self._drafter, self._verifier),
                setting,
                max_new_tokens=config.max_tokens_to_generate,
                batch_size=self._batch_size or len(prompts),
                buckets=(length,),
            )
            result = decoder(
                [tokens[prompt] for prompt, _ in groups],
                num_samples=samples,
                seed=seed,
                log_probs=config.return_logprobs,
                progress=False,
            )
            by_place = {groups[row.index][1][row.sample]: row for row in result}
            rows = [by_place[place] for place in range(len(prompts))]
            outputs = [row.tokens_with_end if self._with_end else row.tokens for row in rows]
            padded = _padded(
                [tokens[prompt] for prompt in prompts], length, self.pad_id(), left=True
            )
            logs = drawn = None
            if config.return_logprobs:
                logs = self._policy_log_probs(config, setting, rows, outputs, padded)
                drawn = [
                    _first(row.log_probs_target, x) for row, x in zip(rows, outputs, strict=True)
                ]
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
        """The policy's log-probabilities at the temperature of training, without top-k and top-p.

        Args:
          prompt_tokens: padded on the left.
          completion_tokens: padded on the right; what is behind the padding means nothing.
        """
        with self._lock:
            arrays = np.asarray(prompt_tokens), np.asarray(completion_tokens)
            return self._scores(*arrays, self._config.temperature)

    def update_params(self, params: Any, filter_types: Any = None) -> None:
        """Takes the weights of a policy after a training step: all, or all adapters."""
        with self._lock:
            self._weights.update(params)
            self._verifier = dataclasses.replace(self._verifier, params=self._weights.params)

    def pad_id(self) -> int:
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        return self._tokenizer.eos_id()

    def model(self) -> None:
        """None: the weights are no NNX module, so tunix calls `update_params` after each step."""

    def _setting(self, config: RolloutConfig) -> Setting:
        """The way to decode with a configuration, which is checked."""
        for field in dataclasses.fields(config):
            value, usual = getattr(config, field.name), field.default
            if usual is dataclasses.MISSING:
                usual = field.default_factory()
            if field.name not in _OBEYED and value != usual:
                raise UserError(
                    f"{field.name} must be left out, because no part of specjax reads it, got "
                    f"{short_repr(value)}"
                )
        for name in ("data_type", "eos_tokens"):
            value, ours = (getattr(one, name) for one in (config, self._config))
            if value != ours:
                raise UserError(f"{name} must be that of training, {ours!r}, got {value!r}")
        if config.top_p is None and config.temperature:
            raise UserError(
                "top_p must be a number, because None makes tunix's own sampler greedy at any "
                "temperature: give top_p=1.0 to sample, or temperature=0.0"
            )
        needed = config.max_prompt_length + config.max_tokens_to_generate
        if config.kv_cache_size < needed:
            raise UserError(
                "kv_cache_size must be at least max_prompt_length + max_tokens_to_generate = "
                f"{needed}, got {config.kv_cache_size}"
            )
        setting = dataclasses.replace(
            self._own,
            temperature=config.temperature,
            top_k=config.top_k if config.top_k and config.top_k > 0 else None,
            top_p=None if config.top_p is None or config.top_p >= 1.0 else config.top_p,
        )
        if not self._approximate and (setting.processors or not setting.is_lossless):
            raise UserError(
                f"{setting.described()} changes the law of the rollouts, so that the gradient is "
                "biased (docs/rollouts.md): choose parts that keep it, or give approximate=True"
            )
        return setting

    def _encode(self, prompt: str) -> Int32[np.ndarray, " L"]:
        """As tunix's own sampler encodes it."""
        bos = self._tokenizer.bos_id()
        ids = [*([bos] if bos else []), *self._tokenizer.encode(prompt)]
        return np.asarray(self._tokenizer.dedup_bos_ids(ids), np.int32)

    def _policy_log_probs(
        self,
        config: RolloutConfig,
        setting: Setting,
        rows: Sequence[Row],
        outputs: Sequence[np.ndarray],
        prompts: Int32[np.ndarray, "B P"],
    ) -> list[Float32[np.ndarray, " m"]]:
        """See `SpecjaxRolloutOutput.logprobs`."""
        known: Any = [row.log_probs for row in rows]
        if config.temperature not in (0.0, 1.0):
            known = [row.log_probs_processed for row in rows]
            if setting.top_k is not None or setting.top_p is not None or setting.processors:
                # The loop knows those of what is cut, and those at temperature 1.
                padded = _padded(outputs, config.max_tokens_to_generate, self.pad_id())
                known = np.asarray(self._scores(prompts, padded, config.temperature))
        return [_first(logs, output) for logs, output in zip(known, outputs, strict=True)]

    def _scores(
        self,
        prompts: Int32[np.ndarray, "B P"],
        outputs: Int32[np.ndarray, "B N"],
        temperature: float,
    ) -> Float32[jax.Array, "B N"]:
        starts = np.argmax(prompts != self.pad_id(), axis=1)
        inputs = np.stack(
            [np.roll(row, -start) for row, start in zip(prompts, starts, strict=True)]
        )
        whole = KnownRows(
            inputs, inputs.shape[1] - starts, outputs, np.full(len(outputs), outputs.shape[1])
        )
        main, sampling = self._verifier, Sampling(temperature)
        most = rows_at_once(KnownTexts(prompts, outputs), main.model.vocab_size, 2)
        scores = []
        for first in range(0, len(outputs), most):
            rows = KnownRows(*(x[first : first + most].astype(np.int32) for x in whole))
            if main.partitioner is not None:
                rows = main.partitioner.place_rows(rows)
            scores.append(log_probs_of(main.model, 0, main.prepared, rows, sampling)[0])
        return jnp.concatenate(scores)


class _Ids(Tokenizer):
    """The ids that a policy may write; tunix's tokenizer reads and writes texts."""

    # Equal for the models of one rollout, whose ids mean the same.
    fingerprint = "tunix"  # type: ignore[assignment]

    def __init__(self, size: int, eos_ids: Sequence[int], pad_id: int) -> None:
        self._size, self.eos_ids, self.pad_id = size, tuple(eos_ids), pad_id

    @property
    def vocab_size(self) -> int:
        return self._size

    def token(self, token_id: int) -> str:
        return str(token_id)

    def _encode(self, text: str) -> list[int]:
        raise AssertionError("prompts are given as ids")

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return ""


def _seed(key: Any) -> int:
    """A `Decoder`'s seed from tunix's: a number, or a key."""
    return key if isinstance(key, int) else int(jax.random.bits(key, dtype=jnp.uint32))


def _padded(
    rows: Sequence[np.ndarray], length: int, pad_id: int, *, left: bool = False
) -> Int32[np.ndarray, "B L"]:
    padded = np.full((len(rows), length), pad_id, np.int32)
    for place, row in enumerate(rows):
        padded[place, slice(length - len(row), None) if left else slice(len(row))] = row
    return padded


def _first(logs: Any, output: np.ndarray) -> Float32[np.ndarray, " m"]:
    return logs[: len(output)]
