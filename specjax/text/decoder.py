"""`Decoder`: from prompts to texts.

    pair = specjax.load_pair(drafter=SMALL, verifier=LARGE)
    decoder = specjax.Decoder(pair, rule=specjax.rules.OPT(strength=0.2), max_draft=5)
    result = decoder(["A man rides a bicycle."], seed=0)

Axes: n prompts, L tokens of a prompt, G longest draft, N longest output.
"""

import dataclasses
import functools
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import tqdm
from jaxtyping import Int32

from specjax import environment
from specjax.checks import check_count, check_flag, options_of, short_repr, whole_number
from specjax.compilation import compile_seconds
from specjax.decoding.cascades import PairMethod
from specjax.decoding.speculative import Speculative
from specjax.drafting import Costs
from specjax.errors import UserError
from specjax.fingerprints import digest
from specjax.memory import explain_full_memory
from specjax.text import requests as requests_lib
from specjax.text import teacher_forcing
from specjax.text.drafts import WithParams
from specjax.text.earlier import EarlierAnswers
from specjax.text.engine import (
    BUCKETS,
    TURNS,
    TURNS_AGAIN,
    Engine,
    Group,
    are_independent,
    buckets_to,
    groups_of,
    row_multiple,
)
from specjax.text.requests import (
    Prefix,
    Prompt,
    Request,
    bind_processors,
    check_forbidding,
    checked_rule,
    warn_of_excluded,
    warn_of_ignored,
)
from specjax.text.results import Result, Row, split_time, warn_of_nan
from specjax.text.setting import Setting, as_written, build, chosen_models
from specjax.text.stops import Added, check_stops, stop_table
from specjax.text.teacher_forcing import OutputScores
from specjax.text.text_models import Pair, TextModel, any_float32
from specjax.types import Drafting, Params, Processor, Rule, Sampling, Stopping, Verification


