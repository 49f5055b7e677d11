"""What must not change when code is only moved: programs, rows and public names.

    python -m benchmarks.frozen write before.json        # in the old checkout
    python -m benchmarks.frozen compare before.json      # in the new one

Each setting has the hashes of its StableHLO programs (without locations and names), and its rows.
Run both on the same machine: floats depend on the processor and the version of XLA.
"""

import hashlib
import importlib
import json
import pkgutil
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import specjax
from specjax import decoding, drafting, rules, verification
from specjax.processors import MinP, RepetitionPenalty

PROMPTS = 12
_MESH = (2, 2)


def settings() -> Iterator[tuple[str, Any, dict[str, Any], dict[str, Any]]]:
    """Each setting's name, its models, the parts of its decoder, and the options of its call."""
    pair = specjax.load_pair()
    opt = rules.OPT(0.2)
    yield "token", pair, {"verification": verification.Token()}, {}
    yield "block", pair, {}, {}
    yield "greedy block", pair, {"verification": verification.GreedyBlock()}, {}
    yield "OPT", pair, {"rule": opt}, {}
    yield "TokenV3", pair, {"rule": rules.TokenV3(0.5)}, {}
    yield "adaptive", pair, {"stopping": drafting.Confidence(0.4), "max_draft": 12}, {}
    yield "lookup", pair, {"drafting": specjax.drafting.Lookup(bigram="built-in")}, {}
    vertical = specjax.drafting.Cascade([[3, 0], [0, 2]], last=specjax.drafting.Lookup())
    yield "vertical cascade", pair, {"drafting": vertical}, {}
    horizontal = specjax.drafting.Cascade([[3, 2], [0, 0]], last=specjax.drafting.Lookup())
    yield "horizontal cascade", pair, {"drafting": horizontal}, {}
    yield "tree", pair, {"drafting": specjax.drafting.Tree(depth=3, width=2)}, {}
    processors = (RepetitionPenalty(1.3), MinP(0.05))
    yield "processors", pair, {"processors": processors}, {}
    yield "int8", specjax.load_pair(weights="int8"), {}, {}
    yield "Llama", specjax.load_pair("gsm8k"), {}, {}
    mesh = specjax.partitioning.make_mesh(*_MESH)
    yield "mesh", specjax.load_pair(mesh=mesh), {}, {}
    yield (
        "token cascade",
        pair,
        {"method": decoding.TokenCascade(), "rule": rules.Chow(0.3)},
        {},
    )
    yield "verifier alone", pair.verifier, {}, {}
    sampling = specjax.Sampling(0.8, top_k=20, top_p=0.9)
    yield "top-k with top-p", pair, {"sampling": sampling}, {}
    yield "stop strings", pair, {"stop": (" in ", " mit")}, {}
    strengths = jnp.asarray([0.1 * (i % 10) for i in range(PROMPTS)], jnp.float32)
    yield "strengths per row", pair, {"rule": opt}, {"rule": rules.OPT(strengths)}
    yield "draft limits", pair, {}, {"draft_limit": [i % 6 for i in range(PROMPTS)]}


def _prompts(of: str) -> list[str]:
    directory = Path(specjax.__file__).parent / "pairs" / of
    if of == "gsm8k":
        records = map(json.loads, (directory / "samples.jsonl").read_text().splitlines())
        return [record["question"] for record in records][:PROMPTS]
    lines = (directory / "samples.tsv").read_text().splitlines()
    return [line.split("\t")[0] for line in lines][:PROMPTS]


def _without_names(program: str) -> str:
    """A StableHLO module without what names and places in the source decide."""
    program = re.sub(r"^#loc.*\n", "", program, flags=re.MULTILINE)
    program = re.sub(r" loc\((?:[^()]|\([^()]*\))*\)", "", program)
    program = re.sub(r'(, )?jax\.result_info = "[^"]*"', "", program)
    symbols: dict[str, str] = {}
    return re.sub(
        r"@[\w$.\-]+|@\"[^\"]+\"",
        lambda match: symbols.setdefault(match[0], f"@f{len(symbols)}"),
        program,
    )


