"""From a verifier, drafters and prompts to the gin file of the fastest way to decode with them.

Files in the output directory:

    tune_config.json   what determines the run
    results.json       what was measured, expected and chosen
    drafts.gin         what was chosen, for `specjax infer --gin_file=drafts.gin`
"""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.data import Example
from specjax.memory import spare_maps
from specjax.runs.environment import environment
from specjax.runs.run_directory import RunDirectory
from specjax.text import Decoder, Ingredients, Lookup, Pair, TextModel
from specjax.tuning.expectation import Expected, expect
from specjax.tuning.forcing import compare
from specjax.tuning.gin_file import gin_text
from specjax.tuning.hierarchies import ALONE, Hierarchy, hierarchies
from specjax.tuning.measurement import Measured, choose, measure, speedup
from specjax.tuning.screening import Screening
from specjax.tuning.settings import Tuning
from specjax.tuning.texts import (
    PathLike,
    check_drafters,
    digest_of,
    encode_prompts,
    fingerprints,
    load_drafters,
    tell,
    verifier_texts,
)
from specjax.tuning.times import measure_times
from specjax.types import Params

CONFIG_NAME, RESULTS_NAME, CHOSEN_NAME = "tune_config.json", "results.json", "drafts.gin"
# Of hierarchies that differ in numbers alone so many are measured.
_OF_A_KIND = 2
_SHOWN = 10


def tune_drafts(
    make_pair: Callable[[], Pair],
    make_model: Callable[..., TextModel],
    *,
    tuning: Tuning,
    prompts: Iterable[Example],
    output_dir: PathLike,
    drafters: Sequence[PathLike] = (),
    chat: bool = False,
    settings: Mapping[str, Any] | None = None,
    on_start: Callable[[RunDirectory], None] | None = None,
) -> dict[str, Any]:
    """Chooses how to draft for a verifier.

    The verifier decodes some of the prompts, and all models read its texts once: that and the times
    of passes tell the expected time of every hierarchy of `hierarchies`. The best are measured on
    other prompts, in turns with the verifier alone and the best single drafter.

    Args:
      make_pair: gives the verifier and a drafter; called after the arguments have been checked.
      make_model: loads a further drafter from its directory.
      tuning: what is weighed.
      prompts: at least `tuning.screened + tuning.measured` of them; references are not used.
      output_dir: a new directory, or that of the same run.
      drafters: the directories of further drafters.
      chat: whether each prompt is a user's message for the model's chat template.
      settings: other names of `runs/infer.gin` and their values, for the gin file.
      on_start: is called with the `RunDirectory` before the long work, after all checks.

    Returns:
      What `results.json` holds.

    Raises:
      OSError: the directory cannot be written, or another process works there.
      TypeError: a value of the wrong type.
      ValueError: too few prompts, a drafter given twice or of another vocabulary, or an
        `output_dir` that holds another run.
    """
    if not isinstance(tuning, Tuning):
        raise TypeError(f"tuning must be a Tuning(...), got {tuning!r}")
    if not isinstance(chat, bool):
        raise TypeError(f"chat must be True or False, got {chat!r}")
    check_drafters(drafters)
    if jax.process_count() > 1:
        raise ValueError("tune_drafts takes one process: others would choose otherwise")
    needed = tuning.screened + tuning.measured
    texts: list[Any] = [example.inputs for example in prompts]
    if len(texts) < needed:
        raise ValueError(
            f"there are {len(texts)} prompts, but {tuning.screened} are screened and "
            f"{tuning.measured} measured: add prompts, or screen or measure fewer"
        )
    run = RunDirectory(output_dir, config_name=CONFIG_NAME, makes=(RESULTS_NAME, CHOSEN_NAME))
    with run:
        models = load_drafters(make_pair, make_model, drafters)
        decoder = Decoder(models["verifier"], **tuning.decoding)
        tokens = encode_prompts(decoder, texts[:needed], chat=chat)
        tables = tables_of_copies(models["verifier"], tuning.bigram)
        run.claim(
            {
                "models": fingerprints(models),
                "tuning": json.loads(json.dumps(dataclasses.asdict(tuning), default=os.fspath)),
                "tokens": digest_of(tokens),
                "environment": environment(),
            }
        )
        if on_start is not None:
            on_start(run)
        held_out = tokens[tuning.screened :]
        screening = screening_of(models, decoder, tokens[: tuning.screened], tables, tuning)
        results, chosen = _tuned(models, screening, held_out, tables, tuning)
        told = gin_text(
            chosen,
            results["why"],
            {name: model.name for name, model in models.items()},
            {name.upper(): value for name, value in tuning.decoding.items()}
            | {**(settings or {}), "CHAT": chat},
            tuning.bigram,
            run.path / CHOSEN_NAME,
        )
        results["gin_file"] = str(run.write(CHOSEN_NAME, told.encode()))
        run.write(RESULTS_NAME, (json.dumps(results, indent=1) + "\n").encode())
    return results


def tables_of_copies(verifier: TextModel, bigram: PathLike | None) -> dict[str, Params]:
    """What may copy -> its bigram table.

    Args:
      verifier: for which it copies.
      bigram: see `Tuning`.
    """
    if bigram is None:
        return {"text": ()}
    given = Ingredients({"verifier": verifier}, 1, _no_model, jnp.asarray)
    return {"text": (), "bigram": Lookup(bigram=bigram).table(given)}


def _no_model(*_: Any) -> Any:
    raise TypeError("copies take no model")


