"""Audits a verifier: what distribution does it emit?"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specjax.checks import check_count, one_number, whole_number
from specjax.errors import UserError
from specjax.rules import Budgeted
from specjax.rules.target import check_is_rule
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
    AuditLimitError,
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
from specjax.testing.auditing.hard_cases import MANY_TOKENS, HardCase, hard_cases
from specjax.testing.auditing.hooked import CHECKED_LAWS, hooked_law
from specjax.testing.auditing.injected import CHECKED
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
# A black box must have intervals below this: else its samples tell too little.
_WIDEST = 0.1
# Of a batched function's cases with other rows, if its law is computed a row at a time.
_BATCH_SAMPLES = 10_000


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
      time_limit: seconds; what is left of the audit then is not done. A call that never returns is
        not ended: `specjax audit` ends it, because it audits in a process of its own.
      seed: of the audit's own random numbers.
      on_row: called with each row of the score sheet.

    Returns:
      An `AuditReport`. A function that raises or returns nonsense is a verdict too.

    Raises:
      TypeError: an argument has a wrong type.
      ValueError: an argument has a wrong value, or the function's parameters are not a verifier's.
    """
    _check_options(function, mode, rule, form, arrays, dtype, drafts)
    check_count("samples", samples, "give the number of draws per case")
    if tolerance is not None:
        tolerance = one_number("tolerance", tolerance, low=0.0, dtype=float)
    chosen = _chosen(cases)
    seed = whole_number("seed", seed, low=0)
    limit = one_number("time_limit", time_limit, low=0.0, open_low=True, dtype=float)
    call = {"form": form, "arrays": arrays, "dtype": dtype, "logits": logits}
    clock = AuditClock(time.monotonic() + limit)
    work = _Audit(function, call, mode, rule, drafts, tolerance, samples, seed, chosen, clock)
    return work.run(on_row)


