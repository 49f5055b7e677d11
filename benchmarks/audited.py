"""Audits verifiers of specjax and of other systems: one line and one verdict for each.

Each function below is also a target of the command: `specjax audit benchmarks.audited:NAME`.
Functions named after a system and marked "re-derived" have its rule, written anew in NumPy from its
code; they are not its code. `transformers` and `keras_hub` run the installed library.
"""

import argparse
import functools
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import command
from benchmarks import known_bugs as reference
from benchmarks.known_bugs import BlockParts, ReferenceVerifier
from specjax import rules, verification
from specjax.cli.report import Report
from specjax.sampling.draws import draw
from specjax.testing import audit, emitted_law, target_law, total_variation
from specjax.testing.auditing.hard_cases import one_hot
from specjax.types import ChildLaw, ScoredBlock

HELP = "verdicts on verifiers of specjax and other systems"


def _of(algorithm: Any) -> Callable[..., Any]:
    """An algorithm of specjax on chains, in its own code, with given uniforms."""

    def row(tokens, draft, target, uniforms, following, length):
        draft = jnp.concatenate([draft, target[-1:]])  # the bonus row, which only a carry reads
        if algorithm.walks_trees:
            parents = jnp.arange(tokens.size, dtype=jnp.int32)
            laws = jnp.full_like(tokens, ChildLaw.DRAWN)
            block = ScoredBlock(tokens, draft, target, length, parents, laws)
            path = algorithm.walk(uniforms, block)
            return path[1], draw(path[2], following)
        carry = algorithm.init_carry(tokens.shape[0])
        block = ScoredBlock(tokens, draft, target, length)
        acceptance, accepted = verification.accept(algorithm, uniforms, block, carry)
        return accepted, verification.draw_next(following, acceptance, block, accepted)

    @jax.jit
    def verify(tokens, draft_probs, target_probs, uniforms, uniform_next, lengths):
        return jax.vmap(row)(tokens, draft_probs, target_probs, uniforms, uniform_next, lengths)

    return verify


specjax_token = _of(verification.Token())
specjax_block = _of(verification.Block())
specjax_greedy_block_one_round = _of(verification.GreedyBlock())
specjax_walk = _of(verification.Walk())
specjax_top_down = _of(verification.TopDown())
specjax_traversal = _of(verification.Traversal())


def transformers(tokens, draft_logits, target_logits, uniforms, uniform_next, weight=None):
    """The installed transformers' `_speculative_sampling`; `weight` is its ensemble weight.

    It draws by `torch.rand_like` and `torch.multinomial`, which give it our uniforms meanwhile.
    """
    torch = importlib.import_module("torch")
    utils = importlib.import_module("transformers.generation.utils")
    weighted = {} if weight is None else {"assistant_ensemble_weight": weight}
    count, length = tokens.shape
    emitted = torch.full((count, length + 1), -1)
    for row in range(count):
        ids = torch.cat([torch.zeros(1, 1, dtype=tokens.dtype), tokens[row : row + 1]], dim=1)

        def rand_like(ratio, row=row):
            return uniforms[row].reshape(ratio.shape)

        def multinomial(weights, num_samples, row=row):
            drawn = reference.draw_first(weights.numpy(), uniform_next[row : row + 1].numpy())
            return torch.from_numpy(drawn)[:, None]

        logits = draft_logits[row : row + 1], target_logits[row : row + 1]
        with (
            mock.patch.object(torch, "rand_like", rand_like),
            mock.patch.object(torch, "multinomial", multinomial),
        ):
            valid, _ = utils._speculative_sampling(ids, logits[0], length, logits[1], **weighted)
        emitted[row, : valid.shape[1]] = valid[0]
    return emitted


def keras_hub(tokens: Any, draft_probs: Any, target_probs: Any) -> np.ndarray:
    """One round of the installed KerasHub's `SpeculativeSampler`, a row at a time.

    It drafts by itself, always q's most probable token: so audit it with argmax drafts.
    """
    rows = zip(tokens, draft_probs, target_probs, strict=True)
    return np.concatenate([keras_hub_batch(t[None], q[None], p[None]) for t, q, p in rows])


