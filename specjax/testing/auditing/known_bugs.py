"""Which known bug has a law like the one that was found."""

import dataclasses

import numpy as np

from specjax.testing.auditing.calling import Calling
from specjax.testing.auditing.case_laws import AuditClock, injected_law
from specjax.testing.auditing.criterion import emitted, joint_law
from specjax.testing.auditing.hard_cases import HardCase
from specjax.testing.auditing.reference_verifiers import (
    COUPLED,
    RIGHT,
    WRONG,
    ReferenceVerifier,
)
from specjax.testing.enumeration import total_variation

_SAME = 1e-9


def bug_laws(
    case: HardCase, target: tuple[np.ndarray, ...], drafts: str, *, coupled: bool = False
) -> dict[str, np.ndarray]:
    """The law of each known bug in a case, by name.

    Those that are right in this case are left out, and so are those that couple rows unless
    `coupled`: then only they are here.
    """
    names = [name for name in WRONG if (name in COUPLED) == coupled]
    key = case.name, drafts, coupled, b"".join(map(np.ndarray.tobytes, target))
    if key not in _KNOWN:
        # A lossy verifier gets p, but follows the rule's distributions.
        declared = dataclasses.replace(case, target=target)
        right = _law(RIGHT["Token"], declared, drafts, target)
        laws = {name: _law(WRONG[name], declared, drafts, target) for name in names}
        _KNOWN[key] = {k: v for k, v in laws.items() if total_variation(v, right) > _SAME}
    return _KNOWN[key]


def nearest_bug(
    case: HardCase,
    target: tuple[np.ndarray, ...],
    drafts: str,
    law: np.ndarray,
    *,
    coupled: bool = False,
    error: float = 0.0,
) -> tuple[str, float] | None:
    """The known bug with the nearest law, and its total variation from it.

    Args:
      case: the case in which the law was found.
      target: what had to be emitted.
      drafts: how tokens are drawn.
      law: `[V] * (L + 1)`, what is emitted.
      coupled: whether the rows are coupled.
      error: how far the law may be from the true one, if it was sampled.

    Returns:
      None if no bug is near: within a twentieth of the law's distance from the target.
    """
    laws = dict(bug_laws(case, target, drafts, coupled=coupled))
    # Right, but not for what is declared.
    otherwise = f"none: a right verifier emits this if the drafts are {drafts}, not drawn from q"
    right = "it follows p, not the declared rule" if drafts == "drawn" else otherwise
    if not coupled and (drafts != "drawn" or target is not case.target):
        laws[right] = _law(RIGHT["Token"], case, drafts, target)
    distances = {name: total_variation(law, each) for name, each in laws.items()}
    name = min(distances, key=distances.__getitem__, default="")
    if distances.get(right, 1.0) <= error:
        name = right  # of several that samples cannot tell apart
    apart = total_variation(law, joint_law(target))
    near = distances and distances[name] < min(0.05 * apart + error, 0.5 * apart)
    return (name, distances[name]) if near else None


def _law(
    verifier: ReferenceVerifier, case: HardCase, drafts: str, target: tuple[np.ndarray, ...]
) -> np.ndarray:
    calling = Calling(verifier, "arrays", "numpy", "float64", False, False, None)
    found = injected_law(calling, case, drafts, np.random.default_rng(0), AuditClock())
    return emitted(found.outcomes, target)


_KNOWN: dict[tuple[object, ...], dict[str, np.ndarray]] = {}
