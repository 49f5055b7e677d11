"""A grid of acceptance heads: loss weights, depths and stopping thresholds on the same labels.

Source: SpecDec++ (arXiv 2405.19715), table 3.
"""

import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from specjax.acceptance_head import Head
from specjax.checks import check_part, whole_number
from specjax.data.examples import Example
from specjax.drafting import Survival
from specjax.evaluation import binary_kl
from specjax.runs.run_directory import RunDirectory
from specjax.text import Decoder, Pair
from specjax.training.head_data import DATA_NAME, HeadData
from specjax.training.head_evaluation import predict
from specjax.training.head_recipe import (
    CURVES_NAME,
    RESULTS_NAME,
    HeadRecipe,
    check_head_pair,
    head_data,
    train_one_head,
)
from specjax.training.head_task import HeadTask
from specjax.training.progress import say
from specjax.training.scoring import covering
from specjax.training.trainer import run_directory

GRID_NAME, HEADS_NAME = "grid_config.json", "heads"

PathLike = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadGrid:
    """Which heads are trained, and how each is measured; the paper's grid by default.

    Attributes:
      rejection_weights: the values of w_rej.
      blocks: the values of D.
      thresholds: the values of h; see `drafting.Survival`.
      max_draft: the longest draft.
      prompts: how many of the validation prompts are decoded.
      rows: the batch size.
      repeats: how often they are decoded; the heads take turns.

    Raises:
      TypeError: for a value of the wrong type.
      ValueError: for a value outside its range, or an empty list.
    """

    rejection_weights: Sequence[float] = (1.0, 3.0, 6.0, 12.0)
    blocks: Sequence[int] = (0, 1, 2, 3, 4)
    thresholds: Sequence[float] = (0.1, 0.3, 0.5, 0.7, 0.9)
    max_draft: int = 20
    prompts: int = 64
    rows: int = 1
    repeats: int = 3

    def __post_init__(self) -> None:
        for name in ("max_draft", "prompts", "rows", "repeats"):
            value = whole_number(f"HeadGrid: {name}", getattr(self, name), low=1)
            object.__setattr__(self, name, value)
        for name in ("rejection_weights", "blocks", "thresholds"):
            values = getattr(self, name)
            if not isinstance(values, tuple | list) or not values:
                raise TypeError(f"HeadGrid: {name} must be a list with a value, got {values!r}")
            if len(set(values)) != len(values):
                raise ValueError(f"HeadGrid: {name} has a value twice: {values}")
            object.__setattr__(self, name, tuple(values))
        # Its checks.
        for threshold in self.thresholds:
            Survival(threshold=threshold)

    def recipes(self, recipe: HeadRecipe) -> dict[str, HeadRecipe]:
        """A name -> one recipe of the grid."""
        return {
            f"w{weight:g}_D{blocks}": dataclasses.replace(
                recipe, rejection_weight=weight, blocks=blocks
            )
            for weight, blocks in itertools.product(self.rejection_weights, self.blocks)
        }


class _Trained(NamedTuple):
    recipe: HeadRecipe
    head: Head
    figures: dict[str, Any]


