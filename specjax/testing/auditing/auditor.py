"""Audits a verifier: what distribution does it emit?"""

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specjax.checks import check_count, one_number
from specjax.rules import Budgeted
from specjax.rules.checking import check_is_rule
from specjax.testing.auditing.black_box import (
    generator_of,
    half_width,
    log10_evidence,
    sampled_law,
)
from specjax.testing.auditing.calling import (
    ARRAYS,
    DTYPES,
    FORMS,
    BadOutcomeError,
    Calling,
    found_calling,
    one_thread,
)
from specjax.testing.auditing.case_laws import (
    AuditClock,
    OutOfTimeError,
    impossible_mass,
    injected_law,
)
from specjax.testing.auditing.criterion import declared_target, score
from specjax.testing.auditing.hard_cases import HardCase, hard_cases
from specjax.testing.auditing.hooked import hooked_law
from specjax.testing.auditing.known_bugs import nearest_bug
from specjax.testing.auditing.score_sheet import AuditReport, SheetRow, Verdict
from specjax.types import Rule

MODES = ("injected", "hooked", "black-box")
DRAFTS = ("drawn", "argmax", "certain")
# A law is exact below these.
_TOLERANCES = {"float64": 1e-9, "float32": 1e-6}
_NO_MASS = 1e-12
_ALPHA = 1e-3  # of the e-processes of all cases together
_LEVEL = 0.01  # intervals hold with probability 1 - _LEVEL
# How long a call may take beyond the limit before it counts as one that never returns.
_GRACE = 2.0


