"""Measures the cost of a pass of each model, from runs of the decoding loop.

Source: SpecDec++ (arXiv 2405.19715), equation 2.1 and section 4.2: linear regression of the runs'
times on their numbers of passes.

Axes: B rows, P prompt length.
"""

import dataclasses
import itertools
import json
import math
import time
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import tqdm

from specjax.decoding import Autoregressive, Method, MethodParams, Speculative
from specjax.drafting import Chain, Costs
from specjax.environment import environment, machine
from specjax.errors import UserError
from specjax.rules import Lossless
from specjax.text.drafts import DecoderModels
from specjax.text.text_models import Pair
from specjax.types import DecodeState, Params, PromptBatch

# A short and a long run separate the cost of a round from the cost of a call.
_ROUNDS = (2, 10)
_ATTEMPTS = 3
# The width of passes in a program with a single width, whose rounds have another cost.
WIDE = 0


class Run(NamedTuple):
    """The numbers of passes in a run of the loop, for all rows together, and its time.

    All passes of the verifier had the same width in tokens.
    """

    draft: int
    verifier: int
    width: int
    seconds: float


class Fit(NamedTuple):
    """The costs of passes, in seconds.

    Attributes:
      draft: a pass of the drafter.
      verifier: width -> a pass of the verifier, with the rest of its round.
      call: the constant time of a run.
      r_squared: 1 - (sum of squared residuals) / (sum of squares about the mean).
    """

    draft: float
    verifier: dict[int, float]
    call: float
    r_squared: float

    def seconds(self, run: Run) -> float:
        return self.call + self.draft * run.draft + self.verifier[run.width] * run.verifier


def fit(runs: Sequence[Run]) -> Fit:
    """Fits nonnegative times by least squares: of the drafter, of each width, and of a call.

    There are at least two runs, with different numbers of passes.
    """
    # Imported here because it takes long.
    from scipy.optimize import nnls

    widths = sorted({run.width for run in runs})
    of_width = [[run.verifier * (run.width == width) for width in widths] for run in runs]
    design = np.array([[run.draft, *counts, 1] for run, counts in zip(runs, of_width, strict=True)])
    seconds = np.array([run.seconds for run in runs])
    times = nnls(design.astype(np.float64), seconds)[0]
    residual = np.sum((design @ times - seconds) ** 2)
    spread = np.sum((seconds - seconds.mean()) ** 2)
    draft, *verifier, call = times.tolist()
    r_squared = float(1 - residual / spread) if spread > 0 else 1.0
    return Fit(draft, dict(zip(widths, verifier, strict=True)), call, r_squared)


def count_passes(
    method: Method, params: Params, state: DecodeState, rounds: int | None = None
) -> list[dict[str, int]]:
    """Counts the passes of a batch; each pass serves all rows. The state is donated.

    `rounds` is the most rounds; None: until all rows are finished.

    Returns:
      For each round: a model's name -> its passes up to the end of that round.
    """
    passes = dict.fromkeys(method.model_names, 0)
    before = jax.device_get(state.info.calls)
    counted: list[dict[str, int]] = []
    # Step by step: only rows with a whole accepted block count the drafter's extra pass.
    while not np.all(state.finished) and len(counted) != rounds:
        state = method.run(params, state, 1)
        after = jax.device_get(state.info.calls)
        for name in passes:
            passes[name] += int(np.max(after[name] - before[name]))
        before = after
        counted.append(dict(passes))
    return counted


class LoopCase(NamedTuple):
    """A way to run the loop in which all passes of the verifier have the same width.

    The width is `WIDE` in a program with a single width. `limit` is the length of all drafts; None
    without drafts.
    """

    method: Method
    params: Params
    width: int
    limit: int | None = None


