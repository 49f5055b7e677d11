"""From a pair, prompts and a grid of settings to a table of what each should bring.

Files in the output directory:

    screen_config.json   what determines the run
    screen.jsonl         one line for each setting, the best first
    times.json           the times of passes by which latencies are told
"""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from specjax.checks import one_number, whole_number
from specjax.data import Example
from specjax.runs.environment import environment
from specjax.runs.inputs import check_truncate
from specjax.runs.run_directory import RunDirectory
from specjax.text import Decoder, Pair, TextModel
from specjax.text.options import check_decoding
from specjax.text.prompts import BUCKETS
from specjax.text.stops import check_stops
from specjax.tuning.grid import ScreenGrid
from specjax.tuning.screen import Screened, check_settings, screen
from specjax.tuning.settings import Drawn, Setting
from specjax.tuning.texts import (
    PathLike,
    Texts,
    check_drafters,
    digest_of,
    encode_prompts,
    fingerprints,
    load_drafters,
    tell,
    verifier_texts,
)
from specjax.tuning.times import Times, measure_times

CONFIG_NAME, RESULTS_NAME, TIMES_NAME = "screen_config.json", "screen.jsonl", "times.json"
# A figure -> whether more of it is better.
ORDERS = {
    "speedup": True,
    "latency": False,
    "tokens_per_call": True,
    "nats_per_token": False,
    "acceptance": True,
}


def screen_settings(
    make_pair: Callable[[], Pair],
    make_model: Callable[..., TextModel],
    *,
    grid: ScreenGrid,
    prompts: Iterable[Example],
    output_dir: PathLike,
    drafters: Sequence[PathLike] = (),
    screened: int = 64,
    batch_size: int = 1,
    max_new_tokens: int = 128,
    stop: str | Sequence[str] = (),
    buckets: Sequence[int] = BUCKETS,
    truncate: str | None = None,
    with_times: bool = True,
    order: str | None = None,
    max_nats: float | None = None,
    samples: int = 4,
    seed: int = 0,
    chat: bool = False,
    on_start: Callable[[RunDirectory], None] | None = None,
) -> list[dict[str, Any]]:
    """Screens a grid of settings.

    The verifier decodes the prompts once at each temperature; then every setting follows from one
    pass of the models over these texts, see `screen`.

    Args:
      make_pair: gives the verifier and a drafter; called after the arguments have been checked.
      make_model: loads a further drafter from its directory.
      grid: the settings.
      prompts: at least `screened`; a text that is given as the reference is not used.
      output_dir: a new directory, or that of the same run.
      drafters: the directories of further drafters, called `drafter_2` and so on.
      screened: how many prompts the verifier decodes.
      batch_size: B, of the times.
      max_new_tokens: the longest text.
      stop: texts that end a text; see `Decoder`.
      buckets: the lengths that prompts are padded to; see `Decoder`.
      truncate: "end" or "beginning", where prompts that are too long are cut; None refuses them.
      with_times: whether passes are measured, for latencies.
      order: what the best have most or least of, a name of `ORDERS`; by default `speedup`, without
        times `tokens_per_call`.
      max_nats: settings with more nats per token come last; None for any.
      samples: see `screen`.
      seed: of all draws.
      chat: whether each prompt is a user's message for the model's chat template.
      on_start: is called with the `RunDirectory` before the long work, after all checks.

    Returns:
      What `screen.jsonl` has, the best first.

    Raises:
      OSError: the directory cannot be written, or another process works there.
      TypeError: a value of the wrong type.
      ValueError: too few prompts, a setting that cannot be screened, or an `output_dir` that holds
        another run.
    """
    if not isinstance(grid, ScreenGrid):
        raise TypeError(f"grid must be a ScreenGrid(...), got {grid!r}")
    for name, value in (("chat", chat), ("with_times", with_times)):
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")
    check_drafters(drafters)
    screened = whole_number("screened", screened, low=1)
    samples, seed = whole_number("samples", samples, low=1), whole_number("seed", seed, low=0)
    size: dict[str, Any] = {"max_new_tokens": max_new_tokens, "batch_size": batch_size}
    check_decoding({"stop": stop, "buckets": buckets, **size})
    order = _checked_order(order, with_times)
    stop = check_stops(stop)
    check_truncate(truncate)
    if max_nats is not None:
        max_nats = one_number("max_nats", max_nats, low=0.0, dtype=float)
    if jax.process_count() > 1:
        raise ValueError("screen takes one process: others would measure other times")
    asked = [example.inputs for example in prompts][:screened]
    if len(asked) < screened:
        raise ValueError(
            f"there are {len(asked)} prompts, but {screened} are screened: add prompts, or screen "
            "fewer"
        )
    run = RunDirectory(output_dir, config_name=CONFIG_NAME, makes=(RESULTS_NAME, TIMES_NAME))
    with run:
        models = load_drafters(make_pair, make_model, drafters)
        settings = grid.settings(list(models)[1:])
        check_settings(settings, models)
        decoders = {
            one.drawn: Decoder(
                models["verifier"],
                temperature=one.temperature,
                top_k=one.top_k,
                top_p=one.top_p,
                **{"stop": stop, "buckets": buckets, **size},
            )
            for one in settings
            if not one.max_draft
        }
        tokens = encode_prompts(next(iter(decoders.values())), asked, chat=chat, truncate=truncate)
        run.claim(
            {
                "models": fingerprints(models),
                "grid": grid.to_dict(),
                "samples": samples,
                "seed": seed,
                "with_times": with_times,
                **size,
                "tokens": digest_of(tokens),
                **({"stop": stop} if stop else {}),
                "environment": environment(),
            }
        )
        if on_start is not None:
            on_start(run)
        found = screen_prompts(models, settings, decoders, tokens, samples, seed, with_times, run)
        rows = [one.to_dict() for one in sorted(found, key=_best_first(order, max_nats))]
        lines = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
        run.write(RESULTS_NAME, lines.encode())
    return rows


