"""Repair: exactly the bad shards are extracted again, and the store has its old bytes."""

import os
import shutil
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from drafttrain.data.errors import StoreError
from drafttrain.data.files import read_json, write_json
from drafttrain.data.store_check import verify_store
from drafttrain.data.store_writer import ShardBuffer
from drafttrain.extract import repair as repair_module
from drafttrain.extract.claims import Claims
from drafttrain.extract.repair import repair
from drafttrain.extract.worker import extract
from tests.data.store_factory import change_record
from tests.data.test_store_check import flip

from .factory import CONFIG, LENGTHS, NUM_SHARDS, contents, count_forwards, make_table, make_target

DIED = 9


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, target):
    """A finished store, and the table it was made from."""
    folder = tmp_path_factory.mktemp("undisturbed")
    table = make_table(folder / "train.parquet", LENGTHS)
    extract(target, CONFIG, table, folder / "store")
    return folder / "store", table


@pytest.fixture
def store(undisturbed, tmp_path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(undisturbed[0], tmp_path / "store"))


def lengths_of(store: Path, *indices: int) -> list[int]:
    """Tokens of every sample in some shards."""
    records = [read_json(store / f"shard-{i:05d}.json", StoreError, "") for i in indices]
    return [n for record in records for n in record["lengths"]]


def never() -> None:
    raise AssertionError("the target must not be loaded")


def test_nothing_to_repair_loads_no_target(store, undisturbed):
    before = contents(store)
    assert repair(never, CONFIG, undisturbed[1], store) == []
    assert contents(store) == before


def test_exactly_the_bad_shards_are_extracted_again(store, undisturbed, target, monkeypatch):
    """(fault kinds 31, 33, 37)"""
    wanted = lengths_of(store, 0, 2, 3, 5)
    flip(store / "shard-00000.safetensors", 900)
    (store / "shard-00002.parquet").unlink()
    (store / "shard-00003.json").write_text("{")
    (store / "shard-00005.json").unlink()
    seen = count_forwards(monkeypatch)
    problems = repair(lambda: target, CONFIG, undisturbed[1], store)
    assert len(problems) == 4
    assert sorted(seen) == sorted(wanted)
    assert contents(store) == contents(undisturbed[0])
    assert repair(never, CONFIG, undisturbed[1], store) == []


def test_bad_states_under_a_fitting_record_are_repaired(store, undisturbed, target):
    """(fault kinds 21, 22)"""
    tensors = load_file(store / "shard-00001.safetensors")
    tensors["taps"][2, 1] = 0
    save_file(tensors, store / "shard-00001.safetensors")
    change_record(store, "shard-00001")
    problems = repair(lambda: target, CONFIG, undisturbed[1], store)
    assert len(problems) == 1 and "all-zero row in tap 2" in problems[0]
    assert contents(store) == contents(undisturbed[0])


def use_states_of(store: Path, other: Path, index: int) -> None:
    """A shard of another target, sealed as if it were of this one."""
    name = f"shard-{index:05d}"
    shutil.copy(other / f"{name}.safetensors", store)
    record = read_json(other / f"{name}.json", StoreError, "")
    change_record(store, name, taps=record["taps"], final=record["final"])


def test_states_of_another_target_are_found_by_new_forwards(
    store, undisturbed, target, tmp_path, monkeypatch
):
    """Everything a file can show is right; only the target knows (fault kinds 21, 23)"""
    extract(make_target("qwen3", seed=1), CONFIG, undisturbed[1], tmp_path / "other")
    use_states_of(store, tmp_path / "other", 4)
    verify_store(store)
    wanted, seen = lengths_of(store, 4), count_forwards(monkeypatch)
    problems = repair(lambda: target, CONFIG, undisturbed[1], store, tokens=100)
    assert len(problems) == 1 and "shard-00004.safetensors: sample" in problems[0]
    assert "against a new forward" in problems[0]
    assert contents(store) == contents(undisturbed[0])
    assert repair(lambda: target, CONFIG, undisturbed[1], store, tokens=100) == []
    assert seen == wanted


@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_a_damaged_head_is_taken_from_the_target_again(
    store, undisturbed, target, damage, monkeypatch
):
    head = store / "head.safetensors"
    flip(head) if damage == "flipped" else head.unlink()
    seen = count_forwards(monkeypatch)
    assert "head.safetensors" in repair(lambda: target, CONFIG, undisturbed[1], store)[0]
    assert contents(store) == contents(undisturbed[0])
    assert seen == []


@pytest.mark.parametrize("text", [None, "", '{"format_version": 2,', '{"target": 3}'])
def test_damaged_settings_are_written_again(store, undisturbed, target, text, monkeypatch):
    path = store / "store.json"
    path.unlink() if text is None else path.write_text(text)
    flip(store / "shard-00001.parquet")
    wanted = lengths_of(store, 1)
    seen = count_forwards(monkeypatch)
    problems = repair(lambda: target, CONFIG, undisturbed[1], store)
    assert "store.json" in problems[0] and "shard-00001" in problems[1]
    assert contents(store) == contents(undisturbed[0])
    assert seen == wanted


