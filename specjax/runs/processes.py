"""The processes that share a run: replicas, or one program of all."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Process:
    """One of the processes that share a run.

    Attributes:
      index: which process this is, from 0.
      count: how many processes share the run.
      together: whether they are one program over one mesh (`join`), each with the rows that lie on
        its devices; else they are replicas, each with whole plans, that know nothing of each other.

    Raises:
      ValueError: `count` is not at least 1, or `index` is none of 0 .. count - 1.
    """

    index: int
    count: int
    together: bool = False

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"process_count must be at least 1, got {self.count}")
        if not 0 <= self.index < self.count:
            raise ValueError(
                f"process_index must be in 0 .. {self.count - 1}, below process_count, got "
                f"{self.index}"
            )

    @property
    def directory(self) -> str:
        """The name of its directory, within that of the run."""
        return f"part-{self.index:05d}-of-{self.count:05d}"


class LostProcessError(RuntimeError):
    """Another process of the program has ended, or cannot be reached."""


# What JAX, gloo, NCCL and gRPC say where another process is gone.
_LOST = (
    "Gloo", "gloo", "NCCL", "coordination", "Coordination", "UNAVAILABLE", "ABORTED",
    "DEADLINE_EXCEEDED",
)  # fmt: skip


def join(
    address: str | None = None, count: int | None = None, index: int | None = None
) -> Process | None:
    """Makes this process one of a program of several, before JAX has started its devices.

    Args:
      address: host and port of process 0; None for what the cluster says (a TPU pod, Slurm, Open
        MPI; see `jax.distributed.initialize`), which then also says the rest.
      count: the number of processes.
      index: which one this is, from 0.

    Returns:
      This process; None in a program of one.

    Raises:
      LostProcessError: another one did not come in time; a later start may join it.
      ValueError: JAX cannot join them.
    """
    # It would take SIGTERM for itself, by which launchers end a run.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(address, count, index)
    except (ValueError, TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        where = "the cluster's environment" if address is None else address
        if any(word in reason for word in _LOST):
            raise LostProcessError(
                f"the processes cannot be joined by {where} ({reason}): read what the other "
                "processes say, and start all of them again"
            ) from None
        raise ValueError(
            f"the processes cannot be joined by {where} ({reason}): give --coordinator_address="
            "HOST:PORT of process 0, --process_count and --process_index"
        ) from None
    if jax.process_count() == 1:
        return None
    return Process(jax.process_index(), jax.process_count(), together=True)


def gather(values: Any) -> np.ndarray:
    """What each process of a program has; all must call it.

    Args:
      values: an array, of the same shape and dtype in all processes.

    Returns:
      `[P, ...]`, those of the P processes.
    """
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(np.asarray(values)))


def check_same(what: str, text: str) -> None:
    """Raises ValueError in all processes of a program where one has another text; all call it.

    Args:
      what: the name of what is compared, for the message.
      text: a hash, of the same length in all.

    Raises:
      ValueError: the texts differ.
    """
    found = [bytes(row).decode() for row in gather(np.frombuffer(text.encode(), np.uint8))]
    other = next((i for i, theirs in enumerate(found) if theirs != found[0]), None)
    if other is not None:
        raise ValueError(
            f"process {other} has {what} that differs from that of process 0: give all processes "
            "the same files and the same command"
        )


@contextlib.contextmanager
def naming_lost_processes(process: Process | None) -> Iterator[None]:
    """Turns what JAX says where another process of the program is gone into one line.

    Args:
      process: this process; None, or a replica, for one that waits for no other.

    Raises:
      LostProcessError: a collective failed.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        reason = " ".join(str(error).split())
        lost = any(word in reason for word in _LOST)
        if process is None or not process.together or not lost:
            raise
        raise LostProcessError(
            f"process {process.index} of {process.count} has lost another one ({reason[:120]}): "
            "read what that one says, and start all of them again; finished rows are kept"
        ) from None
