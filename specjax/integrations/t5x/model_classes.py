"""T5X's model classes, decoding with specjax: a drafter and a verifier instead of one network.

Their parameters are `{"verifier": ..., "drafter": ...}`, each as in T5X. Losses, scores and
everything except decoding use the verifier. Without a drafting network the parameters are those of
the single network, so that its checkpoint restores as usual.

Axes: B rows, n decodes of each, L longest output.
"""

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import core as flax_core
from t5x import models

from specjax import text
from specjax.errors import UserError
from specjax.integrations.t5x import decoding
from specjax.integrations.t5x.call import Call, read_call
from specjax.integrations.t5x.decoding import (
    PairPart,
    check_supported,
    in_names_of_gin,
    method_of,
    run_loop,
)
from specjax.integrations.t5x.networks import read_config, read_network
from specjax.types import Array, DecodeState, Params, PromptBatch
from specjax.types.method import ENDED_BY

VERIFIER, DRAFTER = "verifier", "drafter"
_LOWEST = np.finfo(np.float32).min


class _PairModel(models.BaseTransformerModel):
    """The base of both classes; it precedes T5X's class in the order of bases."""

    drafter_module: Any
    setting: text.Setting
    _bidirectional = False

    def _pair(self, drafter_module: Any, setting: text.Setting | None) -> None:
        self.drafter_module = drafter_module
        self.setting = text.Setting() if setting is None else setting
        with in_names_of_gin(*type(self).__mro__, decoding.setting):  # gin makes subclasses
            check_supported(self.setting)
            if drafter_module is not None and self.setting.drafting is not None:
                raise UserError("drafter_module must be None, because Setting.drafting is set")
            small = None if drafter_module is None else read_config(DRAFTER, drafter_module)
            method_of(self.setting, read_config(VERIFIER, self.module), small)

    def get_initial_variables(
        self, rng: Array, input_shapes: Mapping[str, Any], input_types: Any = None
    ) -> Any:
        # Of both networks, collection by collection.
        large = super().get_initial_variables(rng, input_shapes, input_types)
        if self.drafter_module is None:
            return large
        alone = copy.copy(self)
        alone.module, alone.drafter_module = self.drafter_module, None
        small = alone.get_initial_variables(rng, input_shapes, input_types)
        return flax_core.freeze(
            {
                kind: {VERIFIER: large.get(kind, {}), DRAFTER: small.get(kind, {})}
                for kind in {*large, *small}
            }
        )

    def _compute_logits(self, params: Params, *args: Any, **kwargs: Any) -> Any:
        return super()._compute_logits(self._verifier_params(params), *args, **kwargs)

    def _verifier_params(self, params: Params) -> Params:
        return params if self.drafter_module is None else _part(params, VERIFIER)

    def _networks(self, params: Params) -> tuple[PairPart, PairPart | None]:
        options = {"bidirectional_inputs": self._bidirectional}
        verifier = PairPart(
            *read_network(VERIFIER, self.module, self._verifier_params(params), **options)
        )
        if self.drafter_module is None:
            return verifier, None
        small = read_network(DRAFTER, self.drafter_module, _part(params, DRAFTER), **options)
        return verifier, PairPart(*small)

    def _call(self, decoder_params: Any, rng: Array | None, **options: Any) -> Call:
        return read_call(
            decoder_params,
            rng,
            defaults=self.setting.sampling,
            vocab_size=self.module.config.vocab_size,
            eos_id=self.output_vocabulary.eos_id or 1,
            **options,
        )

    def _decode(
        self, params: Params, prompts: PromptBatch, longest: int, call: Call
    ) -> tuple[Array, dict[str, Array]]:
        state = run_loop(self.setting, *self._networks(params), prompts, longest, call)
        return state.tokens, _aux(state)