@dataclasses.dataclass
class _Audit:
    """An audit under way."""

    function: Callable[..., Any]
    call: dict[str, Any]
    mode: str | None
    rule: Rule | None
    drafts: str
    tolerance: float | None
    samples: int
    seed: int
    cases: Sequence[HardCase]
    clock: AuditClock
    calling: Calling | None = None
    rows: list[SheetRow] = dataclasses.field(default_factory=list)
    laws: dict[str, tuple[HardCase, np.ndarray]] = dataclasses.field(default_factory=dict)
    skipped: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    single: bool = False

    def run(self, on_row: Callable[[SheetRow], None] | None) -> AuditReport:
        """Fills in the score sheet."""
        started, verdict, limit = time.monotonic(), None, None
        try:
            with np.errstate(all="ignore"), one_thread():
                self._find_calling()
                for number, case in enumerate(self.cases):
                    self._audit_case(case, np.random.default_rng((self.seed, number)), on_row)
        except OutOfTimeError:
            done = len(self.rows) + len(self.skipped)
            verdict = Verdict.NOT_FINISHED, f"{done} of {len(self.cases)} cases in the time limit"
        except AuditLimitError as error:
            limit = Verdict.NOT_FINISHED, str(error)
        except BadOutcomeError as error:
            verdict = Verdict.INVALID, str(error)
        # What hooks do not see may have looked like a bias.
        verdict = limit or self._wrong() or verdict or self._right()
        how = "no call worked"
        if self.calling is not None:
            how = f"{self.mode}, {self.calling.form}, {self.calling.arrays} {self.calling.dtype}"
            if self.drafts != "drawn":
                how += f", {self.drafts} drafts"
        return AuditReport(
            *verdict,
            tuple(self.rows),
            name_of(self.function),
            how,
            self.allowed,
            self._nearest() if verdict[0] in (Verdict.BIASED, Verdict.COUPLED) else None,
            tuple(self.skipped),
            self.clock.evaluations,
            time.monotonic() - started,
            # Of random points that agree: see `injected`.
            self._unresolved(),
        )

    def _unresolved(self) -> float:
        if not any(row.variation is not None and row.interval is None for row in self.rows):
            return 0.0
        return math.log(1 / _LEVEL) / (CHECKED_LAWS if self.mode == "hooked" else CHECKED)

    def _find_calling(self) -> None:
        probe = next((c for c in self.cases if c.law and c.length), self.cases[0])
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

    def _audit_case(
        self,
        case: HardCase,
        rng: np.random.Generator,
        on_row: Callable[[SheetRow], None] | None,
    ) -> None:
        assert self.calling is not None
        if why := _left_out(self.calling, case, self.mode):
            self.skipped.append((case.name, why))
            return
        mode = self.mode
        if case.others and mode == "hooked" and not case.is_padded:
            mode = "black-box"  # hooks run single rows: whether rows are coupled is sampled
        elif case.others and not _takes_others(self.calling, mode):
            case = dataclasses.replace(case, others=())
        case = case.drafted_as(self.drafts)
        target = declared_target(case, self.rule)
        try:
            row = self._measured(case, target, rng, mode)
            wide = row.interval is not None and row.interval[1] > _WIDEST
            if wide and mode != "black-box" and not (row.coupled or self.is_biased(row)):
                self.skipped.append((case.name, "too many texts"))  # more points are not drawn
                return
        except BadOutcomeError as error:
            if mode != self.mode:
                self.skipped.append((case.name, f"of a batch: {error}"))
                return
            row = SheetRow(case.name, case.length, case.vocab, problem=str(error))
        self.rows.append(row)
        if on_row is not None:
            on_row(row)

    def _measured(
        self,
        case: HardCase,
        target: tuple[np.ndarray, ...],
        rng: np.random.Generator,
        mode: str | None,
    ) -> SheetRow:
        assert self.calling is not None
        given = self.calling, case, self.drafts, rng, self.clock
        if mode == "black-box":
            samples = self.samples if mode == self.mode else min(self.samples, _BATCH_SAMPLES)
            law = sampled_law(*given, samples=samples)
        else:
            law = (hooked_law if mode == "hooked" else injected_law)(*given)
        self.single |= law.single
        edge = None if law.edges is None else impossible_mass(case, target, law.edges)[1]
        if not case.law:
            lost = float(law.outcomes.weight[law.outcomes.following < 0].sum())
            impossible = impossible_mass(case, target, law.outcomes)[0] - lost
            row = SheetRow(case.name, case.length, case.vocab, impossible=impossible, lost=lost)
            return dataclasses.replace(row, coupled=law.coupled)
        # The intervals of all cases hold together.
        level = _LEVEL / len(self.cases)
        half = 0.0 if law.samples is None else half_width(target, law.samples, level)
        tokens, row = score(case, target, law.outcomes, max(self.allowed, half), self.drafts)
        if case.vocab < MANY_TOKENS:  # the bugs' laws would take long
            self.laws[case.name] = case, tokens
        if law.samples is not None:
            tv = row.variation or 0.0
            row = dataclasses.replace(row, interval=(max(0.0, tv - half), min(1.0, tv + half)))
            if mode == "black-box":
                evidence = log10_evidence(case, target, law.outcomes, self.drafts)
                row = dataclasses.replace(row, evidence=evidence)
        return dataclasses.replace(row, edge=edge, coupled=law.coupled)

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
        # In float32 a uniform next to 1 is rounded to 1.
        most = _TOLERANCES["float32"] if self.single else _NO_MASS
        # Each token's share is rounded.
        limit = self.allowed * max(1.0, row.vocab / 20)
        return (sure or 0.0) > limit or (row.impossible or 0.0) > most

    def _nearest(self) -> tuple[str, float] | None:
        known = [row for row in self.rows if row.case in self.laws]
        coupled = [row for row in known if row.coupled]
        biased = coupled or [row for row in known if self.is_biased(row)]
        if not biased or self._lost():
            return None
        worst = max(biased, key=lambda row: row.variation or 0.0)
        case, law = self.laws[worst.case]
        target = declared_target(case, self.rule)
        error = 0.0 if worst.interval is None else worst.interval[1] - (worst.variation or 0.0)
        given = case, target, self.drafts, law
        with np.errstate(all="ignore"):
            return nearest_bug(*given, coupled=bool(worst.coupled), error=error)

    def _lost(self) -> list[SheetRow]:
        # Who rounds to float32 makes 1 of a uniform next to 1, which its own generator never gives.
        least = _TOLERANCES["float32"] if self.single else 0.0
        return [row for row in self.rows if (row.lost or 0.0) > least]

    def _wrong(self) -> tuple[Verdict, str] | None:
        """The verdict of a verifier that a row shows to be wrong."""
        if bad := [row for row in self.rows if row.problem]:
            return Verdict.INVALID, f"case {bad[0].case!r}: {bad[0].problem}"
        if coupled := [row for row in self.rows if row.coupled]:
            worst = max(coupled, key=lambda row: row.variation or 0.0)
            why = f"a row's outcome depends on the other rows of its batch, as in {worst.case!r}"
            return Verdict.COUPLED, f"{why} (TV {worst.variation:.2g})"
        if bad := self._lost():
            worst = max(bad, key=lambda row: row.lost or 0.0)
            what = "NaN, out of range, or not what was drafted (tokens are padded with -1)"
            return (
                Verdict.INVALID,
                f"case {worst.case!r}: {worst.lost:.2g} of the outcomes are {what}",
            )
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
        own = [row for row in measured if row.evidence is None or self.mode == "black-box"]
        sampled = [row.interval[1] for row in own if row.interval is not None]
        rest = [row.interval[1] for row in measured if row not in own and row.interval]
        sure = f"{100 * (1 - _LEVEL):g} % confidence"
        most = max([*sampled, *rest], default=0.0)
        if most > _WIDEST:
            why = f"no bias found, but the TV may be {most:.2g} ({sure}): give more samples"
            return Verdict.NOT_FINISHED, why
        if sampled or not own:
            return Verdict.NO_BIAS_FOUND, f"all {len(measured)} cases have TV < {most:.2g} ({sure})"
        worst = max(row.variation or 0.0 for row in own)
        follow = "have" if self.rule is None else f"follow {type(self.rule).__name__},"
        text = f"all {len(own)} cases {follow} TV <= {worst:.1g}"
        if rest:
            text += f"; {len(rest)} cases with other rows were sampled, TV < {max(rest):.2g}"
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
    if row.evidence is not None:
        odds = f"at odds of 1 to 10^{row.evidence:.0f}"
        text += f", {odds}" if math.isfinite(row.evidence) else ", and a text is impossible"
    if most := max((r.impossible or 0.0 for r in biased), default=0.0):
        text += f"; up to {most:.2g} of the mass on impossible texts"
    return text


