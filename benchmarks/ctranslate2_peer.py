"""CTranslate2's greedy decoding of a verifier, for `benchmarks.peers`."""

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax.errors import UserError
from specjax.text import TextModel
from specjax.text.directories import real_path

NAME = "CTranslate2"
_WITHOUT = "or leave CTranslate2 out with --no-ctranslate2"


def load_library() -> Any:
    """Returns the module.

    Raises:
      ValueError: it is not installed.
    """
    try:
        import ctranslate2
    except ImportError as error:
        raise UserError(
            f"{error.name} is not installed: install it with pip install ctranslate2, {_WITHOUT}"
        ) from None
    return ctranslate2


def generations(
    ctranslate2: Any,
    model: TextModel,
    prompts: Sequence[list[int]],
    max_new: int,
    threads: Sequence[int],
) -> dict[int, Callable[[int], np.ndarray]]:
    """Converts a model, and decodes it greedily in float32 with each number of threads.

    Args:
      ctranslate2: the module.
      model: a model that was loaded from a Hugging Face directory.
      prompts: token ids.
      max_new: the longest output.
      threads: the numbers of threads.

    Returns:
      Number of threads -> a function of a prompt's index that returns the emitted tokens. A token
      that ended the sequence is replaced by the first end-of-sequence token.

    Raises:
      ValueError: CTranslate2 cannot convert the model.
    """
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

    def generate(model: Any) -> Callable[[int], np.ndarray]:
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
