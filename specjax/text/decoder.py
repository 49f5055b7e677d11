"""From two directories to text: `load_pair` and `Decoder`.

    pair = specjax.load_pair(drafter=SMALL, verifier=LARGE)
    decoder = specjax.Decoder(pair, rule=specjax.rules.OPT(alpha=0.2), max_draft=5)
    result = decoder(["A man rides a bicycle."], seed=0)

Axes: n prompts, B rows of a batch, G longest draft, N longest output.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import tqdm

from specjax.checks import checked
from specjax.decoding import Autoregressive, DecodeInfo, DecodeState, Speculative, insert_rows
from specjax.drafting import NeuralDrafter
from specjax.rules import Lossless, Rule
from specjax.runs import environment
from specjax.sampling import Sampling
from specjax.text import prompts as batches
from specjax.text.models import Pair, TextModel, load_pair, load_text_model
from specjax.text.prompts import BUCKETS, Prompt, Requests, Segment
from specjax.text.results import Result, Row, RunInfo, collect
from specjax.types import LanguageModel
from specjax.verification import Block, Verification

# Rounds between two returns to the host, so that an interrupt is heard.
STOP_AFTER = 64


class Decoder:
    """Turns prompts into texts: speculatively with a pair, token by token with a single model.

    Programs are compiled per shape and shared between Decoders; changing a rule's strength, the
    temperature, the seed or a length limit compiles nothing. Another rule, a first top-k or top-p,
    or strengths per row after one for all does. Compiled programs are kept on disk (see
    `specjax.text.decoder.enable_cache`).

    Args:
      models: a `Pair`, or one `TextModel` to decode alone (`pair.verifier`, `pair.drafter`).
      rule: the target distribution; `rules.Lossless()` by default. Each strength is one number, or
        one per prompt of the call. With a pair only.
      verification: the algorithm; `verification.Block()` by default. With a pair only.
      max_draft: G, tokens drafted per round; 5 by default. With a pair only.
      temperature: >= 0, 0 being greedy; one number, or one per prompt of the call.
      top_k: only the k most probable tokens are drawn (ties included), or None for all.
      top_p: only the nucleus of this probability is drawn, or None for all.
      max_new_tokens: N, the longest output; also the default limit of each row.
      batch_size: rows decoded together; a finished one makes room for the next prompt. Over a
        mesh it is rounded up to a multiple of its `data`.
      buckets: increasing prompt lengths in tokens; a batch is padded to the first that holds its
        longest prompt. Each one used is a program to compile; the last is the longest prompt.

    Raises:
      TypeError: if `models` is neither, or a value is of the wrong type.
      ValueError: if a value is out of range, or rule, verification and drafter do not go together.
    """

    def __init__(
        self,
        models: Pair | TextModel,
        *,
        rule: Rule | None = None,
        verification: Verification | None = None,
        max_draft: int | None = None,
        temperature: Any = 1.0,
        top_k: Any = None,
        top_p: Any = None,
        max_new_tokens: int = 128,
        batch_size: int = 16,
        buckets: Sequence[int] = BUCKETS,
    ) -> None:
        self.max_new_tokens = _at_least_one("max_new_tokens", max_new_tokens)
        self.batch_size = _at_least_one("batch_size", batch_size)
        self.buckets = batches.check_buckets(buckets)
        Sampling(temperature, top_k, top_p)  # its checks
        self._sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        self.rule: Rule | None = None
        self._loop: Autoregressive | Speculative
        if isinstance(models, Pair):
            self.rule = Lossless() if rule is None else rule
            model = models.verifier
            self._longest = _at_least_one("max_draft", 5 if max_draft is None else max_draft)
            verification = Block() if verification is None else verification
            if not hasattr(verification, "has_carry"):
                raise TypeError(
                    f"verification={verification!r} is none: give one of specjax.verification, "
                    "such as verification.Block()"
                )
            self._loop = Speculative(
                model.model,
                NeuralDrafter(models.drafter.model, self._longest),
                verification,
                tuple(model.tokenizer.eos_ids),
            )
            self._check_rule(self.rule)
            # The second half of each is for what stops a draft: nothing here.
            self._params = (model.prepared, (models.drafter.prepared, ()))
            self._networks: tuple[LanguageModel, ...] = (model.model, models.drafter.model)
        elif isinstance(models, TextModel):
            for name, value in (
                ("rule", rule),
                ("verification", verification),
                ("max_draft", max_draft),
            ):
                if value is not None:
                    raise ValueError(
                        f"{name}= needs a pair, but {models.name} decodes alone: give a Pair, or "
                        f"leave {name} out"
                    )
            model, self._longest, self._networks = models, 0, (models.model,)
            self._loop = Autoregressive(model.model, tuple(model.tokenizer.eos_ids))
            self._params = model.prepared
        else:
            raise TypeError(
                f"Decoder needs a Pair or a TextModel, got {type(models).__name__}: see load_pair"
            )
        self.models, self._name = models, model.name
        self.tokenizer = model.tokenizer
        self._mesh = model.mesh

    def __call__(
        self,
        prompts: Iterable[Prompt],
        *,
        seed: Any = 0,
        ids: Any = None,
        rule: Rule | None = None,
        temperature: Any = None,
        top_k: Any = None,
        top_p: Any = None,
        max_new_tokens: Any = None,
        progress: bool | None = None,
    ) -> Result:
        """Decodes all prompts.

        Args:
          prompts: n texts, lists of token ids, or chats (lists of `{"role", "content"}`, for
            models with a chat template).
          seed: one number in 0 .. 2**32 - 1, or one per prompt.
          ids: n numbers in 0 .. 2**31 - 1. A row's randomness depends on its seed and its id
            alone; by default the id is the prompt's place.
          rule: instead of the Decoder's; each strength one number or n. With a pair only.
          temperature: one or n, instead of the Decoder's.
          top_k: one or n, instead of the Decoder's (the vocabulary's size switches it off).
          top_p: one or n, instead of the Decoder's (1.0 switches it off).
          max_new_tokens: one or n in 1 .. N, how many tokens each row may emit.
          progress: whether to show a progress bar; by default on a terminal, after two seconds.

        Returns:
          A `Result`, in the order of the prompts.

        Raises:
          ValueError: if a prompt is empty or does not fit, or a value is out of range.
          TypeError: if `prompts` is a single prompt or in no order, or a value is no number.
        """
        asked = self._requests(
            prompts,
            seed=seed,
            ids=ids,
            rule=rule,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            max_new_tokens=max_new_tokens,
        )
        return collect(list(self._rows(asked, frozenset(), progress, eager=False)))

    def stream(self, prompts: Iterable[Prompt], **options: Any) -> Iterator[tuple[int, str]]:
        """Decodes all prompts, and yields (place of the prompt, text) as rows finish.

        Args:
          prompts: as in a call.
          **options: as in a call.

        Yields:
          (index, text), every index once.

        Raises:
          ValueError: as a call does, at once.
          TypeError: likewise.
        """
        return ((row.index, row.text) for row in self.rows(prompts, **options))

    def rows(
        self,
        prompts: Iterable[Prompt],
        *,
        done: Collection[int] = (),
        progress: bool | None = None,
        **options: Any,
    ) -> Iterator[Row]:
        """Like `stream`, with all that is known of a row.

        Args:
          prompts: as in a call.
          done: places of prompts that are not wanted any more. Everything is decoded together as
            if they were, so that the others come out bit for bit as without it; only where
            nothing of a segment is wanted it is left out.
          progress: as in a call.
          **options: as in a call.

        Returns:
          An iterator over `Row`s.

        Raises:
          ValueError: as a call does, at once; also if there is no prompt at a place of `done`.
          TypeError: likewise.
        """
        asked = self._requests(prompts, **options)
        unwanted = frozenset(done)
        if absent := unwanted.difference(range(len(asked.tokens))):
            raise ValueError(
                f"done names {sorted(absent, key=str)[0]!r}, but the prompts' places are "
                f"0 .. {len(asked.tokens) - 1}"
            )
        return self._rows(asked, unwanted, progress, eager=True)

    def encode(self, prompt: Prompt, name: str = "the prompt") -> np.ndarray:
        """The tokens of one prompt.

        Args:
          prompt: as in a call.
          name: what messages call it.

        Returns:
          `[n]` int32, which a call takes as a prompt too.

        Raises:
          ValueError: if it is empty or does not fit.
          TypeError: if it is no prompt.
        """
        tokens = batches.encode(self.tokenizer, prompt, name)
        batches.check_tokens(tokens, name, self._networks[0].vocab_size, self.buckets[-1])
        return tokens

    def describe(self) -> dict[str, Any]:
        """What determines the outputs, as JSON values: two equal ones give equal texts.

        Returns:
          Fingerprints of the models, the settings, the versions, and the kind of device.
        """
        models = self.models
        named = (
            {"verifier": models.verifier, "drafter": models.drafter}
            if isinstance(models, Pair)
            else {"model": models}
        )
        loop = self._loop
        return {
            **{name: model.fingerprint for name, model in named.items()},
            "rule": None if self.rule is None else repr(self.rule),
            # In full: what is shown of many numbers leaves some out.
            "strengths": [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(self.rule)],
            "verification": repr(loop.verification) if isinstance(loop, Speculative) else None,
            "max_draft": self._longest,
            **{
                name: None if value is None else np.asarray(value).tolist()
                for name, value in self._sampling.items()
            },
            "max_new_tokens": self.max_new_tokens,
            "batch_size": self.batch_size,
            "buckets": list(self.buckets),
            "mesh": None if self._mesh is None else dict(self._mesh.shape),
            **environment.environment(),
        }

    def _requests(
        self,
        prompts: Iterable[Prompt],
        *,
        seed: Any = 0,
        ids: Any = None,
        rule: Rule | None = None,
        temperature: Any = None,
        top_k: Any = None,
        top_p: Any = None,
        max_new_tokens: Any = None,
    ) -> Requests:
        if rule is not None:
            self._check_rule(rule)
        own = self._sampling
        return batches.requests(
            [self.encode(p, f"prompt {i}") for i, p in enumerate(batches.as_list(prompts))],
            seed=seed,
            ids=ids,
            limits=self.max_new_tokens if max_new_tokens is None else max_new_tokens,
            temperature=own["temperature"] if temperature is None else temperature,
            top_k=own["top_k"] if top_k is None else top_k,
            top_p=own["top_p"] if top_p is None else top_p,
            max_new=self.max_new_tokens,
            rule=self.rule if rule is None else rule,
        )

    def _check_rule(self, rule: Rule) -> None:
        if not isinstance(self._loop, Speculative):
            raise ValueError(f"rule= needs a pair, but {self._name} decodes alone: leave it out")
        if not hasattr(rule, "reads_draft"):
            raise TypeError(
                f"rule={rule!r} is none: give one of specjax.rules, such as rules.OPT(alpha=0.2)"
            )
        self._loop.round.check_rule(rule)

    def _rows(
        self, asked: Requests, done: Collection[int], progress: bool | None, *, eager: bool
    ) -> Iterator[Row]:
        environment.enable_cache()
        lengths = [len(tokens) for tokens in asked.tokens]
        multiple = 1 if self._mesh is None else self._mesh.shape["data"]
        segments = batches.plan(lengths, self.buckets, self.batch_size, multiple)
        disable = None if progress is None else not progress
        with tqdm.tqdm(
            total=len(lengths),
            initial=len(done),
            desc="decoding",
            unit="row",
            disable=disable,
            delay=2.0,
        ) as bar:
            for segment in segments:
                if all(int(member) in done for member in segment.members):
                    continue
                if progress is not False:
                    environment.announce()
                for row in self._decode(asked, segment, eager):
                    if row.index not in done:
                        bar.update()
                        yield row

    def _decode(self, asked: Requests, segment: Segment, eager: bool) -> Iterator[Row]:
        """Decodes one segment and yields its rows as they finish."""
        waiting = [int(member) for member in segment.members]
        slots: list[int | None] = [*waiting[: segment.rows]]
        slots += [None] * (segment.rows - len(slots))
        del waiting[: segment.rows]
        state, rule = self._init(asked, slots, segment), asked.rule_of(slots)
        while waiting or any(member is not None for member in slots):
            # A slot without a prompt counts as finished.
            wanted = slots.count(None) + 1 if eager else segment.rows
            state = self._run(state, rule, segment.refill if waiting else wanted)
            # All at once: on an accelerator each array read by itself is a round trip.
            finished, tokens, info = jax.device_get((state.finished, state.tokens, state.info))
            ready = {i: m for i, m in enumerate(slots) if m is not None and finished[i]}
            rows = [self._row(member, i, tokens, info) for i, member in ready.items()]
            # The state's memory is given away below: nothing may look into it then.
            del finished, tokens, info
            slots = [None if i in ready else member for i, member in enumerate(slots)]
            while waiting and slots.count(None) >= segment.refill:
                free = [i for i, member in enumerate(slots) if member is None][: segment.refill]
                fresh: list[int | None] = [*waiting[: len(free)]]
                fresh += [None] * (len(free) - len(fresh))
                del waiting[: len(free)]
                new = self._init(asked, fresh, segment)
                state = self._place(insert_rows(state, np.array(free, np.int32), new))
                for i, member in zip(free, fresh, strict=True):
                    slots[i] = member
                rule = asked.rule_of(slots)
            yield from rows

    def _row(self, index: int, place: int, tokens: np.ndarray, info: DecodeInfo) -> Row:
        values: Any = (np.array(x[place]) for x in info)
        own = DecodeInfo(*values)
        output = np.array(tokens[place, : own.emitted])
        ended = bool(len(output)) and int(output[-1]) in self.tokenizer.eos_ids
        output = output[:-1] if ended else output
        return Row(index, self.tokenizer.decode(output.tolist()), output, ended, own)

    def _init(
        self, asked: Requests, members: Sequence[int | None], segment: Segment
    ) -> DecodeState:
        """Takes prompts in; the rows without one, at the end, are finished from the start."""
        prompts = [member for member in members if member is not None]
        placed = batches.make_batch(
            asked, prompts, len(members), segment.length, self.tokenizer.pad_id
        )
        prompt = max(network.prompt_positions(segment.length, 0) for network in self._networks)
        if self._mesh is not None:
            placed = batches.spread(placed, self._mesh)
        state = self._loop.init(
            self._params,
            placed.inputs,
            placed.input_lengths,
            seed=placed.seeds,
            ids=placed.ids,
            limits=placed.limits,
            sampling=placed.sampling,
            max_new=self.max_new_tokens,
            max_length=prompt + self.max_new_tokens + self._longest + 1,
        )
        return self._place(state)

    def _run(self, state: DecodeState, rule: Rule | None, until_finished: int) -> DecodeState:
        if isinstance(self._loop, Autoregressive):
            return self._loop.run(self._params, state, STOP_AFTER, until_finished)
        assert rule is not None
        return self._loop.run(self._params, rule, state, STOP_AFTER, until_finished)

    def _place(self, state: DecodeState) -> DecodeState:
        return state if self._mesh is None else batches.spread(state, self._mesh)


def _at_least_one(name: str, value: Any) -> int:
    return int(checked(name, value, low=1, dtype=np.int32))


enable_cache = environment.enable_cache

__all__ = [
    "BUCKETS",
    "Decoder",
    "Pair",
    "Prompt",
    "Result",
    "Row",
    "RunInfo",
    "TextModel",
    "enable_cache",
    "load_pair",
    "load_text_model",
]
