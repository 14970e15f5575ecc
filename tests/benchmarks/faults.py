"""Faults against extraction: what can happen to its processes, its disk and its files.

Real processes extract a tiny random target (36 samples, 24 shards) while they are killed, stopped,
run out of disk, or find what others left. After each fault the same command must give the
undisturbed bytes, or ``Wrong`` is raised. The disk is a small tmpfs, or where that may not be
mounted a limit on the size of files. Cost: about two seconds a fault.
"""

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from drafttrain.data.errors import StoreError
from drafttrain.data.store_check import verify_store
from drafttrain.extract.claims import read_claim
from drafttrain.extract.config import TargetConfig
from drafttrain.extract.owners import new_owner
from drafttrain.extract.repair import repair
from drafttrain.extract.target import Target, load_target

from ..extract.factory import contents, make_table, save_target
from ..extract.kill_server import CONFIG, REFUSED
from ..extract.processes import Server, lasting, wait_for_files

LENGTHS = [17, 40, 22, 9, 31, 55, 12, 28, 33, 47, 8, 60] * 3
_EXPIRY_S = 0.6  # where a fault is to be noticed by silence
_DISK = "2m"


class Missed(Exception):
    """The fault did not hit: what it was to disturb had ended."""


class Wrong(Exception):
    """What must not happen."""


