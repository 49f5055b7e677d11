"""Audits a verifier: what distribution does it emit?"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specjax.checks import check_count, one_number, whole_number
from specjax.errors import UserError
from specjax.testing.auditing.calling import (
    ARRAYS,
    DTYPES,
    BadOutcomeError,
    Calling,
    find_calling,
)
from specjax.testing.auditing.hard_cases import MANY_TOKENS, HardCase, hard_cases
from specjax.testing.auditing.laws import (
    CHECKED,
    AuditClock,
    OutOfTimeError,
    declared_target,
    generator_of,
    half_width,
    impossible_mass,
    injected_law,
    is_coupled,
    sampled_law,
    score,
)
from specjax.testing.auditing.report import AuditReport, SheetRow, Verdict
from specjax.types import Rule

MODES = ("injected", "black-box")
DRAFTS = ("drawn", "argmax", "certain")
# The mass of impossible or lost outcomes that counts as none: a uniform next to 1 is 1 in float32.
_NO_MASS = 1e-6
_LEVEL = 0.01  # intervals hold with probability 1 - _LEVEL
# Intervals must be below this: else the samples tell too little.
_WIDEST = 0.1


def audit(
    function: Callable[..., Any],
    *,
    mode: str | None = None,
    rule: Rule | None = None,
    cases: Sequence[str] | None = None,
    arrays: str | None = None,
    dtype: str | None = None,
    drafts: str = "drawn",
    tolerance: float = 1e-6,
    samples: int = 50_000,
    time_limit: float = 300.0,
    seed: int = 0,
) -> AuditReport:
    """Finds the distribution that a verifier emits, and compares it with what it must emit.

    The verifier is called as `verify(tokens, draft_probs, target_probs, uniforms, uniform_next,
    lengths)` and returns `(accepted, next)`, or the emitted tokens: docs/audit.md has the shapes.
    It may take fewer arguments, by these names, `draft_logits` and `target_logits` (logarithms),
    and `generator` (`key` in JAX), the library's random generator.

    Args:
      function: the verifier. One that raises or returns nonsense has a verdict too.
      mode: "injected" (the function gets its uniforms; the law is computed) or "black-box" (the law
        is sampled). By default injected if it takes `uniforms` and `uniform_next`.
      rule: the rule that a lossy verifier declares; it is lossless by default.
      cases: names of cases, or parts of them; all by default.
      arrays: "numpy", "torch" or "jax"; what the function accepts by default.
      dtype: "float64" or "float32"; float64 if the function takes it by default.
      drafts: "drawn" from q; "argmax": q's most probable tokens although the function gets q (which
        is what some pipelines do); "certain": likewise, and the function gets None or one-hot q.
      tolerance: the largest total variation that counts as exact.
      samples: draws per case for a black box.
      time_limit: seconds; what is left of the audit then is not done. A call that never returns is
        not ended: `specjax audit` ends it, because it audits in a process of its own.
      seed: of the audit's own random numbers.

    Raises:
      UserError: an argument has a wrong value, or the function's parameters are not a verifier's.
    """
    if isinstance(function, type) or not callable(function):
        raise UserError(f"`function` must be a function or an instance, got {function!r}")
    if rule is not None:
        # Imported here: who audits a verifier without a rule needs none of this.
        from specjax.rules.target import check_is_rule, has_carry

        check_is_rule("rule", rule)
        if has_carry(rule):
            raise UserError(
                f"rule must not have a carry, got {rule!r}: its target depends on earlier "
                "tokens; declare its inner rule, or one with a bound at each token such as "
                "rules.KLBall(0.05)"
            )
    for name, value, choices in (
        ("mode", mode, (None, *MODES)),
        ("arrays", arrays, (None, *ARRAYS)),
        ("dtype", dtype, (None, *DTYPES)),
        ("drafts", drafts, DRAFTS),
    ):
        if value not in choices:
            names = ", ".join(repr(x) for x in choices if x is not None)
            raise UserError(f"{name} must be one of {names}, got {value!r}")
    check_count("samples", samples, "give the number of draws per case")
    tolerance = one_number("tolerance", tolerance, low=0.0, dtype=float)
    limit = one_number("time_limit", time_limit, low=0.0, open_low=True, dtype=float)
    seed, chosen = whole_number("seed", seed, low=0), _chosen(cases)
    started = time.monotonic()
    clock = AuditClock(started + limit)
    rows: list[SheetRow] = []
    skipped: list[tuple[str, str]] = []
    stopped, how = None, "no call worked"
    try:
        with np.errstate(all="ignore"):
            probe = next((c for c in chosen if c.law and c.length), chosen[0])
            calling = find_calling(
                function,
                probe.rows(probe.blocks(drafts)[0][:1], np.full((1, probe.length + 1), 0.5)),
                certain=drafts == "certain",
                generator=lambda library: generator_of(library, seed),
                arrays=arrays,
                dtype=dtype,
            )
            if mode is None:
                injected = {"uniforms", "uniform_next"} <= calling.takes
                mode = MODES[0] if injected else MODES[1]
            how = f"{mode}, {calling.arrays} {calling.dtype}"
            how += "" if drafts == "drawn" else f", {drafts} drafts"
            # The intervals of all cases hold together.
            level = _LEVEL / len(chosen)
            work = _Audit(calling, mode, rule, drafts, tolerance, samples, level, clock)
            for number, case in enumerate(chosen):
                row = work.row(case, np.random.default_rng((seed, number)))
                if isinstance(row, SheetRow):
                    rows.append(row)
                else:
                    skipped.append((case.name, row))
    except OutOfTimeError:
        done = f"{len(rows) + len(skipped)} of {len(chosen)} cases in the time limit"
        stopped = Verdict.NOT_FINISHED, done
    except BadOutcomeError as error:
        stopped = Verdict.INVALID, str(error)
    inner = getattr(function, "func", function)  # of a functools.partial
    is_computed = any(r.variation is not None and r.interval is None for r in rows)
    return AuditReport(
        *(_wrong(rows, tolerance) or stopped or _right(rows, skipped, rule)),
        tuple(rows),
        str(getattr(inner, "__qualname__", type(inner).__name__)),
        how,
        tuple(skipped),
        clock.evaluations,
        time.monotonic() - started,
        # Of random points that agree: see `laws`.
        math.log(1 / _LEVEL) / CHECKED if is_computed else 0.0,
    )


@dataclasses.dataclass(frozen=True)
class _Audit:
    """How each case is audited."""

    calling: Calling
    mode: str
    rule: Rule | None
    drafts: str
    tolerance: float
    samples: int
    level: float
    clock: AuditClock

    def row(self, case: HardCase, rng: np.random.Generator) -> SheetRow | str:
        """The row of a case, or why the function's interface has no place for it."""
        is_sampled = self.mode == "black-box"
        if case.is_padded and "lengths" not in self.calling.takes:
            return "no padding"
        if case.others and not case.is_padded and self.calling.certain:
            return "certain drafts"  # those of other rows are drawn
        if case.law and case.vocab >= MANY_TOKENS and is_sampled:
            return "too many texts"
        if self.calling.certain:
            case = dataclasses.replace(case, others=())
        case = case.with_drafts(self.drafts)
        target = declared_target(case, self.rule)
        shape = case.name, case.length, case.vocab
        arguments = self.calling, case, self.drafts, rng, self.clock
        try:
            if case.law and not is_sampled and is_coupled(*arguments):
                return SheetRow(*shape, coupled=True)
            law = sampled_law(*arguments, self.samples) if is_sampled else injected_law(*arguments)
        except BadOutcomeError as error:
            return SheetRow(*shape, problem=str(error))
        if not case.law:
            lost = float(law.outcomes.weight[law.outcomes.following < 0].sum())
            impossible = impossible_mass(case, target, law.outcomes)[0] - lost
            return SheetRow(*shape, impossible=impossible, lost=lost)
        half = 0.0 if law.samples is None else half_width(target, law.samples, self.level)
        row = score(case, target, law.outcomes, max(self.tolerance, half))
        edge = None if law.edges is None else impossible_mass(case, target, law.edges)[1]
        row = dataclasses.replace(row, edge=edge, coupled=None if is_sampled else False)
        if law.samples is None:
            return row
        variation = row.variation or 0.0
        ends = max(0.0, variation - half), min(1.0, variation + half)
        row = dataclasses.replace(row, interval=ends)
        if ends[1] > _WIDEST and not is_sampled and not _is_biased(row, self.tolerance):
            return "too many texts"  # more points are not drawn
        return row