def screening_of(
    models: Mapping[str, TextModel],
    decoder: Decoder,
    prompts: Sequence[np.ndarray],
    tables: Mapping[str, Params],
    tuning: Tuning,
) -> Screening:
    """Looks at models once: rates, copies and the times of passes.

    Args:
      models: by name, the verifier first, then the drafters, the largest first.
      decoder: of the verifier alone.
      prompts: tokens.
      tables: of `tables_of_copies`.
      tuning: what is weighed.

    Raises:
      ValueError: the verifier cannot decode a prompt.
    """
    tell(f"screening: the verifier decodes {len(prompts)} prompts ...")
    texts = verifier_texts(models["verifier"], decoder, prompts, tuning.seed)
    tell("screening: all models read its texts ...")
    each = list(models.values())
    found = compare(
        each,
        *texts,
        sampling=tuning.sampling,
        leniences=tuning.used_leniences,
        tables=tables,
        max_draft=tuning.max_draft,
    )
    tell("screening: the times of passes ...")
    times = measure_times(each, decoder, prompts, tuning.max_draft)
    spare_maps(0.1)  # of these programs few are needed again
    return Screening(
        **{field.name: getattr(times, field.name) for field in dataclasses.fields(times)},
        rates=found.rates,
        copies=found.copies,
        text_lengths=np.asarray([len(text) for text in texts.outputs]),
    )


def shortlist(
    expected: Mapping[Hierarchy, Expected], candidates: int
) -> tuple[list[Hierarchy], list[Hierarchy]]:
    """What is measured.

    Args:
      expected: of all that is weighed.
      candidates: how many of the best.

    Returns:
      All hierarchies, the best first; and, to be measured, the verifier alone, the best single
      drafter, and the best of all, of which at most two differ in their numbers alone.
    """
    # Of equal ones the simpler, which comes first.
    ranked = sorted(expected, key=lambda one: -round(expected[one].speedup, 3))
    single = next((one for one in ranked if one.is_single), None)
    chosen: list[Hierarchy] = []
    kinds: dict[Any, int] = {}
    for one in ranked:
        if one != ALONE and one != single and len(chosen) < candidates:
            kinds[one.kind] = kinds.get(one.kind, 0) + 1
            if kinds[one.kind] <= _OF_A_KIND:
                chosen.append(one)
    return ranked, [ALONE, *([single] if single else []), *chosen]


def _tuned(
    models: Mapping[str, TextModel],
    screening: Screening,
    prompts: Sequence[np.ndarray],
    tables: Mapping[str, Params],
    tuning: Tuning,
) -> tuple[dict[str, Any], Hierarchy]:
    """What was expected, measured and chosen."""
    names = list(models)
    weighed = hierarchies(
        len(models) - 1,
        tuple(tables),
        max_draft=tuning.max_draft,
        leniences=tuning.used_leniences,
        levels=tuning.levels,
    )
    expected = {one: expect(one, screening) for one in weighed}
    ranked, taken = shortlist(expected, tuning.candidates)
    tell(f"{len(ranked)} hierarchies were weighed; {len(taken)} are measured")
    decoders = {
        one: one.decoder(names, list(models.values()), tuning.bigram, **tuning.decoding)
        for one in taken
    }
    measured = measure(
        decoders,
        prompts,
        rows=tuning.batch_size,
        repeats=tuning.repeats,
        seed=tuning.seed,
        tell=tell,
        names=names,
    )
    chosen, why = choose(measured)
    single = next((one for one in ranked if one.is_single), ALONE)
    rows = [_row(one, names, expected, expected[single]) for one in ranked[:_SHOWN]]
    results = {
        "chosen": chosen.described(names),
        "why": why,
        "weighed": len(ranked),
        "models": {name: model.name for name, model in models.items()},
        "expected": rows,
        "measured": [
            _row(one, names, expected, expected[single]) | _figures(one, measured, single)
            for one in taken
        ],
        "rank_correlation": rank_correlation(
            [expected[one].speedup for one in taken],
            [speedup(measured[one], measured[ALONE]).value for one in taken],
        ),
        "screening": screening.to_dict(names),
    }
    return results, chosen


def _row(
    one: Hierarchy,
    names: Sequence[str],
    expected: Mapping[Hierarchy, Expected],
    single: Expected,
) -> dict[str, Any]:
    return {
        "drafts": one.described(names),
        "expected": expected[one].speedup,
        "expected_over_single": expected[one].speedup / single.speedup,
        "expected_tokens_per_round": expected[one].tokens,
        "expected_round_ms": 1e3 * expected[one].seconds,
    }


def _figures(
    one: Hierarchy, measured: Mapping[Hierarchy, Measured], single: Hierarchy
) -> dict[str, Any]:
    gain = speedup(measured[one], measured[ALONE])
    over = speedup(measured[one], measured[single])
    return {
        "measured": gain.value,
        "low": gain.low,
        "high": gain.high,
        "over_single": over.value,
        "over_single_low": over.low,
        "over_single_high": over.high,
        "tokens_per_call": measured[one].tokens_per_call,
        "tokens_per_second": float(measured[one].tokens.sum() / measured[one].seconds.sum()),
    }


def rank_correlation(expected: Sequence[float], measured: Sequence[float]) -> float | None:
    """Spearman's; None where there are fewer than three, or one side has one value alone."""
    # Not imported where nothing is compared: it takes a while.
    from scipy.stats import spearmanr

    if len(expected) < 3 or len(set(expected)) < 2 or len(set(measured)) < 2:
        return None
    found = float(spearmanr(expected, measured).statistic)
    return None if math.isnan(found) else found