class _RoundEndedError(Exception):
    """The sampler asks for its second round's first draft."""


def keras_hub_batch(tokens: Any, draft_probs: Any, target_probs: Any) -> np.ndarray:
    """Likewise, all rows in one batch."""
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    samplers = importlib.import_module("keras_hub").samplers
    ops = importlib.import_module("keras").ops
    count, length = tokens.shape
    with np.errstate(divide="ignore"):
        log_q, log_p = (np.log(x).astype(np.float32) for x in (draft_probs, target_probs))
    drafted = 0

    def draft_next(prompt: Any, cache: Any, index: Any) -> Any:
        nonlocal drafted
        if drafted == length:
            raise _RoundEndedError(np.asarray(prompt), int(index))
        drafted += 1
        return ops.convert_to_tensor(log_q[:, drafted - 1]), None, cache

    def verify_next(prompt: Any, cache: Any, index: Any, k: int) -> Any:
        return ops.convert_to_tensor(log_p), cache

    sampler = samplers.SpeculativeSampler(
        num_speculative_tokens=length, base_sampler=samplers.RandomSampler()
    )
    prompt = np.zeros((count, 2 * length + 4), np.int32)
    try:
        sampler(
            next=None,
            prompt=ops.convert_to_tensor(prompt),
            index=1,
            draft_next=draft_next,
            verify_next=verify_next,
        )
    except _RoundEndedError as ended:
        found, index = ended.args
        at = np.arange(1, length + 2)
        return np.where(at < index, found[:, 1 : length + 2], -1)
    raise AssertionError("the sampler ended in its first round")


def vllm_standard(tokens, draft_probs, target_probs, uniforms, uniform_next, lengths):
    """VLLM's rejection sampler, re-derived."""
    emitted = np.full((len(tokens), tokens.shape[1] + 1), -1)
    for row, length in enumerate(lengths):
        x, q, p, u = tokens[row], draft_probs[row], target_probs[row], uniforms[row]
        n = 0
        while n < length and u[n] * q[n, x[n]] < p[n, x[n]]:
            n += 1
        weights = np.maximum(p[n] - q[n], 0.0) if n < length else p[n]
        emitted[row, :n] = x[:n]
        emitted[row, n] = reference.draw_first(weights[None], uniform_next[row : row + 1])[0]
    return emitted