def measure_costs(
    pair: Pair,
    rows: Sequence[int],
    widths: Sequence[int],
    *,
    prompt_length: int = 32,
    seconds: float = 1.0,
    with_alone: bool = False,
    block_apart: bool = False,
    progress: bool | None = None,
) -> Costs:
    """Measures a pair on this machine with a few rounds.

    `specjax bench --costs` measures longer.

    Args:
      pair: the models.
      rows: the batch sizes, increasing.
      widths: the numbers of tokens in the verifier's passes, increasing; the last is G + 1, at
        least 2 (`decoding.Round.verifier_widths`).
      prompt_length: P, the tokens of artificial prompts.
      seconds: the time to measure a batch size, without compilation; up to twice more, and longer,
        if noise makes the time of a pass 0.
      with_alone: whether to measure `Costs.alone` too, as long.
      block_apart: whether the pass of a draft head that drafts a block at once stands in
        `Costs.draft` and not in `Costs.verifier`: for figures, because policies expect the other.
      progress: whether to show a progress bar; by default on a terminal, after two seconds.

    Raises:
      UserError: the time of a pass is 0 because of noise; or several processes decode together,
        which must share their costs.
    """
    if jax.process_count() > 1:
        raise UserError(
            "several processes must share the same costs: measure them in a single process with "
            "specjax bench --costs FILE, and read that file"
        )
    widths = tuple(widths)
    assert widths[-1] >= 2, widths
    cases, main = _of_review(pair, widths), pair.verifier
    single = Autoregressive(main.model, partitioner=main.partitioner)
    alone = [LoopCase(single, MethodParams(main.prepared), 1)]
    batches = rows if with_alone else ()
    disable = None if progress is None else not progress
    total = len(rows) * len(cases) + len(batches)  # compilation takes most of the time
    shown: Any = {"desc": "costs of passes", "unit": "case", "disable": disable, "delay": 2.0}
    with tqdm.tqdm(total=total, **shown) as bar:
        fits = [_steady_fit(cases, batch, prompt_length, seconds, bar) for batch in rows]
        steps = [_steady_fit(alone, batch, prompt_length, seconds, bar) for batch in batches]
    method: Any = cases[0].method
    drafter = method.drafter
    if drafter.draft_passes < drafter.max_draft and not block_apart:
        fits = [_at_once(fit) for fit in fits]
    costs = as_costs(fits, rows, widths, pair.fingerprint)
    for batch, step in zip(batches, steps, strict=True):
        _check_took_time(step, (1,), batch, f"a step of {main.name}")
    return dataclasses.replace(costs, alone=tuple(step.verifier[1] for step in steps))


def _at_once(fit: Fit) -> Fit:
    """The costs if a drafter's pass makes a whole draft: a part of the round that checks it."""
    verifier = {width: time + fit.draft * (width > 1) for width, time in fit.verifier.items()}
    return fit._replace(draft=0.0, verifier=verifier)


def draft_lengths(widths: Sequence[int]) -> list[int]:
    """Returns the shortest and the longest draft for each width of the verifier's passes."""
    shortest = [0, *widths[:-1]]
    return sorted({*shortest, *(width - 1 for width in widths)})


def as_costs(fits: Sequence[Fit], rows: Sequence[int], widths: Sequence[int], pair: str) -> Costs:
    """Returns the costs of several batch sizes for stopping policies, without the cost of a call.

    Costs may be 0 for the drafter, because of noise. A pass does not cost more than a wider pass.
    `pair` is `Pair.fingerprint`.
    """
    verifier = []
    for batch, costs in zip(rows, fits, strict=True):
        _check_took_time(costs, widths, batch, "the verifier's pass")
        times = [costs.verifier[width] for width in widths]
        verifier.append(tuple(np.minimum.accumulate(times[::-1])[::-1].tolist()))
    return Costs(
        rows=tuple(rows),
        widths=tuple(widths),
        draft=tuple(costs.draft for costs in fits),
        verifier=tuple(verifier),
        machine=machine(),
        pair=pair,
    )


def costs_file(costs: Costs, **more: Any) -> bytes:
    """Returns the content of a file for `drafting.read_costs`, with `more` JSON values."""
    values = {**more, "environment": environment(), **costs.to_dict()}
    return (json.dumps(values, indent=1, allow_nan=False) + "\n").encode()


def _check_took_time(costs: Fit, widths: Sequence[int], rows: int, what: str) -> None:
    for width in widths:
        if costs.verifier[width] <= 0:
            raise UserError(
                f"the measured time of {what} of {width} tokens and {rows} rows is 0: other work "
                "disturbed the measurement; repeat it on a machine without other work"
            )