def _is_biased(row: SheetRow, tolerance: float) -> bool:
    sure = row.variation if row.interval is None else row.interval[0]
    # Each token's share is rounded.
    limit = tolerance * max(1.0, row.vocab / 20)
    return (sure or 0.0) > limit or (row.impossible or 0.0) > _NO_MASS


def _wrong(rows: Sequence[SheetRow], tolerance: float) -> tuple[Verdict, str] | None:
    if bad := [row for row in rows if row.problem]:
        return Verdict.INVALID, f"case {bad[0].case!r}: {bad[0].problem}"
    if coupled := [row for row in rows if row.coupled]:
        why = "a row's outcome depends on the other rows of its batch"
        return Verdict.COUPLED, f"{why}, as in {coupled[0].case!r}"
    if bad := [row for row in rows if (row.lost or 0.0) > _NO_MASS]:
        worst = max(bad, key=lambda row: row.lost or 0.0)
        what = "NaN, out of range, or not what was drafted (tokens are padded with -1)"
        share = f"{worst.lost:.2g} of the outcomes are {what}"
        return Verdict.INVALID, f"case {worst.case!r}: {share}"
    biased = [row for row in rows if _is_biased(row, tolerance)]
    if not biased:
        return None
    measured = [row for row in biased if row.variation is not None]
    if not measured:
        case, mass = biased[0].case, biased[0].impossible
        text = f"case {case!r} emits impossible tokens, {mass:.2g} of rejected drafts"
        return Verdict.BIASED, text
    row = max(measured, key=lambda row: row.variation or 0.0)
    text = f"worst case {row.case!r}: TV {row.variation:.2g}"
    if row.first_wrong:
        text += f", wrong from token {row.first_wrong} on"
    if most := max(r.impossible or 0.0 for r in biased):
        text += f"; up to {most:.2g} of the mass on impossible texts"
    return Verdict.BIASED, text


