"""Runs an untrusted program in its own namespaces; a script that `sandbox` starts.

It reads a job as JSON from stdin: `source`, `token`, `status` (a file descriptor), `work` (an empty
directory), `contained`, and the limits `memory`, `seconds`, `processes`, `disk`. It writes to
`status` why it cannot start the program; or the text `started`, and then `token` if the program
reached its end, `late` if it did not in time, otherwise the error.

Three processes: the first makes the namespaces and waits; the second is process 1 in them, so that
all end with it; the third has the limits, no privileges, and runs the program. The program's file
system has only Python and its libraries, read-only, and an empty `work` in memory. This script may
import only the standard library, because it starts without site-packages.
"""

import collections
import contextlib
import ctypes
import json
import os
import resource
import signal
import struct
import sys

_NAMESPACES = {
    "user": 0x10000000,
    "mount": 0x00020000,
    "process": 0x20000000,
    "network": 0x40000000,
    "ipc": 0x08000000,
    "host name": 0x04000000,
}
_PRIVATE = 0x4000 | 1 << 18  # MS_REC | MS_PRIVATE
_NOSUID, _NODEV, _NOEXEC = 2, 4, 8
_BIND = 0x1000 | 0x4000  # with all mounts below
_DETACH = 2
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_ATTRIBUTES = 1 | 2 | 4  # read-only, no set-user-id, no devices
_PDEATHSIG, _KEEPCAPS, _SECCOMP, _DROP_BOUND, _NO_NEW_PRIVILEGES = 1, 8, 22, 24, 38
_CAP_DAC_READ_SEARCH = 1 << 2
_CAP_VERSION = 0x20080522
_NOBODY = 65534
_FILES = 4096
_NEW_USER = _NAMESPACES["user"]
# For each machine its architecture, the numbers of four system calls, and the forbidden calls:
# memory without limits (shmget, msgget, semget, mq_open, memfd_create, memfd_secret), namespaces
# with privileges (unshare, setns, mount), and calls that ordinary programs do not need (ptrace,
# bpf, perf_event_open, add_key, request_key, keyctl, userfaultfd, io_uring_setup,
# open_by_handle_at).
_Calls = collections.namedtuple("_Calls", "architecture clone clone3 socket pivot_root refused")
_CALLS = {
    "x86_64": _Calls(
        architecture=0xC000003E,
        clone=56,
        clone3=435,
        socket=41,
        pivot_root=155,
        refused=(
            *(29, 68, 64, 240, 319, 447, 272, 308, 165),
            *(101, 321, 298, 248, 249, 250, 323, 425, 304),
        ),
    ),
    "aarch64": _Calls(
        architecture=0xC00000B7,
        clone=220,
        clone3=435,
        socket=198,
        pivot_root=41,
        refused=(
            *(194, 186, 190, 180, 279, 447, 97, 268, 40),
            *(117, 280, 241, 217, 218, 219, 282, 425, 265),
        ),
    ),
}
# The families of sockets that a program may make: they reach nothing outside its network namespace.
_AF_INET, _AF_INET6 = 2, 10
# Where the shared libraries of the system are.
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Runs the job."""
    job = json.load(sys.stdin)
    _libc.prctl(_PDEATHSIG, signal.SIGKILL)
    try:
        if job["contained"]:
            _enter_namespaces()
            child = os.fork()
            if child == 0:
                _supervise(job)
        else:
            child = os.fork()
            if child == 0:
                _confine(job, None)
                _execute(job)
            _end_in_time(job)
        os.waitpid(child, 0)
    except OSError as error:
        _tell(job, str(error))
    os._exit(0)


def _enter_namespaces() -> None:
    """Enters new namespaces, in which this process has all privileges."""
    uid, gid = os.getuid(), os.getgid()
    # For root also maps 65534, because the limit of processes does not apply to root.
    ids = {"uid_map": [uid, _NOBODY], "gid_map": [gid, _NOBODY]}
    mine = os.getpid()
    waiting, ready = os.pipe()
    helper = os.fork() if uid == 0 else -1
    if helper == 0:
        # Only a process outside the namespaces may map more than its own id.
        os.close(ready)
        os.read(waiting, 1)
        for name, numbers in ids.items():
            _write(f"/proc/{mine}/{name}", "".join(f"{n} {n} 1\n" for n in sorted({*numbers})))
        os._exit(0)
    os.close(waiting)
    flags = 0
    for flag in _NAMESPACES.values():
        flags |= flag
    _check(_libc.unshare(flags), "namespaces")
    if helper > 0:
        os.write(ready, b"x")
        if os.waitpid(helper, 0)[1]:
            raise OSError("user and group ids cannot be mapped")
    else:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{uid} {uid} 1\n")
        _write("/proc/self/gid_map", f"{gid} {gid} 1\n")
    os.close(ready)


def _supervise(job: dict) -> None:
    """Process 1 of the namespaces: when it ends, the kernel kills all others."""
    try:
        _libc.prctl(_PDEATHSIG, signal.SIGKILL)
        _make_root(job["work"], job["disk"])
        child = os.fork()
        if child == 0:
            _confine(job, job["processes"])
            _execute(job)
        _end_in_time(job)
        while os.wait()[0] != child:
            pass
    except OSError as error:
        _tell(job, str(error))
    os._exit(0)


def _end_in_time(job: dict) -> None:
    """Ends this process when the program's time is over."""

    def end(*_: object) -> None:
        _tell(job, job["late"])
        os._exit(0)

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, job["seconds"])


