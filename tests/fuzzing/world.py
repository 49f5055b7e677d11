"""What every case starts from: pairs of models, an input, and directories of runs."""

import json
import shutil
from pathlib import Path

from tests.fuzzing import toys
from tests.fuzzing.law import start

PREDICTIONS = "predictions.jsonl"
FORMATS = ("hf", "words", "orbax")


class World:
    """All of it, made once.

    Attributes:
      pairs: pairs of models by format.
      source: the input.
      lines: the predictions of each pair.
      runs: directories by what has happened in them, all with the pair "hf".
    """

    def __init__(self, root: Path) -> None:
        self.source = toys.write_input(root)
        self.pairs: dict[str, dict[str, Path]] = {}
        self.lines: dict[str, bytes] = {}
        for name in FORMATS:
            (root / name).mkdir()
            self.pairs[name] = toys.write_pair(root / name, name)
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
        return toys.command(self.pairs[format], self.source, output, *more, **settings)

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