def _right(
    rows: Sequence[SheetRow], skipped: Sequence[tuple[str, str]], rule: Rule | None
) -> tuple[Verdict, str]:
    measured = [row for row in rows if row.variation is not None]
    if not measured:
        why = "; ".join(sorted({why for _, why in skipped})) or "it has no law"
        return Verdict.NOT_FINISHED, f"no law was computed: these cases do not fit ({why})"
    if bad := [row for row in rows if row.edge]:
        tokens = "impossible or invalid tokens"
        why = f"a uniform of 0 or 1 - 2^-24 emits {tokens} in {bad[0].case!r}"
        return Verdict.EDGE, why
    intervals = [row.interval[1] for row in measured if row.interval is not None]
    most = max(intervals, default=0.0)
    sure = f"{100 * (1 - _LEVEL):g} % confidence"
    if most > _WIDEST:
        why = f"no bias found, but the TV may be {most:.2g} ({sure}): give more samples"
        return Verdict.NOT_FINISHED, why
    if intervals:
        return Verdict.NO_BIAS_FOUND, f"all {len(measured)} cases have TV < {most:.2g} ({sure})"
    worst = max(row.variation or 0.0 for row in measured)
    follow = "have" if rule is None else f"follow {type(rule).__name__},"
    text = f"all {len(measured)} cases {follow} TV <= {worst:.1g}"
    return Verdict.EXACT if rule is None else Verdict.LOSSY, text


def _chosen(names: Sequence[str] | None) -> list[HardCase]:
    """The cases with these names, or parts of names."""
    cases = list(hard_cases())
    if names is None:
        return cases
    if isinstance(names, str) or not names:
        raise UserError(f"cases must be a list of names, got {names!r}: leave it out for all")
    for name in names:
        if not any(str(name).lower() in case.name.lower() for case in cases):
            every = ", ".join(repr(case.name) for case in cases)
            raise UserError(f"there is no case {name!r}: choose from {every}")
    return [c for c in cases if any(str(name).lower() in c.name.lower() for name in names)]
