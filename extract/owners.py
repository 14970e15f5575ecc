"""Names of workers that tell whether their process can still live.

    <machine>-<process id>-<start time>-<random part>

A machine is what a process can see: host, boot and process namespace, hashed. Guarantee: no two
workers have one name; ``has_ended`` says True only of a process that is no more, also when its id
was given to another process since; of other machines it never does.
"""

import functools
import hashlib
import os
import secrets
import socket
from pathlib import Path

OWNER = r"\w+-\d+-\d+-\w+"  # a pattern for all names
_UNKNOWN_MACHINE = "unknown"
NOBODY = f"{_UNKNOWN_MACHINE}-0-0-0"  # stands for a name that cannot be read


@functools.cache
def _machine() -> str:
    """Names the processes that this one can see: host, boot and process namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        seen = f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return _UNKNOWN_MACHINE
    return hashlib.sha256(seen.encode()).hexdigest()[:12]


def _started(pid: int) -> int | None:
    """When a process of this machine began, in clock ticks; None if it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else int(fields[18])


def new_owner() -> str:
    """A name that no other worker on any machine has, and that says whether it can still live."""
    pid = os.getpid()
    return f"{_machine()}-{pid}-{_started(pid) or 0}-{secrets.token_hex(4)}"


def has_ended(owner: str) -> bool:
    """Whether an owner is known to be dead: a process of this machine that is no more."""
    machine, pid, started, _ = owner.split("-")
    if machine == _UNKNOWN_MACHINE or machine != _machine():
        return False
    return _started(int(pid)) != int(started)
