"""Compares greedy decoding with transformers and CTranslate2, each by its public API."""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import command
from specjax.checkpoints import read_config, save_model
from specjax.cli.report import Report
from specjax.errors import UserError
from specjax.study.measure import take_turns, time_call
from specjax.text import Decoder, Pair, TextModel, load_pair
from specjax.text.directories import DEFAULT_PAIR, built_in_pair, load_text_model, real_path
from specjax.types import Sampling

HELP = "compare greedy decoding at batch 1 with transformers and CTranslate2"

# A generation: the index of a prompt -> the emitted tokens. A token that ended the sequence is
# replaced by the first end-of-sequence token.
Generate = Callable[[int], np.ndarray]

_METHODS = ("plain", "assisted")
# A method, and its side: "ours", "theirs" or, for CTranslate2, its number of threads in words.
_Key = tuple[str, str]
# The settings of a method of a side, in words -> the generation.
_Settings = Mapping[str, Generate]
_WITHOUT = "or leave CTranslate2 out with --no-ctranslate2"
# The number of prompts that a side decodes per turn.
_TURN = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the pair, its prompts and the sizes."""
    command.add_pair(parser)
    parser.add_argument("--prompts", type=int, default=100, help="number of prompts")
    parser.add_argument(
        "--drafts",
        type=int,
        nargs="+",
        default=[2, 3, 5],
        help="draft lengths G; each side uses its fastest",
    )
    parser.add_argument("--max-new", type=int, default=64, help="longest output, in tokens")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each side")
    parser.add_argument(
        "--pilot", type=int, default=10, help="number of prompts that choose each side's settings"
    )
    parser.add_argument("--grown", action="store_true", help=command.GROWN_HELP)
    parser.add_argument(
        "--no-ctranslate2", action="store_true", help="compare only with transformers"
    )


_COLUMNS = (
    *("method", "peer", "ours_tokens_per_s", "theirs_tokens_per_s"),
    *("ratio", "ratio_low", "ratio_high", "same_outputs", "prompts"),
    *("ours_setting", "theirs_setting"),
)


def run(args: argparse.Namespace) -> Report:
    """Measures all sides in turns.

    A generation is a call of the side's public API: a `Decoder`, `generate` or CTranslate2's
    `translate_batch`; the whole call is timed. All sides compute in float32 from the same token
    ids, with the same end-of-sequence tokens and length limit. specjax and transformers use their
    fastest settings on the first prompts. CTranslate2 does not draft; it is measured with each
    number of threads.
    """
    command.check_positive(args, "prompts", "drafts", "max_new", "repeats", "pilot")
    if jax.default_backend() != "cpu":
        raise UserError(
            f"JAX uses the {jax.default_backend()}, but this benchmark compares on CPUs: set "
            "JAX_PLATFORMS=cpu"
        )
    torch, transformers = load_transformers()
    ctranslate2 = None if args.no_ctranslate2 else load_ctranslate2()
    texts = command.read_texts(args)
    with _directories(args) as (drafter, verifier):
        print("loading ...", flush=True)
        pair = load_pair(drafter=drafter, verifier=verifier, dtype="float32")
        tokens = command.encode_texts(args, texts, pair.verifier.tokenizer)
        prompts = [prompt.tolist() for prompt in tokens]
        print("compiling ...", flush=True)
        ours = _ours(pair, prompts, args.drafts, args.max_new)
        threads = _thread_counts()
        theirs = transformers_generations(
            torch, transformers, pair, prompts, args.drafts, args.max_new, threads
        )
        ways = {
            (method, whose): settings
            for whose, both in (("ours", ours), ("theirs", theirs))
            for method, settings in zip(_METHODS, both, strict=True)
        }
        others: dict[str, Generate] = {}
        if ctranslate2 is not None:
            made = ctranslate2_generations(
                ctranslate2, pair.verifier, prompts, args.max_new, threads
            )
            others = {in_words(n): generate for n, generate in made.items()}
        rows = _measure(ways, others, len(prompts), args)
    return Report(
        rows,
        _COLUMNS,
        notes=_notes(rows),
        summary={
            "verifier": "grown" if args.grown else pair.verifier.name,
            "max_new": args.max_new,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            **({} if ctranslate2 is None else {"ctranslate2": ctranslate2.__version__}),
        },
    )


def _notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        "Each side is called by its public API, with the encoder, at batch 1, in float32: ours "
        "from token ids to text, theirs from tokens to tokens. CTranslate2 never drafts.",
        f"Medians over turns of {_TURN} prompts. ratio: the median of the turns' ratios, "
        "ratio_low and ratio_high their quartiles.",
        "same_outputs: the number of prompts with the same tokens on both sides; tokens can differ "
        "if two logits are equal up to float rounding.",
        *(
            f"{row['method']}: same outputs as plain for {row['ours_as_plain']} prompts (ours) "
            f"and {row['theirs_as_plain']} (theirs)"
            for row in rows[1:2]
        ),
    ]


@contextlib.contextmanager
def _directories(args: argparse.Namespace) -> Iterator[tuple[Path, Path]]:
    """Yields the directories of the drafter and the verifier, which both sides load."""
    if (args.drafter is None) != (args.verifier is None):
        raise UserError("give both --drafter and --verifier, or neither for the built-in pair")
    pair = built_in_pair(DEFAULT_PAIR)
    drafter = Path(real_path(args.drafter or pair / "drafter"))
    verifier = Path(real_path(args.verifier or pair / "verifier"))
    for directory in (drafter, verifier):
        read_config(directory)
        if not (directory / "config.json").is_file():
            raise UserError(
                f"{directory} must be a Hugging Face directory, which transformers reads: make one "
                "with specjax convert"
            )
    if not args.grown:
        yield drafter, verifier
        return
    with tempfile.TemporaryDirectory(prefix="specjax-grown-") as temporary:
        large: Any = command.grown(load_text_model(verifier, dtype="float32"))
        path = Path(temporary) / "verifier"
        save_model(path, large.model, large.params, format="hf", tokenizer_from=verifier)
        del large
        yield drafter, path


def _ours(
    pair: Pair, prompts: Sequence[list[int]], drafts: Sequence[int], max_new: int
) -> tuple[_Settings, _Settings]:
    """A `Decoder` for each setting, plain and assisted, compiled for all prompts."""
    eos_id = pair.verifier.tokenizer.eos_ids[0]

    def generate(models: Pair | TextModel, max_draft: int | None = None) -> Generate:
        decoder = Decoder(
            models,
            max_draft=max_draft,
            sampling=Sampling(0.0),
            max_new_tokens=max_new,
            batch_size=1,
        )
        # A limit of one token compiles all programs: they do not depend on the limit.
        decoder(prompts, max_new_tokens=1, progress=False)

        def call(i: int) -> np.ndarray:
            result = decoder([prompts[i]], progress=False)
            (tokens,) = result.tokens
            return np.append(tokens, np.int32(eos_id)) if result.ended[0] else tokens

        return call

    assisted = {f"G={draft}": generate(pair, draft) for draft in drafts}
    return {"": generate(pair.verifier)}, assisted


def _thread_counts() -> list[int]:
    # XLA uses all cores. PyTorch is faster with one core on a busy machine, so both are tried.
    return sorted({1, len(os.sched_getaffinity(0))})


def _choose(
    ways: Mapping[_Key, _Settings], pilot: Sequence[int], repeats: int
) -> tuple[dict[_Key, str], dict[_Key, dict[str, float]]]:
    """Each side's fastest settings on the first prompts, and the speeds of the tried settings."""
    chosen: dict[_Key, str] = {}
    tried: dict[_Key, dict[str, float]] = {}
    for key, settings in ways.items():
        print(f"{', '.join(key)}: {len(settings)} settings", flush=True)
        for generate in settings.values():
            generate(0)
        # On a busy machine, threads that wait for each other can be 100 times slower than one.
        # The better of two tries counts, so that one stall does not remove a setting.
        first = {k: max(tries) for k, tries in _turns(settings, pilot[:1], 2)[0].items()}
        near = {k: call for k, call in settings.items() if 4 * first[k] >= max(first.values())}
        tried[key] = _medians(_turns(near, pilot, repeats)[0])
        chosen[key] = max(near, key=tried[key].__getitem__)
    return chosen, tried


