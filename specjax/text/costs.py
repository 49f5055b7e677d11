"""Measures what a pass of each model costs, from runs of the decoding loop itself.

Source: SpecDec++ (arXiv 2405.19715), equation 2.1 and section 4.2: the times of passes are found by
linear regression of runs' times on their counts of passes.
"""

import dataclasses
import json
import time
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.checks import check_count
from specjax.decoding import RoundParams, Speculative
from specjax.drafting import Costs, NeuralDrafter, NeuralDrafterParams
from specjax.rules import Lossless
from specjax.runs.environment import environment, machine
from specjax.text.models import Pair
from specjax.types import DecodeState, Method, Params, PromptBatch

# A short and a long run tell the cost of a round from that of a call.
_ROUNDS = (2, 10)
_ATTEMPTS = 3
# The width of a pass in a program with one width, whose rounds cost something else.
WIDE = 0


class Run(NamedTuple):
    """A run of the loop, all of whose verifier's passes had one width.

    Attributes:
      draft: how many passes the drafter made; each serves the whole batch.
      verifier: how many the verifier made.
      width: how many tokens each of the verifier's passes read; passes of equal width have one
        cost.
      seconds: the time of the run.
    """

    draft: int
    verifier: int
    width: int
    seconds: float


class Fit(NamedTuple):
    """What the passes of runs cost, in seconds.

    Attributes:
      draft: a pass of the drafter.
      verifier: width -> a pass of the verifier, with the rest of its round.
      call: what a run takes besides, however long it is.
      r_squared: 1 - (sum of squared residuals) / (sum of squares about the mean).
    """

    draft: float
    verifier: dict[int, float]
    call: float
    r_squared: float

    def seconds(self, run: Run) -> float:
        """The predicted time of a run."""
        return self.call + self.draft * run.draft + self.verifier[run.width] * run.verifier


def fit(runs: Sequence[Run]) -> Fit:
    """Least squares with times of at least 0: one for the drafter, one for each width, one a call.

    Args:
      runs: at least two, which differ in their counts of passes.

    Returns:
      The times.
    """
    # Not imported where nothing is fitted: it takes a while.
    from scipy.optimize import nnls

    widths = sorted({run.width for run in runs})
    of_width = [[run.verifier * (run.width == width) for width in widths] for run in runs]
    design = np.array([[run.draft, *counts, 1] for run, counts in zip(runs, of_width, strict=True)])
    seconds = np.array([run.seconds for run in runs])
    found = nnls(design.astype(np.float64), seconds)[0]
    residual = np.sum((design @ found - seconds) ** 2)
    spread = np.sum((seconds - seconds.mean()) ** 2)
    draft, *verifier, call = found.tolist()
    r_squared = float(1 - residual / spread) if spread > 0 else 1.0
    return Fit(draft, dict(zip(widths, verifier, strict=True)), call, r_squared)


def count_passes(
    method: Method, params: Params, state: DecodeState, rounds: int | None = None
) -> list[dict[str, int]]:
    """Counts the passes of one batch; each serves all its rows.

    Args:
      method: the method.
      params: its parameters.
      state: the rows; donated.
      rounds: how many rounds at most; None until all rows are finished.

    Returns:
      For each round: a model's name -> its passes up to the end of that round.
    """
    passes = dict.fromkeys(method.model_names, 0)
    before = jax.device_get(state.info.calls)
    counted: list[dict[str, int]] = []
    # Step by step: a row counts the pass after a whole block only if the block was its own.
    while not np.all(state.finished) and len(counted) != rounds:
        state = method.run(params, state, 1)
        after = jax.device_get(state.info.calls)
        for name in passes:
            passes[name] += int(np.max(after[name] - before[name]))
        before = after
        counted.append(dict(passes))
    return counted


def draft_lengths(widths: Sequence[int]) -> list[int]:
    """The shortest and the longest draft that each of these widths of the verifier holds."""
    shortest = [0, *widths[:-1]]
    return sorted({*shortest, *(width - 1 for width in widths)})


