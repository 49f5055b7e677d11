"""Whole generations, from token ids to token ids, against transformers' on the same directories."""

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

from specjax import Sampling, TextModel, _batches, _compilation, decoding, drafting, load_pair
from specjax import rules as target_rules
from specjax._pair import BUILT_IN, Pair, load_text_model
from specjax.cli.bench.report import Report
from specjax.data import read_examples
from specjax.verification import Block

HELP = "greedy decoding at batch 1, alone and speculative, against transformers' generate"

# A generation: the number of a prompt -> the tokens emitted, the end of sequence among them.
Generate = Callable[[int], np.ndarray]

# Prompts that one side decodes before it is the other's turn.
_TURN = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the pair, its prompts and the sizes."""
    parser.add_argument("--drafter", help="directory; the built-in pair by default")
    parser.add_argument("--verifier", help="directory; the built-in pair by default")
    parser.add_argument("--inputs", required=True, help="a text file, one prompt per line")
    parser.add_argument("--prompts", type=int, default=100, help="how many of its lines")
    parser.add_argument(
        "--drafts",
        type=int,
        nargs="+",
        default=[2, 3, 5],
        help="draft lengths G; each side takes its fastest",
    )
    parser.add_argument("--max-new", type=int, default=64, help="longest output, in tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--pilot", type=int, default=10, help="prompts on which each side's settings are chosen"
    )
    parser.add_argument(
        "--grown", action="store_true", help="grow the verifier to T5 base's size, same function"
    )


def run(args: argparse.Namespace) -> Report:
    """Measures both sides turn by turn.

    A generation is timed whole: the encoder, the loop, and the tokens back on the host. Both sides
    compute in float32 from the same token ids, with the same end of sequence and length limit.
    Each takes the settings that were the fastest for it on the first prompts.
    """
    for name in ("prompts", "drafts", "max_new", "repeats", "pilot"):
        value = getattr(args, name)
        if min(value if isinstance(value, list) else [value]) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if jax.default_backend() != "cpu":
        raise ValueError(
            f"JAX uses the {jax.default_backend()}, but this comparison is of CPUs: set "
            "JAX_PLATFORMS=cpu"
        )
    torch, transformers = _peer()
    texts = [example.inputs for example in read_examples(args.inputs)][: args.prompts]
    _compilation.enable_cache()
    with _directories(args) as (drafter, verifier):
        print("loading ...", flush=True)
        pair = load_pair(drafter=drafter, verifier=verifier, dtype="float32")
        prompts = [
            _batches.encode(pair.verifier.tokenizer, text, f"{args.inputs}, prompt {i + 1}")
            for i, text in enumerate(texts)
        ]
        ours = _ours(pair, prompts, args.drafts, args.max_new)
        theirs = _theirs(torch, transformers, pair, prompts, args.drafts, args.max_new)
        rows = _measure(ours, theirs, [len(prompt) for prompt in prompts], args)
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
            "Both are timed from token ids to token ids, encoder included, batch 1, float32.",
            f"Medians over turns of {_TURN} prompts; ratio_low, ratio_high: the turns' quartiles.",
            "same_outputs: prompts for which both emit the same tokens; two logits within float "
            "rounding of each other may part them.",
            *(
                f"{row['method']}: as without a draft for {row['ours_as_plain']} prompts (ours) "
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
            f"{error.name} is not installed: this benchmark compares with transformers; pip "
            "install transformers torch"
        ) from None
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    return torch, transformers


@contextlib.contextmanager
def _directories(args: argparse.Namespace) -> Iterator[tuple[Path, Path]]:
    """The drafter's and the verifier's directory, which both sides load."""
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
                f"{directory}: transformers reads Hugging Face directories alone; specjax convert "
                "makes one"
            )
    if not args.grown:
        yield drafter, verifier
        return
    if not isinstance(config, T5Config):
        raise ValueError(f"{verifier}: --grown grows a T5 alone; leave it out")
    with tempfile.TemporaryDirectory(prefix="specjax-grown-") as temporary:
        small = load_text_model(verifier, dtype="float32")
        grown: Any = testing.grow_t5(small.model, small.params)  # type: ignore[arg-type]
        path = Path(temporary) / "verifier"
        save_model(path, *grown, format="hf", tokenizer_from=verifier)
        del grown
        yield drafter, path


@dataclasses.dataclass(frozen=True)
class _Side:
    """What one side can do: settings in words -> a generation."""

    alone: Mapping[str, Generate]
    speculative: Mapping[str, Generate]


def _ours(pair: Pair, prompts: Sequence[np.ndarray], drafts: Sequence[int], max_new: int) -> _Side:
    """Our loops on prompts padded to the Decoder's buckets."""
    verifier, drafter = pair.verifier, pair.drafter
    eos_ids = tuple(verifier.tokenizer.eos_ids)
    padded = []
    for i, prompt in enumerate(prompts):
        longest = _batches.BUCKETS[-1]
        _batches.check_tokens(prompt, f"prompt {i + 1}", verifier.model.vocab_size, longest)
        padded.append(np.pad(prompt, (0, _bucket(len(prompt)) - len(prompt)))[None])
    lengths = [np.array([len(prompt)], np.int32) for prompt in prompts]
    models = (verifier.model, drafter.model)
    first, limits = np.zeros(1, np.int32), np.full(1, max_new, np.int32)

    def generate(loop: Any, params: Any, rule: tuple[Any, ...], longest: int) -> Generate:
        def call(i: int) -> np.ndarray:
            prompt = max(model.prompt_positions(padded[i].shape[1], 0) for model in models)
            state = loop.init(
                params,
                padded[i],
                lengths[i],
                seed=0,
                ids=first,
                limits=limits,
                sampling=Sampling(0.0),
                max_new=max_new,
                max_length=prompt + max_new + longest + 1,
            )
            state = loop.run(params, *rule, state, np.iinfo(np.int32).max)
            return np.array(state.tokens)[0, : np.asarray(state.info.emitted)[0]]

        return call

    alone = decoding.Autoregressive(verifier.model, eos_ids)
    both = (verifier.prepared, (drafter.prepared, ()))
    loops = {
        draft: decoding.Speculative(
            verifier.model, drafting.NeuralDrafter(drafter.model, draft), Block(), eos_ids
        )
        for draft in drafts
    }
    return _Side(
        {"": generate(alone, verifier.prepared, (), 0)},
        {
            f"G={draft}": generate(loop, both, (target_rules.Lossless(),), draft)
            for draft, loop in loops.items()
        },
    )