def _measure(
    ways: Mapping[_Key, _Settings],
    others: Mapping[str, Generate],
    count: int,
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Chooses settings on the first prompts, then times all sides on all prompts."""
    every = range(count)
    chosen, tried = _choose(ways, every[: args.pilot], args.repeats)
    print("measuring ...", flush=True)
    calls = {key: ways[key][setting] for key, setting in chosen.items()}
    for setting, generate in others.items():
        generate(0)
        calls["plain", setting] = generate
    samples, tokens = _turns(calls, every, args.repeats)
    medians = _medians(samples)

    def row(method: str, theirs: _Key, peer: str) -> dict[str, Any]:
        mine = (method, "ours")
        return {
            "method": method,
            "peer": peer,
            "ours_tokens_per_s": medians[mine],
            "theirs_tokens_per_s": medians[theirs],
            **_ratios(samples[mine], samples[theirs]),
            "same_outputs": _same(tokens[mine], tokens[theirs]),
            "prompts": count,
            "ours_setting": chosen[mine] or "-",
            "theirs_setting": chosen.get(theirs, theirs[1]),
            "ours_tried": tried[mine],
            "theirs_tried": tried.get(theirs, {}),
            "ours_as_plain": _same(tokens[mine], tokens["plain", "ours"]),
            "theirs_as_plain": _same(tokens[theirs], tokens["plain", theirs[1]]),
        }

    rows = [row(method, (method, "theirs"), "transformers") for method in _METHODS]
    for method in _METHODS:
        rows += [row(method, ("plain", name), "CTranslate2") for name in others]
    return rows


def _turns(
    calls: Mapping[Any, Generate], prompts: Sequence[int], repeats: int
) -> tuple[dict[Any, list[float]], dict[Any, list[np.ndarray]]]:
    parts = [prompts[i : i + _TURN] for i in range(0, len(prompts), _TURN)]

    def side(generate: Generate) -> Callable[[Sequence[int]], tuple[float, list[np.ndarray]]]:
        return lambda part: time_call(lambda: [generate(i) for i in part])

    samples: dict[Any, list[float]] = {name: [] for name in calls}
    outputs: dict[Any, dict[int, list[np.ndarray]]] = {name: {} for name in calls}
    sides = {name: side(generate) for name, generate in calls.items()}
    for name, _, place, (seconds, texts) in take_turns(sides, parts, repeats):
        samples[name].append(sum(map(len, texts)) / seconds)
        outputs[name][place] = texts
    order = range(len(parts))
    each = {name: [x for i in order for x in found[i]] for name, found in outputs.items()}
    return samples, each


def _ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """The median and the quartiles of the turns' ratios."""
    low, middle, high = np.percentile(np.divide(ours, theirs), (25, 50, 75)).tolist()
    return {"ratio": middle, "ratio_low": low, "ratio_high": high}


def _medians(samples: Mapping[Any, Sequence[float]]) -> dict[Any, float]:
    return {name: statistics.median(values) for name, values in samples.items()}


def _same(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> int:
    return sum(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def load_transformers() -> tuple[Any, Any]:
    """The modules torch and transformers."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise UserError(
            f"{error.name} is not installed: install it with pip install transformers torch"
        ) from None
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    return torch, transformers


def transformers_generations(
    torch: Any,
    transformers: Any,
    pair: Pair,
    prompts: Sequence[list[int]],
    drafts: Sequence[int],
    max_new: int,
    threads: Sequence[int],
) -> tuple[dict[str, Generate], dict[str, Generate]]:
    """Settings in words -> `generate`, plain and assisted, with each number of threads.

    The pair was loaded from Hugging Face directories. Beside the draft lengths, the defaults of
    transformers are tried.
    """
    eos = list(pair.verifier.tokenizer.eos_ids)
    verifier = load_model(torch, transformers, pair.verifier, eos)
    drafter = load_model(torch, transformers, pair.drafter, eos)
    inputs = [torch.tensor([prompt]) for prompt in prompts]
    masks = [torch.ones_like(prompt) for prompt in inputs]

    def generate(threads: int, assistant: Mapping[str, Any] | None) -> Generate:
        extra = {} if assistant is None else {"assistant_model": drafter}

        def call(i: int) -> np.ndarray:
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            for name, value in (assistant or {}).items():
                setattr(drafter.generation_config, name, value)
            with torch.inference_mode():
                out = verifier.generate(
                    inputs[i],
                    attention_mask=masks[i],
                    max_new_tokens=max_new,
                    do_sample=False,
                    **extra,
                )
            # Output starts with the start token (encoder-decoder) or with the prompt (others).
            start = 1 if verifier.config.is_encoder_decoder else inputs[i].shape[1]
            tokens = out[0, start:].numpy()
            return np.where(np.isin(tokens, eos), eos[0], tokens)

        return call

    names = (
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
    )
    # None: transformers' own defaults.
    assistants: dict[str, tuple[Any, ...]] = {"its defaults": (None, None, None)}
    assistants |= {f"G={draft}": (draft, "constant", 0.0) for draft in drafts}
    named = {n: in_words(n) for n in threads}
    return (
        {text: generate(n, None) for n, text in named.items()},
        {
            f"{setting}, {text}": generate(n, dict(zip(names, values, strict=True)))
            for setting, values in assistants.items()
            for n, text in named.items()
        },
    )


def in_words(threads: int) -> str:
    """Returns a number of threads as text."""
    return f"{threads} thread{'s' if threads > 1 else ''}"


def load_model(
    torch: Any, transformers: Any, ours: TextModel, eos: list[int], dtype: str = "float32"
) -> Any:
    """Loads the same directory or GGUF file, with only the special ids of its settings."""
    path = Path(real_path(ours.name))
    options: dict[str, Any] = {"local_files_only": True}
    if path.is_file():
        path, options = path.parent, options | {"gguf_file": path.name}
    config = transformers.AutoConfig.from_pretrained(path, **options)
    kind = (
        transformers.AutoModelForSeq2SeqLM
        if config.is_encoder_decoder
        else transformers.AutoModelForCausalLM
    )
    model = kind.from_pretrained(path, dtype=getattr(torch, dtype), **options).eval()
    if config.model_type == "t5":
        # transformers 5.23 makes as many caches as the encoder has layers, and fails if the
        # decoder has more. The networks exist already, and nothing else reads this.
        model.config.num_layers = config.num_decoder_layers
    old = model.generation_config
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=eos,
        pad_token_id=ours.tokenizer.pad_id,
        bos_token_id=old.bos_token_id,
        decoder_start_token_id=old.decoder_start_token_id,
    )
    return model


def load_ctranslate2() -> Any:
    """The module."""
    try:
        import ctranslate2
    except ImportError as error:
        raise UserError(
            f"{error.name} is not installed: install it with pip install ctranslate2, {_WITHOUT}"
        ) from None
    return ctranslate2


def ctranslate2_generations(
    ctranslate2: Any,
    model: TextModel,
    prompts: Sequence[list[int]],
    max_new: int,
    threads: Sequence[int],
) -> dict[int, Generate]:
    """Converts a model, and decodes it greedily in float32 with each number of threads."""
    path = Path(real_path(model.name))
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    seq2seq = bool(config.get("is_encoder_decoder"))
    kind = ctranslate2.Translator if seq2seq else ctranslate2.Generator
    options = {"device": "cpu", "compute_type": "float32", "inter_threads": 1}
    with tempfile.TemporaryDirectory(prefix="specjax-ctranslate2-") as temporary:
        place = Path(temporary) / "model"
        try:
            ctranslate2.converters.TransformersConverter(str(path)).convert(str(place))
            loaded = {n: kind(str(place), intra_threads=n, **options) for n in threads}
        except Exception as error:  # of many types
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"{model.name}: CTranslate2 cannot convert it ({type(error).__name__}: {reason}): "
                f"give a directory that specjax convert --to hf has written, {_WITHOUT}"
            ) from error
        # The name depends on the kind of model; the index of a piece is its id.
        (vocabulary,) = place.glob("*vocabulary.json")
        pieces = json.loads(vocabulary.read_text(encoding="utf-8"))
    ids = {piece: i for i, piece in enumerate(pieces)}
    words = [[pieces[token] for token in prompt] for prompt in prompts]
    eos = list(model.tokenizer.eos_ids)
    shared: dict[str, Any] = {"beam_size": 1, "end_token": eos, "return_end_token": True}

    def generate(model: Any) -> Generate:
        def call(i: int) -> np.ndarray:
            if seq2seq:
                (result,) = model.translate_batch(
                    [words[i]],
                    max_input_length=0,
                    min_decoding_length=0,
                    max_decoding_length=max_new,
                    **shared,
                )
                tokens = np.array([ids[piece] for piece in result.hypotheses[0]], np.int64)
            else:
                (result,) = model.generate_batch(
                    [words[i]], max_length=max_new, include_prompt_in_result=False, **shared
                )
                tokens = np.array(result.sequences_ids[0], np.int64)
            return np.where(np.isin(tokens, eos), eos[0], tokens)

        return call

    return {n: generate(model) for n, model in loaded.items()}


main = command.program(__file__, HELP, add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