def measure_costs(
    pair: Pair,
    rows: Sequence[int],
    widths: Sequence[int],
    *,
    prompt_length: int = 32,
    seconds: float = 1.0,
) -> Costs:
    """Measures a pair on this machine with a few rounds, for the start of a run.

    `specjax bench cost` measures longer, on real prompts, and says how well the costs predict.

    Args:
      pair: the models.
      rows: the batch sizes, increasing.
      widths: how many tokens a pass of the verifier may read, increasing; the last is G + 1, at
        least 2 (`decoding.Round.verifier_widths`).
      prompt_length: P, the tokens of the invented prompts.
      seconds: how long a batch size is measured, without compiling; each run is made three times
        at least. Where other work disturbs it so much that a pass seems to take no time, it is
        measured up to twice more, each time for longer.

    Returns:
      The costs.

    Raises:
      ValueError: if a size is wrong; if other work disturbs the measurement so much that a pass
        seems to take no time; or if several processes decode together: each would find other
        costs, and they must agree.
    """
    check_count("prompt_length", prompt_length, "give the usual length of the prompts")
    for size in rows:
        check_count("rows", size, "give batch sizes")
    if jax.process_count() > 1:
        raise ValueError(
            "costs cannot be measured by several processes, which must agree on them: measure them "
            "on one, with specjax bench cost --output FILE, and read that file"
        )
    widths = tuple(widths)
    if not widths or widths[-1] < 2:
        raise ValueError(f"widths must end with G + 1, at least 2, got {widths}: draft something")
    # Without tokens that end a row, all rows make all rounds.
    method = Speculative(
        pair.verifier.model,
        NeuralDrafter(pair.drafter.model, widths[-1] - 1),
        widths=widths,
        partitioner=pair.verifier.partitioner,
    )
    small = NeuralDrafterParams(pair.drafter.prepared)
    params = RoundParams(pair.verifier.prepared, small, Lossless())
    methods = [method]
    if len(widths) > 1:
        # Of one width, also for short drafts: they tell the drafter's time from the verifier's.
        methods.append(dataclasses.replace(method, widths=widths[-1:]))
    fits = [_steady_fit(methods, params, batch, prompt_length, seconds) for batch in rows]
    return as_costs(fits, rows, widths, pair.fingerprint)


def _steady_fit(
    methods: Sequence[Speculative],
    params: RoundParams,
    rows: int,
    prompt_length: int,
    seconds: float,
) -> Fit:
    """Measures longer, up to a point, while other work hides what a pass takes."""
    for attempt in range(_ATTEMPTS):
        found = fit(_runs(methods, params, rows, prompt_length, seconds * 3**attempt))
        if min(found.draft, *found.verifier.values()) > 0:
            break
    return found


def as_costs(fits: Sequence[Fit], rows: Sequence[int], widths: Sequence[int], pair: str) -> Costs:
    """The costs of several batch sizes, as policies read them; without the cost of a call.

    Args:
      fits: for each batch size what its passes cost.
      rows: the batch sizes.
      widths: the widths of the verifier's passes.
      pair: see `Pair.fingerprint`.

    Returns:
      The costs. A drafter whose time is lost in the verifier's noise costs 0.

    Raises:
      ValueError: if a pass of the verifier seems to take no time.
    """
    for batch, found in zip(rows, fits, strict=True):
        for width in widths:
            if found.verifier[width] <= 0:
                raise ValueError(
                    f"the verifier's pass of {width} tokens and {batch} rows seems to take no "
                    "time: other work has disturbed the measurement; repeat it on a quieter machine"
                )
    return Costs(
        rows=tuple(rows),
        widths=tuple(widths),
        draft=tuple(found.draft for found in fits),
        verifier=tuple(tuple(found.verifier[width] for width in widths) for found in fits),
        machine=machine(),
        pair=pair,
    )


def costs_file(costs: Costs, **more: Any) -> bytes:
    """The content of a file that `drafting.read_costs` reads.

    Args:
      costs: the costs.
      **more: JSON values that the file tells besides.
    """
    values = {**more, "environment": environment(), **costs.to_dict()}
    return (json.dumps(values, indent=1, allow_nan=False) + "\n").encode()