class EncoderDecoderModel(_PairModel, models.EncoderDecoderModel):
    """T5X's `EncoderDecoderModel`, decoding with a drafter and a verifier.

    Args:
      module: the verifier's network.
      input_vocabulary: see T5X.
      output_vocabulary: see T5X.
      optimizer_def: None, because a pair is not trained.
      drafter_module: the drafter's network; None: only the verifier decodes, or with
        `Setting.drafting`.
      setting: the way to decode; `Setting()` by default.
      **options: T5X's other arguments except `decode_fn`, such as `default_decoder_params`.
    """

    def __init__(
        self,
        module: Any,
        input_vocabulary: Any,
        output_vocabulary: Any,
        optimizer_def: Any = None,
        drafter_module: Any = None,
        setting: text.Setting | None = None,
        **options: Any,
    ) -> None:
        _check_options(options)
        super().__init__(module, input_vocabulary, output_vocabulary, optimizer_def, **options)
        self._pair(drafter_module, setting)

    def predict_batch_with_aux(
        self,
        params: Params,
        batch: Mapping[str, Array],
        rng: Array | None = None,
        decoder_params: MutableMapping[str, Any] | None = None,
        return_all_decodes: bool | None = None,
        num_decodes: int | None = None,
        prompt_with_targets: bool = False,
    ) -> tuple[Array, dict[str, Array]]:
        """Decodes a batch.

        Args:
          params: the parameters of both networks.
          batch: from T5X's feature converter.
          rng: a PRNG key, or None for key 0.
          decoder_params: see `specjax.integrations.t5x.call.read_call`.
          return_all_decodes: whether to return all n outputs, or the most probable; by default as
            in `default_decoder_params`.
          num_decodes: n, the number of outputs per input; the same default.
          prompt_with_targets: whether outputs begin with the batch's `decoder_input_tokens`
            (without ends of sequence and padding; later tokens move up).

        Returns:
          The outputs `[B, L]`, or `[B, n, L]` by increasing score, with a forced prefix and zeros
          past their ends; and a dictionary of `[B]` or `[B, n]`: `scores` (log-probabilities of the
          drawn tokens) and statistics of decoding.
        """
        default = self._default_decoder_params
        call = self._call(
            decoder_params,
            rng,
            num_decodes=default.num_decodes if num_decodes is None else num_decodes,
            return_all=(
                default.return_all_decodes if return_all_decodes is None else return_all_decodes
            ),
        )
        inputs = batch["encoder_input_tokens"].astype(jnp.int32)
        shifted = batch["decoder_input_tokens"].astype(jnp.int32)
        longest = shifted.shape[1]
        room = jnp.full(inputs.shape[:1], longest, jnp.int32)
        prompts = _batch(inputs, real_length(inputs), room)
        forced = None
        if prompt_with_targets and longest > 1:
            forced = forced_tokens(shifted, self.output_vocabulary.eos_id)
            prompts = prompts._replace(
                prefix=forced[0], prefix_lengths=forced[1], limits=room - forced[1]
            )
        tokens, aux = self._decode(params, prompts, longest, call)
        if forced is not None:
            tokens = after_prefix(tokens, *(jnp.repeat(x, call.num_decodes, 0) for x in forced))
        if not call.rescaled:
            repeated = {k: jnp.repeat(v, call.num_decodes, axis=0) for k, v in batch.items()}
            aux["scores"] = self._plain_scores(params, repeated, tokens, aux, forced, call)
        return rank(tokens, aux, call)

    def _plain_scores(
        self, params: Params, batch: Any, tokens: Array, aux: Any, forced: Any, call: Call
    ) -> Array:
        begin = 0 if forced is None else jnp.repeat(forced[1], call.num_decodes)
        shown = {
            **{k: v for k, v in batch.items() if k == "encoder_input_tokens"},
            "decoder_input_tokens": jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1],
            "decoder_target_tokens": jnp.maximum(tokens, 1),  # as if there were no padding
        }
        logits = self._compute_logits(params, shown)
        return drawn_log_probs(logits, tokens, begin, aux["length"])


class DecoderOnlyModel(_PairModel, models.DecoderOnlyModel):
    """T5X's `DecoderOnlyModel`, with a drafter and a verifier; see `EncoderDecoderModel`."""

    def __init__(
        self,
        module: Any,
        vocabulary: Any,
        optimizer_def: Any = None,
        drafter_module: Any = None,
        setting: text.Setting | None = None,
        **options: Any,
    ) -> None:
        _check_options(options)
        super().__init__(module, vocabulary, optimizer_def, **options)
        self._pair(drafter_module, setting)
        self._bidirectional = self._inputs_bidirectional_attention

    def predict_batch_with_aux(
        self,
        params: Params,
        batch: Mapping[str, Array],
        rng: Array | None = None,
        *,
        return_all_decodes: bool = False,
        num_decodes: int = 1,
        decoder_params: MutableMapping[str, Any] | None = None,
    ) -> tuple[Array, dict[str, Array]]:
        """Decodes a batch after its inputs, which are left out; see `EncoderDecoderModel`."""
        if "decoder_causal_attention" not in batch:
            raise UserError(
                "batch has no decoder_causal_attention: give `inputs` and `targets` in the task's "
                "feature lengths"
            )
        call = self._call(
            decoder_params, rng, num_decodes=num_decodes, return_all=return_all_decodes
        )
        # `decoder_causal_attention` covers the start and the inputs; the targets follow.
        inputs = batch["decoder_input_tokens"] * batch["decoder_causal_attention"]
        inputs = inputs.astype(jnp.int32)
        longest = inputs.shape[1]
        before = jnp.sum(inputs[:, 1:] != 0, axis=1, dtype=jnp.int32)
        prompts = _batch(inputs, before + 1, longest - before)
        tokens, aux = self._decode(params, prompts, longest, call)
        if not call.rescaled:
            aux["scores"] = self._plain_scores(params, inputs, before, tokens, aux, call)
        return rank(tokens, aux, call)

    def _plain_scores(
        self, params: Params, inputs: Array, before: Array, tokens: Array, aux: Any, call: Call
    ) -> Array:
        before, start = (jnp.repeat(x, call.num_decodes, 0) for x in (before, inputs))
        text = after_prefix(tokens, start[:, 1:], before)
        place = jnp.arange(text.shape[1])[None]
        shown = {
            "decoder_input_tokens": jnp.pad(text, ((0, 0), (1, 0)))[:, :-1],
            "decoder_target_tokens": jnp.maximum(text, 1),  # as above
            "decoder_causal_attention": (place <= before[:, None]).astype(jnp.int32),
        }
        logits = self._compute_logits(params, shown)
        return drawn_log_probs(logits, text, before, aux["length"])


