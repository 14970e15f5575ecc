"""Which worker writes which shard: claim files in the store's folder, without a server.

    shard-00007.claim   "<owner> <host>", modified every quarter of the expiry while its owner lives

A claim appears whole (hard link of a written file, exclusive) and is taken from an owner that is
dead (a process of this machine that has ended) or silent (not renewed for longer than the expiry,
by the file server's clock). Who takes it claims the taking first, so that of many takers none
removes the claim of the one that won, and renames it; a claim renewed in between is put back.

Guarantee: a claim names one owner at any time, and a worker publishes only what it still holds. A
stalled worker that wakes up finds its claim gone and drops the shard. Needs links and renames that
are atomic, as local file systems and NFS have; no locks. Cost: a few metadata operations a shard.
"""

import logging
import os
import re
import secrets
import socket
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from .owners import NOBODY, OWNER, has_ended, new_owner

_CLAIM = re.compile(rf"({OWNER}) (\S+)\n")
_OWNED = re.compile(rf"\.({OWNER})\.tmp$")
_TAKING = ".taking"  # the claim on taking a claim away
_LOGGER = logging.getLogger(__name__)


class ClaimLost(Exception):
    """Another worker has taken over what this one was writing."""


class Claim(NamedTuple):
    """What a claim file says."""

    owner: str
    host: str
    renewed: float
    """In seconds of the file server's clock."""

    @property
    def who(self) -> str:
        return f"process {self.owner.split('-')[1]} on {self.host}"


def read_claim(path: Path) -> Claim | None:
    """Read a claim file; None if there is none."""
    try:
        # Opening makes a network file system ask its server for the time of renewal.
        with path.open(encoding="utf-8") as file:
            renewed = os.fstat(file.fileno()).st_mtime
            match = _CLAIM.fullmatch(file.read())
    except OSError:
        return None
    if match is None:  # cut short by a power failure: only its age tells
        return Claim(NOBODY, "an unknown host", renewed)
    return Claim(match.group(1), match.group(2), renewed)