def _runs(
    methods: Sequence[Speculative],
    params: RoundParams,
    rows: int,
    prompt_length: int,
    seconds: float,
) -> list[Run]:
    """Runs of both lengths at every draft length; each with the least of its times."""
    method = methods[0]
    widths = method.round.verifier_widths
    max_new = _ROUNDS[-1] * widths[-1]
    words = np.arange(rows * prompt_length, dtype=np.int32).reshape(rows, prompt_length)

    def start(method: Speculative, limit: int) -> DecodeState:
        prompts = PromptBatch(
            inputs=words % method.vocab_size,
            input_lengths=np.full((rows,), prompt_length, np.int32),
            ids=np.arange(rows, dtype=np.int32),
            limits=np.full((rows,), max_new, np.int32),
            draft_limits=np.full((rows,), limit, np.int32),
        )
        return jax.block_until_ready(method.init(params, prompts, max_new=max_new))

    kinds = [(method, limit) for limit in draft_lengths(widths)]
    kinds += [(wide, limit) for wide in methods[1:] for limit in (0, widths[-1] - 1)]
    cases = [(*kind, rounds) for kind in kinds for rounds in _ROUNDS]
    counts = {kind: count_passes(kind[0], params, start(*kind), _ROUNDS[-1]) for kind in kinds}
    least = dict.fromkeys(cases, float("inf"))
    begin, turns = time.perf_counter(), 0
    while turns < 3 or time.perf_counter() - begin < seconds:
        for case in cases:
            method, limit, rounds = case
            state = start(method, limit)
            from_here = time.perf_counter()
            jax.block_until_ready(method.run(params, state, rounds))
            least[case] = min(least[case], time.perf_counter() - from_here)
        turns += 1
    runs = []
    for (method, limit, rounds), spent in least.items():
        counted = counts[method, limit][min(rounds, len(counts[method, limit])) - 1]
        width = WIDE if method is not methods[0] else next(n for n in widths if n > limit)
        runs.append(Run(counted[method.model_names[1]], counted["verifier"], width, spent))
    return runs


def check_costs(costs: Costs, pair: Pair, rows: int, max_draft: int) -> None:
    """Makes sure that costs are those of a pair and of its sizes; warns of another machine.

    Args:
      costs: what is to be weighed.
      pair: the models.
      rows: the batch size.
      max_draft: the longest draft; a warning tells where the costs are those of shorter ones.

    Raises:
      ValueError: if they are of another pair, or of smaller or larger batches alone.
    """
    how = "measure them with `specjax bench cost --output FILE`"
    if costs.pair and costs.pair != pair.fingerprint:
        raise ValueError(
            f"CostAware: the costs are those of another pair ({costs.pair}; this one is "
            f"{pair.fingerprint}): {how} for this pair"
        )
    if rows > costs.rows[-1]:
        raise ValueError(
            f"CostAware: the costs were measured with at most {costs.rows[-1]} rows, but the batch "
            f"has {rows}: {how} and --rows {' '.join(map(str, (*costs.rows, rows)))}"
        )
    if rows < costs.rows[0]:
        raise ValueError(
            f"CostAware: the costs were measured with at least {costs.rows[0]} rows, but the batch "
            f"has {rows}: {how} and --rows {' '.join(map(str, (rows, *costs.rows)))}"
        )
    if costs.widths[-1] <= max_draft:
        warnings.warn(
            f"CostAware: the costs were measured with drafts of up to {costs.widths[-1] - 1} "
            f"tokens, max_draft is {max_draft}: the times of wider passes are guessed; {how} and "
            f"--max-draft {max_draft}",
            stacklevel=2,
        )
    here = machine()
    if costs.machine and costs.machine != here:
        warnings.warn(
            f"CostAware: the costs were measured on another machine ({costs.machine}; this one is "
            f"{here}): drafts may end too early or late; {how} here",
            stacklevel=2,
        )
