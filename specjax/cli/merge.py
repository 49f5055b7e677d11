"""`specjax merge DIRECTORY`: merges the parts of several processes of `infer`."""

import argparse
import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING

from specjax.errors import UserError

if TYPE_CHECKING:
    from specjax.runs.run_directory import RunDirectory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "directory",
        help="the directory of the run, for the merged results",
    )
    parser.add_argument(
        "parts",
        nargs="*",
        help="directories of the parts, part-I-of-N, or directories that contain them (default: "
        "the parts in the run's directory or one level below)",
    )


def run(args: argparse.Namespace) -> int:
    """Merges; prints the metrics as one line of JSON."""
    from specjax.runs import merging

    on_start = functools.partial(_record, command=args.command_line)
    print(json.dumps(merging.merge(args.directory, args.parts, on_start=on_start)))
    return 0


def _record(run: "RunDirectory", *, command: list[str], paths: dict[str, str]) -> None:
    """Records the command, with the gin configuration of the first part."""
    from specjax.runs.run_directory import GIN_NAME
    from specjax.writing import read_regular

    path, config = Path(next(iter(paths.values())), GIN_NAME), None
    try:
        config = read_regular(path).decode()
    except FileNotFoundError:
        pass
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 ({error.reason}): restore it") from None
    run.record(command=command, config=config, paths=paths)
