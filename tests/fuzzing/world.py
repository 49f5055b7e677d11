"""What every case starts from: pairs of tiny models in several formats, an input, and runs."""

import json
import shutil
from pathlib import Path
from typing import Any

import tokenizers

from specjax.checkpoints import load_model, save_model
from tests import tiny_pair
from tests.cli.infer_command import CONFIGS, arguments, write
from tests.fuzzing.law import start

PREDICTIONS = "predictions.jsonl"
FORMATS = ("hf", "words", "orbax")
CONFIG = CONFIGS / "runs/infer.gin"
TEXTS = tiny_pair.sentences(5, seed=4, longest=3)
SETTINGS = {"MAX_NEW_TOKENS": 4, "BATCH_SIZE": 4, "MAX_DRAFT": 2, "BUCKETS": "(8,)"}


def write_pair(directory: Path, format: str) -> dict[str, Path]:
    """Writes a pair; format "words" is Hugging Face's with a `tokenizer.json`."""
    paths = tiny_pair.write_pair(directory / "hf")
    if format == "hf":
        return paths
    found = {}
    for name, path in paths.items():
        found[name] = directory / name
        if format == "orbax":
            loaded = load_model(path)
            save_model(
                found[name], loaded.model, loaded.params, format="orbax", tokenizer_from=path
            )
        else:
            shutil.copytree(path, found[name])
            _write_words(found[name])
    return found


def _write_words(directory: Path) -> None:
    (directory / "spiece.model").unlink()
    (directory / "tokenizer_config.json").unlink(missing_ok=True)
    words = ["<pad>", "</s>", "<unk>", *tiny_pair.SYLLABLES]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>")
    built = tokenizers.Tokenizer(model)
    built.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    built.add_special_tokens(words[:3])
    built.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    built.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        '{"eos_token": "</s>", "pad_token": "<pad>", "unk_token": {"content": "<unk>"}, '
        '"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": '
        '{"1": {"content": "</s>", "special": true}}, "additional_special_tokens": ["<pad>"], '
        '"chat_template": [{"name": "default", "template": "{{ messages[0].content }}"}]}'
    )
    (directory / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}')
    (directory / "added_tokens.json").write_text('{"<unk>": 2}')


def command(
    pair: dict[str, Path], source: Path | str, output: Path | str, *more: str, **settings: Any
) -> list[str]:
    """The words of a start; `more` come last."""
    return [*arguments(pair, source, output, **{**SETTINGS, **settings}), *more]


class World:
    """All of it, made once.

    Attributes:
      pairs: pairs of models by format.
      source: the input.
      lines: the predictions of each pair.
      runs: directories by what has happened in them, all with the pair "hf".
    """

    def __init__(self, root: Path) -> None:
        self.source = write(root, TEXTS)
        self.pairs: dict[str, dict[str, Path]] = {}
        self.lines: dict[str, bytes] = {}
        for name in FORMATS:
            (root / name).mkdir()
            self.pairs[name] = write_pair(root / name, name)
            assert start(self.command(root / name / "out", name)).status == 0
            self.lines[name] = (root / name / "out" / PREDICTIONS).read_bytes()
        self.runs = {name: root / name for name in ("stopped", "other", "new")}
        self.runs["finished"] = root / "hf/out"
        self.runs["new"].mkdir()
        assert start(self.command(self.runs["other"], SEED=1)).status == 0
        self._stop()

    def command(
        self, output: Path | str, format: str = "hf", *more: str, **settings: object
    ) -> list[str]:
        """The words of a start with a pair that is whole."""
        return command(self.pairs[format], self.source, output, *more, **settings)

    def _stop(self) -> None:
        place = self.runs["stopped"]
        shutil.copytree(self.runs["finished"], place)
        rows = self.lines["hf"].splitlines(keepends=True)
        (place / PREDICTIONS).write_bytes(rows[3] + rows[1] + rows[0][:20])
        (place / "metrics.json").unlink()
        # A run lists what it has made when it makes it.
        config = json.loads((place / "infer_config.json").read_bytes())
        config["files"].remove("metrics.json")
        (place / "infer_config.json").write_text(json.dumps(config))

    def __repr__(self) -> str:
        return "World(...)"
