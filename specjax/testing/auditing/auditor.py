"""Audits a verifier: what distribution does it emit?"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specjax.checks import check_count, one_number, whole_number
from specjax.errors import UserError
from specjax.testing.auditing.black_box import generator_of, half_width, sampled_law
from specjax.testing.auditing.calling import (
    ARRAYS,
    DTYPES,
    BadOutcomeError,
    Calling,
    find_calling,
)
from specjax.testing.auditing.criterion import declared_target, impossible_mass, score
from specjax.testing.auditing.hard_cases import MANY_TOKENS, HardCase, hard_cases
from specjax.testing.auditing.injected import (
    CHECKED,
    AuditClock,
    OutOfTimeError,
    injected_law,
    is_coupled,
)
from specjax.testing.auditing.score_sheet import AuditReport, SheetRow, Verdict
from specjax.types import Rule

MODES = ("injected", "black-box")
DRAFTS = ("drawn", "argmax", "certain")
# A law is exact below these.
_TOLERANCES = {"float64": 1e-9, "float32": 1e-6}
_NO_MASS = 1e-12
_LEVEL = 0.01  # intervals hold with probability 1 - _LEVEL
# A black box must have intervals below this: else its samples tell too little.
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
    tolerance: float | None = None,
    samples: int = 50_000,
    time_limit: float = 300.0,
    seed: int = 0,
    on_row: Callable[[SheetRow], None] | None = None,
) -> AuditReport:
    """Finds the distribution that a verifier emits, and compares it with what it must emit.

    The verifier is called as `verify(tokens, draft_probs, target_probs, uniforms, uniform_next,
    lengths)` and returns `(accepted, next)`, or the emitted tokens `[B, G + 1]` padded with -1. It
    may take fewer arguments, by these names. B rows, G padded block, V vocabulary:

    - `tokens`: `[B, G]` int32 (int64 in PyTorch), drafted from q; the first `lengths` count.
    - `draft_probs`: `[B, G, V]`, q; None with `drafts="certain"`. `draft_logits` are logarithms.
    - `target_probs`: `[B, G + 1, V]`, p; `target_logits` likewise.
    - `uniforms`: `[B, G]`, one for each drafted token, in [0, 1).
    - `uniform_next`: `[B]`, for the token after the accepted ones. Or `generator` (`key` in JAX):
      the library's random generator.
    - `lengths`: `[B]` int32, L <= G.
    - `accepted`: `[B]`, how many drafted tokens are accepted; `next`: `[B]`, the token after them.

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
      tolerance: the largest total variation that counts as exact; by default 1e-9 in float64 and
        1e-6 in float32.
      samples: draws per case for a black box.
      time_limit: seconds; what is left of the audit then is not done. A call that never returns is
        not ended: `specjax audit` ends it, because it audits in a process of its own.
      seed: of the audit's own random numbers.
      on_row: called with each row of the score sheet.

    Raises:
      ValueError: an argument has a wrong value, or the function's parameters are not a verifier's.
    """
    if isinstance(function, type):
        raise UserError(
            f"function must be a function or an instance, got the class {function.__name__}"
        )
    if not callable(function):
        raise UserError(f"function must be a verifier's function, got {function!r}")
    if rule is not None:
        # Imported here: who audits a verifier without a rule needs none of this.
        from specjax.rules import Budgeted
        from specjax.rules.target import check_is_rule

        check_is_rule("rule", rule)
        if isinstance(rule, Budgeted):
            raise UserError(
                f"rule must not be Budgeted, got {rule!r}: its target depends on what earlier "
                "tokens spent; declare its inner rule, or one with a bound at each token such as "
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
    if tolerance is not None:
        tolerance = one_number("tolerance", tolerance, low=0.0, dtype=float)
    limit = one_number("time_limit", time_limit, low=0.0, open_low=True, dtype=float)
    work = _Audit(
        function,
        mode,
        rule,
        drafts,
        tolerance,
        samples,
        whole_number("seed", seed, low=0),
        _chosen(cases),
        AuditClock(time.monotonic() + limit),
    )
    return work.run({"arrays": arrays, "dtype": dtype}, on_row or (lambda row: None))


@dataclasses.dataclass
class _Audit:
    """An audit under way."""

    function: Callable[..., Any]
    mode: str | None
    rule: Rule | None
    drafts: str
    tolerance: float | None
    samples: int
    seed: int
    cases: Sequence[HardCase]
    clock: AuditClock
    calling: Calling = None  # type: ignore[assignment]  # until a call worked
    rows: list[SheetRow] = dataclasses.field(default_factory=list)
    skipped: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    single: bool = False

    def run(self, call: dict[str, Any], on_row: Callable[[SheetRow], None]) -> AuditReport:
        """Fills in the score sheet."""
        started = time.monotonic()
        verdict = None
        try:
            with np.errstate(all="ignore"):
                probe = next((c for c in self.cases if c.law and c.length), self.cases[0])
                blocks, _ = probe.blocks(self.drafts)
                self.calling = find_calling(
                    self.function,
                    probe.rows(blocks[:1], np.full((1, probe.length + 1), 0.5)),
                    certain=self.drafts == "certain",
                    generator=lambda arrays: generator_of(arrays, self.seed),
                    **call,
                )
                if self.mode is None:
                    is_injected = {"uniforms", "uniform_next"} <= self.calling.takes
                    self.mode = "injected" if is_injected else "black-box"
                for number, case in enumerate(self.cases):
                    row = self._audit_case(case, np.random.default_rng((self.seed, number)))
                    if row is not None:
                        self.rows.append(row)
                        on_row(row)
        except OutOfTimeError:
            done = len(self.rows) + len(self.skipped)
            verdict = Verdict.NOT_FINISHED, f"{done} of {len(self.cases)} cases in the time limit"
        except BadOutcomeError as error:
            verdict = Verdict.INVALID, str(error)
        verdict = self._wrong() or verdict or self._right()
        how = "no call worked"
        if self.calling is not None:
            how = f"{self.mode}, {self.calling.arrays} {self.calling.dtype}"
            if self.drafts != "drawn":
                how += f", {self.drafts} drafts"
        is_computed = any(r.variation is not None and r.interval is None for r in self.rows)
        inner = getattr(self.function, "func", self.function)  # of a functools.partial
        return AuditReport(
            *verdict,
            tuple(self.rows),
            str(getattr(inner, "__qualname__", type(inner).__name__)),
            how,
            self.allowed,
            tuple(self.skipped),
            self.clock.evaluations,
            time.monotonic() - started,
            # Of random points that agree: see `injected`.
            math.log(1 / _LEVEL) / CHECKED if is_computed else 0.0,
        )

    def _audit_case(self, case: HardCase, rng: np.random.Generator) -> SheetRow | None:
        """None if the function's interface has no place for the case: it is left out."""
        why = ""
        if case.is_padded and "lengths" not in self.calling.takes:
            why = "no padding"
        elif case.others and not case.is_padded and self.calling.certain:
            why = "certain drafts"  # those of other rows are drawn
        elif case.law and case.vocab >= MANY_TOKENS and self.mode == "black-box":
            why = "too many texts"
        if why:
            self.skipped.append((case.name, why))
            return None
        if self.calling.certain:
            case = dataclasses.replace(case, others=())
        case = case.drafted_as(self.drafts)
        try:
            row = self._measured(case, declared_target(case, self.rule), rng)
        except BadOutcomeError as error:
            return SheetRow(case.name, case.length, case.vocab, problem=str(error))
        wide = row.interval is not None and row.interval[1] > _WIDEST
        if wide and self.mode == "injected" and not self.is_biased(row):
            self.skipped.append((case.name, "too many texts"))  # more points are not drawn
            return None
        return row

    def _measured(
        self, case: HardCase, target: tuple[np.ndarray, ...], rng: np.random.Generator
    ) -> SheetRow:
        arguments = self.calling, case, self.drafts, rng, self.clock
        is_sampled = self.mode == "black-box"
        if case.law and not is_sampled and is_coupled(*arguments):
            return SheetRow(case.name, case.length, case.vocab, coupled=True)
        law = sampled_law(*arguments, self.samples) if is_sampled else injected_law(*arguments)
        self.single |= law.single
        if not case.law:
            lost = float(law.outcomes.weight[law.outcomes.following < 0].sum())
            impossible = impossible_mass(case, target, law.outcomes)[0] - lost
            return SheetRow(case.name, case.length, case.vocab, impossible=impossible, lost=lost)
        # The intervals of all cases hold together.
        level = _LEVEL / len(self.cases)
        half = 0.0 if law.samples is None else half_width(target, law.samples, level)
        row = score(case, target, law.outcomes, max(self.allowed, half))
        edge = None if law.edges is None else impossible_mass(case, target, law.edges)[1]
        row = dataclasses.replace(row, edge=edge, coupled=None if is_sampled else False)
        if law.samples is not None:
            tv = row.variation or 0.0
            row = dataclasses.replace(row, interval=(max(0.0, tv - half), min(1.0, tv + half)))
        return row

    @property
    def allowed(self) -> float:
        """The largest total variation that counts as exact."""
        if self.tolerance is not None:
            return self.tolerance
        narrow = self.single or self.rule is not None or self.calling is None
        return _TOLERANCES["float32" if narrow else self.calling.dtype]

    def is_biased(self, row: SheetRow) -> bool:
        """Whether a row shows a bias."""
        sure = row.interval[0] if row.interval is not None else row.variation
        # In float32 a uniform next to 1 is rounded to 1.
        most = _TOLERANCES["float32"] if self.single else _NO_MASS
        # Each token's share is rounded.
        limit = self.allowed * max(1.0, row.vocab / 20)
        return (sure or 0.0) > limit or (row.impossible or 0.0) > most

    def _lost(self) -> list[SheetRow]:
        # Who rounds to float32 makes 1 of a uniform next to 1, which its own generator never gives.
        least = _TOLERANCES["float32"] if self.single else 0.0
        return [row for row in self.rows if (row.lost or 0.0) > least]

    def _wrong(self) -> tuple[Verdict, str] | None:
        """The verdict of a verifier that a row shows to be wrong."""
        if bad := [row for row in self.rows if row.problem]:
            return Verdict.INVALID, f"case {bad[0].case!r}: {bad[0].problem}"
        if coupled := [row for row in self.rows if row.coupled]:
            why = "a row's outcome depends on the other rows of its batch"
            return Verdict.COUPLED, f"{why}, as in {coupled[0].case!r}"
        if bad := self._lost():
            worst = max(bad, key=lambda row: row.lost or 0.0)
            what = "NaN, out of range, or not what was drafted (tokens are padded with -1)"
            share = f"{worst.lost:.2g} of the outcomes are {what}"
            return Verdict.INVALID, f"case {worst.case!r}: {share}"
        if biased := [row for row in self.rows if self.is_biased(row)]:
            return Verdict.BIASED, _worst(biased)
        return None

    def _right(self) -> tuple[Verdict, str]:
        """The verdict of a verifier that no row shows to be wrong."""
        measured = [row for row in self.rows if row.variation is not None]
        if not measured:
            why = "; ".join(sorted({why for _, why in self.skipped})) or "it has no law"
            return Verdict.NOT_FINISHED, f"no law was computed: these cases do not fit ({why})"
        if bad := [row for row in self.rows if row.edge]:
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
        follow = "have" if self.rule is None else f"follow {type(self.rule).__name__},"
        text = f"all {len(measured)} cases {follow} TV <= {worst:.1g}"
        return Verdict.EXACT if self.rule is None else Verdict.LOSSY, text