def _of_review(pair: Pair, widths: Sequence[int]) -> list[LoopCase]:
    """Cases for the costs of rounds."""
    longest, main = widths[-1] - 1, pair.verifier
    drafts, drafter_params = Chain(max_draft=longest).bind(DecoderModels(pair.named))
    params = MethodParams(main.prepared, drafter_params, Lossless())
    # Without end-of-sequence tokens all rows make all rounds.
    several = Speculative(main.model, drafts, widths=tuple(widths), partitioner=main.partitioner)
    cases = [
        LoopCase(several, params, next(width for width in widths if width > limit), limit)
        for limit in draft_lengths(widths)
    ]
    if len(widths) > 1:
        # A single width also for short drafts separates the drafter's time from the verifier's.
        wide = dataclasses.replace(several, widths=tuple(widths[-1:]))
        cases += [LoopCase(wide, params, WIDE, limit) for limit in (0, longest)]
    return cases


def _steady_fit(
    cases: Sequence[LoopCase], rows: int, prompt_length: int, seconds: float, bar: Any
) -> Fit:
    for attempt in range(_ATTEMPTS):
        runs = _runs(cases, rows, prompt_length, seconds * 3**attempt, bar)
        costs = fit(runs)
        drafts = [costs.draft] * any(run.draft for run in runs)
        if min([*drafts, *costs.verifier.values()]) > 0:
            break
    return costs


def _runs(
    cases: Sequence[LoopCase], rows: int, prompt_length: int, seconds: float, bar: Any
) -> list[Run]:
    """Runs of both lengths of each case, with their least times."""
    max_new = _ROUNDS[-1] * (cases[0].method.max_draft + 1)
    words = np.arange(rows * prompt_length, dtype=np.int32).reshape(rows, prompt_length)

    def start(case: LoopCase) -> DecodeState:
        limits = None if case.limit is None else np.full((rows,), case.limit, np.int32)
        prompts = PromptBatch(
            inputs=words % case.method.vocab_size,
            input_lengths=np.full((rows,), prompt_length, np.int32),
            ids=np.arange(rows, dtype=np.int32),
            limits=np.full((rows,), max_new, np.int32),
            draft_limits=limits,
        )
        return jax.block_until_ready(case.method.init(case.params, prompts, max_new=max_new))

    counts = []
    for case in cases:  # compiles the programs
        counts.append(count_passes(*case[:2], start(case), _ROUNDS[-1]))
        bar.update(bar.n < bar.total)
    least = dict.fromkeys(itertools.product(range(len(cases)), _ROUNDS), math.inf)
    begin, turns = time.perf_counter(), 0
    while turns < 3 or time.perf_counter() - begin < seconds:
        for i, rounds in least:
            case = cases[i]
            state = start(case)
            before = time.perf_counter()
            jax.block_until_ready(case.method.run(case.params, state, rounds))
            least[i, rounds] = min(least[i, rounds], time.perf_counter() - before)
        turns += 1
    runs = []
    for (i, rounds), spent in least.items():
        method, counted = cases[i].method, counts[i][min(rounds, len(counts[i])) - 1]
        reviewer, *drafters = (counted[name] for name in method.model_names)
        runs.append(Run(sum(drafters), reviewer, cases[i].width, spent))
    return runs


def check_costs(costs: Costs, pair: Pair, rows: int, max_draft: int) -> None:
    """Checks that costs belong to a pair and to the sizes; warns of another machine."""
    how = "measure them with `specjax bench --costs FILE`"
    if costs.pair and costs.pair != pair.fingerprint:
        raise UserError(
            f"the costs belong to another pair ({costs.pair}, not {pair.fingerprint}): "
            f"{how} for this pair"
        )
    if not costs.rows[0] <= rows <= costs.rows[-1]:
        sizes = " ".join(map(str, sorted((*costs.rows, rows))))
        raise UserError(
            f"the costs are those of {costs.rows[0]} to {costs.rows[-1]} rows, but "
            f"the batch has {rows}: {how} and --rows {sizes}"
        )
    if costs.widths[-1] <= max_draft:
        warnings.warn(
            f"the costs were measured with drafts of up to {costs.widths[-1] - 1} "
            f"tokens, but max_draft is {max_draft}, so the times of wider passes are extrapolated: "
            f"{how} and --drafts {max_draft}",
            stacklevel=2,
        )
    here = machine()
    if costs.machine and costs.machine != here:
        warnings.warn(
            f"the costs were measured on another machine ({costs.machine}, not {here}), "
            f"so drafts may be too short or too long: {how} here",
            stacklevel=2,
        )
