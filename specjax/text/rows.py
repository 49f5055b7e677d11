"""Many requests through engines of few shapes, and finished rows as text."""

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np
import tqdm

from specjax.text import prompts as prompts_lib
from specjax.text.engine import Engine, Finished
from specjax.text.models import TextModel
from specjax.text.prompts import TURNS, TURNS_AGAIN, SlotPlan
from specjax.text.requests import Request
from specjax.text.results import Row
from specjax.text.stops import cut
from specjax.tokenizers import added_text
from specjax.types import Method


def are_independent(method: Method, requests: list[Request]) -> bool:
    """Whether a row comes out the same without the others, if these keep their slots."""
    longest = (None, method.max_draft)
    return method.independent_rows and all(r.draft_limit in longest for r in requests)


def plans_of(
    method: Method, requests: list[Request], buckets: Sequence[int], batch_size: int
) -> list[SlotPlan]:
    """Which of a call's rows share slots; they follow from the arguments alone."""
    lengths = [len(request.tokens) for request in requests]
    turns = TURNS if are_independent(method, requests) else TURNS_AGAIN
    multiple = row_multiple(method)
    return list(prompts_lib.plan(lengths, buckets, batch_size, multiple, turns))


def split(plans: Sequence[SlotPlan], count: int) -> list[list[int]]:
    """Deals whole plans to `count` parts of much the same number of rows.

    Args:
      plans: which rows share slots.
      count: the number of parts.

    Returns:
      The rows of each part, increasing.
    """
    parts: list[list[int]] = [[] for _ in range(count)]
    # The largest first, each to the part that has least.
    for plan in sorted(plans, key=lambda plan: -len(plan.members)):
        min(parts, key=len).extend(map(int, plan.members))
    return [sorted(part) for part in parts]


def checked_engines(
    make_engine: Callable[[SlotPlan], Engine], plans: Sequence[SlotPlan], done: Collection[int]
) -> Callable[[SlotPlan], Engine]:
    """Makes an engine of each shape at once: what does not fit is refused now, not in its turn.

    Args:
      make_engine: makes the engine of a plan, or raises ValueError.
      plans: which rows share slots.
      done: rows that are not wanted.

    Returns:
      Like `make_engine`; the engines that are made already are used, once.
    """
    wanted = (plan for plan in reversed(plans) if any(int(m) not in done for m in plan.members))
    firsts = {plan[1:]: plan for plan in wanted}.values()
    ready = {int(plan.members[0]): make_engine(plan) for plan in firsts}
    return lambda plan: ready.pop(int(plan.members[0]), None) or make_engine(plan)


def finished_rows(
    make_engine: Callable[[SlotPlan], Engine],
    requests: Sequence[Request],
    plans: Iterable[SlotPlan],
    done: Collection[int],
    progress: bool | None,
    *,
    eager: bool,
) -> Iterator[tuple[int, Finished]]:
    """Decodes plan after plan.

    Args:
      make_engine: makes the engine of a plan.
      requests: what is asked of each row.
      plans: which rows share slots.
      done: rows that are not wanted. Where it is a mapping, their values are the rounds that they
        took, and only their slots are held for so long; else they are decoded beside the others of
        their plan. So these come out as without it. A plan of which nothing is wanted is left out.
      progress: whether to show a progress bar; None: on a terminal, after two seconds.
      eager: whether rows are yielded as they finish, not once all slots have.

    Yields:
      (place of the request, its row).
    """
    steps = done if isinstance(done, Mapping) else {}
    disable = None if progress is None else not progress
    with tqdm.tqdm(
        total=len(requests),
        initial=len(done),
        desc="decoding",
        unit="row",
        disable=disable,
        delay=2.0,
    ) as bar:
        for plan in plans:
            members = [int(member) for member in plan.members]
            if all(member in done for member in members):
                continue
            engine = make_engine(plan)
            for member in members:
                engine.add(requests[member], steps=steps.get(member))
            while engine.unfinished:
                for finished in engine.step(until_empty=not eager):
                    if members[finished.id] not in done:
                        bar.update()
                        yield members[finished.id], finished


def to_row(
    model: TextModel,
    index: int,
    finished: Finished,
    *,
    prompt: np.ndarray,
    stop: Sequence[str] = (),
) -> Row:
    """A finished row as text; warns if it ended by NaN.

    Args:
      model: what has written it.
      index: the prompt's place.
      finished: the row.
      prompt: `[n]` int32, its tokens.
      stop: its text is cut before these.

    Returns:
      The row.
    """
    if finished.error is not None:
        warnings.warn(
            f"row {index}: {finished.error}; its text ends there: look at the weights",
            stacklevel=2,
        )
    info, tokens = finished.info, finished.tokens
    before = prompt.tolist() if model.continues_prompts else ()
    log_p, log_target = (
        None if x is None else x[: len(tokens)] for x in (info.token_log_p, info.token_log_target)
    )
    ended = finished.ended_by == "eos"
    output = tokens[:-1] if ended else tokens
    return Row(
        index=index,
        text=cut(added_text(model.tokenizer, before, output.tolist()), stop),
        tokens=output,
        ended_by=finished.ended_by,
        info=info._replace(token_log_p=None, token_log_target=None),
        seconds=finished.seconds,
        log_probs=log_p,
        log_probs_target=log_target,
        error=finished.error,
        eos_id=int(tokens[-1]) if ended else None,
    )


def check_most(rows: int, most: int | None) -> None:
    """Raises ValueError for more rows than costs were measured of."""
    if most is not None and rows > most:
        told = f"rows must be at most {most}, of which the costs of CostAware were measured, got "
        raise ValueError(f"{told}{rows}: give the Decoder batch_size={rows}")


def row_multiple(method: Method) -> int:
    """Slots and refills are multiples of this: the rows of a mesh are on several devices."""
    return 1 if method.partitioner is None else method.partitioner.row_multiple
