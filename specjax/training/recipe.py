"""From files to a trained Hugging Face directory: what `specjax train` runs."""

import dataclasses
import functools
import io
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import sacrebleu

from specjax.base import Params
from specjax.checkpoints import load_model, save_model
from specjax.checkpoints.save import replacing
from specjax.data.batching import TokenPairs, tokenize_pairs
from specjax.data.examples import Example
from specjax.data.model_files import SpecialIds, copy_tokenizer_files
from specjax.data.tokenizers import Tokenizer, load_tokenizer
from specjax.models import T5, T5Config
from specjax.output_directory import make_writable, write_atomically
from specjax.training.distillation import add_teacher_samples
from specjax.training.greedy import generate
from specjax.training.loop import Batching, Teacher, digest, train
from specjax.training.optimizer import AdamW
from specjax.training.run_directory import CONFIG_NAME
from specjax.training.step import Objective
from specjax.training.vocabulary import train_vocabulary

MODEL_NAME = "model"
RESULTS_NAME = "results.json"
SAMPLES_NAME = "teacher_samples.npz"
TOKENIZER_NAME = "tokenizer"


def run_recipe(
    *,
    output_dir: str | os.PathLike[str],
    config: T5Config,
    training_data: Iterable[Example],
    validation_data: Iterable[Example],
    optimizer: AdamW,
    num_steps: int,
    test_data: Iterable[Example] | None = None,
    vocabulary: str | os.PathLike[str] | None = None,
    vocabulary_type: str = "unigram",
    objective: Objective | None = None,
    batching: Batching | None = None,
    seed: int = 0,
    checkpoint_every: int = 500,
    log_every: int = 50,
    init_from: str | os.PathLike[str] | None = None,
    teacher: str | os.PathLike[str] | None = None,
    teacher_samples: int = 0,
    num_devices: int | None = None,
    export_dtype: str = "float32",
    progress: bool = True,
) -> dict[str, Any]:
    """Trains a T5 on pairs of texts and writes it as a Hugging Face directory.

    Killed at any moment and started again, it continues where it stopped (see `train`).

    Args:
      output_dir: takes the run: `model/` (the result, with its tokeniser), `results.json`,
        `metrics.jsonl`, `checkpoints/`, `train_config.json` and `tokenizer/`.
      config: the network.
      training_data: pairs of texts.
      validation_data: pairs of texts; the best checkpoint on them is exported.
      optimizer: the optimiser and its schedule.
      num_steps: updates in all; more than before prolongs a finished run.
      test_data: pairs of texts on which the result is scored too.
      vocabulary: a model's directory, one of its tokeniser files, or "bytes". By default that of
        `init_from` or `teacher`; without these a SentencePiece vocabulary of
        `config.vocab_size` pieces is trained on the training data.
      vocabulary_type: of a trained one, "unigram" or "bpe".
      objective: the loss.
      batching: the shapes of the batches.
      seed: of everything random.
      checkpoint_every: updates between checkpoints.
      log_every: updates between lines of the log.
      init_from: a model's directory to start from (fine-tuning); its network must be `config`'s.
      teacher: a model's directory to distil from, with the same vocabulary.
      teacher_samples: targets drawn from the teacher for each input, added to the references.
      num_devices: devices that share each batch; all by default.
      export_dtype: of the exported arrays: float32, bfloat16 or float16.
      progress: whether to show progress bars (on a terminal only).

    Returns:
      What `results.json` holds: step, validation loss, number of parameters, and greedy
      sacreBLEU on the validation (and test) data.

    Raises:
      OSError: `output_dir` cannot be written, or a file is missing.
      ValueError: a value outside its range, unusable data, or an `output_dir` that holds another
        run.
    """
    directory = make_writable(output_dir)
    objective, batching = objective or Objective(), batching or Batching()
    if export_dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"export_dtype={export_dtype!r} is not float32, bfloat16 or float16")
    if teacher_samples < 0 or (teacher_samples and teacher is None):
        raise ValueError(f"teacher_samples={teacher_samples} needs a teacher, and must be >= 0")
    starting, teaching = _load_t5(init_from, "init_from"), _load_t5(teacher, "teacher")
    training, validation = list(training_data), list(validation_data)
    test = None if test_data is None else list(test_data)
    tokenizer_dir = directory / TOKENIZER_NAME
    _provide_vocabulary(
        tokenizer_dir, vocabulary or init_from or teacher, training, config, vocabulary_type
    )
    tokenizer = load_tokenizer(tokenizer_dir)
    for path, name in ((init_from, "init_from"), (teacher, "teacher")):
        if path is not None and load_tokenizer(path).fingerprint != tokenizer.fingerprint:
            raise ValueError(
                f"{name}={path} has another vocabulary than this run; use that directory as "
                "vocabulary"
            )
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"the vocabulary has {tokenizer.vocab_size} pieces, but the network's vocab_size="
            f"{config.vocab_size}; make it at least as large"
        )
    ids: dict[str, int] = {"eos_id": tokenizer.eos_ids[0], "pad_id": tokenizer.pad_id}
    notes: dict[str, Any] = {"vocabulary_type": vocabulary_type}
    augment = None
    if teaching is not None and teacher_samples:
        notes["teacher_samples"] = teacher_samples
        notes["sampled_teacher"] = digest(*jax.tree.leaves(teaching.params))
        augment = functools.partial(
            _with_samples, directory / SAMPLES_NAME, teaching, teacher_samples, batching, seed,
            ids, progress,
        )  # fmt: skip
    result = train(
        output_dir=directory,
        config=config,
        training_pairs=_tokenize(training, tokenizer),
        validation_pairs=_tokenize(validation, tokenizer),
        optimizer=optimizer,
        num_steps=num_steps,
        objective=objective,
        batching=batching,
        seed=seed,
        checkpoint_every=checkpoint_every,
        log_every=log_every,
        init_params=starting and starting.params,
        teacher=teaching if objective.distillation_weight else None,
        augment=augment,
        notes=notes,
        num_devices=num_devices,
        progress=progress,
        **ids,
    )
    _export(
        directory / MODEL_NAME,
        config,
        result.params,
        export_dtype,
        tokenizer_dir,
        SpecialIds(tokenizer.eos_ids, tokenizer.pad_id, None, config.decoder_start_token),
    )
    results = {
        "step": result.step,
        "validation_loss": result.validation_loss,
        "num_params": T5(config).num_params(),
    }
    # Scored as it was written: rounding included.
    exported = _load_t5(directory / MODEL_NAME, "model")
    assert exported is not None
    for name, examples in (("validation", validation), ("test", test)):
        if examples is not None:
            results[f"{name}_bleu"] = greedy_bleu(
                exported.model, exported.params, tokenizer, examples, progress=progress
            )
    write_atomically(directory / RESULTS_NAME, json.dumps(results, indent=1).encode())
    return results


