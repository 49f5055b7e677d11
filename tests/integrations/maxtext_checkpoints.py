"""Tiny checkpoints that MaxText writes, with the logits of its own forward pass.

`python -m tests.integrations.maxtext_checkpoints DIR [NAME ...]` writes the cases of `CASES` into
DIR; packed without `commit_success.txt`, and without `ocdbt.process_0` where Orbax has merged it
(not in gemma4), they are `tests/checkpoints/maxtext.zip`. It needs MaxText (`make test-outside`).
MaxText imports libraries that a forward pass on a CPU does not use, and kernels that need Python
3.12 and a later JAX: `_Absent` stands for them.
"""

import importlib.abc
import importlib.machinery
import os
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import yaml

_ABSENT = (
    *("PIL", "array_record", "datasets", "drjax", "google.cloud", "grain", "jsonlines", "pandas"),
    *("pathwaysutils", "tensorboardX", "tensorflow", "tensorflow_datasets", "tiktoken", "tokamax"),
    *("sympy", "tunix"),
)
_UNUSED = ("maxtext.common.grain_utility", "maxtext.kernels")
_SIZES = {
    "vocab_size": 24,
    "base_emb_dim": 8,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 6,
    "base_mlp_dim": 8,
    "base_num_decoder_layers": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 8}
_WINDOW = {"sliding_window_size": 5}
_GEMMA4 = {**_WINDOW, "base_num_kv_heads": 1, "global_head_dim": 8}
_SMALL = {
    "base_num_decoder_layers": 10,
    "num_kv_shared_layers": 5,
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": 24,
}
# By case: the model, what differs from `_SIZES`, and how it is written: "scanned", "unscanned", or
# "nnx", unscanned as MaxText's generate_param_only_checkpoint writes it.
CASES = {
    "llama": ("llama3.1-8b", {}, "scanned"),
    "llama_unscanned": ("llama3.1-8b", {}, "unscanned"),
    "llama3": ("llama3-8b", {}, "nnx"),
    "qwen3": ("qwen3-0.6b", {}, "scanned"),
    "qwen3_unscanned": ("qwen3-8b", {}, "unscanned"),
    "qwen3_moe": ("qwen3-30b-a3b", _EXPERTS, "scanned"),
    "qwen3_moe_unscanned": ("qwen3-30b-a3b", _EXPERTS, "unscanned"),
    "mixtral": ("mixtral-8x7b", _EXPERTS, "scanned"),
    "mixtral_unscanned": ("mixtral-8x7b", _EXPERTS, "unscanned"),
    "gemma2": ("gemma2-2b", _WINDOW, "scanned"),
    "gemma2_unscanned": ("gemma2-2b", _WINDOW, "unscanned"),
    "gemma3": ("gemma3-4b", {**_WINDOW, "base_num_decoder_layers": 13}, "scanned"),
    "gemma3_unscanned": ("gemma3-27b", {**_WINDOW, "base_num_decoder_layers": 7}, "unscanned"),
    "gemma4": ("gemma4-31b", {**_GEMMA4, "base_num_decoder_layers": 12}, "scanned"),
    "gemma4_moe": (
        "gemma4-26b",
        {**_GEMMA4, **_EXPERTS, "base_num_decoder_layers": 6, "base_moe_mlp_dim": 4},
        "scanned",
    ),
    "gemma4_moe_unscanned": (
        "gemma4-26b",
        {**_GEMMA4, **_EXPERTS, "base_num_decoder_layers": 6, "base_moe_mlp_dim": 4},
        "unscanned",
    ),
    "gemma4_small": ("gemma4-e2b", {**_GEMMA4, **_SMALL}, "unscanned"),
}


class _Absent(type):
    """A class whose attributes are such classes, and whose instances are false."""

    def __getattr__(cls, name):
        return _absent(name)