def _make_root(work: str, disk: int) -> None:
    """Replaces the file system by one with only Python, its libraries and an empty `work`."""
    pivot_root = _calls_of(os.uname().machine).pivot_root
    _check(_libc.mount(b"none", b"/", None, _PRIVATE, None), "mounts")
    os.umask(0o022)
    root = work
    _tmpfs(root, b"size=1m,mode=0755")
    bound: list[str] = []
    for place in sorted(_needed()):
        if not any(place == other or place.startswith(f"{other}/") for other in bound):
            _bind(place, root)
            bound.append(place)
    for link in filter(os.path.islink, _LIBRARIES):
        if not os.path.lexists(root + link):
            os.symlink(os.readlink(link), root + link)
    os.makedirs(root + work)
    _tmpfs(root + work, f"size={disk},nr_inodes={_FILES},mode=0777".encode())
    # Shows only its own processes.
    os.mkdir(f"{root}/proc")
    flags = _NOSUID | _NODEV | _NOEXEC
    proc = os.fsencode(f"{root}/proc")
    _check(_libc.mount(b"proc", proc, b"proc", flags, None), "/proc")
    os.chdir(root)
    _check(_libc.syscall(pivot_root, b".", b"."), "a file system of its own")
    _check(_libc.umount2(b".", _DETACH), "the file system outside")
    os.chdir("/")
    _set_read_only("/", 0)


def _needed() -> set[str]:
    """The files and directories of this Python and of its shared libraries."""
    paths = {path for path in sys.path if os.path.exists(path)} | {sys.executable}
    with open("/proc/self/maps") as maps:
        loaded = {line.split(maxsplit=5)[-1].rstrip("\n") for line in maps if ".so" in line}
    libraries = (*_LIBRARIES, os.path.realpath(sys.base_prefix))
    for library in filter(os.path.isfile, loaded):
        # A library from elsewhere may lie among a user's files.
        is_among = any(library.startswith(f"{place}/") for place in libraries)
        paths.add(os.path.dirname(library) if is_among else library)
    # Where programs have their loader.
    paths |= {place for place in ("/lib64",) if os.path.isdir(place)}
    return paths | {os.path.realpath(path) for path in paths}


def _bind(place: str, root: str) -> None:
    """Shows a file or a directory under its own name below `root`, read-only."""
    target = root + place
    if os.path.isdir(place):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    _check(_libc.mount(os.fsencode(place), os.fsencode(target), None, _BIND, None), place)
    _set_read_only(target, _AT_RECURSIVE)


def _tmpfs(place: str, size: bytes) -> None:
    path = os.fsencode(place)
    _check(_libc.mount(b"tmpfs", path, b"tmpfs", _NOSUID | _NODEV, size), place)