def name_of(function: Callable[..., Any]) -> str:
    """What a function is called in reports."""
    inner = getattr(function, "func", function)  # of a functools.partial
    return str(getattr(inner, "__qualname__", type(inner).__name__))


def _takes_others(calling: Calling, mode: str | None) -> bool:
    """Whether a call may have other rows; theirs are drawn drafts."""
    return calling.is_batched and not calling.certain and mode != "hooked"


def _left_out(calling: Calling, case: HardCase, mode: str | None) -> str:
    """Why the interface has no place for a case; empty if it has."""
    if case.is_padded and not calling.takes_padding:
        return "no padding"
    if case.others and not case.is_padded and not _takes_others(calling, None):
        return "certain drafts" if calling.certain else "one row at a time"
    if not case.law and mode == "hooked":
        return "not sampled"
    if case.law and case.vocab >= MANY_TOKENS and mode == "black-box":
        return "too many texts"
    return ""


def _chosen(cases: Sequence[str] | None) -> list[HardCase]:
    """The cases with these names, or parts of names."""
    known = hard_cases()
    if cases is None:
        return list(known)
    if isinstance(cases, str):
        raise UserError(f"cases must be a list of names, got {cases!r}: write [{cases!r}]")
    for name in cases:
        if not any(str(name).lower() in case.name.lower() for case in known):
            names = ", ".join(repr(case.name) for case in known)
            raise UserError(f"there is no case {name!r}: choose from {names}")
    found = [c for c in known if any(str(name).lower() in c.name.lower() for name in cases)]
    if not found:
        raise UserError("cases is empty: leave it out for all")
    return found


def _check_options(
    function: Any, mode: Any, rule: Any, form: Any, arrays: Any, dtype: Any, drafts: Any
) -> None:
    if isinstance(function, type):
        raise UserError(
            f"function must be a function or an instance, got the class {function.__name__}"
        )
    if not callable(function):
        raise UserError(f"function must be a verifier's function, got {function!r}")
    if rule is not None:
        check_is_rule("rule", rule)
        if isinstance(rule, Budgeted):
            raise UserError(
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
            raise UserError(f"{name} must be one of {names}, got {value!r}")
