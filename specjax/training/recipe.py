"""From files to a trained Hugging Face directory: what `specjax train` runs."""

import dataclasses
import functools
import io
import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sacrebleu

from specjax.checkpoints import load_model, save_model
from specjax.checks import checked
from specjax.data.batching import Batching, TokenPairs, check_pairs, tokenize_pairs
from specjax.data.examples import Example
from specjax.models import T5, T5Config
from specjax.runs.output_directory import make_writable, write_atomically
from specjax.tokenizers.load import Tokenizer, load_tokenizer
from specjax.tokenizers.model_files import SpecialIds
from specjax.training.distillation import add_teacher_samples
from specjax.training.greedy import generate
from specjax.training.loop import Teacher, check_numbers, local_devices, train
from specjax.training.optimizer import AdamW
from specjax.training.run_directory import CONFIG_NAME
from specjax.training.step import Objective
from specjax.training.vocabulary import provide_vocabulary
from specjax.types import Params

MODEL_NAME = "model"
RESULTS_NAME = "results.json"
SAMPLES_NAME = "teacher_samples.npz"
TOKENIZER_NAME = "tokenizer"
LONGEST_SCORED = 512


def run_recipe(
    *,
    output_dir: str | os.PathLike[str],
    training_data: Iterable[Example],
    validation_data: Iterable[Example],
    optimizer: AdamW,
    num_steps: int,
    config: T5Config | None = None,
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
      training_data: pairs of texts.
      validation_data: pairs of texts; the best checkpoint on them is exported.
      optimizer: the optimiser and its schedule.
      num_steps: updates in all; more than before prolongs a finished run.
      config: the network; by default that of `init_from`.
      test_data: pairs of texts on which the result is scored too.
      vocabulary: a model's directory, a SentencePiece model, a `tokenizer.json`, or "bytes". By
        default that of `init_from` or `teacher`; without these a SentencePiece vocabulary of
        `config.vocab_size` pieces is trained on the training data.
      vocabulary_type: of a trained one, "unigram" or "bpe".
      objective: the loss.
      batching: the shapes of the batches.
      seed: of everything random.
      checkpoint_every: updates between checkpoints.
      log_every: updates between lines of the log.
      init_from: a model's directory to start from (fine-tuning); its network must be `config`'s.
      teacher: a model's directory to distil from, with the same vocabulary; the objective's
        `distillation_weight`, `teacher_samples` or both say how.
      teacher_samples: targets drawn from the teacher for each input, added to the references.
      num_devices: devices that share each batch; all by default.
      export_dtype: of the exported arrays: float32, bfloat16 or float16.
      progress: whether to show progress bars (on a terminal only).

    Returns:
      What `results.json` holds: step, validation loss (nats per token), number of parameters, and
      `greedy_bleu` on the validation (and test) data.

    Raises:
      OSError: `output_dir` cannot be written, another process trains in it, or a file is missing.
      TypeError: a value of the wrong type.
      ValueError: a value outside its range, unusable data, or an `output_dir` that holds another
        run.
    """
    directory = make_writable(output_dir)
    objective, batching = objective or Objective(), batching or Batching()
    if export_dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"export_dtype={export_dtype!r} is not float32, bfloat16 or float16")
    numbers = check_numbers(
        seed=seed, num_steps=num_steps, checkpoint_every=checkpoint_every, log_every=log_every
    )
    local_devices(num_devices)
    teacher_samples = int(checked("teacher_samples", teacher_samples, low=0, dtype=np.int32))
    if (teacher is not None) != bool(objective.distillation_weight or teacher_samples):
        raise ValueError(
            f"teacher={teacher}, distillation_weight={objective.distillation_weight}, "
            f"teacher_samples={teacher_samples}: a teacher needs one of the other two, and they it"
        )
    starting, teaching = _load_t5(init_from, "init_from"), _load_t5(teacher, "teacher")
    if config is None:
        if starting is None:
            raise ValueError("config=None: give a T5Config, or init_from, whose network is taken")
        config = starting.model.config
    data = {"training": list(training_data), "validation": list(validation_data)}
    if test_data is not None:
        data["test"] = list(test_data)
    for name, examples in data.items():
        check_pairs(examples, f"{name} data")
    tokenizer_dir = directory / TOKENIZER_NAME
    provide_vocabulary(
        tokenizer_dir,
        vocabulary or init_from or teacher,
        (text for e in data["training"] for text in (e.inputs, e.targets or "")),
        vocab_size=config.vocab_size,
        model_type=vocabulary_type,
        begun=(directory / CONFIG_NAME).exists(),
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
    pairs = {name: _tokenize(examples, tokenizer) for name, examples in data.items()}
    longest = max(LONGEST_SCORED, batching.bucket_lengths[-1])
    if progress:
        _tell_unscored(pairs, longest)
    ids: dict[str, int] = {"eos_id": tokenizer.eos_ids[0], "pad_id": tokenizer.pad_id}
    notes: dict[str, Any] = {"vocabulary_type": vocabulary_type}
    augment = None
    if teaching is not None and teacher_samples:
        notes["teacher_samples"] = teacher_samples
        notes["sampled_teacher"] = teaching.describe()
        augment = functools.partial(
            _with_samples, directory / SAMPLES_NAME, teaching, teacher_samples, batching,
            numbers["seed"], ids, progress,
        )  # fmt: skip
    result = train(
        output_dir=directory,
        config=config,
        training_pairs=pairs["training"],
        validation_pairs=pairs["validation"],
        optimizer=optimizer,
        objective=objective,
        batching=batching,
        init_params=starting and starting.params,
        teacher=teaching if objective.distillation_weight else None,
        augment=augment,
        notes=notes,
        num_devices=num_devices,
        progress=progress,
        **numbers,
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
    for name in [n for n in data if n != "training"]:
        results[f"{name}_bleu"] = greedy_bleu(
            exported.model,
            exported.params,
            tokenizer,
            data[name],
            longest=longest,
            progress=progress,
        )
    write_atomically(directory / RESULTS_NAME, json.dumps(results, indent=1).encode())
    return results


def greedy_bleu(
    model: T5,
    params: Params,
    tokenizer: Tokenizer,
    examples: Sequence[Example],
    *,
    longest: int = LONGEST_SCORED,
    progress: bool = False,
) -> float:
    """The corpus sacreBLEU of greedy outputs against the references.

    An input of more than `longest` tokens is not decoded: its output counts as empty, for one
    damaged line must not exhaust the memory.

    Args:
      model: the network.
      params: its parameters.
      tokenizer: its tokeniser.
      examples: inputs with references.
      longest: tokens of the longest input to decode, its end-of-sequence token included.
      progress: whether to show a progress bar (on a terminal only).

    Returns:
      BLEU, 0 to 100 (sacreBLEU's defaults: 13a tokenisation, case sensitive).
    """
    eos_id = tokenizer.eos_ids[0]
    pairs = _tokenize(examples, tokenizer)
    inputs = {i: pairs[i][0] for i in range(len(pairs)) if len(pairs[i][0]) <= longest}
    outputs = generate(
        model,
        params,
        list(inputs.values()),
        bucket_lengths=_covering(inputs.values()),
        eos_id=eos_id,
        pad_id=tokenizer.pad_id,
        progress="greedy decoding" if progress else None,
    )
    texts = [""] * len(pairs)
    for i, tokens in zip(inputs, outputs, strict=True):
        texts[i] = tokenizer.decode(tokens.tolist())
    references = [example.targets or "" for example in examples]
    return float(sacrebleu.corpus_bleu(texts, [references]).score)


def _covering(inputs: Iterable[Any]) -> tuple[int, ...]:
    """Powers of two from 16 up to the longest input: few shapes, each at most twice too long."""
    longest = max(map(len, inputs), default=0)
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


def _tell_unscored(pairs: Mapping[str, TokenPairs], longest: int) -> None:
    for name in [n for n in pairs if n != "training"]:
        count = int(np.sum(pairs[name].lengths()[:, 0] > longest))
        if count:
            print(
                f"specjax: {count} of {len(pairs[name])} {name} inputs are longer than {longest} "
                "tokens; they are not decoded, and their outputs count as empty",
                file=sys.stderr,
            )


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