def run_head_grid(
    grid: HeadGrid,
    recipe: HeadRecipe,
    make_pair: Callable[[], Pair],
    *,
    output_dir: PathLike,
    training_data: Iterable[Example],
    validation_data: Iterable[Example],
    on_start: Callable[[RunDirectory], None] | None = None,
) -> dict[str, Any]:
    """Trains all heads of a grid on the same labels, and decodes with each at each threshold.

    Killed and started again, it continues with the head that it was at; measuring starts anew.

    Args:
      grid: which heads.
      recipe: how each is trained, but for its weight and its depth.
      make_pair: is called after the arguments have been checked.
      output_dir: takes `head_data/`, `heads/w6_D3/` and so on, `results.json` and the records.
      training_data: prompts.
      validation_data: prompts, to choose checkpoints and to decode.
      on_start: see `run_head_recipe`.

    Returns:
      What `results.json` holds. `heads` has a row per head: `rejection_weight`, `blocks`,
      `train_kl` and `kl` (binary KL divergence in nats, without weights, of the training and the
      validation data), and the fastest `threshold` with its figures. `thresholds` has a row per
      head and threshold: `tokens_per_second`, `verification_rate` and `discard_rate` (verifier's
      passes and discarded tokens per emitted token, at the pair's sampling temperature).

    Raises:
      OSError: `output_dir` cannot be written, or another process is at work there.
      TypeError: a value of the wrong type.
      ValueError: no usable prompt, a pair that is none, or an `output_dir` that holds another run.
    """
    check_part("grid", grid, ("recipes", "thresholds"), "training.HeadGrid()")
    check_part("recipe", recipe, ("labelling", "trainer"), "training.HeadRecipe()")
    recipes = grid.recipes(recipe)  # their checks
    examples = {"training": list(training_data), "validation": list(validation_data)}
    names = (DATA_NAME, HEADS_NAME, RESULTS_NAME)
    with RunDirectory(output_dir, config_name=GRID_NAME, makes=names) as run:
        pair = make_pair()
        check_head_pair(run, pair)
        data = head_data(run, recipe, pair, examples)
        described = {name: of_one.describe() for name, of_one in data.items()}
        run.claim({"grid": dataclasses.asdict(grid), "data": described})
        if on_start is not None:
            on_start(run)
        heads = run.own(HEADS_NAME)
        heads.mkdir(exist_ok=True)
        trained = []
        for name, one in recipes.items():
            if recipe.progress:
                say(f"the head {name} of {', '.join(recipes)}")
            with run_directory(heads / name, (CURVES_NAME,)) as place:
                figures, head = train_one_head(place, one, pair, data)
            run.keep()
            figures["train_kl"] = _train_kl(one, head, data["training"])
            trained.append(_Trained(one, head, figures))
        prompts = data["validation"].prompts[: grid.prompts]
        rows = _measured(grid, pair, trained, prompts, recipe)
        results = {"heads": _table(trained, rows), "thresholds": rows}
        run.write(RESULTS_NAME, (json.dumps(results, indent=1) + "\n").encode())
    return results


def _train_kl(recipe: HeadRecipe, head: Head, data: HeadData) -> float:
    task = HeadTask(head=head.config, weights=recipe.weights)
    return binary_kl(data.column("labels"), predict(task, head.params, data))


def _measured(
    grid: HeadGrid, pair: Pair, trained: list[_Trained], prompts: Any, recipe: HeadRecipe
) -> list[dict[str, Any]]:
    """One row per head and threshold; they take turns at all prompts."""
    labelling = recipe.labelling
    decoders = {}
    pairs = [Pair(dataclasses.replace(pair.drafter, head=x.head), pair.verifier) for x in trained]
    for (i, of_head), threshold in itertools.product(enumerate(pairs), grid.thresholds):
        decoders[i, threshold] = Decoder(
            of_head,
            stopping=Survival(threshold=threshold),
            max_draft=grid.max_draft,
            temperature=labelling.temperature,
            max_new_tokens=labelling.max_new_tokens,
            batch_size=grid.rows,
            buckets=covering(prompts),
        )
    if recipe.progress:
        say(f"decoding {len(prompts)} prompts with {len(decoders)} heads and thresholds")
    seconds = dict.fromkeys(decoders, 0.0)
    rows = []
    for repeat in range(-1, grid.repeats):
        for case, decoder in decoders.items():
            result = decoder(prompts, progress=False)
            if repeat < 0:  # compiles
                continue
            seconds[case] += result.seconds
            if repeat == 0:
                rows.append(_row(trained[case[0]].recipe, case[1], result.info))
    for row, spent in zip(rows, seconds.values(), strict=True):
        row["tokens_per_second"] = row.pop("emitted") * grid.repeats / spent
    return rows


def _row(recipe: HeadRecipe, threshold: float, info: Any) -> dict[str, Any]:
    return {
        "rejection_weight": recipe.rejection_weight,
        "blocks": recipe.blocks,
        "threshold": threshold,
        "verification_rate": info.verification_rate,
        "discard_rate": info.discard_rate,
        "emitted": int(info.rows.emitted.sum()),
    }


def _table(trained: list[_Trained], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per head with its fastest threshold."""
    table = []
    for one in trained:
        key = (one.recipe.rejection_weight, one.recipe.blocks)
        own = [row for row in rows if (row["rejection_weight"], row["blocks"]) == key]
        best = max(own, key=lambda row: row["tokens_per_second"])
        head = next(row for row in one.figures["rows"] if row["predictor"] == "head")
        kl = {"train_kl": one.figures["train_kl"], "kl": head["kl"]}
        table.append({**dict(zip(("rejection_weight", "blocks"), key, strict=True)), **kl, **best})
    return table