def _absent(name):
    if name.startswith("__"):
        raise AttributeError(name)
    init = lambda self, *args, **options: None  # noqa: E731
    return _Absent(name, (), {"__init__": init, "__bool__": lambda self: False})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path, target=None):
        if any(name == absent or name.startswith(f"{absent}.") for absent in self.names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


class _Module(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        return _absent(name)


# On a grid, so that the arrays are small when packed; queries are short, for logits without noise.
def _drawn(rng, path, shape):
    if path[-1] in ("scale", "layer_scalar", "pre_forward_scale_2"):
        return rng.integers(3, 8, shape) / (16 if path[-2] == "query_norm" else 4)
    return rng.integers(-4, 5, shape) / (2 if path[-1] == "embedding" else 16)


def write(directory, case):
    """Writes `<step>/items`, a YAML file and `logits.npy` into a directory."""
    import flax.linen as nn
    import jax
    import maxtext
    from flax.traverse_util import flatten_dict, unflatten_dict
    from maxtext.checkpoint_conversion.utils.utils import save_weights_to_checkpoint
    from maxtext.common import checkpointing
    from maxtext.common.common_types import MODEL_MODE_TRAIN
    from maxtext.configs import pyconfig
    from maxtext.models import models
    from maxtext.utils import maxtext_utils

    name, changes, form = CASES[case]
    configs = Path(maxtext.__path__[0]) / "configs"
    sizes = {**_SIZES, **changes}
    config = pyconfig.initialize(
        ["", str(configs / "base.yml")],
        model_name=name,
        override_model_config=True,
        run_name="tiny",
        base_output_directory="output",
        scan_layers=form == "scanned",
        max_target_length=9,
        per_device_batch_size=2,
        dtype="float32",
        matmul_precision="highest",
        attention="dot_product",
        hardware="cpu",
        skip_jax_distributed_system=True,
        async_checkpointing=False,
        log_config=False,
        megablox=False,
        sparse_matmul=False,
        remat_policy="none",
        **sizes,
    )
    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    model = models.transformer_as_linen(config, mesh, quant=None, model_mode=MODEL_MODE_TRAIN)
    shapes = flatten_dict(nn.unbox(maxtext_utils.get_abstract_param(model, config)["params"]))
    rng = np.random.default_rng(0)
    params = unflatten_dict(
        {path: np.float32(_drawn(rng, path, leaf.shape)) for path, leaf in shapes.items()}
    )
    ids = np.random.default_rng(1).integers(3, config.vocab_size, (2, 9)).astype(np.int32)
    positions = np.tile(np.arange(9, dtype=np.int32), (2, 1))
    with jax.set_mesh(mesh), nn.logical_axis_rules(config.logical_axis_rules):
        logits = model.apply(
            {"params": params}, ids, positions, np.ones_like(ids), enable_dropout=False
        )
    if form == "nnx":
        manager = checkpointing.create_orbax_checkpoint_manager(str(directory), True, False, 1)
        values = jax.tree.map(lambda x: {"value": x}, params)
        checkpointing.save_checkpoint(manager, 0, values)
        checkpointing.wait_until_finished(manager)
    else:
        save_weights_to_checkpoint(str(directory), params, 1, True, True, config=config)
    np.save(directory / "logits.npy", np.asarray(logits, np.float32))
    if case == "llama":  # as runs of earlier versions wrote it
        values = config._pydantic_config.model_dump(mode="json")
        (directory / "config.yml").write_text(yaml.dump(values))
    else:
        lines = (configs / "models" / f"{name}.yml").read_text().splitlines(keepends=True)
        kept = [line for line in lines if line.split(":")[0] not in sizes and line[0] != "#"]
        (directory / f"{name}.yml").write_text("".join(kept) + yaml.dump(sizes))


def main():
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    sys.meta_path.insert(0, _Finder(_UNUSED))
    sys.meta_path.append(_Finder(_ABSENT))  # where they are not installed
    root, *names = sys.argv[1:]
    for case in names or CASES:
        directory = Path(root).absolute() / case
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        write(directory, case)


if __name__ == "__main__":
    main()
