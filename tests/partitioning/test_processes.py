"""Two processes with four devices each decode a fixed batch as one process with eight does."""

import json
import os
import socket
import subprocess
import sys

import pytest

from tests import tiny_pair

CHILD = """
import json, os, sys
import jax
process, count, port, drafter, verifier, model = sys.argv[1:]
if int(count) > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=int(count),
                               process_id=int(process), initialization_timeout=60)
import specjax
from specjax import partitioning, rules
from tests import tiny_pair
mesh = partitioning.make_mesh(model=int(model))
pair = specjax.load_pair(drafter=drafter, verifier=verifier, mesh=mesh)
decoder = specjax.Decoder(pair, rule=rules.OPT(0.2), max_draft=3, max_new_tokens=10,
                          batch_size=8, buckets=(16,))
prompts = tiny_pair.sentences(20, seed=5)
rows = decoder.rows(prompts, seed=3, rule=rules.OPT([0.0, 0.2] * 10), progress=False)
print(json.dumps({row.index: [row.tokens.tolist(), row.ended_by] for row in rows}))
print(json.dumps([pair.verifier.fingerprint, jax.process_count(), len(jax.local_devices())]))
"""


def _decode(count: int, paths, model: int) -> tuple[dict, list]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={8 // count}",
        "PYTHONPATH": os.getcwd(),
    }
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(i), str(count), str(port), paths["drafter"],
             paths["verifier"], str(model)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for i in range(count)
    ]  # fmt: skip
    rows: dict[str, list] = {}
    facts = []
    for child in children:
        out, err = child.communicate(timeout=300)
        assert child.returncode == 0, err[-3000:]
        own, fact = (json.loads(line) for line in out.strip().splitlines()[-2:])
        assert not rows.keys() & own.keys()
        assert count == 1 or own, "each process has rows of its own"
        rows |= own
        facts.append(fact)
    return rows, facts


@pytest.mark.parametrize("model", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_two_processes_agree_with_one(tmp_path, model):
    paths = tiny_pair.write_pair(tmp_path)
    one, [[fingerprint, *_]] = _decode(1, paths, model)
    two, facts = _decode(2, paths, model)
    assert one == two and len(one) == 20
    assert facts == [[fingerprint, 2, 4]] * 2
