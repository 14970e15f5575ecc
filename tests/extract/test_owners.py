"""Names of workers: who can still live, and who cannot."""

import re
import subprocess
import time
from pathlib import Path

from drafttrain.extract.owners import NOBODY, OWNER, has_ended, new_owner


def test_no_two_workers_have_one_name():
    names = {new_owner() for _ in range(100)}
    assert len(names) == 100
    assert all(re.fullmatch(OWNER, name) for name in (*names, NOBODY))
    assert not has_ended(NOBODY)


def test_a_process_id_that_was_given_again_is_another_process():
    machine, pid, started, end = new_owner().split("-")
    assert not has_ended(f"{machine}-{pid}-{started}-{end}")
    assert has_ended(f"{machine}-{pid}-{int(started) - 1}-{end}")
    assert not has_ended(f"elsewhere-{pid}-{int(started) - 1}-{end}")


def test_a_killed_process_that_nobody_has_waited_for_has_ended():
    process = subprocess.Popen(["sleep", "60"])
    started = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
    owner = f"{new_owner().split('-')[0]}-{process.pid}-{started}-0"
    assert not has_ended(owner)
    process.kill()
    deadline = time.monotonic() + 10
    while not has_ended(owner) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert has_ended(owner)
    process.wait()