def _own(p: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The probabilities of tokens `[B, G]` in p `[B, G + 1, V]`."""
    return np.take_along_axis(p[:, :-1], tokens[..., None], axis=2)[..., 0]


def _by_chance(
    chance: Callable[[BlockParts], np.ndarray], residual: Callable[..., np.ndarray] | None = None
) -> ReferenceVerifier:
    """Accepts each token with a chance; the residual is Token's by default."""
    return ReferenceVerifier(
        passes=lambda u, _, b, joint: u < chance(b), residual=residual or reference.difference
    )


def _without_drafted(b: BlockParts, n: np.ndarray) -> np.ndarray:
    """P without the rejected token, after n accepted ones."""
    p = reference.whole(b, n)
    rejected = b.at(b.x, n)
    return np.where(np.arange(p.shape[1]) == rejected[:, None], 0.0, p)


def _entropy(p: np.ndarray) -> np.ndarray:
    return -(p * np.log(np.where(p > 0.0, p, 1.0))).sum(axis=-1)


def _best_of(b: BlockParts, n: np.ndarray) -> np.ndarray:
    return one_hot(np.argmax(reference.whole(b, n), axis=1), b.p.shape[2])


def _typical(b: BlockParts, epsilon: float = 0.3, alpha: float = 0.09) -> np.ndarray:
    limit = np.minimum(epsilon, alpha * np.exp(-_entropy(b.p[:, :-1])))
    return 1.0 * (_own(b.p, b.x) > limit)


def _relaxed(b: BlockParts, top_k: int = 3, delta: float = 0.5) -> np.ndarray:
    p, own = b.p[:, :-1], _own(b.p, b.x)
    rank = (p > own[..., None]).sum(axis=-1)
    return 1.0 * ((rank == 0) | ((rank < top_k) & (own >= p.max(axis=-1) - delta)))


def _cactus_cap(p: np.ndarray, delta: float = 0.1) -> np.ndarray:
    return np.minimum(1.0, p + np.sqrt(2.0 * delta * p * (1.0 - p)))


def _cactus_residual(b: BlockParts, n: np.ndarray) -> np.ndarray:
    p, x = reference.whole(b, n), b.at(b.x, n)
    own = np.take_along_axis(p, x[:, None], axis=1)
    cap = _cactus_cap(own)
    rest = p * (1.0 - cap) / np.where(own < 1.0, 1.0 - own, 1.0)
    h = np.where(np.arange(p.shape[1]) == x[:, None], cap, rest)
    return np.maximum(h - b.at(b.q, n), 0.0)


def _by_list_index(b: BlockParts, n: np.ndarray) -> np.ndarray:
    """Q is sorted, p is not, and entries of the same index are subtracted."""
    q = np.sort(b.at(b.q, n), axis=1)[:, ::-1]
    return np.maximum(reference.whole(b, n) - q, 0.0)


def _over_draft(b: BlockParts, value: np.ndarray) -> np.ndarray:
    own = np.take_along_axis(b.q, b.x[..., None], axis=2)[..., 0]
    return value / np.where(own > 0.0, own, 1.0)


vllm_synthetic = _by_chance(lambda b: np.full(b.x.shape, 0.7))
vllm_ascend_block = reference.WRONG[
    "block: P_i is compared with a product of uniforms (vllm-ascend before 7808)"
]
vllm_padding = ReferenceVerifier(block=True, reads_padding=True)
hsd = reference.WRONG["block: the last test is not capped (HSD as published)"]
sglang_exact = _by_chance(lambda b: _own(b.p, b.x), _without_drafted)
sglang_threshold = _by_chance(
    lambda b: np.where(_own(b.p, b.x) >= 0.3, 1.0, _own(b.p, b.x)), _without_drafted
)
tensorrt_strict = sglang_exact
tpu_inference = ReferenceVerifier(
    passes=lambda u, _, b, joint: u <= _own(b.p, b.x), residual=_without_drafted
)
tensorrt_relaxed = _by_chance(_relaxed, _best_of)
medusa_typical = _by_chance(_typical, _best_of)
cactus = _by_chance(lambda b: _over_draft(b, _cactus_cap(_own(b.p, b.x))), _cactus_residual)
llama_cpp = ReferenceVerifier(residual=_by_list_index)
lossy = _by_chance(lambda b: _over_draft(b, _own(b.p, b.x)) / (1.0 - 0.3))
keras_hub_rule = ReferenceVerifier(
    count=reference.WRONG["all rows advance by the batch's minimum"].count,
    draw=lambda w, u: reference.draw_first(w / w.sum(axis=1, keepdims=True) + 1e-7, u),
)


class Audited(NamedTuple):
    """A line of the table, with the name of a function here, and options of `audit`.

    Without a package the rule was re-derived. `given` are further arguments of the function.
    """

    system: str
    target: str
    package: str = ""
    options: dict[str, Any] = {}  # noqa: RUF012
    given: dict[str, Any] = {}  # noqa: RUF012


_KERAS = {"drafts": "argmax", "mode": "black-box", "samples": 1000, "cases": ["ties"]}
LINES = (
    Audited("specjax Token", "specjax_token", "specjax"),
    Audited("specjax Block", "specjax_block", "specjax"),
    Audited("specjax Walk, chains", "specjax_walk", "specjax"),
    Audited("specjax TopDown, chains", "specjax_top_down", "specjax"),
    Audited("specjax Traversal, chains", "specjax_traversal", "specjax"),
    Audited("transformers", "transformers", "transformers", {"arrays": "torch"}),
    Audited(
        *("transformers, weight 0.7", "transformers", "transformers"),
        *({"arrays": "torch"}, {"weight": 0.7}),
    ),
    Audited(
        *("transformers, argmax drafts", "transformers", "transformers"),
        {"arrays": "torch", "drafts": "argmax"},
    ),
    Audited("KerasHub, a row at a time", "keras_hub", "keras-hub", _KERAS),
    Audited("KerasHub, a batch", "keras_hub_batch", "keras-hub", _KERAS),
    Audited("KerasHub's rule, drawn drafts", "keras_hub_rule"),
    Audited("vLLM standard", "vllm_standard"),
    Audited("vLLM synthetic 0.7", "vllm_synthetic"),
    Audited("vLLM block before 50939", "vllm_padding"),
    Audited("vllm-ascend block before 7808", "vllm_ascend_block"),
    Audited("SGLang, thresholds 1, 1", "sglang_exact", "", {"drafts": "certain"}),
    Audited("SGLang, threshold_single 0.3", "sglang_threshold", "", {"drafts": "certain"}),
    Audited("tpu-inference, its verifier", "tpu_inference", "", {"drafts": "certain"}),
    Audited("TensorRT-LLM strict", "tensorrt_strict", "", {"drafts": "certain"}),
    Audited("TensorRT-LLM relaxed 3, 0.5", "tensorrt_relaxed", "", {"drafts": "certain"}),
    Audited("Medusa typical 0.3, 0.09", "medusa_typical", "", {"drafts": "certain"}),
    Audited("HSD as published", "hsd"),
    Audited("Cactus 0.1", "cactus"),
    Audited("llama.cpp example", "llama_cpp", "", {"drafts": "argmax"}),
    Audited("Lossy(0.3) declared", "lossy", "", {"rule": rules.Lossy(0.3)}),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the choice of lines."""
    parser.add_argument("--only", nargs="+", metavar="WORD", help="lines with one of these words")
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="only these cases")
    parser.add_argument("--time-limit", type=float, default=600.0, help="seconds per line")


def run(args: argparse.Namespace) -> Report:
    """Audits all lines; a package that is not installed leaves its line empty."""
    table = []
    for line in LINES:
        if args.only and not any(word.lower() in line.system.lower() for word in args.only):
            continue
        print(f"benchmarks.audited: {line.system}", file=sys.stderr)
        table.append(_row(line, args.cases, args.time_limit))
    for system, made in _OTHERS.items():
        if not args.only or any(word.lower() in system.lower() for word in args.only):
            table.append({"system": system, **made()})
    notes = ["version: of the package that ran; re-derived: its rule, written anew in NumPy."]
    columns = ("system", "version", "verdict", "largest_tv", "case")
    return Report(table, columns, notes)


def _row(line: Audited, cases: list[str] | None, time_limit: float) -> dict[str, Any]:
    version = "re-derived"
    if line.package:
        try:
            version = importlib.metadata.version(line.package)
        except importlib.metadata.PackageNotFoundError:
            version = "checkout" if line.package == "specjax" else "not installed"
    row: dict[str, Any] = {"system": line.system, "version": version}
    if version == "not installed":
        return row
    function = globals()[line.target]
    if line.given:
        function = functools.partial(function, **line.given)
    found = audit(function, **{"cases": cases, "time_limit": time_limit, **line.options})
    worst = found.worst
    row |= {"verdict": found.verdict.text, "reason": found.reason}
    if worst is not None and worst.variation is not None:
        row |= {"largest_tv": float(f"{worst.variation:.2g}"), "case": worst.case}
    row["rows"] = found.to_dict()["rows"]
    return row


def _greedy_block() -> dict[str, Any]:
    """Greedy block's law over rounds, with its carry: a single round alone is not exact."""
    rng = np.random.default_rng(0)
    vocab, length, tokens = 3, 2, 3
    prefixes = sum(vocab**n for n in range(tokens + length + 1))
    q, p = rng.dirichlet(np.ones(vocab), size=(2, prefixes)).astype(np.float32)
    given = verification.GreedyBlock(), q, p, tokens, length
    exact = total_variation(emitted_law(*given), target_law(p, tokens))
    without = total_variation(emitted_law(*given, keep_carry=False), target_law(p, tokens))
    return {
        "version": "checkout",
        "verdict": "EXACT" if exact < 1e-6 else "BIASED",
        "largest_tv": float(f"{exact:.2g}"),
        "case": f"random, {tokens} tokens (without its carry: {without:.2g})",
    }


def _filter_law(logits: np.ndarray, temperature: float, top_p: float, *, first: bool) -> np.ndarray:
    """The law of tokens whose top-p is taken before the division by the temperature, or after."""

    def softmax(x: np.ndarray) -> np.ndarray:
        p = np.exp(x - x.max(axis=-1, keepdims=True))
        return p / p.sum(axis=-1, keepdims=True)

    judged = softmax(logits if first else logits / temperature)
    descending = -np.sort(-judged, axis=-1)
    more = np.cumsum(descending, axis=-1) < top_p
    least = np.take_along_axis(descending, more.sum(axis=-1, keepdims=True), axis=-1)
    return softmax(np.where(judged >= least, logits / temperature, -np.inf))


def _two_laws() -> dict[str, Any]:
    """tpu-inference: what its rejection sampler emits, against its sampler without drafts."""
    temperature, top_p, rows = 0.7, 0.9, 1000
    logits = 2.0 * np.random.default_rng(0).normal(size=(rows, 32))
    drafted, alone = (
        _filter_law(logits, temperature, top_p, first=first) for first in (True, False)
    )
    apart = 0.5 * np.abs(drafted - alone).sum(axis=-1)
    return {
        "version": "re-derived",
        "verdict": "TWO LAWS",
        "largest_tv": float(f"{apart.max():.2g}"),
        "case": f"T={temperature}, top-p {top_p}, {rows} random rows; mean {apart.mean():.2g}",
    }


def _assistant_after_a_rejection() -> dict[str, Any]:
    """Whether a Gemma 4 assistant's draft depends on a token that was rejected before."""
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return {"version": "not installed"}
    torch, models = map(importlib.import_module, ("torch", "transformers"))
    generator = importlib.import_module("transformers.generation.candidate_generator")
    sizes = {
        "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3,
        "vocab_size": 40, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "global_head_dim": 8, "intermediate_size": 32, "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
    }  # fmt: skip
    config = functools.partial(models.Gemma4TextConfig, **sizes)
    large, small = (
        config(hidden_size=32, num_kv_shared_layers=2),
        config(hidden_size=16, num_kv_shared_layers=6),
    )
    torch.manual_seed(0)
    main = models.Gemma4ForCausalLM(large).eval()
    try:
        assistant = models.Gemma4AssistantForCausalLM(
            models.Gemma4AssistantConfig(text_config=small, backbone_hidden_size=32)
        ).eval()
    except ValueError as error:
        return {"version": version, "verdict": "NOT BUILT", "reason": str(error)}
    with torch.no_grad():
        for model in (main, assistant):
            for matrix in model.parameters():
                if matrix.ndim > 1:
                    matrix.normal_(0.0, matrix.shape[-1] ** -0.5)
        prompt, after = torch.arange(3, 13)[None], torch.tensor([[7]])
        drafts = []
        for rejected in (11, 13):
            read = main(
                torch.cat([prompt, torch.tensor([[rejected]])], dim=1),
                return_shared_kv_states=True,
                output_hidden_states=True,
            )
            read["hidden_states"] = (read.hidden_states[-1][:, 9:],)
            settings = models.GenerationConfig(max_length=64)
            candidates = generator.SinglePositionMultiTokenCandidateGenerator(
                assistant, main.get_input_embeddings(), settings
            )
            candidates.num_assistant_tokens, candidates.is_main_model_prefill = 1, False
            text = torch.cat([prompt, after], dim=1)
            drafts.append(candidates.get_candidates(text, {}, read, False, 0)[1])
    apart = float((drafts[0] - drafts[1]).abs().max() / drafts[0].abs().max())
    return {
        "version": version,
        "verdict": "STALE ROW" if apart > 1e-4 else "NO DIFFERENCE",
        "case": f"another rejected token moves a logit by {apart:.2g} of the largest",
    }


# Lines that no verifier of a single round has.
_OTHERS = {
    "specjax GreedyBlock, over rounds": _greedy_block,
    "tpu-inference, top-p with and without drafts": _two_laws,
    "transformers, Gemma 4 assistant after a rejection": _assistant_after_a_rejection,
}

if __name__ == "__main__":
    sys.exit(command.program(__file__, HELP, add_arguments, run)())