def _worst(biased: Sequence[SheetRow]) -> str:
    measured = [row for row in biased if row.variation is not None]
    if not measured:
        row = biased[0]
        return f"case {row.case!r} emits impossible tokens, {row.impossible:.2g} of rejected drafts"
    row = max(measured, key=lambda row: row.variation or 0.0)
    text = f"worst case {row.case!r}: TV {row.variation:.2g}"
    if row.first_wrong:
        text += f", wrong from token {row.first_wrong} on"
    if most := max((r.impossible or 0.0 for r in biased), default=0.0):
        text += f"; up to {most:.2g} of the mass on impossible texts"
    return text


def _chosen(names: Sequence[str] | None) -> list[HardCase]:
    """The cases with these names, or parts of names."""
    cases = list(hard_cases())
    if names is None:
        return cases
    if isinstance(names, str):
        raise UserError(f"cases must be a list of names, got {names!r}: write [{names!r}]")
    for name in names:
        if not any(str(name).lower() in case.name.lower() for case in cases):
            every = ", ".join(repr(case.name) for case in cases)
            raise UserError(f"there is no case {name!r}: choose from {every}")
    if not names:
        raise UserError("cases is empty: leave it out for all")
    return [c for c in cases if any(str(name).lower() in c.name.lower() for name in names)]
