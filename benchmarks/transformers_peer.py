"""transformers' greedy decoding of a pair, for `benchmarks.peers`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from specjax.errors import UserError
from specjax.text import Pair, TextModel
from specjax.text.directories import real_path

# A generation: the index of a prompt -> the emitted tokens.
Generate = Callable[[int], np.ndarray]


def load_libraries() -> tuple[Any, Any]:
    """Returns the modules torch and transformers.

    Raises:
      ValueError: a module is not installed.
    """
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


def generations(
    torch: Any,
    transformers: Any,
    pair: Pair,
    prompts: Sequence[list[int]],
    drafts: Sequence[int],
    max_new: int,
    threads: Sequence[int],
) -> tuple[dict[str, Generate], dict[str, Generate]]:
    """Returns `generate`, plain and assisted by the drafter, with each number of threads.

    Args:
      torch: the module.
      transformers: the module.
      pair: a pair that was loaded from Hugging Face directories.
      prompts: token ids.
      drafts: the draft lengths; the defaults of transformers are also tried.
      max_new: the longest output.
      threads: the numbers of threads.

    Returns:
      Settings in words -> generation, plain and assisted. A token that ended the sequence is
      replaced by the first end-of-sequence token.
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


def load_model(torch: Any, transformers: Any, ours: TextModel, eos: list[int]) -> Any:
    """Loads the same directory in float32, with only the special ids of its generation settings."""
    path = real_path(ours.name)
    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    kind = (
        transformers.AutoModelForSeq2SeqLM
        if config.is_encoder_decoder
        else transformers.AutoModelForCausalLM
    )
    model = kind.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()
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