def _part(params: Params, role: str) -> Params:
    if role not in params:
        raise UserError(
            f"params must be {{'verifier': ..., 'drafter': ...}}, but {role!r} is missing (they "
            f"have {', '.join(map(repr, params)) or 'nothing'}): give the parameters of both "
            "networks, or drafter_module=None"
        )
    return params[role]


def _batch(inputs: Array, lengths: Array, limits: Array) -> PromptBatch:
    ids = jnp.arange(inputs.shape[0], dtype=jnp.uint32)
    return PromptBatch(inputs, lengths, ids, limits)


def real_length(tokens: Array) -> Array:
    """`[B]` int32, the number of `tokens [B, P]` before the padding; at least 1."""
    place = jnp.arange(1, tokens.shape[1] + 1, dtype=jnp.int32)
    return jnp.maximum(jnp.max(jnp.where(tokens != 0, place[None], 0), axis=1), 1)


def forced_tokens(shifted: Array, eos_id: int | None) -> tuple[Array, Array]:
    """The tokens that `decoder_input_tokens` force, `[B, L - 1]`, and their number, `[B]` int32.

    Token 0 starts and pads; an end of sequence would end the output. Both are left out, and later
    tokens move up.
    """
    tokens = shifted[:, 1:]
    real = (tokens != 0) & (tokens != eos_id)
    order = jnp.argsort(~real, axis=1, stable=True)
    tokens = jnp.take_along_axis(jnp.where(real, tokens, 0), order, axis=1)
    return tokens, jnp.sum(real, axis=1, dtype=jnp.int32)


def after_prefix(tokens: Array, prefix: Array, lengths: Array) -> Array:
    """Puts outputs `[B, L]` after the first `lengths [B]` of `prefix [B, F]`; `[B, L]`."""
    longest = tokens.shape[1]
    place = jnp.arange(longest, dtype=jnp.int32)[None] - lengths[:, None]
    prefix = jnp.pad(prefix, ((0, 0), (0, longest - prefix.shape[1])))
    moved = jnp.take_along_axis(tokens, jnp.maximum(place, 0), axis=1)
    return jnp.where(place < 0, prefix, moved)


def drawn_log_probs(logits: Array, text: Array, begin: Any, count: Array) -> Array:
    """Sums log softmax of `text [B, L]` over `count [B]` tokens from `begin`; `[B]` float32."""
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    log_probs = jnp.take_along_axis(log_probs, text[..., None], axis=-1)[..., 0]
    begin = jnp.broadcast_to(jnp.asarray(begin, jnp.int32), count.shape)[:, None]
    place = jnp.arange(text.shape[1], dtype=jnp.int32)[None]
    drawn = (place >= begin) & (place < begin + count[:, None])
    return jnp.sum(jnp.where(drawn, log_probs, 0.0), axis=1)


def rank(tokens: Array, aux: dict[str, Array], call: Call) -> tuple[Array, dict[str, Array]]:
    """Rows `[B * n, ...]` in T5X's form: all by increasing score, or the best.

    The score of a row that ended by NaN, and every log-probability that is NaN or minus infinity,
    becomes the lowest float32.
    """
    n = call.num_decodes
    rows = tokens.shape[0] // n
    tokens, aux = jax.tree.map(lambda x: x.reshape(rows, n, *x.shape[1:]), (tokens, aux))
    # A truncated row must not be the best, although its few tokens may have the highest score.
    aux["scores"] = jnp.where(aux["ended_by"] == ENDED_BY.index("nan"), _LOWEST, aux["scores"])
    for name in ("scores", "log_p"):  # T5X writes JSON, which has neither NaN nor infinity
        aux[name] = jnp.maximum(jnp.where(jnp.isnan(aux[name]), _LOWEST, aux[name]), _LOWEST)
    order = jnp.argsort(aux["scores"], axis=1)

    def sort(x: Array) -> Array:
        x = jnp.take_along_axis(x, order.reshape(rows, n, *(1,) * (x.ndim - 2)), axis=1)
        return x if call.return_all else x[:, -1]

    return sort(tokens), jax.tree.map(sort, aux)


def _check_options(options: Mapping[str, Any]) -> None:
    if "decode_fn" in options:
        raise UserError("decode_fn must be left out: bind specjax_t5x.setting")


def _aux(state: DecodeState) -> dict[str, Array]:
    info = state.info
    longest = jnp.arange(info.drafted_lengths.shape[1], dtype=jnp.int32)
    return {
        "scores": info.log_prob.target,
        "log_p": info.log_prob.processed,
        "length": state.lengths,
        "ended_by": state.ended_by,
        "drafted": jnp.sum(info.drafted_lengths * longest, axis=1),
        "accepted": jnp.sum(info.accepted_lengths * longest, axis=1),
        "rollbacks": info.rollbacks,
        **{f"{name}_calls": count for name, count in info.calls.items()},
    }
