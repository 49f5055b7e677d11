"""How much memory loading takes, on a checkpoint of 207 M parameters."""

import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from specjax.checkpoints.arrays import flatten
from specjax.checkpoints.hf import config_to_hf
from specjax.models import LlamaConfig, family_of, model_from_config
from specjax.tokenizers.model_files import SpecialIds, write_json

CONFIG = LlamaConfig(
    vocab_size=32000,
    embed_dim=1024,
    num_heads=16,
    num_kv_heads=16,
    head_dim=64,
    mlp_dim=2816,
    num_layers=11,
)

# Anonymous memory, so that memory-mapped files do not count.
SCRIPT = """
import json, sys, threading, time
import jax, numpy as np, safetensors.numpy
from specjax.checkpoints import load_model

def anonymous():
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

def everything_first(path):
    arrays = safetensors.numpy.load_file(f"{path}/model.safetensors")
    return {name: jax.device_put(np.array(a.T, order="C")) for name, a in arrays.items()}

path, loader = sys.argv[1:]
jax.device_put(np.zeros(8)).block_until_ready()
baseline = anonymous()
peak, done = baseline, threading.Event()

def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, anonymous())

watcher = threading.Thread(target=watch, daemon=True)
watcher.start()
params = load_model(path).params if loader == "load_model" else everything_first(path)
jax.block_until_ready(params)
done.set()
watcher.join()
sizes = [x.nbytes for x in jax.tree.leaves(params)]
print(json.dumps({"peak": peak - baseline, "model": sum(sizes), "largest": max(sizes)}))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """0.4 GB of bfloat16."""
    directory = tmp_path_factory.mktemp("large")
    rng = np.random.default_rng(0)
    pattern = rng.integers(0, 0x7F80, 2**20, dtype=np.uint16).view(ml_dtypes.bfloat16)
    arrays = {}
    for path, leaf in flatten(model_from_config(CONFIG).abstract_params()).items():
        rule = family_of(CONFIG).hf_name(path)
        shape = leaf.shape[::-1] if rule.transposed else leaf.shape
        arrays[rule.hf] = np.resize(pattern, shape)
    assert sum(a.size for a in arrays.values()) >= 200e6
    safetensors.numpy.save_file(arrays, directory / "model.safetensors")
    dtype = np.dtype(ml_dtypes.bfloat16)
    write_json(directory / "config.json", config_to_hf(CONFIG, SpecialIds(), dtype))
    yield directory
    (directory / "model.safetensors").unlink()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
@pytest.mark.parametrize(("loader", "fits"), [("load_model", True), ("everything_first", False)])
def test_peak_host_memory(checkpoint, loader, fits):
    """At most 1.2 times the model plus the largest array; a loader that reads all first fails."""
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(checkpoint), loader],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout.splitlines()[-1])
    assert told["model"] >= 2 * 200e6
    bound = 1.2 * told["model"] + told["largest"]
    assert (told["peak"] <= bound) == fits, told
    assert told["peak"] >= 0.9 * told["model"]  # else it was not measured