def edit_settings(store: Path, **changes) -> None:
    path = store / "store.json"
    write_json(path, read_json(path, StoreError, "") | changes)


def test_a_recipe_of_another_store_changes_nothing(store, undisturbed, target):
    """What is whole must not be thrown away because the recipe is wrong."""
    flip(store / "shard-00001.safetensors")
    before = contents(store)
    other = CONFIG.model_copy(update={"taps": [0, 2, 3]})
    with pytest.raises(StoreError, match=r"taps \[0, 2, 4\] there, \[0, 2, 3\] now.*nothing was"):
        repair(lambda: target, other, undisturbed[1], store)
    assert contents(store) == before
    # The same, where store.json cannot say what the shards were made with.
    (store / "store.json").write_text("{")
    before = contents(store)
    with pytest.raises(StoreError, match="sealed shards were made with other settings"):
        repair(lambda: target, other, undisturbed[1], store)
    assert contents(store) == before


def test_edited_settings_do_not_cost_the_shards(store, undisturbed, target):
    """All shards seem foreign; they are not thrown away, and deleting the file mends it."""
    edit_settings(store, rope_theta=5.0)
    before = contents(store)
    with pytest.raises(StoreError, match=r"rope_theta 5\.0 there.*delete it and repair again"):
        repair(lambda: target, CONFIG, undisturbed[1], store)
    assert contents(store) == before
    (store / "store.json").unlink()
    repair(lambda: target, CONFIG, undisturbed[1], store)
    assert contents(store) == contents(undisturbed[0])


def test_a_store_of_another_version_is_not_damage(store, undisturbed):
    edit_settings(store, format_version=99)
    with pytest.raises(StoreError, match="format version 99"):
        repair(never, CONFIG, undisturbed[1], store)


def test_a_shard_of_another_store_is_not_overwritten(store, undisturbed, target):
    change_record(store, "shard-00003", store="0" * 16)
    before = contents(store)
    with pytest.raises(StoreError, match=r"shard-00003\.json belong to another store"):
        repair(lambda: target, CONFIG, undisturbed[1], store)
    assert contents(store) == before


def test_a_target_that_gives_bad_states_again_is_said(store, undisturbed, target, monkeypatch):
    """A shard that stays odd must not be repaired for ever."""
    flip(store / "shard-00001.safetensors")
    real = ShardBuffer.seal

    def seal_badly(self, folder, *ownership):
        record = real(self, folder, *ownership)
        flip(folder / f"shard-{record.index:05d}.safetensors")
        return record

    monkeypatch.setattr(ShardBuffer, "seal", seal_badly)
    with pytest.raises(StoreError, match=r"shard-00001(.|\n)*extracted again, and refused again"):
        repair(lambda: target, CONFIG, undisturbed[1], store)


@pytest.mark.parametrize("moment", range(NUM_SHARDS))
def test_a_repair_killed_anywhere_continues(store, undisturbed, target, monkeypatch, moment):
    """A process dies for real, so that its claims are those of the dead (fault kind 33)."""
    for index in range(0, NUM_SHARDS, 2):
        flip(store / f"shard-{index:05d}.safetensors")
    real, left = Path.unlink, moment
    sealed = ShardBuffer.seal

    def stop() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os._exit(DIED)

    def unlink(self, missing_ok=False):
        stop()
        real(self, missing_ok=missing_ok)

    def seal(self, *given):
        stop()
        return sealed(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink)
        patch.setattr(ShardBuffer, "seal", seal)
        child = os.fork()
        if child == 0:
            try:
                repair(lambda: target, CONFIG, undisturbed[1], store)
            finally:
                os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == DIED
    repair(lambda: target, CONFIG, undisturbed[1], store)
    assert contents(store) == contents(undisturbed[0])


def test_the_head_of_a_repair_is_swept_once_it_is_dead_and_not_before(
    store, undisturbed, target, monkeypatch
):
    """Other workers sweep while a real repair stands still, and after it was killed (33)."""
    (store / "store.json").write_text("{")
    child = os.fork()
    if child == 0:
        stop = lambda *given: os.kill(os.getpid(), signal.SIGSTOP)  # noqa: E731
        monkeypatch.setattr(repair_module, "store_settings", stop)
        try:
            repair(lambda: target, CONFIG, undisturbed[1], store)
        finally:
            os._exit(0)
    assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
    with Claims(store, 60) as claims:
        try:
            claims.sweep(set())
            left = list(store.glob("head.safetensors.anew.*"))
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert len(left) == 1
        claims.sweep(set())
        assert not left[0].exists()
    repair(lambda: target, CONFIG, undisturbed[1], store)
    assert contents(store) == contents(undisturbed[0])
