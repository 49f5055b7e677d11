"""A tiny T5 pair with random weights and a trained SentencePiece vocabulary, on disk."""

import dataclasses
import fcntl
import functools
import os
import random
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

from specjax import Engine, Pair, TextModel, testing
from specjax.checkpoints import save_model
from specjax.models import LlamaConfig, Seq2SeqLM, T5Config, model_from_config
from specjax.partitioning import Partitioner
from specjax.text.directories import built_in_pair
from specjax.text.results import Row
from specjax.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer
from specjax.training.vocabulary import train_vocabulary
from tests.models.tiny import random_params

SYLLABLES = ["ba", "de", "ki", "lo", "mu", "na", "po", "ri"]
VOCAB = 24
SIZES = {
    "verifier": {"embed_dim": 24, "num_decoder_layers": 2},
    "drafter": {"embed_dim": 16, "num_decoder_layers": 1},
}


def chat_model(seed: int = 0) -> TextModel:
    """Returns a tiny Llama of bytes with a chat template."""
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = "{% for m in messages %}Q: {{ m.content }}\nA:{% endfor %}"
    model = model_from_config(LlamaConfig.of(259, 16, 2, 2, 8, 24, 1))
    return TextModel(model, random_params(model, seed), tokenizer)


def sentences(
    count: int, seed: int = 0, longest: int = 6, syllables: Sequence[str] = SYLLABLES
) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(syllables, k=rng.randint(1, longest))) for _ in range(count)]


def write_model(directory: Path, name: str, *, vocab: int = VOCAB, seed: int = 0) -> Path:
    """Writes one model as a Hugging Face directory, without a tokenizer."""
    config = T5Config(
        vocab_size=vocab,
        num_heads=2,
        head_dim=8,
        mlp_dim=24,
        num_encoder_layers=1,
        **SIZES[name],
    )
    model = Seq2SeqLM(config)
    params = random_params(model, seed)
    # Flatter than random: every token has a chance, the end of sequence too.
    head = params["decoder"]["logits_dense"]
    head["kernel"] = head["kernel"] * jnp.float32(0.5)
    save_model(directory, model, params, format="hf")
    return directory


def write_vocabulary(directory: Path, syllables: Sequence[str] = SYLLABLES) -> None:
    model = train_vocabulary(sentences(200, syllables=syllables), vocab_size=VOCAB)
    (directory / "spiece.model").write_bytes(model)


@functools.cache
def shared_pair() -> dict[str, Path]:
    """Both, written once by all processes of a run of the tests; the keys are `load_pair`'s."""
    root = Path(os.environ.get("SPECJAX_TESTS_SHARED") or tempfile.mkdtemp())
    with open(root / "pair.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        paths = {name: root / "pair" / name for name in SIZES}
        for seed, name in enumerate(SIZES):
            if not (paths[name] / "spiece.model").exists():  # the last file of each
                write_model(paths[name], name, seed=seed)
                write_vocabulary(paths[name])
    return paths


def write_pair(directory: Path) -> dict[str, Path]:
    """A copy of `shared_pair`, for tests that write into it or name its directory."""
    return {name: shutil.copytree(path, directory / name) for name, path in shared_pair().items()}


def tabular(seed: int, tokenizer=None, mesh=None) -> TextModel:
    """A model whose every distribution is known, over bytes."""
    tokenizer = tokenizer or ByteTokenizer()
    table = testing.random_table(seed, 259, 1, scale=1.5)
    table[:, 1] += 3.0  # so that many rows end by themselves
    return TextModel(testing.TabularModel(259, 1), jnp.asarray(table), tokenizer, mesh)


def near(model: TextModel, seed: int, noise: float) -> TextModel:
    """A tabular model whose distributions are those of another, with noise."""
    table = model.params + noise * jnp.asarray(testing.random_table(seed, 259, 1))
    return dataclasses.replace(model, params=table)


def finished_rows(engine: Engine) -> dict[tuple[int, int], Row]:
    """Decodes all requests of an engine: (index, sample) -> row."""
    rows: dict[tuple[int, int], Row] = {}
    while engine.unfinished:
        rows |= {(row.index, row.sample): row for row in engine.step()}
    return rows


def llama(layers: int, words: Tokenizer, mesh: Mesh | None = None) -> TextModel:
    """A small random Llama; the number of layers is the seed, too."""
    model = model_from_config(LlamaConfig.of(words.vocab_size, 16, 4, 2, 8, 24, layers))
    params = random_params(model, layers)
    if mesh is not None:
        where = Partitioner(mesh)
        params = where.place(params, where.param_shardings(model, params))
    return TextModel(model, params, words, mesh)


def llamas(mesh: Mesh | None = None) -> Pair:
    """Small random Llamas with the vocabulary of the built-in ones."""
    words = load_tokenizer(built_in_pair("gsm8k") / "verifier")
    return Pair(*(llama(layers, words, mesh) for layers in (1, 2)))


def write_bench_inputs(directory: Path, count: int = 4) -> list[str]:
    """Writes a pair and some prompts; returns the options of a benchmark that name them."""
    prompts = directory / "prompts.txt"
    prompts.write_text("\n".join(sentences(count, seed=1)) + "\n", encoding="utf-8")
    named = [f"--{name}={path}" for name, path in write_pair(directory / "models").items()]
    return [*named, f"--inputs={prompts}"]


def quick_bench(directory: Path, patch: pytest.MonkeyPatch) -> list[str]:
    """The words for four prompts, with a pair whose programs compile quickly."""
    pair = Pair(tabular(1), tabular(2))
    patch.setattr("specjax.cli.bench.load_pair", lambda **_: pair)
    prompts = directory / "prompts.txt"
    prompts.write_text("ba\nde\nki\nlo\n", encoding="utf-8")
    return [f"--inputs={prompts}", "--max-new=6"]
