"""Runs an untrusted program within limits; a script that `sandbox` starts, inside of bwrap.

It reads a job as JSON from stdin, and writes to the file descriptor `status` the text `started`;
then `token` if the program reached its end, otherwise the error. It may import only the standard
library, because it starts without site-packages.
"""

import contextlib
import json
import os
import resource
import sys


def main() -> None:
    """Runs the job."""
    job = json.load(sys.stdin)
    os.dup2(1, 2)  # until here, errors are told
    # For root the limit of processes would not hold.
    if job["user"] is not None:
        os.setgroups([])
        os.setresgid(job["user"], job["user"], job["user"])
        os.setresuid(job["user"], job["user"], job["user"])
    for name, most in job["limits"].items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    program = os.getpid()
    _tell(job, job["started"])
    try:
        exec(compile(job["source"], "program.py", "exec"), {"__name__": "__main__"})
        status = job["token"]
    except BaseException as error:
        status = type(error).__name__
        with contextlib.suppress(BaseException):  # its own code makes the message
            status = f"{status}: {error}"[:200]
    if os.getpid() == program:  # not a child of the program
        _tell(job, status)
    os._exit(0)


def _tell(job: dict, text: str) -> None:
    # If the program has filled the pipe, it fails.
    os.set_blocking(job["status"], False)
    with contextlib.suppress(BlockingIOError):
        os.write(job["status"], text.encode(errors="backslashreplace"))


if __name__ == "__main__":
    main()
