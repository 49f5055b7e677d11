"""The record of how a run was started, which every run writes to its output directory.

config.gin    the configuration of the run; gin can read it
runs.jsonl    one line per process that worked on the run: time, command, machine, versions
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
    """Saves the configuration and adds a line about this process.

    Call it before the long work, after all checks and when the run has claimed its directory.

    Args:
      directory: the output directory of the run; it must exist.
      command: the words of the command line.
      config: the configuration as gin text, such as `gin.operative_config_str()`.
      paths: names and absolute paths of the files that the run reads and writes.

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
        raise OSError(f"{path} cannot be written ({error.strerror}): free some space") from None