def _bucket(length: int) -> int:
    return next(bucket for bucket in _batches.BUCKETS if bucket >= length)


def _theirs(
    torch: Any,
    transformers: Any,
    pair: Pair,
    prompts: Sequence[np.ndarray],
    drafts: Sequence[int],
    max_new: int,
) -> _Side:
    """`generate`, plain and assisted, with one thread and with as many as there are cores."""
    eos = list(pair.verifier.tokenizer.eos_ids)
    verifier = _load_peer(torch, transformers, pair.verifier, eos)
    drafter = _load_peer(torch, transformers, pair.drafter, eos)
    inputs = [torch.from_numpy(prompt.astype(np.int64))[None] for prompt in prompts]
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
            # An encoder-decoder's output begins with the start token, another's with the prompt.
            start = 1 if verifier.config.is_encoder_decoder else inputs[i].shape[1]
            return out[0, start:].numpy()

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
    # XLA uses all cores. On a busy machine PyTorch is faster with one: the better one counts.
    return sorted({1, len(os.sched_getaffinity(0))})


def _load_peer(torch: Any, transformers: Any, ours: TextModel, eos: list[int]) -> Any:
    """The same directory in float32; of its generation settings only the special ids are kept."""
    config = transformers.AutoConfig.from_pretrained(ours.name, local_files_only=True)
    kind = (
        transformers.AutoModelForSeq2SeqLM
        if config.is_encoder_decoder
        else transformers.AutoModelForCausalLM
    )
    model = kind.from_pretrained(ours.name, dtype=torch.float32, local_files_only=True).eval()
    if config.model_type == "t5":
        # transformers 5.23 makes as many caches as the encoder has layers, and fails where the
        # decoder has more. The networks are made by now: nothing else reads this.
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
    ours: _Side, theirs: _Side, lengths: Sequence[int], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Chooses each side's settings on the first prompts, then times them on all."""
    ways = {
        "plain": (ours.alone, theirs.alone),
        "assisted": (ours.speculative, theirs.speculative),
    }
    every = range(len(lengths))
    # One prompt of each bucket: whatever compiles does so here.
    print("compiling ...", flush=True)
    shapes = {_bucket(length): i for i, length in enumerate(lengths)}
    pilot = every[: args.pilot]
    for own, _ in ways.values():
        for generate in own.values():
            for i in shapes.values():
                generate(i)
    chosen: dict[tuple[str, int], str] = {}
    tried: dict[tuple[str, int], dict[str, float]] = {}
    for method, sides in ways.items():
        for side, settings in enumerate(sides):
            print(f"{method}, {('ours', 'theirs')[side]}: {len(settings)} settings", flush=True)
            for generate in settings.values():
                generate(0)
            # Threads that wait for each other on a busy machine can be 100 times slower than one.
            # The better of two tries, so that a stall leaves no setting out.
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
        rates = [medians[method, side] for side in (0, 1)]
        ratios = np.divide(samples[method, 0], samples[method, 1])
        low, high = np.percentile(ratios, (25, 75))
        rows.append(
            {
                "method": method,
                "ours_tokens_per_s": rates[0],
                "theirs_tokens_per_s": rates[1],
                "ratio": rates[0] / rates[1],
                "ratio_low": float(low),
                "ratio_high": float(high),
                "same_outputs": _same(tokens[method, 0], tokens[method, 1]),
                "prompts": len(lengths),
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
    """Decodes all prompts by every call, some prompts at a turn: noise disturbs all alike.

    Returns:
      By call: the tokens per second of each turn (of tokens really emitted), and the outputs in
      the order of the prompts.
    """
    samples: dict[Any, list[float]] = {name: [] for name in calls}
    outputs: dict[Any, list[np.ndarray]] = {name: [] for name in calls}
    for start in range(0, len(prompts), _TURN):
        part = prompts[start : start + _TURN]
        for _ in range(repeats):
            for name, generate in calls.items():
                begin = time.perf_counter()
                texts = [generate(i) for i in part]
                seconds = time.perf_counter() - begin
                samples[name].append(sum(map(len, texts)) / seconds)
                outputs[name][start:] = texts
    return samples, outputs


def _medians(samples: Mapping[Any, Sequence[float]]) -> dict[Any, float]:
    return {name: statistics.median(values) for name, values in samples.items()}


def _same(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> int:
    return sum(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
