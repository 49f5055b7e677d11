"""From prompts to texts: `Decoder`.

    pair = specjax.load_pair(drafter=SMALL, verifier=LARGE)
    decoder = specjax.Decoder(pair, rule=specjax.rules.OPT(alpha=0.2), max_draft=5)
    result = decoder(["A man rides a bicycle."], seed=0)

Axes: n prompts, B rows of a batch, G longest draft, N longest output.
"""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specjax.checks import check_count, whole_number
from specjax.drafting import Costs
from specjax.runs import environment
from specjax.text import prompts as prompts_lib
from specjax.text.assembly import Parts, assemble, check_own_rule, checked_rule
from specjax.text.baselines import MethodPlan
from specjax.text.engine import Engine
from specjax.text.models import Models, TextModel, any_float32
from specjax.text.plans import DraftPlan
from specjax.text.prompts import BUCKETS, Prompt, SlotPlan
from specjax.text.requests import Request, settings_of
from specjax.text.results import Result, Row, collect
from specjax.text.rows import (
    are_independent,
    check_most,
    checked_engines,
    finished_rows,
    plans_of,
    row_multiple,
    split,
    to_row,
)
from specjax.text.stops import check_stops, stop_table
from specjax.types import Drafter, Method, Params, Rule, Sampling, Stopping, Verification