def frozen() -> dict[str, dict[str, Any]]:
    """The programs and rows of every setting."""
    kept = {}
    for name, models, parts, options in settings():
        jax.clear_caches()  # a setting's programs do not depend on the settings before it
        with tempfile.TemporaryDirectory() as directory:
            jax.config.update("jax_dump_ir_to", directory)
            decoder = specjax.Decoder(models, max_new_tokens=32, batch_size=4, **parts)
            prompts = _prompts("gsm8k" if name == "Llama" else "multi30k_ende")
            result = decoder(prompts, seed=7, log_probs=True, progress=False, **options)
            jax.config.update("jax_dump_ir_to", None)
            programs = [_without_names(file.read_text()) for file in Path(directory).iterdir()]
        # The methods' own programs; the rest are single operations.
        loops = [text for text in programs if text.count("\n") > 500]
        kept[name] = {
            "programs": sorted(hashlib.sha256(text.encode()).hexdigest()[:16] for text in loops),
            "rows": [_row(row) for row in result],
        }
        print(f"{name}: {len(loops)} programs", file=sys.stderr)
    return kept


def _row(row: Any) -> dict[str, Any]:
    return {
        "text": row.text,
        "tokens": row.tokens.tolist(),
        "ended_by": row.ended_by,
        "rounds": int(row.info.rounds),
        "calls": {name: int(calls) for name, calls in row.info.calls.items()},
        "accepted_lengths": row.info.accepted_lengths.tolist(),
        "log_probs": [float(x).hex() for x in row.log_probs],
        "log_prob": float(row.info.log_prob).hex(),
    }


def public_names() -> list[str]:
    """The names in every package's `__all__`, and those that a module of `specjax` defines."""
    names = [f"specjax.{name}" for name in specjax.__all__]
    for info in pkgutil.walk_packages(specjax.__path__, "specjax."):
        is_module = not info.ispkg and info.name.count(".") == 1 and info.name != "specjax.__main__"
        if info.name.startswith(("specjax.cli", "specjax.integrations")):
            continue
        if info.ispkg or is_module:
            module = importlib.import_module(info.name)
            own = [
                name
                for name, value in vars(module).items()
                if is_module
                and not name.startswith("_")
                and getattr(value, "__module__", None) == info.name
            ]
            names += [f"{info.name}.{name}" for name in getattr(module, "__all__", own)]
    return sorted(names)


def main(action: str, file: str) -> int:
    """Writes what is frozen, or compares and prints the differences."""
    jax.config.update("jax_num_cpu_devices", _MESH[0] * _MESH[1])
    specjax.enable_compilation_cache()
    now: dict[str, Any] = {"settings": frozen(), "names": public_names()}
    if action == "write":
        Path(file).write_text(json.dumps(now, indent=0))
        return 0
    before = json.loads(Path(file).read_text())
    differ = 0
    for name, old in before["settings"].items():
        new = now["settings"][name]
        unlike = [i for i, row in enumerate(old["rows"]) if row != new["rows"][i]]
        same = old["programs"] == new["programs"]
        differ += len(unlike) + (not same)
        print(
            f"{name}: programs {'the same' if same else 'differ'}, "
            f"{len(old['rows']) - len(unlike)} of {len(old['rows'])} rows the same"
        )
        for i in unlike[:1]:
            pairs = ((key, value, new["rows"][i].get(key)) for key, value in old["rows"][i].items())
            print({key: (value, now) for key, value, now in pairs if value != now})
    left = sorted(set(before["names"]) - set(now["names"]))
    new = sorted(set(now["names"]) - set(before["names"]))
    print(f"public names: {len(before['names'])} before, {len(now['names'])} now")
    print(f"  gone: {', '.join(left) or '-'}\n  new: {', '.join(new) or '-'}")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
