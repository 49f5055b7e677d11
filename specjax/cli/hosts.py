"""The options for one JAX program of several processes.

Each option also has an environment variable, which launchers set on their hosts, such as
SPECJAX_PROCESS_INDEX for `--process_index`.
"""

import argparse
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from specjax.errors import UserError

if TYPE_CHECKING:
    from specjax.runs.processes import Process


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options, named as in T5X."""
    parser.add_argument(
        "--process_count",
        metavar="N",
        help="number of processes that form one JAX program over all of their devices",
    )
    parser.add_argument("--process_index", metavar="I", help="index of this process, from 0")
    parser.add_argument(
        "--coordinator_address",
        metavar="HOST:PORT",
        help="address of process 0, the same for all processes",
    )
    parser.add_argument(
        "--distributed",
        action="store_const",
        const="1",
        help="form one JAX program over all processes of a TPU pod, of Slurm or of Open MPI, which "
        "replace the three options above. This is the default if TPU_WORKER_HOSTNAMES (set by GKE) "
        "has several hosts",
    )


def start(args: argparse.Namespace) -> "Process | None":
    """Joins the other processes, and returns this one; None if it is alone.

    JAX must not have started its devices.
    """
    from specjax.runs import processes

    count, index = (_number(name, args) for name in ("process_count", "process_index"))
    address = _value("coordinator_address", args)
    detected = _value("distributed", args) not in (None, "0")
    if count is None and index is None and address is None:
        several = "," in os.environ.get("TPU_WORKER_HOSTNAMES", "")
        return processes.join() if detected or several else None
    if count is None or index is None or address is None or detected:
        raise UserError(
            "give --process_count, --process_index and --coordinator_address, or only "
            "--distributed; options count in the environment, too"
        )
    processes.Process(index, count)  # checks them
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(
            f"--coordinator_address must be HOST:PORT, the same for all processes, got {address!r}"
        )
    if count == 1:
        return None
    processes.meet(address, count, index)
    return processes.join(address, count, index)


def check_joined(args: argparse.Namespace) -> None:
    """Checks that JAX has no other processes, unless `start` has joined them.

    `start` reads the hosts of GKE in TPU_WORKER_HOSTNAMES. On Cloud TPU VMs only the TPU's runtime
    knows the hosts, after it has started: each host would do all of the work.
    """
    import jax

    count = jax.process_count()
    if count == 1 or getattr(args, "process", None) is not None:
        return
    remedy = f"run specjax {args.command} on a TPU of one host, or with JAX_PLATFORMS=cpu"
    if hasattr(args, "process"):
        remedy = "give --distributed, or run launch/tpu.sh"
    raise UserError(f"this TPU has {count} hosts: {remedy}")


def end(status: int) -> NoReturn:
    """Ends a failed process of a JAX program at once.

    A normal exit would wait for the other processes, which wait for this process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _value(name: str, args: argparse.Namespace) -> str | None:
    value = getattr(args, name)
    return os.environ.get(f"SPECJAX_{name.upper()}") or None if value is None else value


def _number(name: str, args: argparse.Namespace) -> int | None:
    value = _value(name, args)
    if value is not None and not value.isdecimal():
        raise UserError(
            f"--{name} (or SPECJAX_{name.upper()}) must be a whole number, got {value!r}"
        )
    return None if value is None else int(value)