def screen_prompts(
    models: dict[str, TextModel],
    settings: Sequence[Setting],
    decoders: dict[Drawn, Decoder],
    tokens: Sequence[np.ndarray],
    samples: int,
    seed: int,
    with_times: bool,
    run: RunDirectory,
) -> list[Screened]:
    """Screens settings on what the verifier writes; the times of passes go to `times.json`.

    Args:
      models: by name, the verifier first.
      settings: with the verifier alone at each temperature.
      decoders: of the verifier alone, one for each way to draw.
      tokens: of the prompts.
      samples: see `screen`.
      seed: of all draws.
      with_times: whether passes are measured.
      run: the directory, which may write `TIMES_NAME`.

    Returns:
      One for each setting, in order.
    """
    texts: dict[Drawn, Texts] = {}
    for drawn, decoder in decoders.items():
        tell(f"the verifier decodes {len(tokens)} prompts, T={drawn[0]:g} ...")
        texts[drawn] = verifier_texts(models["verifier"], decoder, tokens, seed)
    times: Times | None = None
    if with_times:
        tell("the times of passes ...")
        longest = max(setting.max_draft for setting in settings)
        first = next(iter(decoders.values()))
        times = measure_times(list(models.values()), first, tokens, longest)
        told = json.dumps(times.told(list(models)), indent=1) + "\n"
        run.write(TIMES_NAME, told.encode())
    begin = time.perf_counter()
    found = screen(models, texts, settings, times=times, samples=samples, seed=seed, tell=tell)
    tell(f"{len(found)} settings were screened in {time.perf_counter() - begin:.1f} seconds")
    return found


def _checked_order(order: Any, with_times: bool) -> str:
    if order is None:
        return "speedup" if with_times else "tokens_per_call"
    if not isinstance(order, str) or order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
    if order in ("speedup", "latency") and not with_times:
        raise ValueError(f"order={order!r} needs times: leave with_times=True, or order otherwise")
    return order


def _best_first(
    order: str, max_nats: float | None
) -> Callable[[Screened], tuple[bool, bool, float]]:
    def key(one: Screened) -> tuple[bool, bool, float]:
        value = getattr(one, order)
        too_far = max_nats is not None and one.nats_per_token > max_nats
        return too_far, bool(np.isnan(value)), -value if ORDERS[order] else value

    return key
