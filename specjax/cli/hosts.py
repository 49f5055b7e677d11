"""The options for runs of several processes.

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


def add_arguments(parser: argparse.ArgumentParser, *, joins: bool = True) -> None:
    """Adds the options, named as in T5X; `joins`: the processes may form one JAX program.

    If not, they work independently.
    """
    parser.set_defaults(joins=joins)
    parser.add_argument(
        "--process_count",
        metavar="N",
        help="number of processes that share the run. Without a coordinator each works on its own "
        "part; `specjax merge` merges the results",
    )
    parser.add_argument("--process_index", metavar="I", help="index of this process, from 0")
    parser.add_argument(
        "--coordinator_address",
        metavar="HOST:PORT",
        help="address of process 0: the processes then form one JAX program over all devices",
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
    """Returns this process, and joins the others if they form one JAX program; None if it is alone.

    JAX must not have started its devices.
    """
    from specjax.runs import processes

    count, index = (_number(name, args) for name in ("process_count", "process_index"))
    address = _value("coordinator_address", args)
    detected = _value("distributed", args) not in (None, "0")
    if (
        (count is None) != (index is None)
        or (address and count is None)
        or (detected and (address or count is not None))
    ):
        raise UserError(
            "give --process_count and --process_index, and --coordinator_address if the processes "
            "form one JAX program; or only --distributed; options count in the environment, too"
        )
    several = count is None and "," in os.environ.get("TPU_WORKER_HOSTNAMES", "")
    if not args.joins and (detected or address or several):
        # The TPU's runtime would wait for the other hosts, or each host would do all the work.
        raise UserError(
            f"specjax {args.command} cannot run as one program of several processes or hosts: give "
            "only --process_count and --process_index, or use launch/tpu.sh run --replicas"
        )
    if count is None or index is None:
        return processes.join() if detected or several else None
    process = processes.Process(index, count)
    if count == 1:
        return None
    if not address:
        return process
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(
            f"--coordinator_address must be HOST:PORT, the same for all processes, got {address!r}"
        )
    processes.meet(address, count, index)
    return processes.join(address, count, index)


def check_joined(args: argparse.Namespace) -> None:
    """Checks that JAX has no other processes, unless `start` has joined them.

    `start` reads the hosts of GKE in TPU_WORKER_HOSTNAMES. On Cloud TPU VMs only the TPU's runtime
    knows the hosts, after it has started: each host would do all of the work.
    """
    import jax

    count = jax.process_count()
    if count == 1 or getattr(getattr(args, "process", None), "together", False):
        return
    remedies = {
        True: "give --distributed, or run launch/tpu.sh",
        False: "use launch/tpu.sh run --replicas",
        None: f"run specjax {args.command} on a TPU of one host, or with JAX_PLATFORMS=cpu",
    }
    remedy = remedies[getattr(args, "joins", None)]
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
