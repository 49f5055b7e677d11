"""How a run was started: the record that every run leaves in its output directory.

config.gin    the configuration in effect, which gin reads again
runs.jsonl    one line per process that worked on the run: when, which command, where, versions
"""

import datetime
import json
import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax.runs.environment import environment
from specjax.runs.output_directory import write_atomically

CONFIG_NAME = "config.gin"
RUNS_NAME = "runs.jsonl"


def record_run(
    directory: str | os.PathLike[str],
    *,
    command: Sequence[str],
    config: str,
    paths: Mapping[str, str] | None = None,
) -> None:
    """Saves the configuration, and adds a line about this process.

    Call it when the run has been checked and has claimed its directory, before the long work.

    Args:
      directory: the run's output directory, which exists.
      command: the command line, a word each.
      config: the configuration in gin's language, such as `gin.operative_config_str()`.
      paths: names and paths of what the run reads and writes, as absolute paths.

    Raises:
      OSError: the directory cannot be written.
    """
    directory = Path(directory).absolute()
    write_atomically(directory / CONFIG_NAME, config.encode())
    line: dict[str, Any] = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command),
        "working_directory": os.getcwd(),
        "host": platform.node(),
        "paths": {**(paths or {}), "output_dir": str(directory)},
        "python": platform.python_version(),
        **environment(),
    }
    path = directory / RUNS_NAME
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as error:
        raise OSError(f"{path} cannot be written ({error.strerror}); make room for it") from None
