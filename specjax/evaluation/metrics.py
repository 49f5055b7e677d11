"""Metrics of output texts against references, all from 0 to 100.

sacrebleu and rouge-score are an optional extra: they are imported where they are used.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from specjax.checks import require

Metric = Callable[[Sequence[str], Sequence[str]], float]


def bleu(outputs: Sequence[str], references: Sequence[str]) -> float:
    """Corpus BLEU, as sacreBLEU computes it (13a tokenisation, case sensitive).

    Args:
      outputs: n texts.
      references: n texts, one for each output.

    Returns:
      0 to 100.

    Raises:
      ValueError: there are no texts, not as many outputs as references, or sacrebleu is not
        installed.

    Source: Papineni et al. 2002; Post 2018.
    """
    _check_counts(outputs, references)
    return float(_imported("sacrebleu").corpus_bleu(list(outputs), [list(references)]).score)


def rouge_l(outputs: Sequence[str], references: Sequence[str]) -> float:
    """The mean F1 of ROUGE-L over the longest common subsequence, without stemming.

    Args:
      outputs: n texts.
      references: n texts, one for each output.

    Returns:
      0 to 100.

    Raises:
      ValueError: there are no texts, not as many outputs as references, or rouge-score is not
        installed.

    Source: Lin 2004.
    """
    _check_counts(outputs, references)
    scorer = _imported("rouge_score.rouge_scorer").RougeScorer(["rougeL"])
    pairs = zip(references, outputs, strict=True)
    return 100.0 * statistics.fmean(scorer.score(r, o)["rougeL"].fmeasure for r, o in pairs)


def exact_match(outputs: Sequence[str], references: Sequence[str]) -> float:
    """The share of outputs that equal their reference, but for the space around both.

    Args:
      outputs: n texts.
      references: n texts, one for each output.

    Returns:
      0 to 100.

    Raises:
      ValueError: there are no texts, or not as many outputs as references.
    """
    _check_counts(outputs, references)
    pairs = zip(outputs, references, strict=True)
    return 100.0 * statistics.fmean(o.strip() == r.strip() for o, r in pairs)


METRICS: Mapping[str, Metric] = MappingProxyType(
    {"bleu": bleu, "rouge_l": rouge_l, "exact_match": exact_match}
)
_MODULES = {"bleu": "sacrebleu", "rouge_l": "rouge_score.rouge_scorer"}


def check_metrics(names: Iterable[str]) -> None:
    """Makes sure, before long work, that metrics are known and installed.

    Args:
      names: keys of `METRICS`.

    Raises:
      ValueError: a name is not one of `METRICS`, or what computes it is not installed.
    """
    for name in names:
        if name not in METRICS:
            raise ValueError(f"`metrics` must be among {', '.join(METRICS)}, got {name!r}")
        if name in _MODULES:
            _imported(_MODULES[name])


def _imported(module: str) -> Any:
    return require(module, "eval")


def _check_counts(outputs: Sequence[str], references: Sequence[str]) -> None:
    if len(outputs) != len(references) or not len(outputs):
        raise ValueError(
            f"there are {len(outputs)} outputs and {len(references)} references; give one "
            "reference for each output, and at least one"
        )
