"""Which known bug has a law like the one that was found."""

import numpy as np

from specjax.testing.auditing.calling import Calling
from specjax.testing.auditing.case_laws import AuditClock, injected_law
from specjax.testing.auditing.criterion import Outcomes, emitted, joint_law
from specjax.testing.auditing.hard_cases import HardCase
from specjax.testing.auditing.reference_verifiers import COUPLED, WRONG
from specjax.testing.enumeration import total_variation


def bug_laws(
    case: HardCase, target: tuple[np.ndarray, ...], drafts: str, *, coupled: bool = False
) -> dict[str, np.ndarray]:
    """The law of each known bug in a case, by name; of those that couple rows only if asked."""
    names = [name for name in WRONG if (name in COUPLED) == coupled]
    return {name: emitted(_outcomes(name, case, drafts), target) for name in names}


def nearest_bug(
    case: HardCase,
    target: tuple[np.ndarray, ...],
    drafts: str,
    law: np.ndarray,
    *,
    coupled: bool = False,
) -> tuple[str, float] | None:
    """The known bug with the nearest law, and its total variation from it.

    Args:
      case: the case in which the law was found.
      target: what had to be emitted.
      drafts: how tokens are drawn.
      law: `[V] * (L + 1)`, what is emitted.
      coupled: whether the rows are coupled.

    Returns:
      None if no bug is nearer than half of the law's distance from the target.
    """
    laws = bug_laws(case, target, drafts, coupled=coupled)
    distances = {name: total_variation(law, each) for name, each in laws.items()}
    name = min(distances, key=distances.__getitem__)
    wanted = joint_law(target)
    near = distances[name] < 0.5 * total_variation(law, wanted)
    return (name, distances[name]) if near else None


def _outcomes(name: str, case: HardCase, drafts: str) -> Outcomes:
    """What a bug does in a case; kept, because several audits ask."""
    key = name, case.name, drafts
    if key not in _KNOWN:
        calling = Calling(WRONG[name], "arrays", "numpy", "float64", False, False, None)
        law = injected_law(calling, case, drafts, np.random.default_rng(0), AuditClock())
        _KNOWN[key] = law.outcomes
    return _KNOWN[key]


_KNOWN: dict[tuple[str, str, str], Outcomes] = {}