class Claims:
    """The claims of one worker; use as a context manager, which renews and finally releases them.

    Args:
        folder: the store. A unit of work ``x`` is finished when ``x.json`` is there.
        expiry_s: a claim older than this is free to take.
    """

    def __init__(self, folder: Path, expiry_s: float) -> None:
        self.owner = new_owner()
        self._folder, self._expiry_s = folder, expiry_s
        self._held: set[str] = set()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._renewing = threading.Thread(target=self._renew, daemon=True)

    def __enter__(self) -> "Claims":
        self._renewing.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.set()
        self._renewing.join()
        for unit in list(self._held):
            self.release(unit)
        self._remove_written("*", self.owner)

    def take(self, unit: str) -> bool:
        """Claim a unit of work; False if a living worker (or this one) has it."""
        if unit in self._held:
            return False
        while not self._create(unit):
            found = self.holder(unit)
            if found is not None and not (self._is_dead(found) and self._take_away(unit)):
                return False
        with self._lock:
            self._held.add(unit)
        return True

    def holder(self, unit: str) -> Claim | None:
        """Who has claimed a unit."""
        return read_claim(self._path(unit))

    def holds(self, unit: str) -> bool:
        """Whether a unit that this worker took is still its own."""
        found = self.holder(unit)
        if found is not None:
            return found.owner == self.owner
        # Removed by a taker that will put it back, or after another worker finished the unit.
        return not (self._folder / f"{unit}.json").exists() and self._create(unit)

    def confirm(self, unit: str) -> None:
        """Raise ClaimLost unless the unit is still this worker's."""
        if not self.holds(unit):
            raise ClaimLost(unit)

    @contextmanager
    def writing(self, unit: str) -> Iterator[None]:
        """Write the files of a unit: one that is missing as its taker removed it is a lost claim.

        Raises:
            ClaimLost: the unit is another worker's by now.
        """
        try:
            yield
        except FileNotFoundError as exc:
            self.confirm(unit)
            raise exc

    def release(self, unit: str) -> None:
        """Give a unit back, finished or not; nothing happens if another worker has it by now."""
        with self._lock:
            self._held.discard(unit)
            self._remove_own(unit)

    def drop(self, unit: str) -> None:
        """Give up a unit that was lost, with what was written of it."""
        self.release(unit)
        self._remove_written(unit, self.owner)

    def sweep(self, finished: Collection[str]) -> None:
        """Remove what dead workers left: temporary files, and claims of finished units.

        Args:
            finished: units that are whole, so that nobody needs claims on them.
        """
        claims = {path.stem: read_claim(path) for path in self._folder.glob("*.claim")}
        for unit in claims:
            if unit.removesuffix(_TAKING) in finished:
                self._path(unit).unlink(missing_ok=True)
        living = {claim.owner for claim in claims.values() if claim and not self._is_dead(claim)}
        # Nothing of ours begins with .tmp or has no owner; libraries and older versions wrote such.
        for path in {*self._folder.glob("*.tmp"), *self._folder.glob(".tmp*")}:
            match = _OWNED.search(path.name)
            if match is not None and not self._is_left(path, match.group(1), living):
                continue
            _LOGGER.info("removing %s, left by an interrupted run", path)
            path.unlink(missing_ok=True)

    def _is_left(self, path: Path, owner: str, living: set[str]) -> bool:
        if owner == self.owner or owner in living:
            return False
        try:
            return self._is_dead(Claim(owner, "", path.stat().st_mtime))
        except FileNotFoundError:
            return False

    def _path(self, unit: str) -> Path:
        return self._folder / f"{unit}.claim"

    def _aside(self, unit: str) -> Path:
        """A new name; two threads of a worker may need one at the same time."""
        return self._folder / f"{unit}.{secrets.token_hex(4)}.{self.owner}.tmp"

    def _create(self, unit: str) -> bool:
        while True:
            aside = self._aside(unit)
            try:
                aside.write_text(f"{self.owner} {socket.gethostname()}\n", encoding="utf-8")
                os.link(aside, self._path(unit))
                return True
            except FileExistsError:
                # An answer of the server that got lost makes the repeated request fail.
                found = self.holder(unit)
                return found is not None and found.owner == self.owner
            except FileNotFoundError:
                # Swept away by another worker while this one stood still; or no folder at all.
                if not self._folder.is_dir():
                    raise
            finally:
                aside.unlink(missing_ok=True)

    def _is_dead(self, claim: Claim) -> bool:
        return has_ended(claim.owner) or self._now() - claim.renewed > self._expiry_s

    def _now(self) -> float:
        """The file server's clock, with which times of renewal can be compared."""
        probe = self._aside("clock")
        try:
            with probe.open("x") as file:
                return os.fstat(file.fileno()).st_mtime
        finally:
            probe.unlink(missing_ok=True)

    def _take_away(self, unit: str) -> bool:
        """Remove a dead worker's claim; False if another worker does, or it has come to life."""
        taking = unit + _TAKING
        if not self._create(taking):
            found = self.holder(taking)
            if found is not None and self._is_dead(found):
                self._remove(taking, found)
            return False
        try:
            dead = self.holder(unit)
            if dead is None:
                return True
            if not self._is_dead(dead) or not self._remove(unit, dead):
                return False
            why = "which has ended" if has_ended(dead.owner) else "which is silent"
            _LOGGER.warning("taking %s over from %s, %s", unit, dead.who, why)
            self._remove_written(unit, dead.owner)
            return True
        finally:
            self._remove_own(taking)

    def _remove(self, unit: str, dead: Claim) -> bool:
        """Remove a claim; False if it was renewed or replaced meanwhile."""
        aside = self._aside(unit)
        try:
            os.rename(self._path(unit), aside)
        except FileNotFoundError:
            return True
        found = read_claim(aside)
        if found != dead:
            with suppress(FileExistsError, FileNotFoundError):
                os.link(aside, self._path(unit))
        aside.unlink(missing_ok=True)
        return found == dead

    def _remove_own(self, unit: str) -> None:
        found = self.holder(unit)
        if found is not None and found.owner == self.owner:
            self._path(unit).unlink(missing_ok=True)

    def _remove_written(self, unit: str, owner: str) -> None:
        for path in self._folder.glob(f"{unit}.*{owner}.tmp"):
            path.unlink(missing_ok=True)

    def _renew(self) -> None:
        while not self._closing.wait(self._expiry_s / 4):
            for unit in list(self._held):
                # An outage of the file server must not end the renewing.
                with self._lock, suppress(OSError):
                    if unit in self._held and self.holds(unit):
                        os.utime(self._path(unit))