class Decoder:
    """Turns prompts into texts: speculatively with a pair, token by token with a single model.

    Programs are compiled per shape and shared between Decoders; changing a rule's strength, the
    temperature, the seed or a length limit compiles nothing. Another rule or a first top-k or top-p
    does. `specjax.enable_compilation_cache()` keeps programs on disk.

    Args:
      models: a `Pair` or `Models`, or one `TextModel` to decode alone (`pair.verifier`).
      rule: the target distribution, `rules.Lossless()` by default; strengths may be per prompt.
      verification: the algorithm; `verification.Block()` by default.
      max_draft: G, tokens drafted per round; 5 by default.
      min_draft: the fewest tokens drafted per round, whatever `stopping` says; 0 by default.
      stopping: when a draft ends before `max_draft`, such as `drafting.Confidence(0.4)`;
        `drafting.FixedLength()` by default. Another threshold compiles nothing.
      stopping_params: the parameters of a policy of your own; those of specjax bring their own.
      costs: what passes cost, for `drafting.CostAware()`; left out, they are measured at once.
      drafting: a plan of how drafts are made, such as `text.Lookup()`; see `text.DraftPlan`.
      drafter: a drafter of your own, in the place of a neural one with the pair's small model.
      drafter_params: its parameters.
      widths: how many tokens a pass of the verifier may read; see `decoding.Round`.
      method: a cascade such as `text.TokenCascade()`, or a method of your own; it has all that.
      params: the parameters of your own method.
      temperature: >= 0, 0 being greedy; one number, or one per prompt of the call.
      top_k: only the k most probable tokens are drawn (ties included), or None for all.
      top_p: only the nucleus of this probability is drawn, or None for all.
      max_new_tokens: N, the longest output; also the default limit of each row.
      stop: texts such as `("Q:", "END")`; a row ends with the token that completes one of them in
        its text, also inside a draft, and its text is cut before it.
      batch_size: rows decoded together; a finished one makes room for the next prompt. Over a
        mesh it is rounded up to a multiple of its `data`.
      buckets: increasing prompt lengths in tokens; a batch is padded to the first that holds its
        longest prompt. Each one used is a program to compile; the last is the longest prompt.

    Attributes:
      costs: those that were given or measured; None if none were needed.
      stop: the stop strings.
      measured: whether they were measured.

    Raises:
      TypeError: if `models` is neither, or a value is of the wrong type.
      ValueError: if a value is out of range, or the parts do not go together.
    """

    def __init__(
        self,
        models: Models | TextModel,
        *,
        rule: Rule | None = None,
        verification: Verification | None = None,
        max_draft: int | None = None,
        min_draft: int | None = None,
        stopping: Stopping | None = None,
        stopping_params: Params = None,
        costs: Costs | None = None,
        drafting: DraftPlan | None = None,
        drafter: Drafter | None = None,
        drafter_params: Params = None,
        widths: Sequence[int] | None = None,
        method: Method | MethodPlan | None = None,
        params: Params = None,
        temperature: Any = 1.0,
        top_k: Any = None,
        top_p: Any = None,
        max_new_tokens: int = 128,
        stop: str | Sequence[str] = (),
        batch_size: int = 16,
        buckets: Sequence[int] = BUCKETS,
    ) -> None:
        self.max_new_tokens = whole_number("max_new_tokens", max_new_tokens, low=1)
        self.batch_size = whole_number("batch_size", batch_size, low=1)
        self.buckets = prompts_lib.check_buckets(buckets)
        self._sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        Sampling(**self._sampling)  # its checks
        parts = Parts(
            rule=rule,
            verification=verification,
            max_draft=max_draft,
            min_draft=min_draft,
            stopping=stopping,
            stopping_params=stopping_params,
            costs=costs,
            drafting=drafting,
            drafter=drafter,
            drafter_params=drafter_params,
            widths=widths,
            method=method,
            params=params,
        )
        made = assemble(models, parts, self.batch_size, self.buckets[0])
        self.models, self.method, self._params = models, made.method, made.params
        self._named, self._main, self.tokenizer = made.models, made.main, made.main.tokenizer
        self._own_params, self._stopping, self.costs = made.own_params, made.stopping, made.costs
        self._most_rows, self.measured = made.most_rows, made.costs is not None and costs is None
        self.stop = check_stops(stop)
        table = stop_table(self.stop, self._main, self.method) if self.stop else None
        self._of_engines: dict[str, Any] = {"stop_table": table, "fitting": set()}
        self.rule: Rule | None = getattr(made.params, "rule", None)
        check_own_rule(self.rule)

    def __call__(
        self, prompts: Iterable[Prompt], *, progress: bool | None = None, **options: Any
    ) -> Result:
        """Decodes all prompts.

        Args:
          prompts: n texts, lists of token ids, or chats (lists of `{"role", "content"}`, for
            models with a chat template).
          progress: whether to show a progress bar; by default on a terminal, after two seconds.
          **options: any of

            - seed: one number in 0 .. 2**32 - 1, or one per prompt; 0 by default.
            - ids: n numbers in 0 .. 2**31 - 1. A row's randomness depends on its seed and its id
              alone; by default the id is the prompt's place.
            - rule: instead of the Decoder's; each strength one number or n.
            - temperature, top_k, top_p: one or n, instead of the Decoder's (top_k of the
              vocabulary's size and top_p of 1.0 switch these off).
            - max_new_tokens: one or n in 1 .. N, how many tokens each row may emit.
            - draft_limit: one or n in 0 .. G, the longest draft of each row; a row with 0 takes
              one token per round.
            - log_probs: True keeps the log-probability of each token, after temperature, top-k
              and top-p: at temperature 0 all are 0.0 (see `Row`). They are NaN where a method of
              your own does not write them with `decoding.add_log_probs`.

        Returns:
          A `Result`, in the order of the prompts. Of several processes each gets its own rows.

        Raises:
          ValueError: if a prompt is empty or does not fit, or a value is out of range.
          TypeError: if `prompts` is a single prompt or in no order, a value is no number, or there
            is no such option.
        """
        start = time.perf_counter()
        rows = self._rows(self._asked(prompts, **options), frozenset(), progress, eager=False)
        return collect(list(rows), time.perf_counter() - start)

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
        done: Collection[int] | Mapping[int, int] = (),
        progress: bool | None = None,
        **options: Any,
    ) -> Iterator[Row]:
        """Like `stream`, with all that is known of a row.

        Args:
          prompts: as in a call.
          done: places of prompts that are not wanted any more; the others come out bit for bit as
            without it. In a mapping each place has its row's `info.rounds`: then only what is
            missing is decoded, if the rows beside a row change nothing in it
            (`Method.independent_rows`: drafts of a fixed length, or none) and no draft limit is
            given. Else a plan (prompts that share slots) of which something is wanted is decoded
            from its start.
          progress: as in a call.
          **options: as in a call.

        Returns:
          An iterator over `Row`s.

        Raises:
          ValueError: as a call does, at once; also if there is no prompt at a place of `done`, or
            its rounds are no whole number of at least 1.
          TypeError: likewise.
        """
        asked = self._asked(prompts, **options)
        unwanted = prompts_lib.check_done(done, len(asked[0]))
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
        tokens = prompts_lib.encode(self.tokenizer, prompt, name)
        prompts_lib.check_tokens(tokens, name, self.method.vocab_size, self.buckets[-1])
        return tokens

    def parts(self, prompts: Iterable[Prompt], count: int) -> list[list[int]]:
        """Splits prompts among several replicas of this decoder, each with the same options.

        A part is whole plans. So if each replica decodes all prompts with `done` naming the places
        of the others, the rows come out bit for bit as those of one that decodes them all.

        Args:
          prompts: as in a call.
          count: the number of replicas.

        Returns:
          The places of each replica's prompts, increasing; none where there are too few plans.
        """
        check_count("count", count, "give the number of replicas")
        return split(self._plans(self._asked(prompts)[0]), count)

    def describe(self) -> dict[str, Any]:
        """What determines the outputs, as JSON values: two equal ones give equal texts.

        Returns:
          Fingerprints of the models, the method and its settings, the versions, and the kind of
          device.
        """
        mesh = self._main.mesh
        return {
            "models": {name: model.fingerprint for name, model in self._named.items()},
            **self.method.describe(),
            "own_params": self._own_params,
            "stopping": self._stopping,
            "rule": None if self.rule is None else repr(self.rule),
            # In full: what is shown of many numbers leaves some out.
            "strengths": [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(self.rule)],
            **{
                name: None if value is None else np.asarray(value).tolist()
                for name, value in self._sampling.items()
            },
            "max_new_tokens": self.max_new_tokens,
            "batch_size": self.batch_size,
            "buckets": list(self.buckets),
            **({"stop": list(self.stop)} if self.stop else {}),
            "mesh": None if mesh is None else dict(mesh.shape),
            "environment": environment.environment(float32=any_float32(self._named.values())),
        }

    def engine(
        self,
        *,
        prompt_length: int,
        rows: int | None = None,
        refill: int | None = None,
        rule: Rule | None = None,
        log_probs: bool = False,
    ) -> Engine:
        """An engine of this method, for requests that arrive one by one.

        Args:
          prompt_length: the longest prompt in tokens.
          rows: the slots; the batch size by default. Over a mesh they are rounded up.
          refill: how many free slots are filled at once; see `Engine`.
          rule: instead of the Decoder's; each strength one number.
          log_probs: whether the log-probability of each token is kept, as in a call.

        Returns:
          An `Engine`. Its requests hold tokens (see `encode`), and its finished rows too.

        Raises:
          ValueError: as `Engine` does, or for strengths per prompt.
        """
        rule = self.rule if rule is None else checked_rule(self.method, rule)
        values = [*jax.tree.leaves(rule), *self._sampling.values()]
        if any(np.ndim(value) for value in values if value is not None):
            raise ValueError(
                "an engine takes one value of each setting: give strengths, temperature, top_k and "
                "top_p per row with its requests"
            )
        rows = self.batch_size if rows is None else rows
        check_count("rows", rows, "give a whole number")
        check_most(rows, self._most_rows)
        refill = max(1, rows // 4) if refill is None else refill
        check_count("refill", refill, "give a whole number")
        multiple = row_multiple(self.method)
        sizes = {"rows": rows + -rows % multiple, "refill": refill + -refill % multiple}
        sizes |= {"prompt_length": prompt_length, "token_log_probs": log_probs}
        return self._engine(rule, Sampling(**self._sampling), **sizes)

    def _engine(self, rule: Rule | None, sampling: Sampling, **sizes: Any) -> Engine:
        params = self._params if rule is None else self._params._replace(rule=rule)
        sizes |= {"max_new": self.max_new_tokens, "pad_id": self.tokenizer.pad_id}
        return Engine(self.method, params, sampling=sampling, **self._of_engines, **sizes)

    def _asked(
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
        draft_limit: Any = None,
        log_probs: bool = False,
        **unknown: Any,
    ) -> tuple[list[Request], Rule | None, bool]:
        """The requests of a call, its rule, and whether log-probabilities are kept by token."""
        prompts_lib.check_options(unknown, tuple(Decoder._asked.__kwdefaults__ or ()))
        rule = self.rule if rule is None else checked_rule(self.method, rule)
        given = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        numbered = enumerate(prompts_lib.as_list(prompts))
        asked = prompts_lib.requests(
            [self.encode(prompt, f"prompt {i}") for i, prompt in numbered],
            seed=seed,
            ids=ids,
            max_new_tokens=self.max_new_tokens if max_new_tokens is None else max_new_tokens,
            sampling={k: self._sampling[k] if v is None else v for k, v in given.items()},
            draft_limit=draft_limit,
            max_draft=self.method.max_draft,
            rule=rule,
        )
        prompts_lib.check_limits(asked, self.max_new_tokens)
        return asked, rule, log_probs

    def _plans(self, requests: list[Request]) -> list[SlotPlan]:
        return plans_of(self.method, requests, self.buckets, self.batch_size)

    def _rows(
        self,
        asked: tuple[list[Request], Rule | None, bool],
        done: Collection[int],
        progress: bool | None,
        *,
        eager: bool,
    ) -> Iterator[Row]:
        requests, rule, log_probs = asked
        plans = self._plans(requests)
        done = done if are_independent(self.method, requests) else frozenset(done)
        # Requests carry their own strengths: here the engine needs the rule's structure alone.
        one_rule = jax.tree.map(lambda x: x if not np.ndim(x) else x[0], rule)

        def make_engine(plan: SlotPlan) -> Engine:
            # Of the first row; the others say their own.
            sampling = settings_of(requests[int(plan.members[0])])
            sizes = {"rows": plan.rows, "refill": plan.refill, "prompt_length": plan.length}
            return self._engine(one_rule, sampling, token_log_probs=log_probs, **sizes)

        engines = checked_engines(make_engine, plans, done)
        done_rows = finished_rows(engines, requests, plans, done, progress, eager=eager)
        main, stop = self._main, self.stop
        return (to_row(main, i, row, prompt=requests[i].tokens, stop=stop) for i, row in done_rows)