def greedy_bleu(
    model: T5,
    params: Params,
    tokenizer: Tokenizer,
    examples: Sequence[Example],
    *,
    progress: bool = False,
) -> float:
    """The corpus sacreBLEU of greedy outputs against the references.

    Args:
      model: the network.
      params: its parameters.
      tokenizer: its tokeniser.
      examples: inputs with references.
      progress: whether to show a progress bar (on a terminal only).

    Returns:
      BLEU, 0 to 100 (sacreBLEU's defaults: 13a tokenisation, case sensitive).
    """
    eos_id = tokenizer.eos_ids[0]
    pairs = _tokenize(examples, tokenizer)
    inputs = [pairs[i][0] for i in range(len(pairs))]
    outputs = generate(
        model,
        params,
        inputs,
        bucket_lengths=_covering(inputs),
        eos_id=eos_id,
        pad_id=tokenizer.pad_id,
        progress="greedy decoding" if progress else None,
    )
    texts = [tokenizer.decode(tokens.tolist()) for tokens in outputs]
    references = [example.targets or "" for example in examples]
    return float(sacrebleu.corpus_bleu(texts, [references]).score)


def _covering(inputs: Sequence[Any]) -> tuple[int, ...]:
    """Powers of two from 16 up to the longest input: few shapes, each at most twice too long."""
    longest = max(map(len, inputs))
    lengths = [16]
    while lengths[-1] < longest:
        lengths.append(2 * lengths[-1])
    return tuple(lengths)


