"""The options by which a command learns that it is one of several processes.

Each option also has an environment variable, which launchers set on their hosts. It is named like
the option: SPECJAX_PROCESS_INDEX for `--process_index`.
"""

import argparse
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from specjax.checks import whole_number

if TYPE_CHECKING:
    from specjax.runs.processes import Process

_JOINED = "--coordinator_address or --distributed"


def add_arguments(parser: argparse.ArgumentParser, *, joins: bool = True) -> None:
    """Adds the options, named as in T5X.

    Args:
      parser: of a command.
      joins: whether its processes may be one program. Else they only learn which of several they
        are: one that waited for the others would end with them.
    """
    parser.set_defaults(joins=joins)
    parser.add_argument(
        "--process_count",
        metavar="N",
        help="how many processes share the run. Without a coordinator they are replicas, each with "
        "its part of the work; `specjax merge` makes one of their results",
    )
    parser.add_argument(
        "--process_index", metavar="I", help="which of these processes this is, from 0"
    )
    parser.add_argument(
        "--coordinator_address",
        metavar="HOST:PORT",
        help="the address of process 0, by which the processes become one program over all devices",
    )
    parser.add_argument(
        "--distributed",
        action="store_const",
        const="1",
        help="one program over all processes of a TPU pod, of Slurm or of Open MPI, which say what "
        "the three options above say. So it is without them where TPU_WORKER_HOSTNAMES, which GKE "
        "sets, has several hosts",
    )


def start(args: argparse.Namespace) -> "Process | None":
    """Finds out which process this is, and joins the others if they are one program.

    Args:
      args: with the options of `add_arguments`. JAX must not have started its devices.

    Returns:
      This process; None for one alone.

    Raises:
      ValueError: the options contradict one another, or the processes cannot be joined.
    """
    from specjax.runs import processes

    count, index = (_number(name, args) for name in ("process_count", "process_index"))
    address = _value("coordinator_address", args)
    detected = _value("distributed", args) not in (None, "", "0")
    if detected and (address or count is not None or index is not None):
        raise ValueError(
            "--distributed takes all from the cluster: leave out --coordinator_address, "
            "--process_count and --process_index, or give these three alone"
        )
    if (count is None) != (index is None):
        given, absent = ("count", "index") if index is None else ("index", "count")
        raise ValueError(f"--process_{given} is given without --process_{absent}: give both")
    if address and count is None:
        raise ValueError("--coordinator_address needs --process_count and --process_index")
    if not args.joins and (detected or address):
        raise ValueError(
            f"the processes of specjax {args.command} are no program: leave out {_JOINED} (in the "
            "environment, too), and give --process_count and --process_index alone"
        )
    if count is None or index is None:
        several = "," in os.environ.get("TPU_WORKER_HOSTNAMES", "")
        if several and not args.joins:
            # The TPU's runtime would wait for the other hosts, or each host do all the work.
            raise ValueError(
                f"this TPU has several hosts, and specjax {args.command} is no program of several: "
                "give --process_count and --process_index, and keep the hosts' TPUs apart "
                "(launch/tpu.sh run --replicas does both)"
            )
        return processes.join() if detected or several else None
    process = processes.Process(index, count)
    if count == 1:
        return None
    if not address:
        return process
    _check_address(address)
    return processes.join(address, count, index)


def check_joined(args: argparse.Namespace) -> None:
    """Refuses a process that JAX counts among several, but that was not started as one of them.

    GKE names a TPU's hosts in TPU_WORKER_HOSTNAMES, which `start` reads. On Cloud TPU VMs only the
    TPU's runtime knows of them, once it has started: each host would then do all of the work.

    Args:
      args: of any command; `process` is what `start` has returned.

    Raises:
      ValueError: there are several processes, and no program of them was joined.
    """
    import jax

    count = jax.process_count()
    if count == 1 or getattr(getattr(args, "process", None), "together", False):
        return
    joins = getattr(args, "joins", None)
    if joins:
        remedy = "give --distributed, or run launch/tpu.sh"
    elif joins is None:
        remedy = f"specjax {args.command} takes a TPU of one host, or JAX_PLATFORMS=cpu"
    else:
        remedy = "keep them apart, by launch/tpu.sh run --replicas"
    raise ValueError(f"this TPU has {count} hosts: {remedy}")


def end(status: int) -> NoReturn:
    """Ends a failed process of a program at once.

    Else JAX would wait for the others to end first, and they for this one.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _value(name: str, args: argparse.Namespace) -> str | None:
    given = getattr(args, name)
    return os.environ.get(f"SPECJAX_{name.upper()}") or None if given is None else given


def _number(name: str, args: argparse.Namespace) -> int | None:
    value = _value(name, args)
    if value is None:
        return None
    try:
        return whole_number(name, int(value), low=0)
    except ValueError:
        raise ValueError(
            f"--{name} (or SPECJAX_{name.upper()}) must be a whole number, got {value!r}"
        ) from None


def _check_address(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(
            f"--coordinator_address must be HOST:PORT, the same for all processes, got {address!r}"
        )
