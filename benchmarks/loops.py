"""The decoding loops of a pair, timed batch by batch without the prompts."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from specjax import decoding, drafting, rules
from specjax.decoding import Method
from specjax.drafting.chain import catches_up_on
from specjax.memory import check_state_fits
from specjax.text import Pair
from specjax.text.passes import count_passes
from specjax.types import (
    DecodeState,
    Params,
    PromptBatch,
    Sampling,
    Stopping,
    Verification,
)
from specjax.verification import Block

REMEDY = "give a smaller --max-new or --rows, or shorter prompts"
# More steps than any output takes.
_FOREVER = 2**31 - 1


@dataclasses.dataclass(frozen=True, eq=False)
class Loops:
    """A pair and its padded prompts `[n, P]`, ready to decode outputs of up to N tokens."""

    pair: Pair
    inputs: np.ndarray
    lengths: np.ndarray
    max_new: int
    verification: Verification = Block()  # noqa: RUF009  immutable

    @classmethod
    def of(
        cls,
        pair: Pair,
        tokens: Sequence[np.ndarray],
        max_new: int,
        verification: Verification = Block(),  # noqa: B008  immutable
    ) -> "Loops":
        """Pads the tokens of prompts to a multiple of eight."""
        inputs = np.zeros((len(tokens), -(-max(map(len, tokens)) // 8) * 8), np.int32)
        for row, ids in zip(inputs, tokens, strict=True):
            row[: len(ids)] = ids
        lengths = np.array([len(ids) for ids in tokens], np.int32)
        return cls(pair, inputs, lengths, max_new, verification)

    def speculative(
        self,
        max_draft: int,
        widths: tuple[int, ...] | None = None,
        policy: Stopping | None = None,
    ) -> decoding.Speculative:
        """Returns lossless rounds; None: drafts of a fixed length."""
        policy = drafting.FixedLength() if policy is None else policy
        verifier, eos_ids = self.pair.verifier, self.pair.verifier.tokenizer.eos_ids
        drafter = drafting.Chain(
            self.pair.drafter.model,
            max_draft,
            policy,
            eos_ids=() if policy.is_fixed else eos_ids,  # as `Decoder` does it
            catches_up=catches_up_on(verifier.platform),
        )
        return decoding.Speculative(
            verifier.model, drafter, self.verification, widths=widths, eos_ids=tuple(eos_ids)
        )

    def autoregressive(self) -> decoding.Autoregressive:
        """Returns the verifier alone."""
        verifier = self.pair.verifier
        return decoding.Autoregressive(verifier.model, eos_ids=tuple(verifier.tokenizer.eos_ids))

    def params_of(self, method: Method, stopping: Params = ()) -> Params:
        """Returns the parameters of a method, with those of its stopping policy."""
        verifier = self.pair.verifier.prepared
        if method.max_draft == 0:
            return decoding.MethodParams(verifier)
        small = drafting.chain.ChainParams(self.pair.drafter.prepared, stopping)
        return decoding.MethodParams(verifier, small, rules.Lossless())

    def batches(self, rows: int) -> list[slice]:
        """Returns the prompts in full batches of `rows`; an incomplete batch is left out."""
        return [slice(i, i + rows) for i in range(0, len(self.inputs) - rows + 1, rows)]

    def longest(self, method: Method) -> int:
        """Returns S, the cache positions of a batch."""
        return method.cache_length(self.inputs.shape[1], 0, self.max_new)

    def check_fits(self, rows: int, max_draft: int) -> None:
        """Raises ValueError if a batch of `rows` rows cannot fit into the memory."""
        method = self.speculative(max_draft)
        check_state_fits(
            method,
            self.params_of(method),
            self._prompts(slice(0, rows), 0.0),
            max_new=self.max_new,
            max_length=self.longest(method),
            remedy=REMEDY,
        )

    def start(
        self, method: Method, part: slice, temperature: float, *, limit: int | None = None,
        stopping: Params = (),
    ) -> DecodeState:  # fmt: skip
        """Reads the prompts of a batch; its drafts have at most `limit` tokens."""
        prompts, longest = self._prompts(part, temperature, limit), self.longest(method)
        params = self.params_of(method, stopping)
        return method.init(params, prompts, max_new=self.max_new, max_length=longest)

    def run(
        self, method: Method, part: slice, temperature: float, *, limit: int | None = None,
        stopping: Params = (),
    ) -> tuple[float, DecodeState]:  # fmt: skip
        """Decodes a batch; returns the seconds of the loop without prefill, and the last state."""
        params = self.params_of(method, stopping)
        state = self.start(method, part, temperature, limit=limit, stopping=stopping)
        jax.block_until_ready(state)
        begin = time.perf_counter()
        state = jax.block_until_ready(method.run(params, state, _FOREVER))
        return time.perf_counter() - begin, state

    def passes(
        self, method: Method, part: slice, temperature: float, *, limit: int | None = None,
        stopping: Params = (),
    ) -> dict[str, int]:  # fmt: skip
        """Returns the passes of each model in a batch; a pass serves all rows."""
        state = self.start(method, part, temperature, limit=limit, stopping=stopping)
        return count_passes(method, self.params_of(method, stopping), state)[-1]

    def _prompts(self, part: slice, temperature: float, limit: int | None = None) -> PromptBatch:
        rows = part.stop - part.start
        shared: dict[str, Any] = {"sampling": Sampling(temperature)}
        return PromptBatch(
            inputs=self.inputs[part],
            input_lengths=self.lengths[part],
            ids=np.arange(part.start, part.stop, dtype=np.int32),
            limits=np.full((rows,), self.max_new, np.int32),
            draft_limits=None if limit is None else np.full((rows,), limit, np.int32),
            **shared,
        )
