"""Outputs of the built-in pair for twelve settings: write with one version, compare with another.

    python -m benchmarks.rows write rows.json
    python -m benchmarks.rows compare rows.json

Run both on the same machine: floats depend on the processor and the version of XLA.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp

import specjax
from specjax import drafting, rules, verification


def settings(pair: specjax.Pair) -> Iterator[tuple[str, specjax.Decoder, dict[str, Any]]]:
    """Each setting's name, its decoder and the options of its call."""
    common: dict[str, Any] = {"max_new_tokens": 32, "batch_size": 4}

    def made(**parts: Any) -> specjax.Decoder:
        return specjax.Decoder(pair, **common, **parts)

    opt = rules.OPT(0.2)
    yield "lossless, token", made(verification=verification.Token()), {}
    yield "lossless, block", made(), {}
    yield "OPT", made(rule=opt), {}
    yield "TokenV3", made(rule=rules.TokenV3(0.5)), {}
    yield "adaptive", made(stopping=drafting.Confidence(0.4), max_draft=12), {}
    yield "lookup", made(drafting=specjax.Lookup(bigram="built-in")), {}
    yield (
        "cascade of drafters",
        made(drafting=specjax.Cascade([[3, 0], [0, 2]], last=specjax.Lookup())),
        {},
    )
    yield "token cascade", made(method=specjax.TokenCascade(), rule=rules.Chow(0.3)), {}
    yield "top-k with top-p", made(sampling=specjax.Sampling(0.8, top_k=20, top_p=0.9)), {}
    yield "stop strings", made(stop=(" in ", " mit")), {}
    strengths = [0.1 * (i % 10) for i in range(PROMPTS)]
    yield (
        "strengths per row",
        made(rule=opt),
        {"rule": rules.OPT(jnp.asarray(strengths, jnp.float32))},
    )
    yield "draft limits", made(), {"draft_limit": [i % 6 for i in range(PROMPTS)]}


PROMPTS = 24


def rows(prompts: list[str]) -> dict[str, list[dict[str, Any]]]:
    """The outputs of every setting."""
    pair = specjax.load_pair()
    found = {}
    for name, decoder, options in settings(pair):
        result = decoder(prompts, seed=7, log_probs=True, progress=False, **options)
        found[name] = [
            {
                "text": row.text,
                "tokens": row.tokens.tolist(),
                "ended_by": row.ended_by,
                "rounds": int(row.info.rounds),
                "calls": {name: int(calls) for name, calls in row.info.calls.items()},
                "accepted_lengths": row.info.accepted_lengths.tolist(),
                "log_probs": None
                if row.log_probs is None
                else [float(x).hex() for x in row.log_probs],
                "log_p": float(row.info.log_prob).hex(),
                "block_sum": float(row.info.block_sum).hex(),
            }
            for row in result
        ]
    return found


def main(action: str, file: str) -> int:
    """Writes the outputs, or compares and prints the differences."""
    path = Path(file)
    if action == "write":
        samples = Path(specjax.__file__).parent / "pairs/multi30k_ende/samples.tsv"
        prompts = [line.split("\t")[0] for line in samples.read_text().splitlines()][:PROMPTS]
        path.write_text(json.dumps({"prompts": prompts, "rows": rows(prompts)}, indent=0))
        return 0
    before = json.loads(path.read_text())
    now = rows(before["prompts"])
    differ = 0
    for name, theirs in before["rows"].items():
        unlike = [i for i, row in enumerate(theirs) if row != now[name][i]]
        differ += len(unlike)
        print(f"{name}: {len(theirs) - len(unlike)} of {len(theirs)} rows are the same")
        for i in unlike[:1]:
            print(
                {
                    k: (theirs[i][k], now[name][i][k])
                    for k in theirs[i]
                    if theirs[i][k] != now[name][i][k]
                }
            )
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
