"""From a pair, texts with references and a demand to a way to decode.

Files in the output directory:

    tune_config.json   what determines the run
    screen.jsonl       what is expected of each setting
    times.json         the times of passes by which latencies are expected
    candidates.json    the settings that are measured
    measured/          their predictions and times, text by text
    results.json       the rounds, the answer, and the figures of the held-out texts
    tuned.gin          what was chosen, for `specjax infer --gin_file=tuned.gin`
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specjax.checks import check_part, one_number, whole_number
from specjax.data import FewShot
from specjax.runs.environment import environment
from specjax.runs.inputs import check_truncate, tokens_of
from specjax.runs.run_directory import RunDirectory
from specjax.sweeping.measurement import Bench, Measuring
from specjax.sweeping.scores import RELATIVE, Scores, over
from specjax.sweeping.texts import Texts as References
from specjax.text import Decoder, Pair, TextModel
from specjax.text.options import check_decoding
from specjax.tuning import evidence
from specjax.tuning.demand import DIFFERENCE, LATENCY, NATS, Demand
from specjax.tuning.evidence import Evidence, parts_of, timed_of
from specjax.tuning.gin_file import portable_names, prompt_names, setting_text, task_of_all
from specjax.tuning.grid import ScreenGrid
from specjax.tuning.halving import Round, halve, promising
from specjax.tuning.judging import Choice, Judge, verdict
from specjax.tuning.screen import Screened, check_settings
from specjax.tuning.screener import TIMES_NAME, screen_prompts
from specjax.tuning.settings import Setting
from specjax.tuning.texts import (
    PathLike,
    check_drafters,
    digest_of,
    fingerprints,
    load_drafters,
    tell,
)

CONFIG_NAME, RESULTS_NAME, CHOSEN_NAME = "tune_config.json", "results.json", "tuned.gin"
SCREENED_NAME, CANDIDATES_NAME = "screen.jsonl", "candidates.json"
_MAKES = (RESULTS_NAME, CHOSEN_NAME, SCREENED_NAME, CANDIDATES_NAME, TIMES_NAME, evidence.NAME)
# Of each setting in `results.json`.
_TOLD = (RELATIVE, LATENCY, NATS, "tokens_per_verifier_call", "output_length")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """What is looked for, and how long.

    Attributes:
      demand: see `Demand.of`.
      held_out: the share of the texts that the choice does not see.
      confidence: how likely what is chosen meets the demand on these.
      screened: how many of the other texts the verifier decodes for screening.
      candidates: how many settings are measured.
      rounds: of successive halving; each looks at twice as many texts as the one before.
      samples: see `screen`.
      seed: of screening, and of which texts are held out.

    Raises:
      TypeError: for a value of the wrong type.
      ValueError: for one out of range, or a demand that cannot be read.
    """

    demand: Demand | str
    held_out: float = 0.5
    confidence: float = 0.9
    screened: int = 64
    candidates: int = 12
    rounds: int = 3
    samples: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "demand", Demand.of(self.demand))
        span: dict[str, Any] = {"open_low": True, "high": 1.0, "open_high": True, "dtype": float}
        put(self, "held_out", one_number("held_out", self.held_out, low=0.0, **span))
        put(self, "confidence", one_number("confidence", self.confidence, low=0.5, **span))
        for name in ("screened", "candidates", "rounds", "samples"):
            put(self, name, whole_number(name, getattr(self, name), low=1))
        put(self, "seed", whole_number("seed", self.seed, low=0))

    @property
    def asked(self) -> Demand:
        """The demand as it was read."""
        assert isinstance(self.demand, Demand)
        return self.demand

    def ends(self, rows: int, measuring: Measuring) -> list[int]:
        """Where each round's texts end, of so many; the held-out ones follow.

        Raises:
          ValueError: there are too few.
        """
        seen = rows - round(rows * self.held_out)
        ends = parts_of(seen, self.rounds)
        least = 2 * measuring.latency_batch_size
        if min(ends[0], rows - seen) < least or self.screened > seen:
            needed = f"{least} in the first of {self.rounds} rounds, and {self.screened} screened"
            raise ValueError(
                f"there are {rows} texts, of which {rows - seen} are held out: too few for "
                f"{needed}; add texts, or lower rounds, screened or latency_batch_size"
            )
        return ends

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return dataclasses.asdict(self) | {"demand": self.asked.described()}


def tune(
    make_pair: Callable[[], Pair],
    make_model: Callable[..., TextModel],
    *,
    search: Search,
    grid: ScreenGrid,
    texts: References,
    measuring: Measuring,
    output_dir: PathLike,
    drafters: Sequence[PathLike] = (),
    decoding: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    chat: bool = False,
    truncate: str | None = None,
    task: FewShot | None = None,
    allow_other_environment: bool = False,
    on_start: Callable[[RunDirectory], None] | None = None,
) -> dict[str, Any]:
    """Finds the fastest way to decode that meets a demand.

    The verifier decodes some of the texts, and all settings of the grid are screened on these. The
    promising ones are measured by successive halving, beside the verifier alone. What is chosen
    must meet the demand by a margin (see `judging`), and is then measured on the held-out texts.
    A run that was stopped goes on with what it has measured.

    Args:
      make_pair: gives the verifier and a drafter; called after the arguments have been checked.
      make_model: loads a further drafter from its directory.
      search: what is looked for.
      grid: the settings, of one temperature.
      texts: with references.
      measuring: how settings are measured; of the texts of all rounds, and again of the held-out
        ones, `latency_texts` are timed.
      output_dir: a new directory, or that of the same run.
      drafters: the directories of further drafters, called `drafter_2` and so on.
      decoding: further options of all decoders, such as `max_new_tokens`.
      settings: other names of `runs/infer.gin` and their values, for the gin file.
      chat: whether each text is a user's message for the model's chat template.
      truncate: where texts that are too long are cut: "end" or "beginning"; None refuses them.
      task: what has made the texts of records, for the gin file.
      allow_other_environment: continue a run that was begun on another device or with other
        versions.
      on_start: is called with the `RunDirectory` before the long work, after all checks.

    Returns:
      What `results.json` holds.

    Raises:
      OSError: the directory cannot be written, or another process works there.
      TypeError: a value of the wrong type.
      ValueError: too few texts, a setting that cannot be screened, or an `output_dir` that holds
        another run.
    """
    if not isinstance(search, Search):
        raise TypeError(f"search must be a Search(...), got {search!r}")
    check_part("grid", grid, ("settings", "to_dict"), "ScreenGrid()")
    check_part("measuring", measuring, ("seeds_at",), "Measuring()")
    if len(grid.temperatures) != 1:
        raise ValueError(f"grid must have one temperature, got {grid.temperatures}")
    if not isinstance(chat, bool):
        raise TypeError(f"chat must be True or False, got {chat!r}")
    check_truncate(truncate)
    options = dict(decoding or {})
    check_decoding(options)
    check_drafters(drafters)
    if jax.process_count() > 1:
        raise ValueError("tune takes one process: others would take other times")
    ends = search.ends(len(texts.examples), measuring)
    measuring.check_texts(texts.references, texts.problems)
    with RunDirectory(output_dir, config_name=CONFIG_NAME, makes=_MAKES) as run:
        models = load_drafters(make_pair, make_model, drafters)
        everything = grid.settings(list(models)[1:])
        check_settings(everything, models)
        bench = _bench(models, everything[0], options, texts, measuring, search, chat, truncate)
        run.claim(
            {
                "models": fingerprints(models),
                "search": search.to_dict(),
                "grid": grid.to_dict(),
                "measuring": measuring.describe(),
                "decoding": options,
                "tokens": digest_of(bench.prompts),
                "references": _digest(bench.references),
                **({} if bench.problems is None else {"problems": _digest(bench.problems)}),
                "environment": environment(),
            },
            allow_other_environment=allow_other_environment,
        )
        if on_start is not None:
            on_start(run)
        taken = _candidates(models, everything, options, bench, search, run)
        timed = timed_of(ends, len(bench.examples), measuring)
        found = Evidence(models, options, bench, ends, timed, run)
        results, choice = _searched(found, everything[0], taken, search, measuring)
        results |= {"screened": len(everything), "gin_file": None}
        if choice.setting is not None:
            paths = {name: model.name for name, model in models.items()}
            given = {name.upper(): value for name, value in options.items()} | {
                "BATCH_SIZE": measuring.latency_batch_size,
                **portable_names(settings or {}),
                **prompt_names(chat, truncate, task_of_all(task)),
            }
            file = run.path / CHOSEN_NAME
            told = setting_text(choice.setting, choice.why, paths, given, file)
            results["gin_file"] = str(run.write(CHOSEN_NAME, told.encode()))
        text = json.dumps(results, indent=1, allow_nan=False) + "\n"
        run.write(RESULTS_NAME, text.encode())
    return results


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def _bench(
    models: Mapping[str, TextModel],
    alone: Setting,
    options: Mapping[str, Any],
    texts: References,
    measuring: Measuring,
    search: Search,
    chat: bool,
    truncate: str | None,
) -> Bench:
    """All texts in the order of the run: those of the rounds, then the held-out ones."""
    order = np.random.default_rng(search.seed).permutation(len(texts.examples))
    examples = [texts.examples[i] for i in order]
    decoder = alone.decoder(models, batch_size=measuring.latency_batch_size, **options)
    tokens = [
        tokens_of(decoder, e.inputs, f"text {e.id}", chat=chat, truncate=truncate) for e in examples
    ]
    problems = None if texts.problems is None else [texts.problems[i] for i in order]
    return Bench(examples, tokens, [texts.references[i] for i in order], measuring, problems)


def _candidates(
    models: dict[str, TextModel],
    everything: Sequence[Setting],
    options: Mapping[str, Any],
    bench: Bench,
    search: Search,
    run: RunDirectory,
) -> list[Setting]:
    """What is measured; read where an earlier start has screened, for times are never the same."""
    path = run.path / CANDIDATES_NAME
    if path.exists():
        try:
            return [Setting(**values) for values in json.loads(path.read_bytes())]
        except (ValueError, TypeError):
            raise ValueError(f"{path} was changed: delete it, and run the command again") from None
    alone = everything[0]
    decoder: Decoder = alone.decoder(
        models, batch_size=bench.measuring.latency_batch_size, **options
    )
    screened: list[Screened] = screen_prompts(
        models,
        everything,
        {alone.drawn: decoder},
        bench.prompts[: search.screened],
        search.samples,
        search.seed,
        True,
        run,
    )
    lines = "".join(json.dumps(one.to_dict(), allow_nan=False) + "\n" for one in screened)
    run.write(SCREENED_NAME, lines.encode())
    taken = promising(screened, search.asked, search.candidates, bench.measuring.latency_batch_size)
    run.write(CANDIDATES_NAME, json.dumps([one.to_dict() for one in taken], indent=1).encode())
    run.keep()
    return taken


def _searched(
    found: Evidence,
    alone: Setting,
    taken: Sequence[Setting],
    search: Search,
    measuring: Measuring,
) -> tuple[dict[str, Any], Choice]:
    """What was measured and chosen."""
    quality = measuring.metrics[0]
    *texts, last = found.texts()
    judge = Judge(search.asked, quality, search.confidence, texts[-1], last)
    choice, rounds = halve(taken, alone, found.look, judge, texts, tell)
    failed = {one.described(): why for each in rounds for one, why in each.failed.items()}
    results: dict[str, Any] = {
        "demand": search.asked.described(),
        "answer": choice.answer,
        "setting": None,
        "described": None,
        "why": choice.why,
        "quality": quality,
        "candidates": len(taken),
        "rounds": [_told_round(one, quality) for one in rounds],
        "failed": failed,
        "held_out": None,
    }
    if choice.setting is not None:
        results["setting"] = choice.setting.to_dict()
        results["described"] = choice.setting.described()
        tell(f"the held-out texts: {choice.setting.described()} on {last.rows} texts ...")
        verifier = found.held_out(alone)
        scores = verifier if choice.setting == alone else found.held_out(choice.setting)
        parts = verdict(
            search.asked, choice.setting, scores, verifier, quality, measuring.bootstrap
        )
        results["held_out"] = {
            "texts": last.rows,
            "timed": last.timed,
            "met": all(part["met"] for part in parts),
            "demands": parts,
            "figures": _figures(scores, quality),
            "verifier": _figures(verifier, quality),
            DIFFERENCE: over(scores, verifier, quality, measuring.bootstrap),
        }
    return results, choice


def _told_round(one: Round, quality: str) -> dict[str, Any]:
    settings = [
        {
            "setting": setting.described(),
            "chance": one.judged[setting].chance,
            "passes": one.judged[setting].passes,
            "margin": one.judged[setting].margin,
            "figures": _figures(scores, quality),
        }
        for setting, scores in one.found.items()
    ]
    return {"texts": one.texts.rows, "timed": one.texts.timed, "settings": settings}


def _figures(scores: Scores, quality: str) -> dict[str, Any]:
    return {name: scores.figures[name] for name in (quality, *_TOLD) if name in scores.figures}