def _load_t5(path: str | os.PathLike[str] | None, name: str) -> Teacher | None:
    if path is None:
        return None
    loaded = load_model(path, dtype="float32")
    if not isinstance(loaded.model, T5):
        raise ValueError(f"{name}={path} holds a {type(loaded.model).__name__}, not a T5")
    return Teacher(model=loaded.model, params=loaded.params)


def _tokenize(examples: Sequence[Example], tokenizer: Tokenizer) -> TokenPairs:
    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    return tokenize_pairs(examples, encode, tokenizer.eos_ids[0])


def _provide_vocabulary(
    directory: Path,
    source: str | os.PathLike[str] | None,
    training: Sequence[Example],
    config: T5Config,
    model_type: str,
) -> None:
    """Puts the run's tokeniser files into `directory`, unless an earlier start did."""
    if (directory.parent / CONFIG_NAME).exists() and directory.exists():
        if source and load_tokenizer(source).fingerprint != load_tokenizer(directory).fingerprint:
            raise ValueError(
                f"vocabulary={source} is not the one that the run in {directory.parent} began "
                "with; choose another output_dir"
            )
        return
    # Left by a start that failed before the run began.
    shutil.rmtree(directory, ignore_errors=True)
    with replacing(directory) as partial:
        if source is None:
            texts = (text for e in training for text in (e.inputs, e.targets or ""))
            model = train_vocabulary(texts, vocab_size=config.vocab_size, model_type=model_type)
            (partial / "spiece.model").write_bytes(model)
        elif source == "bytes":
            settings = {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 0}
            (partial / "tokenizer_config.json").write_text(json.dumps(settings))
        else:
            load_tokenizer(source)
            if Path(source).is_dir():
                copy_tokenizer_files(Path(source), partial)
            else:
                shutil.copyfile(source, partial / Path(source).name)


def _with_samples(
    path: Path,
    teacher: Teacher,
    samples: int,
    batching: Batching,
    seed: int,
    ids: dict[str, int],
    progress: bool,
    pairs: TokenPairs,
) -> TokenPairs:
    """The pairs with samples of the teacher, drawn once and then read from `path`."""
    if path.exists():
        with np.load(path) as stored:
            return TokenPairs(stored["tokens"], stored["offsets"])
    pairs = add_teacher_samples(
        pairs,
        teacher.model,
        teacher.params,
        samples=samples,
        bucket_lengths=batching.bucket_lengths,
        seed=seed,
        progress=progress,
        **ids,
    )
    buffer = io.BytesIO()
    np.savez(buffer, tokens=pairs.tokens, offsets=pairs.offsets)
    write_atomically(path, buffer.getvalue())
    return pairs


def _export(
    path: Path, config: T5Config, params: Params, dtype: str, tokenizer_dir: Path, ids: SpecialIds
) -> None:
    """Writes the Hugging Face directory, in the place of an earlier export."""
    # Computing in bfloat16 while training does not bind those who load the weights.
    config = dataclasses.replace(config, dtype="float32")
    shutil.rmtree(path, ignore_errors=True)
    save_model(
        path,
        config,
        params,
        format="hf",
        dtype=dtype,
        special_ids=ids,
        tokenizer_from=tokenizer_dir,
    )