def audit(
    function: Callable[..., Any],
    *,
    mode: str | None = None,
    rule: Rule | None = None,
    cases: Sequence[str] | None = None,
    form: str | None = None,
    arrays: str | None = None,
    dtype: str | None = None,
    logits: bool = False,
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
    - `lengths`: `[B]` int32, L <= G. Or `cu_lengths`: rows lie one after the other, as in vLLM:
      tokens, q and uniforms of all rows, p of L + 1 positions per row, and the lengths' sums.
    - `accepted`: `[B]`, how many drafted tokens are accepted; `next`: `[B]`, the token after them.

    Args:
      function: the verifier.
      mode: "injected" (the function gets its uniforms; the law is computed), "hooked" (the
        generators of NumPy, PyTorch or JAX are replaced while it runs; the law is computed) or
        "black-box" (the law is sampled). By default injected if it takes `uniforms` and
        `uniform_next`; else hooked, and a black box with JAX's arrays (hooks run JAX's operations
        one by one, which takes long).
      rule: the rule that a lossy verifier declares; it is lossless by default.
      cases: names of cases, or parts of them; all by default.
      form: "arrays", "flat" or "transformers" (the arguments of its `_speculative_sampling`); by
        the parameters' names by default.
      arrays: "numpy", "torch" or "jax"; what the function accepts by default.
      dtype: "float64" or "float32"; float64 if the function takes it by default.
      logits: whether `draft_probs` and `target_probs` are logarithms.
      drafts: "drawn" from q; "argmax": q's most probable tokens although the function gets q (which
        is what some pipelines do); "certain": likewise, and the function gets None or one-hot q.
      tolerance: the largest total variation that counts as exact; by default 1e-9 in float64 and
        1e-6 in float32.
      samples: draws per case for a black box.
      time_limit: seconds; what is left of the audit then is not done.
      seed: of the audit's own random numbers.
      on_row: called with each row of the score sheet.

    Returns:
      An `AuditReport`. A function that raises, hangs or returns nonsense is a verdict too.

    Raises:
      TypeError: an argument has a wrong type.
      ValueError: an argument has a wrong value, or the function's parameters are not a verifier's.
    """
    _check_options(function, mode, rule, form, arrays, dtype, drafts)
    check_count("samples", samples, "give the number of draws per case")
    if tolerance is not None:
        tolerance = one_number("tolerance", tolerance, low=0.0, dtype=float)
    chosen = _chosen(cases)
    limit = one_number("time_limit", time_limit, low=0.0, open_low=True, dtype=float)
    call = {"form": form, "arrays": arrays, "dtype": dtype, "logits": logits}
    work = _Audit(function, call, mode, rule, drafts, tolerance, samples, seed, limit, on_row)
    # A call may never return: then the thread is left behind.
    thread = threading.Thread(target=work.run, args=(chosen,), daemon=True)
    thread.start()
    thread.join(limit + _GRACE)
    if work.refusal is not None:
        raise work.refusal
    return work.report(chosen)


@dataclasses.dataclass
class _Audit:
    """An audit under way, in a thread."""

    function: Callable[..., Any]
    call: dict[str, Any]
    mode: str | None
    rule: Rule | None
    drafts: str
    tolerance: float | None
    samples: int
    seed: int
    limit: float
    on_row: Callable[[SheetRow], None] | None
    calling: Calling | None = None
    rows: list[SheetRow] = dataclasses.field(default_factory=list)
    laws: dict[str, tuple[HardCase, np.ndarray]] = dataclasses.field(default_factory=dict)
    skipped: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    single: bool = False
    invalid: str = ""
    nearest: tuple[str, float] | None = None
    refusal: Exception | None = None
    finished: bool = False

    def __post_init__(self) -> None:
        self.started = time.monotonic()
        self.clock = AuditClock(self.started + self.limit)

    def run(self, cases: Sequence[HardCase]) -> None:
        """Fills in the score sheet."""
        try:
            with np.errstate(all="ignore"), one_thread():
                self._find_calling(cases)
                for number, case in enumerate(cases):
                    self._audit_case(case, np.random.default_rng((self.seed, number)))
                self._find_bug()
            self.finished = True
        except OutOfTimeError:
            pass
        except BadOutcomeError as error:
            self.invalid, self.finished = str(error), True
        except Exception as error:
            self.refusal = error

    def _find_calling(self, cases: Sequence[HardCase]) -> None:
        probe = next((c for c in cases if c.law and c.length), cases[0])
        blocks, _ = probe.blocks(self.drafts)
        rows = probe.rows(blocks[:1], np.full((1, probe.length + 1), 0.5))
        self.calling = found_calling(
            self.function,
            rows,
            certain=self.drafts == "certain",
            generator=lambda kind: generator_of(kind, self.seed),
            **self.call,
        )
        takes = self.calling.takes
        if self.mode is None:
            given = {"uniforms", "uniform_next"} <= takes or self.calling.form == "flat"
            # JAX's operations one by one take too long for the calls of hooks.
            own = "black-box" if self.calling.arrays == "jax" else "hooked"
            self.mode = "injected" if given else own

    def _audit_case(self, case: HardCase, rng: np.random.Generator) -> None:
        assert self.calling is not None
        if why := _left_out(self.calling, case, self.mode):
            self.skipped.append((case.name, why))
            return
        case = case.drafted_as(self.drafts)
        target = declared_target(case, self.rule)
        try:
            row = self._measured(case, target, rng)
        except BadOutcomeError as error:
            row = SheetRow(case.name, case.length, problem=str(error))
        self.rows.append(row)
        if self.on_row is not None:
            self.on_row(row)

    def _measured(
        self, case: HardCase, target: tuple[np.ndarray, ...], rng: np.random.Generator
    ) -> SheetRow:
        assert self.calling is not None
        given = self.calling, case, self.drafts, rng, self.clock
        if self.mode == "black-box":
            law = sampled_law(*given, samples=self.samples)
        else:
            law = (hooked_law if self.mode == "hooked" else injected_law)(*given)
        self.single |= law.single
        edge = None if law.edges is None else impossible_mass(case, target, law.edges)[1]
        if not case.law:
            impossible = impossible_mass(case, target, law.outcomes)[0]
            lost = float(law.outcomes.weight[law.outcomes.following < 0].sum())
            return SheetRow(
                case.name,
                case.length,
                impossible=impossible - lost,
                lost=lost,
                coupled=law.coupled,
            )
        half = 0.0 if law.samples is None else half_width(target, law.samples, _LEVEL)
        scores = score(case, target, law.outcomes, max(self.allowed, half), self.drafts)
        if law.single and scores.lost < _TOLERANCES["float32"]:
            # It rounds a uniform next to 1 to 1, which its own generator would not give.
            scores = dataclasses.replace(scores, lost=0.0)
        self.laws[case.name] = (case, scores.law)
        interval = evidence = None
        if law.samples is not None:
            tv = scores.variation
            interval = max(0.0, tv - half), min(1.0, tv + half)
            if self.mode == "black-box":
                evidence = log10_evidence(case, target, law.outcomes, self.drafts)
        names = ("divergence", "impossible", "lost", "accepted", "token", "block", "first_wrong")
        return SheetRow(
            case.name,
            case.length,
            scores.variation,
            interval,
            edge=edge,
            coupled=law.coupled,
            evidence=evidence,
            **{name: getattr(scores, name) for name in names},
        )

    @property
    def allowed(self) -> float:
        """The largest total variation that counts as exact."""
        if self.tolerance is not None:
            return self.tolerance
        narrow = self.single or self.rule is not None or self.calling is None
        return _TOLERANCES["float32" if narrow else self.calling.dtype]  # type: ignore[union-attr]

    def is_biased(self, row: SheetRow) -> bool:
        """Whether a row shows a bias."""
        if row.evidence is not None and row.evidence > math.log10(max(len(self.rows), 1) / _ALPHA):
            return True
        sure = row.interval[0] if row.interval is not None else row.variation
        return (sure or 0.0) > self.allowed or (row.impossible or 0.0) > _NO_MASS

    def _find_bug(self) -> None:
        biased = [r for r in self.rows if r.case in self.laws and self.is_biased(r)]
        coupled = [r for r in self.rows if r.case in self.laws and r.coupled]
        if not (coupled or biased) or any(row.lost for row in self.rows):
            return
        worst = max(coupled or biased, key=lambda row: row.variation or 0.0)
        case, law = self.laws[worst.case]
        target = declared_target(case, self.rule)
        self.nearest = nearest_bug(case, target, self.drafts, law, coupled=bool(worst.coupled))

    def report(self, cases: Sequence[HardCase]) -> AuditReport:
        """The report, of what was done so far."""
        verdict, reason = self._verdict(cases)
        calling = self.calling
        how = "not called"
        if calling is not None:
            how = f"{self.mode}, {calling.form}, {calling.arrays} {calling.dtype}"
            if self.drafts != "drawn":
                how += f", {self.drafts} drafts"
        return AuditReport(
            verdict,
            reason,
            tuple(self.rows),
            name_of(self.function),
            how,
            self.allowed,
            self.nearest if verdict in (Verdict.BIASED, Verdict.COUPLED) else None,
            tuple(self.skipped),
            self.clock.evaluations,
            time.monotonic() - self.started,
        )

    def _verdict(self, cases: Sequence[HardCase]) -> tuple[Verdict, str]:
        rows = list(self.rows)
        if self.invalid:
            return Verdict.INVALID, self.invalid
        done = len(rows) + len(self.skipped)
        under_way = cases[min(done, len(cases) - 1)].name
        waited = time.monotonic() - self.clock.answered
        if not self.finished and waited > max(_GRACE, 0.5 * self.limit):
            return (
                Verdict.INVALID,
                f"a call in case {under_way!r} had no answer after {waited:.0f} s",
            )
        if bad := [row for row in rows if row.problem]:
            return Verdict.INVALID, f"case {bad[0].case!r}: {bad[0].problem}"
        if bad := [row for row in rows if row.lost]:
            worst = max(bad, key=lambda row: row.lost or 0.0)
            what = "NaN, out of range, or not what was drafted"
            return Verdict.INVALID, f"case {worst.case!r}: {worst.lost:.2g} of outcomes are {what}"
        biased = [row for row in rows if self.is_biased(row)]
        if coupled := [row for row in rows if row.coupled]:
            worst = max(coupled, key=lambda row: row.variation or 0.0)
            why = f"a row's outcome depends on the other rows of its batch, as in {worst.case!r}"
            return Verdict.COUPLED, f"{why} (TV {worst.variation:.2g})"
        if biased:
            return Verdict.BIASED, _worst(biased)
        if not self.finished:
            return Verdict.NOT_FINISHED, f"{done} of {len(cases)} cases in {self.limit:g} s"
        if not rows:
            return Verdict.NOT_FINISHED, "no case fits the function's interface"
        if edge := [row for row in rows if row.edge]:
            tokens = "impossible or invalid tokens"
            return Verdict.EDGE, f"a uniform of 0 or 1 - 2^-24 emits {tokens} in {edge[0].case!r}"
        return self._right(rows)

    def _right(self, rows: Sequence[SheetRow]) -> tuple[Verdict, str]:
        sampled = [row.interval[1] for row in rows if row.interval is not None]
        worst = max((row.variation or 0.0 for row in rows), default=0.0)
        if sampled:
            likely = f"{100 * (1 - _LEVEL):g} % each"
            return (
                Verdict.NO_BIAS_FOUND,
                f"all {len(rows)} cases have TV < {max(sampled):.2g} ({likely})",
            )
        if self.rule is not None:
            rule = type(self.rule).__name__
            return Verdict.LOSSY, f"all {len(rows)} cases follow {rule}, TV <= {worst:.1g}"
        return Verdict.EXACT, f"all {len(rows)} cases have TV <= {worst:.1g}"


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


def name_of(function: Callable[..., Any]) -> str:
    """What a function is called in reports."""
    inner = getattr(function, "func", function)  # of a functools.partial
    return str(getattr(inner, "__qualname__", type(inner).__name__))


def _left_out(calling: Calling, case: HardCase, mode: str | None) -> str:
    """Why the interface has no place for a case; empty if it has."""
    alone = mode == "hooked" or not calling.is_batched
    if case.others and alone:
        return "one row at a time"
    if case.is_padded and not calling.takes_padding:
        return "no padding"
    if case.others and calling.certain:
        return "certain drafts"
    if not case.law and mode == "hooked":
        return "not sampled"
    return ""


def _chosen(cases: Sequence[str] | None) -> list[HardCase]:
    """The cases with these names, or parts of names."""
    known = hard_cases()
    if cases is None:
        return list(known)
    if isinstance(cases, str):
        raise TypeError(f"cases must be a list of names, got {cases!r}: write [{cases!r}]")
    for name in cases:
        if not any(str(name).lower() in case.name.lower() for case in known):
            names = ", ".join(repr(case.name) for case in known)
            raise ValueError(f"there is no case {name!r}: choose from {names}")
    found = [c for c in known if any(str(name).lower() in c.name.lower() for name in cases)]
    if not found:
        raise ValueError("cases is empty: leave it out for all")
    return found


def _check_options(
    function: Any, mode: Any, rule: Any, form: Any, arrays: Any, dtype: Any, drafts: Any
) -> None:
    if not callable(function):
        raise TypeError(f"function must be a verifier's function, got {function!r}")
    if rule is not None:
        check_is_rule("rule", rule)
        if isinstance(rule, Budgeted):
            raise ValueError(
                f"rule must not be Budgeted, got {rule!r}: its target depends on what earlier "
                "tokens spent; declare its inner rule, or one with a bound at each token such as "
                "rules.KLBall(0.05)"
            )
    for name, value, known in (
        ("mode", mode, (None, *MODES)),
        ("form", form, (None, *FORMS)),
        ("arrays", arrays, (None, *ARRAYS)),
        ("dtype", dtype, (None, *DTYPES)),
        ("drafts", drafts, DRAFTS),
    ):
        if value not in known:
            names = ", ".join(repr(x) for x in known if x is not None)
            raise ValueError(f"{name} must be one of {names}, got {value!r}")
