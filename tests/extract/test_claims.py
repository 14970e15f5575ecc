"""Claims on shards: one owner at a time, none kept from the living, none left by the dead."""

import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from drafttrain.extract.claims import ClaimLost, Claims, read_claim
from drafttrain.extract.owners import new_owner

UNIT = "shard-00003"


def ended_owner() -> str:
    """The name of a worker of this machine whose process is no more."""
    process = subprocess.Popen(["true"])
    process.wait()
    machine, _, started, end = new_owner().split("-")
    return f"{machine}-{process.pid}-{started}-{end}"


def elsewhere() -> str:
    """The name of a worker of another machine."""
    return new_owner().replace(new_owner().split("-")[0], "elsewhere")


def claim_by(folder: Path, owner: str, age_s: float = 0.0, unit: str = UNIT) -> Path:
    path = folder / f"{unit}.claim"
    path.write_text(f"{owner} node7\n")
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def race(folder: Path, workers: int, unit: str) -> list[Claims]:
    """Workers that got the unit when all tried at the same moment."""
    claims = [Claims(folder, 60) for _ in range(workers)]
    barrier, won = threading.Barrier(workers), []

    def attempt(claim: Claims) -> None:
        barrier.wait()
        if claim.take(unit):
            won.append(claim)

    threads = [threading.Thread(target=attempt, args=(claim,)) for claim in claims]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return won


@pytest.mark.parametrize("stale", [False, True])
def test_of_many_workers_one_gets_a_unit(tmp_path, stale):
    """A free one, and one whose owner is dead."""
    dead = ended_owner()
    for attempt in range(100):
        unit = f"shard-{attempt:05d}"
        if stale:
            claim_by(tmp_path, dead, unit=unit)
        won = race(tmp_path, 6, unit)
        assert len(won) == 1
        assert won[0].holds(unit)
    assert len(list(tmp_path.iterdir())) == 100


def test_a_taker_that_died_while_taking_does_not_block_the_unit(tmp_path):
    claim_by(tmp_path, ended_owner())
    claim_by(tmp_path, ended_owner(), unit=f"{UNIT}.taking")
    claims = Claims(tmp_path, 60)
    assert not claims.take(UNIT)  # only clears the way
    assert claims.take(UNIT)
    assert [path.name for path in tmp_path.iterdir()] == [f"{UNIT}.claim"]


def test_nobody_takes_from_who_has_just_taken(tmp_path, monkeypatch):
    """The first taker is faster between the second one's look and its taking."""
    claim_by(tmp_path, ended_owner())
    first, second = Claims(tmp_path, 60), Claims(tmp_path, 60)
    real = second._take_away

    def late(unit):
        assert first.take(unit)
        return real(unit)

    monkeypatch.setattr(second, "_take_away", late)
    assert not second.take(UNIT)
    assert first.holds(UNIT) and first.holder(UNIT).owner == first.owner


def test_the_living_keep_their_claims_and_the_ended_lose_them_at_once(tmp_path):
    claims = Claims(tmp_path, 60)
    claim_by(tmp_path, new_owner())  # this very process
    assert not claims.take(UNIT)
    claim_by(tmp_path, elsewhere())
    assert not claims.take(UNIT)
    claim_by(tmp_path, ended_owner())
    assert claims.take(UNIT)
    assert not claims.take(UNIT), "its own claims are taken once"


@pytest.mark.parametrize("content", ["worker", "", "half a cl"])
def test_a_silent_claim_expires_by_its_age(tmp_path, content):
    """Also one that a power failure has left empty or cut short."""
    claims = Claims(tmp_path, 60)
    path = claim_by(tmp_path, elsewhere(), age_s=50)
    if content != "worker":
        path.write_text(content)
        os.utime(path, (time.time() - 50,) * 2)
    assert not claims.take(UNIT)
    os.utime(path, (time.time() - 70,) * 2)
    assert claims.take(UNIT)


def test_claims_are_renewed_while_their_worker_lives(tmp_path):
    with Claims(tmp_path, 0.4) as claims:
        assert claims.take(UNIT)
        time.sleep(1.0)
        assert not Claims(tmp_path, 0.4).take(UNIT)
    assert not list(tmp_path.iterdir())
    silent = Claims(tmp_path, 0.4)  # a control: nothing renews for it
    assert silent.take(UNIT)
    time.sleep(0.6)
    assert Claims(tmp_path, 0.4).take(UNIT)


def test_who_lost_a_claim_notices_and_leaves_it_to_the_other(tmp_path):
    stalled, other = Claims(tmp_path, 60), Claims(tmp_path, 60)
    assert stalled.take(UNIT)
    stalled.confirm(UNIT)
    os.utime(tmp_path / f"{UNIT}.claim", (0, 0))
    half = tmp_path / f"{UNIT}.safetensors.{stalled.owner}.tmp"
    half.write_bytes(b"half")
    assert other.take(UNIT)
    assert not half.exists()
    with pytest.raises(ClaimLost, match=UNIT):
        stalled.confirm(UNIT)
    stalled.release(UNIT)
    assert other.holds(UNIT)


def test_a_claim_renewed_while_it_is_taken_is_given_back(tmp_path, monkeypatch):
    owner, taker = Claims(tmp_path, 60), Claims(tmp_path, 60)
    assert owner.take(UNIT)
    path = tmp_path / f"{UNIT}.claim"
    os.utime(path, (0, 0))
    real = os.rename

    def awake(source, target):
        os.utime(path)  # between the taker's look and its renaming
        real(source, target)

    monkeypatch.setattr(os, "rename", awake)
    assert not taker.take(UNIT)
    assert read_claim(path).owner == owner.owner
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_claim_that_is_gone_is_renewed_unless_the_unit_is_finished(tmp_path):
    claims = Claims(tmp_path, 60)
    assert claims.take(UNIT)
    (tmp_path / f"{UNIT}.claim").unlink()
    claims.confirm(UNIT)
    assert read_claim(tmp_path / f"{UNIT}.claim").owner == claims.owner
    (tmp_path / f"{UNIT}.claim").unlink()
    (tmp_path / f"{UNIT}.json").write_text("{}")
    with pytest.raises(ClaimLost):
        claims.confirm(UNIT)


def test_sweeping_removes_what_the_dead_left_and_nothing_of_the_living(tmp_path):
    """(fault kind 33)"""
    dead, living, silent, starting = ended_owner(), elsewhere(), elsewhere(), elsewhere()
    claim_by(tmp_path, living)
    claim_by(tmp_path, silent, age_s=90, unit="shard-00005")
    claim_by(tmp_path, dead, unit="shard-00001")  # it was killed after it had sealed
    claim_by(tmp_path, dead, unit="shard-00001.taking")
    with Claims(tmp_path, 60) as claims:
        kept = [f"{UNIT}.parquet.{living}.tmp", f"shard-00009.json.{claims.owner}.tmp"]
        gone = [
            f"shard-00004.json.{dead}.tmp",
            f"shard-00005.parquet.{silent}.tmp",
            "shard-00000.safetensors.tmp",
            ".tmpsuQvWd",
        ]
        for name in [*kept, *gone]:
            (tmp_path / name).write_bytes(b"half")
            os.utime(tmp_path / name, (time.time() - 3600,) * 2)
        young = f"store.json.{starting}.tmp"  # of a finished unit, but it may live
        (tmp_path / young).write_bytes(b"half")
        claims.sweep({"shard-00001"})
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {*kept, young, f"{UNIT}.claim", "shard-00005.claim"}
    assert (tmp_path / kept[0]).exists() and not (tmp_path / kept[1]).exists()
