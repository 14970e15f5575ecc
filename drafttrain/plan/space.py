"""How many bytes a run may still write: free space, the user's quota, and a limit given by hand.

Free space and quota are the system's; ``--space`` is for limits that it does not know (a project
allocation, a promise to colleagues) and counts everything under the run's folder.
"""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_QUOTA_BLOCK = 1024
_QUOTA_TIMEOUT_S = 20  # of file servers that do not answer


@dataclass(frozen=True, slots=True)
class Limit:
    """One reason why no more than ``bytes`` can be written."""

    name: str
    bytes: int


def limits_of(folder: Path, space: int | None) -> list[Limit]:
    """Everything that bounds what can be written into a folder, the tightest first.

    Args:
        folder: of the run; need not exist.
        space: what the folder may hold in all, or None.
    """
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    limits = [Limit(f"free on the file system of {there}", shutil.disk_usage(there).free)]
    left = _quota_left(there)
    if left is not None:
        limits.append(Limit("left of your quota", left))
    if space is not None:
        limits.append(Limit("left of --space", max(0, space - folder_bytes(folder))))
    return sorted(limits, key=lambda limit: limit.bytes)


def folder_bytes(folder: Path) -> int:
    """Bytes of all files under a folder; 0 if it does not exist."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _quota_left(folder: Path) -> int | None:
    """What user and group quota leave on a folder's file system; None where there is none."""
    command = shutil.which("quota")
    if command is None:
        return None
    try:
        done = subprocess.run(
            [command, "-ugw"],
            capture_output=True,
            text=True,
            timeout=_QUOTA_TIMEOUT_S,
            env=os.environ | {"LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    # The exit code is 1 where a quota is exceeded, so only the text counts.
    left = [
        found
        for line in done.stdout.splitlines()
        if (found := _left_in(line.split(), _device_of(folder))) is not None
    ]
    return min(left, default=None)


def _left_in(fields: list[str], device: str) -> int | None:
    """Bytes left by one line ``device blocks quota limit ...``; a starred count is over quota."""
    if len(fields) < 4 or fields[0] != device:
        return None
    numbers = [field.rstrip("*") for field in fields[1:4]]
    if not all(number.isdigit() for number in numbers):
        return None
    used, *bounds = (int(number) for number in numbers)
    # The soft limit counts too: a long run outlasts its grace period. 0 means no limit.
    bounds = [bound for bound in bounds if bound]
    return max(0, min(bounds) - used) * _QUOTA_BLOCK if bounds else None


def _device_of(folder: Path) -> str:
    """The device (or server path) that a folder's file system is mounted from."""
    best, device = "", ""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        source, point, *_ = line.split()
        point = point.replace("\\040", " ")
        if folder.resolve().is_relative_to(point) and len(point) >= len(best):
            best, device = point, source
    return device