class Soak:
    """Faults on one undisturbed store.

    Args:
        folder: an empty folder to work in.
        seed: of everything random.
        mount: mount a small file system for the full disk, if that is allowed.
    """

    def __init__(self, folder: Path, seed: int, mount: bool) -> None:
        self.rng = random.Random(seed)
        self.detected = 0
        """Faults that an error or ``store verify`` has told of so far."""
        self.folder, self.out = folder, folder / "store"
        self.disk = folder / "disk"
        self.table = make_table(folder / "table.parquet", LENGTHS)
        self.server = Server(save_target(folder / "target"), self.table, folder / "errors")
        for out in (self.out, folder / "whole"):  # the first one also loads the target
            started = time.monotonic()
            self.must_finish(self.server.start(out))
        self.seconds = time.monotonic() - started
        self.whole = contents(folder / "whole")
        self.compare(self.out)
        self.disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "tmpfs", str(self.disk)]
        self.mounted = mount and subprocess.run(command, capture_output=True).returncode == 0

    def close(self) -> None:
        self.server.close()
        if self.mounted:
            subprocess.run(["umount", str(self.disk)], check=True)

    def fresh(self) -> Path:
        """An output folder that does not exist yet."""
        shutil.rmtree(self.out, ignore_errors=True)
        return self.out

    def finished(self) -> Path:
        """A finished store."""
        shutil.copytree(self.folder / "whole", self.fresh())
        return self.out

    def must_finish(self, *pids: int) -> None:
        for pid in pids:
            code, error = self.server.wait(pid)
            if code:
                raise Wrong(f"a rerun or surviving worker ended with {code}: {error}")

    def rerun(self, out: Path, **options: float) -> None:
        self.must_finish(self.server.start(out, **options))
        self.compare(out)

    def compare(self, out: Path) -> None:
        found = contents(out)
        if found != self.whole:
            names = sorted(found.keys() ^ self.whole.keys()) or [
                name for name in found if found[name] != self.whole[name]
            ]
            raise Wrong(f"the store differs in {', '.join(names)}")
        verify_store(out)

    def pause(self) -> None:
        """A random moment of an extraction, counted from when its folder appears."""
        time.sleep(self.rng.uniform(0, self.seconds * 0.8))

    # One method a kind; each leaves nothing running.

    def killed(self) -> None:
        """kill -9 of the only worker."""
        pid = self.server.start(self.fresh())
        wait_for_files(self.out, 1, "*")
        self.pause()
        _signal(pid, signal.SIGKILL)
        if self.server.wait(pid)[0] != -signal.SIGKILL:
            raise Missed
        self.rerun(self.out)

    def killed_beside_others(self) -> None:
        """kill -9 of one of three workers: the others finish, without waiting for an expiry."""
        out = self.fresh()
        pids = [self.server.start(out) for _ in range(3)]
        wait_for_files(out, 1, "*")
        self.pause()
        victim = self.rng.choice(pids)
        _signal(victim, signal.SIGKILL)
        hit = self.server.wait(victim)[0] == -signal.SIGKILL
        self.must_finish(*(pid for pid in pids if pid != victim))
        if not hit:
            raise Missed
        self.compare(out)

    def vanished_elsewhere(self) -> None:
        """kill -9 of a worker of a machine that cannot be looked at: its claims expire."""
        out = self.fresh()
        pid = self.server.start(out)
        wait_for_files(out, 1, "*.claim")
        self.pause()
        _signal(pid, signal.SIGKILL)
        hit = self.server.wait(pid)[0] == -signal.SIGKILL
        claims = list(out.glob("*.claim"))
        if not hit or not claims:
            raise Missed
        machine = new_owner().split("-")[0]
        for path in [*claims, *out.glob("*.tmp")]:
            if path in claims:
                path.write_text(path.read_text().replace(machine, "elsewhere"))
            else:
                path.rename(path.with_name(path.name.replace(machine, "elsewhere")))
        self.rerun(out, expiry_s=_EXPIRY_S)

    def stopped(self) -> None:
        """A worker stands still for longer than the expiry, and wakes up while or after another one
        does its shards."""
        out = self.fresh()
        first = self.server.start(out, expiry_s=_EXPIRY_S)
        wait_for_files(out, 1, "*.claim")
        self.pause()
        _signal(first, signal.SIGSTOP)
        claims = [read_claim(path) for path in out.glob("*.claim")]
        hit = any(claim is not None and f"-{first}-" in claim.owner for claim in claims)
        second = self.server.start(out, expiry_s=_EXPIRY_S)
        time.sleep(_EXPIRY_S + self.rng.uniform(0, 2 * self.seconds))
        _signal(first, signal.SIGCONT)
        self.must_finish(first, second)
        if not hit:
            raise Missed
        self.compare(out)

    def together(self) -> None:
        """Two to four workers claim the same shards at the same moment."""
        out, at = self.fresh(), time.time() + 0.15
        workers = range(self.rng.randint(2, 4))
        self.must_finish(*[self.server.start(out, at=at) for _ in workers])
        self.compare(out)

    def full_disk(self) -> None:
        """The disk fills up (or files may not grow) while shards are written."""
        if not self.mounted:
            sizes = [len(data) for name, data in self.whole.items() if name != "head.safetensors"]
            limit = self.rng.randint(1, max(sizes) - 1)
            out = self.fresh()
            pid = self.server.start(out, file_bytes=limit)
        else:
            out = self.disk / "store"
            pid = self.server.start(out)
            wait_for_files(out, self.rng.randint(1, len(self.whole) - 3))
            _fill(self.disk / "filler")
        code, error = self.server.wait(pid)
        try:
            if code == 0:
                raise Missed
            if code != REFUSED or "disk is full" not in error or "rerun" not in error:
                raise Wrong(f"a full disk ended extraction with {code}: {error}")
            self.detected += 1
            left = [path.name for path in out.glob("*") if path not in lasting(out)]
            if left:
                raise Wrong(f"a full disk left {left}")
            (self.disk / "filler").unlink(missing_ok=True)
            self.rerun(out)
        finally:
            (self.disk / "filler").unlink(missing_ok=True)
            shutil.rmtree(out)

    def truncated(self) -> None:
        """A file is cut short."""
        path = self._victim()
        os.truncate(path, self.rng.randrange(path.stat().st_size))
        self._flagged(path)

    def flipped(self) -> None:
        """One bit of a file is another one."""
        path = self._victim()
        data = bytearray(path.read_bytes())
        data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        path.write_bytes(data)
        self._flagged(path)

    def deleted(self) -> None:
        """Some records, or other files, are gone."""
        out = self.finished()
        names = [name for name in self.whole if name != "store.json"]
        for name in self.rng.sample(names, self.rng.randint(1, 12)):
            (out / name).unlink()
        self._verify(out)
        self.rerun(out)

    def stale(self) -> None:
        """Temporary files and claims that dead workers left, in a store that is half done."""
        out, rng = self.finished(), self.rng
        for name in rng.sample(sorted(name for name in self.whole if "shard-" in name), 20):
            (out / name).unlink()
        dead = subprocess.Popen(["true"])
        machine, _, _, end = new_owner().split("-")
        owner = f"{machine}-{dead.pid}-1-{end}"
        dead.wait()
        names = [
            *(f"{name}.{owner}.tmp" for name in rng.sample(sorted(self.whole), 3)),
            *(f"{name}.tmp" for name in rng.sample(sorted(self.whole), 2)),
            f".tmp{rng.randrange(1 << 24):06x}",
        ]
        for name in names:
            (out / name).write_bytes(rng.randbytes(rng.randrange(3000)))
        for unit in ("store", *(f"shard-{i:05d}" for i in rng.sample(range(20), 3))):
            (out / f"{unit}.claim").write_text(f"{owner} here\n")
        self.rerun(out)

    def _victim(self) -> Path:
        out = self.finished()
        return out / self.rng.choice(sorted(name for name in self.whole if name != "store.json"))

    def _verify(self, out: Path) -> str:
        """What ``store verify`` says of a damaged store."""
        try:
            verify_store(out)
        except StoreError as exc:
            self.detected += 1
            return str(exc)
        raise Wrong("store verify does not see the damage")

    def _flagged(self, path: Path) -> None:
        """The damage is named, and what the message says to do mends it."""
        message = self._verify(path.parent)
        if path.name not in message:
            raise Wrong(f"store verify does not name {path.name}: {message}")
        if "drafttrain store repair" in message:
            repair(self._load, CONFIG, self.table, path.parent)
        self.rerun(path.parent)

    def _load(self) -> Target:
        config = TargetConfig(path=str(self.folder / "target"), dtype="float32", device="cpu")
        return load_target(config)


# Kind -> (what happens, whether an error or `store verify` has to tell the user).
KINDS: dict[str, tuple[Callable[[Soak], None], bool]] = {
    "kill -9": (Soak.killed, False),
    "kill -9 of one of three workers": (Soak.killed_beside_others, False),
    "worker of another machine vanished": (Soak.vanished_elsewhere, False),
    "worker stopped past expiry, then awake": (Soak.stopped, False),
    "workers claim the same shards at once": (Soak.together, False),
    "disk full": (Soak.full_disk, True),
    "file truncated": (Soak.truncated, True),
    "bit flipped": (Soak.flipped, True),
    "files deleted": (Soak.deleted, True),
    "stale temporary files and claims": (Soak.stale, False),
}


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _fill(path: Path) -> None:
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
