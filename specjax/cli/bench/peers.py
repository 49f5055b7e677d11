"""Compares whole generations with transformers', both by their public API."""

import argparse
import contextlib
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax import Decoder, Pair, TextModel, load_pair
from specjax.cli.bench import pairs
from specjax.cli.bench.report import Report
from specjax.text.models import BUILT_IN, load_text_model

HELP = "greedy decoding at batch 1, alone and speculative, compared with transformers' generate"

# A generation: the index of a prompt -> the emitted tokens. A token that ended the sequence is
# replaced by the first end-of-sequence token.
Generate = Callable[[int], np.ndarray]

# The number of prompts that one side decodes per turn.
_TURN = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the pair, its prompts and the sizes."""
    pairs.add_pair(parser)
    parser.add_argument("--prompts", type=int, default=100, help="number of prompts")
    parser.add_argument(
        "--drafts",
        type=int,
        nargs="+",
        default=[2, 3, 5],
        help="draft lengths G; each side uses its fastest",
    )
    parser.add_argument("--max-new", type=int, default=64, help="longest output, in tokens")
    parser.add_argument("--repeats", type=int, default=3, help="times that each is measured")
    parser.add_argument(
        "--pilot", type=int, default=10, help="number of prompts that choose each side's settings"
    )
    parser.add_argument(
        "--grown", action="store_true", help="grow the verifier to T5 base's size, same function"
    )


def run(args: argparse.Namespace) -> Report:
    """Measures both sides in turns.

    A generation is one call of the side's public API, a `Decoder` or `generate`; the time is that
    of the whole call. Both sides compute in float32 from the same token ids, with the same end of
    sequence and length limit. Each uses the settings that were its fastest on the first prompts.
    """
    pairs.check_positive(args, "prompts", "drafts", "max_new", "repeats", "pilot")
    if jax.default_backend() != "cpu":
        raise ValueError(
            f"JAX uses the {jax.default_backend()}, but this benchmark compares on CPUs: set "
            "JAX_PLATFORMS=cpu"
        )
    torch, transformers = _peer()
    texts = pairs.read_texts(args)
    with _directories(args) as (drafter, verifier):
        print("loading ...", flush=True)
        pair = load_pair(drafter=drafter, verifier=verifier, dtype="float32")
        tokens = pairs.encode_texts(args, texts, pair.verifier.tokenizer)
        prompts = [prompt.tolist() for prompt in tokens]
        print("compiling ...", flush=True)
        ours = _ours(pair, prompts, args.drafts, args.max_new)
        theirs = _theirs(torch, transformers, pair, prompts, args.drafts, args.max_new)
        rows = _measure(ours, theirs, len(prompts), args)
    return Report(
        rows,
        [
            "method",
            "ours_tokens_per_s",
            "theirs_tokens_per_s",
            "ratio",
            "ratio_low",
            "ratio_high",
            "same_outputs",
            "prompts",
            "ours_setting",
            "theirs_setting",
        ],
        notes=[
            "Each side runs by its public API, with the encoder, at batch 1, in float32: ours from "
            "token ids to text, theirs from token ids to token ids.",
            f"Medians over turns of {_TURN} prompts. ratio: the median of the turns' ratios, "
            "ratio_low and ratio_high their quartiles.",
            "same_outputs: the number of prompts for which both emit the same tokens; they can "
            "differ where two logits are equal up to float rounding.",
            *(
                f"{row['method']}: same outputs as plain for {row['ours_as_plain']} prompts (ours) "
                f"and {row['theirs_as_plain']} (theirs)"
                for row in rows[1:]
            ),
        ],
        summary={
            "verifier": "grown to T5 base" if args.grown else pair.verifier.name,
            "max_new": args.max_new,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
    )


def _peer() -> tuple[Any, Any]:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ValueError(
            f"{error.name} is not installed, but this benchmark needs it: install it with pip "
            "install transformers torch"
        ) from None
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    return torch, transformers


@contextlib.contextmanager
def _directories(args: argparse.Namespace) -> Iterator[tuple[Path, Path]]:
    """The directories of the drafter and of the verifier, which both sides load."""
    from specjax import testing
    from specjax.checkpoints import read_config, save_model
    from specjax.models import T5Config

    if (args.drafter is None) != (args.verifier is None):
        raise ValueError("give both --drafter and --verifier, or neither for the built-in pair")
    drafter = Path(args.drafter or BUILT_IN / "drafter")
    verifier = Path(args.verifier or BUILT_IN / "verifier")
    for directory in (drafter, verifier):
        config = read_config(directory)
        if not (directory / "config.json").is_file():
            raise ValueError(
                f"{directory} must be a Hugging Face directory, which transformers reads: make one "
                "with specjax convert"
            )
    if not args.grown:
        yield drafter, verifier
        return
    if not isinstance(config, T5Config):
        raise ValueError(f"{verifier} is not a T5, but --grown needs a T5: leave out --grown")
    with tempfile.TemporaryDirectory(prefix="specjax-grown-") as temporary:
        small = load_text_model(verifier, dtype="float32")
        grown: Any = testing.grow_t5(small.model, small.params)  # type: ignore[arg-type]
        path = Path(temporary) / "verifier"
        save_model(path, *grown, format="hf", tokenizer_from=verifier)
        del grown
        yield drafter, path


@dataclasses.dataclass(frozen=True)
class _Side:
    """The generations of one side, by their settings in words."""

    alone: Mapping[str, Generate]
    speculative: Mapping[str, Generate]


def _ours(pair: Pair, prompts: Sequence[list[int]], drafts: Sequence[int], max_new: int) -> _Side:
    """A `Decoder` for each setting, compiled for all prompts."""
    eos_id = pair.verifier.tokenizer.eos_ids[0]

    def generate(models: Pair | TextModel, max_draft: int | None = None) -> Generate:
        decoder = Decoder(
            models, max_draft=max_draft, temperature=0.0, max_new_tokens=max_new, batch_size=1
        )
        # One token each compiles all programs: a lower limit runs the same ones.
        decoder(prompts, max_new_tokens=1, progress=False)

        def call(i: int) -> np.ndarray:
            result = decoder([prompts[i]], progress=False)
            (tokens,) = result.tokens
            return np.append(tokens, np.int32(eos_id)) if result.ended[0] else tokens

        return call

    return _Side(
        {"": generate(pair.verifier)},
        {f"G={draft}": generate(pair, draft) for draft in drafts},
    )


def _theirs(
    torch: Any,
    transformers: Any,
    pair: Pair,
    prompts: Sequence[list[int]],
    drafts: Sequence[int],
    max_new: int,
) -> _Side:
    """`generate`, plain and assisted, with one thread and with one thread per core."""
    eos = list(pair.verifier.tokenizer.eos_ids)
    verifier = _load_peer(torch, transformers, pair.verifier, eos)
    drafter = _load_peer(torch, transformers, pair.drafter, eos)
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
    threads = {n: f"{n} thread{'s' if n > 1 else ''}" for n in _thread_counts()}
    return _Side(
        {text: generate(n, None) for n, text in threads.items()},
        {
            f"{setting}, {text}": generate(n, dict(zip(names, values, strict=True)))
            for setting, values in assistants.items()
            for n, text in threads.items()
        },
    )


def _thread_counts() -> list[int]:
    # XLA uses all cores. PyTorch is faster with one on a busy machine, so both are tried.
    return sorted({1, len(os.sched_getaffinity(0))})


def _load_peer(torch: Any, transformers: Any, ours: TextModel, eos: list[int]) -> Any:
    """The same directory in float32; only the special ids of its generation settings are kept."""
    config = transformers.AutoConfig.from_pretrained(ours.name, local_files_only=True)
    kind = (
        transformers.AutoModelForSeq2SeqLM
        if config.is_encoder_decoder
        else transformers.AutoModelForCausalLM
    )
    model = kind.from_pretrained(ours.name, dtype=torch.float32, local_files_only=True).eval()
    if config.model_type == "t5":
        # transformers 5.23 makes as many caches as the encoder has layers, and fails where the
        # decoder has more. The networks exist by now, and nothing else reads this.
        model.config.num_layers = config.num_decoder_layers
    old = model.generation_config
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=eos,
        pad_token_id=ours.tokenizer.pad_id,
        bos_token_id=old.bos_token_id,
        decoder_start_token_id=old.decoder_start_token_id,
    )
    return model


def _measure(
    ours: _Side, theirs: _Side, count: int, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Chooses each side's settings on the first prompts, then times them on all prompts."""
    ways = {
        "plain": (ours.alone, theirs.alone),
        "assisted": (ours.speculative, theirs.speculative),
    }
    every = range(count)
    pilot = every[: args.pilot]
    chosen: dict[tuple[str, int], str] = {}
    tried: dict[tuple[str, int], dict[str, float]] = {}
    for method, sides in ways.items():
        for side, settings in enumerate(sides):
            print(f"{method}, {('ours', 'theirs')[side]}: {len(settings)} settings", flush=True)
            for generate in settings.values():
                generate(0)
            # On a busy machine, threads that wait for each other can be 100 times slower than one.
            # The better of two tries counts, so that one stall does not remove a setting.
            first = {k: max(tries) for k, tries in _turns(settings, every[:1], 2)[0].items()}
            near = {k: call for k, call in settings.items() if 4 * first[k] >= max(first.values())}
            tried[method, side] = _medians(_turns(near, pilot, args.repeats)[0])
            chosen[method, side] = max(near, key=tried[method, side].__getitem__)
    print("measuring ...", flush=True)
    calls = {key: ways[key[0]][key[1]][name] for key, name in chosen.items()}
    samples, tokens = _turns(calls, every, args.repeats)
    medians = _medians(samples)
    rows = []
    for method in ways:
        rows.append(
            {
                "method": method,
                "ours_tokens_per_s": medians[method, 0],
                "theirs_tokens_per_s": medians[method, 1],
                **_ratios(samples[method, 0], samples[method, 1]),
                "same_outputs": _same(tokens[method, 0], tokens[method, 1]),
                "prompts": count,
                "ours_setting": chosen[method, 0] or "-",
                "theirs_setting": chosen[method, 1],
                "ours_tried": tried[method, 0],
                "theirs_tried": tried[method, 1],
                "ours_as_plain": _same(tokens[method, 0], tokens["plain", 0]),
                "theirs_as_plain": _same(tokens[method, 1], tokens["plain", 1]),
            }
        )
    return rows