class Decoder:
    """Turns prompts into texts: speculatively with a pair, token by token with a single model.

    Several threads may call a Decoder. An engine, a stream and a chat are used by one thread at a
    time.

    A part is an object or a text that names it (see `Setting`): `rule="OPT(0.2)"` is
    `rule=rules.OPT(0.2)`.

    Programs are compiled per shape and shared between Decoders. Changing a rule's strength, the
    temperature, the seed or a length limit compiles nothing; another rule or a first top-k or top-p
    does. `specjax.enable_compilation_cache()` keeps programs on disk.

    Args:
      models: a `Pair`, models by name, or a single `TextModel` (such as
        `pair.verifier`).
      setting: the way to decode; the options up to `sampling` are its short form.
      rule: see `Setting`, also for the next options. A part with arrays of yours is
        `WithParams(part, params)`. `drafting.CostAware()` without any costs measures them now.
      sampling: temperature, top-k and top-p, each a value or one value per prompt of the call;
        `Sampling(temperature=1.0)` by default.
      max_new_tokens: N, the longest output; also the default limit of each row.
      stop: texts such as `("Q:", "END")`; a row ends with the token that completes a stop string,
        also inside a draft, and its text is cut before the string.
      batch_size: the number of rows decoded together; the next prompt replaces a finished row. On a
        mesh it is rounded up to a multiple of its `data`.
      buckets: increasing prompt lengths in tokens; a batch is padded to the first bucket that is
        long enough. Each used bucket is a program to compile; the last is the longest prompt. By
        default 16, 24, 32 and so on to 1024; then doubled up to the verifier's context, which
        `max_position_embeddings` of its files says.
      chat_template_kwargs: options of the chat template, for prompts that are chats: `tools`,
        `documents`, `chat_template`, `add_generation_prompt`, `continue_final_message`, and
        variables such as `{"enable_thinking": False}`; see `Tokenizer.render_chat`.

    Attributes:
      models, stop, chat_template_kwargs: as given, but the only model where one decodes alone.
      setting: the way to decode; `method` is VerifierAlone where the only model has no drafts.
      main: the model whose distribution is asked for: the verifier, or the only model.
      method, params, rule, sampling: what decodes; `rule` is None if the method has none.
      tokenizer: the verifier's tokenizer.
      costs: those that were measured here for `drafting.CostAware()`, or None.
      length: G as given costs have chosen it, and why; or None.
      earlier: the answers that drafts are copied from, for `Lookup(earlier=8)`; else None. It may
        be that of another decoder with the same tokenizer. At temperatures above 0 a row's text
        depends on what it has of the prompt when the call begins; its distribution does not.

    Raises:
      UserError: a value is out of range, or the parts cannot be combined.
    """

    @options_of("Decoder")
    def __init__(
        self,
        models: Pair | TextModel | Mapping[str, TextModel],
        setting: Setting | None = None,
        *,
        rule: Rule | str | None = None,
        verification: Verification | str | None = None,
        max_draft: int | None = None,
        min_draft: int | None = None,
        stopping: Stopping | WithParams | str | None = None,
        drafting: Drafting | WithParams | str | None = None,
        method: PairMethod | WithParams | str | None = None,
        costs: Costs | None = None,
        widths: Sequence[int] | None = None,
        processors: Sequence[Processor | WithParams | str] | None = None,
        process_drafts: bool | None = None,
        sampling: Sampling | None = None,
        max_new_tokens: int = 128,
        stop: str | Sequence[str] = (),
        batch_size: int = 16,
        buckets: Sequence[int] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.max_new_tokens = whole_number("max_new_tokens", max_new_tokens, low=1)
        self.batch_size = whole_number("batch_size", batch_size, low=1)
        lengths = None if buckets is None else requests_lib.check_buckets(buckets)
        self.stop = check_stops(stop)
        self.chat_template_kwargs = requests_lib.template_options(chat_template_kwargs)
        given = {
            "rule": rule,
            "verification": verification,
            "max_draft": max_draft,
            "min_draft": min_draft,
            "stopping": stopping,
            "drafting": drafting,
            "method": method,
            "widths": widths,
            "process_drafts": process_drafts,
            "costs": costs,
            "sampling": sampling,
            "processors": processors,
        }
        setting = _setting_of(setting, {k: x for k, x in given.items() if x is not None})
        setting, chosen = chosen_models(setting, models)
        built = build(setting, chosen, self.batch_size, (lengths or BUCKETS)[0])
        self.setting, self.main = setting, (main := built.main)
        self.buckets = buckets_to(main.context) if lengths is None else lengths
        self.models, self._built, self.tokenizer = chosen, built, main.tokenizer
        self.method, self.costs, self.length = built.method, built.costs, built.length
        if self.length is not None and not self.length.max_draft:
            self.models = main
        answers = self.method.predictions - 1  # one is given with a prompt
        self.earlier = EarlierAnswers(answers) if answers > 0 else None
        self.rule: Rule | None = getattr(built.params, "rule", None)
        self.params = built.params
        self.sampling = dataclasses.replace(setting.sampling, processors=None)
        self.sampling, self.params = self._sampled(
            self.sampling, setting.processors or None, self.rule
        )
        contexts = {name: model.context for name, model in built.models.items()}
        self._contexts = {name: most for name, most in contexts.items() if most is not None}
        self._new_engine = functools.partial(
            Engine,
            self.method,
            model=main,
            max_new_tokens=self.max_new_tokens,
            stop=self.stop,
            stop_table=main.place(stop_table(self.stop, main)) if self.stop else None,
            chat_template_kwargs=self.chat_template_kwargs,
            contexts=self._contexts,
            fitting=set(),
        )
        fixed = setting.method is None and "max_draft" in setting.left_out
        self._draft_option = {"max_draft": "drafting"} if fixed else {}

    def __repr__(self) -> str:
        def given(**values: Any) -> str:
            return ", ".join(f"{name}={x}" for name, x in values.items() if x is not None)

        drawn = {name: as_written(getattr(self.sampling, name)) for name in requests_lib.DRAWN}
        parts = given(
            rule=self.rule,
            verification=getattr(self.method, "verification", None),
            max_draft=self.method.max_draft or None,
            sampling=f"Sampling({given(**drawn, processors=self.sampling.processors)})",
        )
        return f"Decoder({self.models!r}, {type(self.method).__name__}, {parts})"

    @options_of("a call of the Decoder")
    def __call__(
        self,
        prompts: Iterable[Prompt],
        *,
        seed: Any = 0,
        ids: Any = None,
        rule: Rule | str | None = None,
        sampling: Sampling | None = None,
        processors: Sequence[Processor | WithParams | str] | None = None,
        max_new_tokens: Any = None,
        draft_limit: Any = None,
        num_samples: int = 1,
        best_of: int | None = None,
        prefix: Prefix | None = None,
        share_prefix: bool = False,
        log_probs: bool = False,
        top_log_probs: int | None = None,
        sources: bool = False,
        predictions: Sequence[str | Sequence[int] | np.ndarray | Row | None] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool | None = None,
    ) -> Result:
        """Decodes all prompts.

        Args:
          prompts: n texts, lists of token ids, or chats (lists of `{"role", "content"}`, for
            models with a chat template).
          seed: in 0 .. 2**32 - 1; a number or n numbers.
          ids: n numbers in 0 .. 2**32 - 1, the prompts' places by default; with the seed they alone
            determine the randomness of a row (and the number of earlier answers to its prompt, if
            drafts are copied from them).
          rule: replaces the Decoder's rule; each strength is a number or n numbers.
          sampling: replaces the Decoder's sampling; each field is a value or n values.
          processors: replaces the Decoder's processors; each strength is a number or n numbers.
          max_new_tokens: the most tokens of each row, in 1 .. N; a number or n numbers.
          draft_limit: the longest draft of each row, in 0 .. G; a number or n numbers.
          num_samples: k outputs of each prompt, which is read once; at most the batch size. Sample
            j of a prompt with id i is the row of a call with the id `i * k + j`.
          best_of: keeps so many of the samples of each prompt, the best first; see `Result.best`.
          prefix: from `prefix`: each prompt is the rest of a text that begins with it, and only
            this rest is read. Tokens are those of the joined text; logits differ in the last bits.
          share_prefix: whether to read the beginning of most prompts once, such as the examples of
            a few-shot prompt (decoder-only models).
          log_probs: whether to keep each token's log-probability; see `Row.log_probs`.
          top_log_probs: k: the verifier reads the outputs once more, for `Row.top`.
          sources: whether to keep where tokens came from, for `Row.sources` and `Row.show`. It
            compiles a program of its own.
          predictions: of each prompt a text, token ids or a row that the output may resemble, or
            None. `Lookup` copies drafts from it, too; outputs follow the same distribution. It
            compiles a program of its own.
          chat_template_kwargs: more options of the chat template, for all prompts that are chats.
          progress: whether to show a progress bar; by default on a terminal, after two seconds.

        Returns:
          A `Result`, in the order of the prompts; each of several processes gets all of it.

        Raises:
          UserError: a prompt is empty or too long, or a value is out of range.
        """
        start, compiled = time.perf_counter(), compile_seconds()
        call = self._call(
            prompts,
            seed=seed,
            ids=ids,
            rule=rule,
            sampling=sampling,
            processors=processors,
            max_new_tokens=max_new_tokens,
            draft_limit=draft_limit,
            num_samples=num_samples,
            prefix=prefix,
            share_prefix=share_prefix,
            log_probs=log_probs,
            sources=sources,
            predictions=predictions,
            chat_template_kwargs=chat_template_kwargs,
        )
        if best_of is not None and whole_number("best_of", best_of, low=1) > call.num_samples:
            raise UserError(
                f"best_of must be at most num_samples={call.num_samples}, got {best_of}: give a "
                "larger num_samples"
            )
        teacher_forcing.check_top(self.main, top_log_probs)
        if top_log_probs is not None and self.uses_processes:
            raise UserError(
                "top_log_probs must be left out, because the mesh has several processes: score the "
                "outputs with a decoder of one process"
            )
        rows = self._rows(call, frozenset(), progress, eager=False)
        result = Result(tuple(sorted(rows, key=lambda row: (row.index, row.sample))))
        if best_of is not None:
            result = result.best(best_of)
        if top_log_probs is not None:
            tokens = [call.tokens[row.index] for row in result]
            scored = teacher_forcing.rows_with_top(self.main, tokens, result.rows, top_log_probs)
            result = Result(scored)
        times = split_time(time.perf_counter() - start, compile_seconds() - compiled)
        return Result(result.rows, **times)

    def stream(self, prompts: Iterable[Prompt], **options: Any) -> Iterator[tuple[int, str]]:
        """Decodes all prompts, and yields rows when they finish: (place of the prompt, text).

        Each row is yielded once, with its complete text. Options are those of `rows`.
        """
        return ((row.index, row.text) for row in self.rows(prompts, **options))

    def stream_tokens(
        self, prompts: Iterable[Prompt], *, every: int = 1, **options: Any
    ) -> Iterator[tuple[int, str]]:
        """Decodes all prompts, and yields text while rows grow: (place of the row, text added).

        The texts of a row together are its text in a call. A text has no incomplete character, and
        no beginning of a possible stop string. With a tokenizer without `pieces()` a row's text
        comes when the row is finished.

        Args:
          prompts: as in a call.
          every: the most rounds between two texts of a row, at most 64. A larger number is faster.
          **options: as in a call, but not `best_of`, `top_log_probs` and `progress`. They are
            checked now.

        Yields:
          The place of the row, `index * num_samples + sample`, and a text that is not empty.
        """
        call = self._call(prompts, **options)
        check_count("every", every, "give the number of rounds between two texts")
        all_added = self._added(call, frozenset(), every=every)

        def texts() -> Iterator[tuple[int, str]]:
            for added in all_added:
                if added.row is not None:
                    warn_of_nan(added.row)
                if added.text:
                    yield added.index * call.num_samples + added.sample, added.text

        return texts()

    def rows(
        self,
        prompts: Iterable[Prompt],
        *,
        done: Collection[int] | Mapping[int, int] = (),
        progress: bool | None = None,
        **options: Any,
    ) -> Iterator[Row]:
        """Like `stream`, with all information about a row.

        Args:
          prompts: as in a call.
          done: places of rows to skip: of prompts, or `index * num_samples + sample`. The other
            rows are bit for bit the same as without `done`. If it maps each place to the row's
            `info.rounds`, rows are independent (`Method.independent_rows`: one drafter with drafts
            of a fixed length, or none) and there are no draft limits, only the missing rows are
            decoded. Otherwise each group (prompts that share slots) with a missing row is decoded
            from its start.
          progress: as in a call.
          **options: as in a call, but not `best_of` and `top_log_probs`. They are checked now.
        """
        call = self._call(prompts, **options)
        count = len(call.requests) * call.num_samples
        known = dict(done) if isinstance(done, Mapping) else frozenset(done)
        if absent := set(known).difference(range(count)):
            raise UserError(
                f"done must have places in 0 .. {count - 1}, got {sorted(absent, key=str)[0]!r}"
            )
        for place, rounds in known.items() if isinstance(known, dict) else ():
            check_count(f"done[{place}]", rounds, "give the row's info.rounds")
        return self._rows(call, known, progress, eager=True)

    def score(
        self,
        prompts: Iterable[Prompt],
        outputs: Sequence[str | Sequence[int] | np.ndarray | Row],
        *,
        sampling: Sampling | None = None,
        prompt_log_probs: bool = False,
        top_log_probs: int | None = None,
    ) -> OutputScores:
        """Returns the verifier's log-probabilities of given outputs, without decoding.

        It is the model's own distribution: the Decoder's rule, sampling and processors are not
        used.

        Args:
          prompts: as in a call, of any length.
          outputs: an output of each prompt: token ids; a text, which gets the end-of-sequence
            token and is tokenized without its prompt; or a `Row`, with the end-of-sequence token
            that ended it. So a `Result` scores its own rows.
          sampling: temperature, top-k and top-p, a number each; `Sampling(temperature=1.0)` by
            default. At temperature 0 the scores are the model's own, as by default.
          prompt_log_probs: whether to score the prompts' tokens too; only for a decoder-only
            model.
          top_log_probs: k, to return the k most probable tokens at each position of the outputs.

        Returns:
          The scores, in the order of the prompts.
        """
        check_flag("prompt_log_probs", prompt_log_probs)
        named = enumerate(requests_lib.as_list(prompts))
        tokens = [self._encoded(prompt, f"prompt {i}") for i, prompt in named]
        model = self.main
        ids = teacher_forcing.checked_outputs(model, outputs, len(tokens))
        return teacher_forcing.score(model, tokens, ids, sampling, prompt_log_probs, top_log_probs)

    def text_after(self, prompt: np.ndarray) -> Callable[[Sequence[int]], str]:
        """Returns the function that decodes the tokens of an output, from its prompt's tokens."""
        return self.main.text_after(prompt)

    def encode(
        self,
        prompt: Prompt,
        name: str = "the prompt",
        *,
        truncate: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Int32[np.ndarray, " L"]:
        """Returns the tokens of a prompt.

        Args:
          prompt: as in a call.
          name: its name in messages.
          truncate: "end" or "beginning", where a long prompt is cut; None: it is an error.
          chat_template_kwargs: more options of the chat template, if it is a chat.

        Returns:
          Ids, which are also a valid prompt of a call.
        """
        requests_lib.check_truncate(truncate)
        tokens = self._encoded(prompt, name, chat_template_kwargs)
        if truncate is not None:
            tokens = requests_lib.shortened(self.tokenizer, tokens, self.buckets[-1], truncate)
        requests_lib.check_length(tokens, self.buckets[-1], name)
        return tokens

    def prefix(self, prompt: Prompt) -> Prefix:
        """Reads the common beginning of many prompts once.

        Args:
          prompt: a text, token ids or chat messages; prompts with it are of the same kind.

        Returns:
          A `Prefix` for calls and engines of this Decoder: `decoder(prompts, prefix=prefix)`. Its
          caches stay on the device as long as it exists.

        Raises:
          UserError: the models are encoder-decoders, the mesh has several processes, or the prompt
            is empty or too long.
        """
        tokens = self.encode(prompt, "the prefix")
        prefix = dataclasses.replace(self._whole_prefix(tokens), prompt=prompt)
        with explain_full_memory(f"a prefix of {len(prefix)} tokens", "give a shorter prefix"):
            prefix.beginning  # noqa: B018  reads it
        return prefix

    def chat(
        self, system: str | None = None, *, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> "Chat":
        """Begins a conversation, in which each turn reads only the tokens that are new.

        Args:
          system: the text of a first message with the role `system`; None for none.
          chat_template_kwargs: more options of the chat template, such as `tools`.

        Returns:
          A `Chat`: `chat("Hello")` returns the reply's `Row`.
        """
        return Chat(self, system, chat_template_kwargs)

    @property
    def can_share_prefix(self) -> bool:
        """Whether models can read a common beginning of prompts once."""
        return self.main.continues_prompts and not self.uses_processes

    @property
    def uses_processes(self) -> bool:
        """Whether its mesh has devices of several processes."""
        mesh = self.main.mesh
        return mesh is not None and mesh.is_multi_process

    def describe(self) -> dict[str, Any]:
        """Returns the JSON values that determine the outputs; equal values give equal texts.

        They are fingerprints of the models, the method and its settings, the versions, and the
        device.
        """
        built, mesh = self._built, self.main.mesh
        values = {
            "models": {name: model.fingerprint for name, model in built.models.items()},
            **self.method.describe(),
            "own_params": built.own_params,
            "stopping": built.stopping,
            "rule": None if self.rule is None else repr(self.rule),
            # All numbers: the text of a rule abbreviates them.
            "strengths": [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(self.rule)],
            **{name: as_written(getattr(self.sampling, name)) for name in requests_lib.DRAWN},
            "max_new_tokens": self.max_new_tokens,
            "batch_size": self.batch_size,
            "buckets": list(self.buckets),
        }
        if self.sampling.processors is not None:
            # A strength per row is written whole.
            with np.printoptions(threshold=sys.maxsize):
                values["processors"] = [repr(one) for one in self.sampling.processors]
            values["processors_params"] = digest(self.params.processors)
            values["process_drafts"] = getattr(self.method, "process_drafts", True)
        if self.stop:
            values["stop"] = list(self.stop)
        if self.chat_template_kwargs:
            values["chat_template_kwargs"] = self.chat_template_kwargs
        values["mesh"] = None if mesh is None else dict(mesh.shape)
        float32 = any_float32(built.models.values())
        return {**values, "environment": environment.environment(float32=float32)}

    @options_of("Decoder.engine")
    def engine(
        self,
        *,
        prompt_length: int,
        rows: int | None = None,
        refill: int | None = None,
        rule: Rule | str | None = None,
        log_probs: bool = False,
        sources: bool = False,
        predictions: bool = False,
        num_samples: int = 1,
        prefix: Prefix | None = None,
        kept_prefixes: int = 0,
    ) -> Engine:
        """Returns an engine of this method, for requests that arrive one by one.

        Args:
          prompt_length: the longest prompt in tokens; shorter ones are padded to a bucket.
          rows: the number of slots; the batch size by default. It is rounded up to a multiple of
            `num_samples`, and on a mesh of its `data`.
          rule: replaces the Decoder's rule; each strength must be a number.
          refill, log_probs, sources, predictions, num_samples, prefix, kept_prefixes: see `Engine`;
            models that cannot continue a prompt keep none.

        Returns:
          An `Engine`, whose requests may have texts.
        """
        rule = self.rule if rule is None else checked_rule(self.method.check_rule, rule)
        if any(np.ndim(value) for value in jax.tree.leaves((rule, self.sampling))):
            raise UserError(
                "the rule and the sampling of an engine must have scalar values: give different "
                "values per row in its requests"
            )
        flags: dict[str, Any] = {
            "log_probs": log_probs, "sources": sources, "predictions": predictions
        }  # fmt: skip
        for name, flag in flags.items():
            check_flag(name, flag)
        if predictions:
            self._check_copies()
        flags["predictions"] |= self.earlier is not None
        rows = self.batch_size if rows is None else rows
        sizes = {"prompt_length": prompt_length, "rows": rows, "num_samples": num_samples}
        for name, size in sizes.items():
            check_count(name, size, "give a whole number")
        kept = whole_number("kept_prefixes", kept_prefixes, low=0)
        refill = max(1, rows // 4) if refill is None else refill
        check_count("refill", refill, "give a whole number")
        most = self._built.most_rows
        if most is not None and rows > most:
            raise UserError(
                f"rows must be at most {most}, the largest batch with measured costs for "
                f"CostAware, got {rows}: make the Decoder with batch_size={rows}"
            )
        if refill > rows:
            raise UserError(f"refill must be at most rows={rows}, got {refill}")
        self._warn_of_budget(rows)
        warn_of_ignored(self.main, self.sampling.processors or ())
        multiple = row_multiple(self.method) * num_samples
        return self._new_engine(
            self.params if rule is None else self.params._replace(rule=rule),
            sampling=self.sampling,
            rows=rows + -rows % multiple,
            refill=refill + -refill % multiple,
            prompt_length=prompt_length,
            num_samples=num_samples,
            **flags,
            earlier=self.earlier,
            named=self._draft_option,
            prefix=self._own_prefix(prefix),
            kept_prefixes=kept if self.can_share_prefix and prefix is None else 0,
            buckets=self.buckets,
        )

    def _sampled(
        self, sampling: Sampling | None, processors: Any, rule: Rule | None
    ) -> tuple[Sampling, Params]:
        """The sampling with bound processors, and the method's parameters with their arrays."""
        base = self.sampling if sampling is None else requests_lib.as_sampling(sampling)
        in_sampling = None if sampling is None else base.processors
        if processors is not None and in_sampling is not None:
            raise UserError("processors must be given once: here or in sampling")
        new = in_sampling if processors is None else processors
        bound, params = self.sampling.processors, self.params
        if new is not None:
            bound, shared = bind_processors(new, self.main)
            if hasattr(params, "processors"):
                params = params._replace(processors=self.main.place(shared))
            else:
                assert not shared, f"{type(params).__name__} has no field `processors`"
        if isinstance(self.method, Speculative):
            process_drafts = self.method.process_drafts
            check_forbidding(self.method.drafter, rule, bound, process_drafts=process_drafts)
        warn_of_excluded(rule, base, self.method.vocab_size)
        return dataclasses.replace(base, processors=bound), params

    def _warn_of_budget(self, rows: int) -> None:
        tokens = self._built.budget
        if tokens is not None and rows >= tokens:
            what = (
                f"stopping=Budget(tokens={tokens}) drafts nothing while {rows} rows may draft, "
                "because the last token of each row counts: give more tokens, or a smaller "
                "batch_size"
            )
            warnings.warn(what, stacklevel=3)

    def _encoded(
        self, prompt: Prompt, name: str, more: Mapping[str, Any] | None = None
    ) -> np.ndarray:
        options = {**self.chat_template_kwargs, **requests_lib.template_options(more)}
        return requests_lib.encode(prompt, name, self.method.vocab_size, self.tokenizer, options)

    def _groups(self, call: "_Call") -> list[Group]:
        lengths = [len(tokens) for tokens in call.tokens]
        at_once = self.batch_size // call.num_samples
        turns = TURNS if are_independent(self.method, call.requests) else TURNS_AGAIN
        return list(groups_of(lengths, self.buckets, at_once, row_multiple(self.method), turns))

    @options_of("a call of the Decoder")
    def _call(
        self,
        prompts: Iterable[Prompt],
        *,
        seed: Any = 0,
        ids: Any = None,
        rule: Any = None,
        sampling: Any = None,
        processors: Any = None,
        max_new_tokens: Any = None,
        draft_limit: Any = None,
        num_samples: Any = 1,
        prefix: Any = None,
        share_prefix: Any = False,
        log_probs: Any = False,
        sources: Any = False,
        predictions: Any = None,
        chat_template_kwargs: Any = None,
    ) -> "_Call":
        """Checks a call, and makes its requests."""
        samples = whole_number("num_samples", num_samples, low=1)
        flags = {"share_prefix": share_prefix, "log_probs": log_probs, "sources": sources}
        for name, flag in flags.items():
            check_flag(name, flag)
        if share_prefix and prefix is not None:
            raise UserError("give either prefix or share_prefix=True, not both")
        if samples > self.batch_size:
            raise UserError(
                f"num_samples must be at most batch_size={self.batch_size}, got {samples}: make "
                f"the Decoder with batch_size={samples}"
            )
        rule = self.rule if rule is None else checked_rule(self.method.check_rule, rule)
        sampling, params = self._sampled(sampling, processors, rule)
        warn_of_ignored(self.main, sampling.processors or ())
        prefix = self._own_prefix(prefix)
        named = [(f"prompt {i}", x) for i, x in enumerate(requests_lib.as_list(prompts))]
        if prefix is not None:
            named = [(name, prefix.join(prompt, name)) for name, prompt in named]
        tokens = [self._encoded(prompt, name, chat_template_kwargs) for name, prompt in named]
        requests = requests_lib.requests_of(
            tokens,
            sampling,
            rule,
            ids,
            seed=seed,
            max_new_tokens=max_new_tokens,
            draft_limit=draft_limit,
        )
        predicts = predictions is not None or self.earlier is not None
        expected: list[list[np.ndarray]] = [[] for _ in tokens]
        if predictions is not None:
            expected = self._predicted(predictions, len(tokens))
        if self.earlier is not None:
            for i, (prompt, request) in enumerate(zip(tokens, requests, strict=True)):
                texts, own_seed = self.earlier.of(prompt, request.seed)
                expected[i] += texts
                requests[i] = dataclasses.replace(request, seed=own_seed)
        longest = self.buckets[-1]
        limits = requests_lib.Limits(
            self.method, longest, self.max_new_tokens, sampling, rule, samples
        )
        for request, prompt, (name, _) in zip(requests, tokens, named, strict=True):
            requests_lib.check_request(request, prompt, limits, name)
        requests_lib.warn_beyond(max(map(len, tokens)), self._contexts)
        if share_prefix:
            prefix = self._whole_prefix(requests_lib.common_of(tokens))
        common = rule, params, prefix, samples, log_probs, sources, predicts
        return _Call(requests, tokens, expected, *common)

    def _check_copies(self) -> None:
        if not self.method.predictions:
            raise UserError(
                "predictions must be left out, because no drafter here copies: make the Decoder "
                'with drafting="Lookup()", or "Lookup(min_match=2)" beside a drafter'
            )

    def _predicted(self, predictions: Any, count: int) -> list[list[np.ndarray]]:
        """The tokens of the text that each of so many prompts has, if it has one."""
        self._check_copies()
        listed = isinstance(predictions, Sequence) and not isinstance(predictions, str)
        if not listed or len(predictions) != count:
            raise UserError(
                "predictions must be a list with a text, token ids, a row or None for each of the "
                f"{count} prompts, got {short_repr(predictions)}"
            )
        encode = requests_lib.encode_output
        return [
            [] if x is None else [encode(x, f"predictions[{i}]", self.main)]
            for i, x in enumerate(predictions)
        ]

    def _own_prefix(self, prefix: Any) -> Prefix | None:
        if prefix is not None and getattr(prefix, "params", None) is not self.params:
            raise UserError(
                f"prefix must come from this Decoder's prefix(text), got {prefix!r:.60}"
            )
        return prefix

    def _whole_prefix(self, tokens: np.ndarray) -> Prefix:
        """The prefix of whole prompts, of which most begin with these tokens."""
        remedy = "give whole prompts, without prefix and share_prefix"
        if not self.main.continues_prompts:
            raise UserError(f"{remedy}, because an encoder reads whole prompts")
        if self.uses_processes:
            raise UserError(f"{remedy}, because the mesh has several processes")
        return Prefix(tokens, None, self.method, self.params)

    def _rows(
        self, call: "_Call", done: Collection[int], progress: bool | None, *, eager: bool
    ) -> Iterator[Row]:
        all_added = self._added(call, done, eager=eager)
        total = len(call.requests) * call.num_samples
        disable = None if progress is None else not progress
        shown: Any = {"total": total, "initial": len(done), "desc": "decoding", "unit": "row"}

        def rows() -> Iterator[Row]:
            with tqdm.tqdm(**shown, disable=disable, delay=2.0) as bar:
                for added in all_added:
                    assert added.row is not None
                    bar.update()
                    warn_of_nan(added.row)
                    yield added.row

        return rows()

    def _added(
        self, call: "_Call", done: Collection[int], *, eager: bool = True, every: int | None = None
    ) -> Iterator[Added]:
        """The rows that are not done, and every so many rounds the text that rows got."""
        samples, groups = call.num_samples, self._groups(call)
        rest = set(range(len(call.requests) * samples)).difference(done)
        missing = {place // samples for place in rest}
        wanted = [group for group in groups if not missing.isdisjoint(group.members)]
        shapes = {group[1:]: group for group in reversed(wanted)}
        engines = {shape: self._engine_of(call, group) for shape, group in shapes.items()}
        # Of rows with known results, which only occupy their slots.
        rounds: Mapping[int, int] = {}
        if isinstance(done, Mapping) and are_independent(self.method, call.requests):
            rounds = done

        def all_added() -> Iterator[Added]:
            for group in wanted:
                engine = engines.pop(group[1:], None) or self._engine_of(call, group)
                for place in group.members:
                    idle_steps = [rounds.get(place * samples + j) for j in range(samples)]
                    engine.put(*call.row(place), idle_steps)
                for added in engine.added(every, until_empty=not eager):
                    place, row = group.members[added.index], added.row
                    if place * samples + added.sample in rest:
                        row = row and dataclasses.replace(row, index=place)
                        yield dataclasses.replace(added, index=place, row=row)

        return all_added()

    def _engine_of(self, call: "_Call", group: Group) -> Engine:
        # Requests have their own strengths: the engine needs only the rule's structure.
        one_rule = jax.tree.map(lambda x: x if not np.ndim(x) else x[0], call.rule)
        drafting = [i for i in group.members if call.requests[i].draft_limit != 0]
        samples = call.num_samples
        self._warn_of_budget(samples * min(group.rows, len(drafting)))
        return self._new_engine(
            call.params if one_rule is None else call.params._replace(rule=one_rule),
            # Of the first row; each request has its own.
            sampling=call.requests[group.members[0]].sampling or self.sampling,
            rows=group.rows * samples,
            refill=group.refill * samples,
            prompt_length=group.length,
            num_samples=samples,
            log_probs=call.log_probs,
            sources=call.sources,
            predictions=call.predictions,
            earlier=self.earlier,
            named={"rows": "batch_size", "prompt_length": "buckets", **self._draft_option},
            prefix=call.prefix,
        )

    def _turn(self, tokens: np.ndarray, prefix: Prefix | None, **options: Any) -> Engine:
        """An engine with the tokens of a whole prompt as its only request, for a `Chat`.

        `prefix` has the caches of the last turn; the options are those of a call.
        """
        for name in ("num_samples", "prefix", "share_prefix"):
            if name in options:
                raise UserError(f"{name} must be left out of a chat, got {options[name]!r}")
        call = self._call([tokens], **options)._replace(prefix=prefix)
        (group,) = self._groups(call)
        engine = self._engine_of(call, group)
        engine.put(*call.row(0), [None])
        return engine


class _Call(NamedTuple):
    """A checked call.

    Attributes:
      prefix: given, or common to the prompts.
      expected: of each prompt the tokens of the texts that drafts are copied from.
    """

    requests: list[Request]
    tokens: list[np.ndarray]
    expected: list[list[np.ndarray]]
    rule: Rule | None
    params: Params
    prefix: Prefix | None
    num_samples: int
    log_probs: bool
    sources: bool
    predictions: bool

    def row(self, place: int) -> tuple[Request, np.ndarray, list[np.ndarray]]:
        """What an engine needs of a prompt."""
        return self.requests[place], self.tokens[place], self.expected[place]


def _setting_of(setting: Any, given: dict[str, Any]) -> Setting:
    if setting is not None:
        if not isinstance(setting, Setting):
            raise UserError(f"setting must be Setting(...), got {short_repr(setting)}")
        if given:
            raise UserError(f"{next(iter(given))} must be left out: the setting has it")
        return setting
    sampling = requests_lib.as_sampling(given.pop("sampling", None))
    if sampling.processors is not None:
        if "processors" in given:
            raise UserError("processors must be given once: here or in sampling")
        given["processors"] = sampling.processors
    return Setting(**given, **{name: getattr(sampling, name) for name in requests_lib.DRAWN})


class Chat:
    """A conversation with a model; from `Decoder.chat`.

    A turn renders all messages with the tokenizer's chat template. It takes the caches of the last
    turn for the tokens with which both begin, and reads the others: see `Row.prefilled`. Its reply
    is that of `decoder([messages])`; only the last bits of the logits differ.

    Args:
      decoder: the decoder.
      system, chat_template_kwargs: see `Decoder.chat`.
    """

    def __init__(
        self,
        decoder: "Decoder",
        system: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if decoder.tokenizer.chat_template is None:
            raise UserError(
                "the tokenizer has no chat template: put chat_template.jinja into the model's "
                "directory, or give texts to the Decoder"
            )
        if decoder.uses_processes:
            raise UserError("a chat needs a mesh of a single process: load the models without it")
        self._decoder = decoder
        self._template_kwargs = _merged(decoder.chat_template_kwargs, chat_template_kwargs)
        self._messages = [] if system is None else [_message("system", system)]
        self._prefix: Prefix | None = None

    def __repr__(self) -> str:
        return f"Chat({len(self._messages)} messages)"

    @property
    def messages(self) -> list[dict[str, str]]:
        """A copy of the messages so far, with `role` and `content`."""
        return [dict(message) for message in self._messages]

    def __call__(self, text: str, **options: Any) -> Row:
        """Adds a message of the user, and returns the reply.

        Options are those of a call of the Decoder, except for several samples and prefixes. If an
        error is raised, the conversation stays as it was.
        """
        *_, last = self._turn(text, None, options)
        assert last.row is not None
        return last.row

    def stream(self, text: str, *, every: int = 1, **options: Any) -> Iterator[str]:
        """Like a call, but yields the texts that the reply gets; see `Decoder.stream_tokens`.

        A text is not empty, and at most `every` rounds are between two texts. The messages are
        added when the reply is finished.

        Raises:
          UserError: another turn ended while this stream was read.
        """
        check_count("every", every, "give the number of rounds between two texts")
        turn = self._turn(text, every, options)
        return (added.text for added in turn if added.text)

    def _turn(self, text: str, every: int | None, options: dict[str, Any]) -> Iterator[Added]:
        """The texts and the row of a turn; arguments are checked now."""
        messages = [*self._messages, _message("user", text)]
        options = dict(options)
        template = _merged(self._template_kwargs, options.pop("chat_template_kwargs", None))
        tokens = self._decoder.encode(messages, "the conversation", chat_template_kwargs=template)
        engine = self._decoder._turn(tokens, self._prefix, **options)

        def steps() -> Iterator[Added]:
            for added in engine.added(every):
                row = added.row
                if row is not None:
                    if self._messages != messages[:-1]:
                        raise UserError(
                            "another turn ended during this stream: read it to its end before"
                        )
                    warn_of_nan(row)
                    read = np.append(tokens, row.tokens_with_end)
                    self._messages = [*messages, {"role": "assistant", "content": row.text}]
                    # What the models have read.
                    can_share = self._decoder.can_share_prefix and row.error is None
                    self._prefix = engine.prefix_of(read) if can_share else None
                yield added

        return steps()


def _merged(options: Mapping[str, Any], more: Any) -> dict[str, Any]:
    merged = {**options, **requests_lib.template_options(more)}
    if merged.get("continue_final_message"):
        raise UserError(
            "continue_final_message must be left out of a chat: call decoder([messages])"
        )
    return merged


def _message(role: str, text: Any) -> dict[str, str]:
    name = "the message" if role == "user" else role
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{name} must be a text that is not empty, got {short_repr(text)}")
    requests_lib.check_unicode(text, name)
    return {"role": role, "content": text}