def _set_read_only(place: str, flags: int) -> None:
    attributes = (ctypes.c_uint64 * 4)(_ATTRIBUTES, 0, 0, 0)
    path = os.fsencode(place)
    done = _libc.syscall(
        _MOUNT_SETATTR, _AT_FDCWD, path, flags, ctypes.byref(attributes), ctypes.sizeof(attributes)
    )
    _check(done, f"{place} read-only")


def _confine(job: dict, processes: int | None) -> None:
    """Sets the limits and drops all privileges; `processes`: None for no limit."""
    os.setsid()
    os.chdir(job["work"])
    limits = {
        resource.RLIMIT_AS: job["memory"],
        resource.RLIMIT_CPU: int(job["seconds"]) + 1,
        resource.RLIMIT_FSIZE: job["disk"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    kept = 0
    if job["contained"]:
        for capability in range(64):
            _libc.prctl(_DROP_BOUND, capability)
        if os.getuid() == 0:
            # Keeps the right to read, because only root may read Python's files on some systems.
            kept = _CAP_DAC_READ_SEARCH
            _libc.prctl(_KEEPCAPS, 1)
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        if processes is not None:
            resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
        header = (ctypes.c_uint32 * 2)(_CAP_VERSION, 0)
        rights = (ctypes.c_uint32 * 6)(kept, kept, 0, 0, 0, 0)
        _check(_libc.capset(ctypes.byref(header), ctypes.byref(rights)), "capabilities")
    _check(_libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "no new privileges")
    if job["contained"]:
        _refuse_calls(_calls_of(os.uname().machine))


def _calls_of(machine: str) -> _Calls:
    if machine not in _CALLS:
        raise OSError(f"the system calls of {machine} are unknown")
    return _CALLS[machine]


def _refuse_calls(calls: _Calls) -> None:
    """Installs a filter of system calls (seccomp)."""
    load, equal, at_least, has_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    number, kind, first = 0, 4, 16  # offsets in seccomp_data; the first argument
    allow, no, unknown, no_family = 0x7FFF0000, 0x00050001, 0x00050026, 0x00050061
    steps = [(load, 0, 0, kind), (equal, 1, 0, calls.architecture), (give, 0, 0, no)]
    # Larger numbers belong to x32.
    steps += [(load, 0, 0, number), (at_least, 0, 1, 0x40000000), (give, 0, 0, no)]
    for call in calls.refused:
        steps += [(equal, 0, 1, call), (give, 0, 0, no)]
    # The flags of clone3 are not visible; without clone3 the library uses clone.
    steps += [(equal, 0, 1, calls.clone3), (give, 0, 0, unknown)]
    steps += [(equal, 0, 5, calls.socket), (load, 0, 0, first), (equal, 2, 0, _AF_INET)]
    steps += [(equal, 1, 0, _AF_INET6), (give, 0, 0, no_family), (give, 0, 0, allow)]
    steps += [(equal, 1, 0, calls.clone), (give, 0, 0, allow)]
    steps += [(load, 0, 0, first), (has_bit, 0, 1, _NEW_USER), (give, 0, 0, no)]
    steps += [(give, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_void_p)]

    made = Program(len(steps), ctypes.addressof(code))
    _check(_libc.prctl(_SECCOMP, 2, ctypes.byref(made), 0, 0), "a filter of system calls")


def _execute(job: dict) -> None:
    """Runs the program, and reports whether it reached its end."""
    me = os.getpid()
    _tell(job, job["started"])
    try:
        exec(compile(job["source"], "program.py", "exec"), {"__name__": "__main__"})
        status = job["token"]
    except BaseException as error:
        status = type(error).__name__
        with contextlib.suppress(BaseException):  # its own code makes the message
            status = f"{status}: {error}"[:200]
    if os.getpid() == me:  # not a child of the program
        _tell(job, status)
    os._exit(0)


def _tell(job: dict, text: str) -> None:
    # If the program has filled the pipe, it fails.
    os.set_blocking(job["status"], False)
    with contextlib.suppress(BlockingIOError):
        os.write(job["status"], text.encode(errors="backslashreplace"))


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