def _turns(
    calls: Mapping[Any, Generate], prompts: Sequence[int], repeats: int
) -> tuple[dict[Any, list[float]], dict[Any, list[np.ndarray]]]:
    """Decodes all prompts with every call, some prompts per turn: noise affects all calls equally.

    Every second time the order of the calls is reversed, so that no call is always the first.

    Returns:
      For each call: the emitted tokens per second of each turn, and the outputs in the order of the
      prompts.
    """
    samples: dict[Any, list[float]] = {name: [] for name in calls}
    outputs: dict[Any, list[np.ndarray]] = {name: [] for name in calls}
    for start in range(0, len(prompts), _TURN):
        part = prompts[start : start + _TURN]
        for repeat in range(repeats):
            for name, generate in list(calls.items())[:: -1 if repeat % 2 else 1]:
                begin = time.perf_counter()
                texts = [generate(i) for i in part]
                seconds = time.perf_counter() - begin
                samples[name].append(sum(map(len, texts)) / seconds)
                outputs[name][start:] = texts
    return samples, outputs


def _ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """The median and the quartiles of the turns' ratios."""
    low, middle, high = np.percentile(np.divide(ours, theirs), (25, 50, 75)).tolist()
    return {"ratio": middle, "ratio_low": low, "ratio_high": high}


def _medians(samples: Mapping[Any, Sequence[float]]) -> dict[Any, float]:
    return {name: statistics.median(values) for name, values in samples.items()}


def _same(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> int:
    return sum(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
