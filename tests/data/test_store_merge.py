"""Parts of one extraction become the store that one process would have written."""

import errno
import os
import resource
import shutil
from pathlib import Path

import pytest

from drafttrain.data import store_merge
from drafttrain.data.errors import StoreError
from drafttrain.data.store_check import verify_store
from drafttrain.data.store_merge import merge_stores

from .store_factory import MadeStore, bytes_of, change_record, make_store, prove
from .test_store_check import flip


@pytest.fixture
def whole(tmp_path) -> MadeStore:
    made = make_store(tmp_path / "whole", [9] * 6, shard_tokens=9, num_shards=6)
    (made.folder / "recipe.yaml").write_text("output: run\n")
    return made


def part(whole: MadeStore, name: str, indices: list[int]) -> Path:
    """A folder in which a worker finished only these shards."""
    folder = whole.folder.parent / name
    shutil.copytree(whole.folder, folder)
    for shard in whole.shards:
        if shard.index not in indices:
            for file in (shard.record, shard.parquet, shard.states):
                (folder / file).unlink()
    return folder


def test_parts_become_one_store(tmp_path, whole):
    parts = [part(whole, "a", [0, 3]), part(whole, "b", [1, 3, 4]), part(whole, "c", [2, 5])]
    before = [bytes_of(folder) for folder in parts]
    out = tmp_path / "out"
    merge = merge_stores(out, parts)
    assert sorted(merge.taken) == list(range(6)) and not merge.missing and not merge.bad
    assert bytes_of(out) == bytes_of(whole.folder)
    verify_store(out)
    assert (out / "shard-00001.safetensors").samefile(parts[1] / "shard-00001.safetensors")
    again = merge_stores(out, [*parts, out])
    assert again.kept == list(range(6)) and not again.taken
    assert bytes_of(out) == bytes_of(whole.folder)
    assert [bytes_of(folder) for folder in parts] == before


def test_shards_of_another_engine_come_with_its_proof(tmp_path, whole):
    """(fault kind 28)"""
    change_record(whole.folder, whole.shards[1].stem, engine="vllm")
    change_record(whole.folder, whole.shards[4].stem, engine="vllm")
    parts = [part(whole, "a", [0, 2, 3, 5]), part(whole, "b", [1]), part(whole, "c", [4])]
    prove(parts[2], whole.meta)
    merge = merge_stores(tmp_path / "out", parts)
    # The proof of one server says nothing of another's shards.
    assert merge.missing == [1] and "written by engine 'vllm'" in merge.bad[0]
    prove(parts[1], whole.meta)
    assert not merge_stores(tmp_path / "out", parts).missing
    engines = [record.engine for _, record in sorted(verify_store(tmp_path / "out").whole.items())]
    assert engines == [("transformers", "vllm")[i in (1, 4)] for i in range(6)]


def test_missing_shards_are_named_and_may_come_later(tmp_path, whole):
    out = tmp_path / "out"
    merge = merge_stores(out, [part(whole, "a", [0, 3])])
    assert merge.missing == [1, 2, 4, 5]
    assert merge_stores(out, [part(whole, "b", [1, 2, 4, 5])]).missing == []
    assert bytes_of(out) == bytes_of(whole.folder)


def test_without_links_files_are_copied(tmp_path, whole, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    out = tmp_path / "out"
    merge_stores(out, [whole.folder])
    assert bytes_of(out) == bytes_of(whole.folder)
    assert not (out / whole.shards[0].states).samefile(whole.folder / whole.shards[0].states)


def test_a_damaged_shard_is_not_taken(tmp_path, whole):
    """(fault kind 37)"""
    bad, good = part(whole, "bad", [0, 1, 2]), part(whole, "good", [2])
    flip(bad / whole.shards[1].states)
    flip(bad / whole.shards[2].states)
    out = tmp_path / "out"
    merge = merge_stores(out, [bad, good])
    assert merge.taken == [0, 2] and merge.missing == [1, 3, 4, 5]
    assert len(merge.bad) == 1 and str(bad / whole.shards[1].states) in merge.bad[0]
    assert not (out / whole.shards[1].record).exists()
    # A shard that was cut short in the merged store is taken again.
    (out / whole.shards[0].states).unlink()
    assert merge_stores(out, [whole.folder]).kept == [2]
    assert bytes_of(out) == bytes_of(whole.folder)


def test_a_damaged_head_is_replaced_by_another_parts(tmp_path, whole):
    bad = part(whole, "bad", [0])
    flip(bad / "head.safetensors")
    out = tmp_path / "out"
    assert "head.safetensors" in merge_stores(out, [bad]).bad[0]
    assert not merge_stores(out, [bad, whole.folder]).bad
    assert bytes_of(out) == bytes_of(whole.folder)


def test_another_extraction_is_refused_by_the_field_that_differs(tmp_path, whole):
    other = make_store(
        tmp_path / "other", [9] * 6, shard_tokens=9, num_shards=6, target_fingerprint="e" * 32
    )
    out = tmp_path / "out"
    with pytest.raises(StoreError, match=r"other is not of the same .*target_fingerprint fff"):
        merge_stores(out, [whole.folder, other.folder])
    assert not out.exists()
    merge_stores(out, [whole.folder])
    before = bytes_of(out)
    with pytest.raises(StoreError, match="target_fingerprint"):
        merge_stores(out, [other.folder])
    assert bytes_of(out) == before
    moved = make_store(tmp_path / "moved", [9] * 6, shard_tokens=9, num_shards=6, target="/there")
    assert merge_stores(out, [moved.folder]).kept == list(range(6))  # where it lies is no setting


@pytest.mark.parametrize("links", [True, False])
def test_a_merge_killed_anywhere_continues(tmp_path, whole, monkeypatch, links):
    """Stopped before every single rename, then run again (fault kind 33)"""
    real = os.replace
    if not links:
        monkeypatch.setattr(os, "link", lambda *paths: (_ for _ in ()).throw(OSError("no links")))
    moment = 0
    while True:
        out = tmp_path / f"out{moment}"
        left = moment

        def stop(source, target):
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            real(source, target)

        monkeypatch.setattr(os, "replace", stop)
        try:
            merge_stores(out, [whole.folder])
        except KeyboardInterrupt:
            monkeypatch.setattr(os, "replace", real)
            for record in out.glob("shard-*.json"):  # what is sealed is whole
                assert (out / f"{record.stem}.safetensors").exists()
            merge_stores(out, [whole.folder])
            assert bytes_of(out) == bytes_of(whole.folder)
            moment += 1
        else:
            break
    assert moment == 3 + 3 * 6  # settings, head, recipe; three files a shard


def test_a_shard_that_is_replaced_is_unsealed_first(tmp_path, whole, monkeypatch):
    """Its old record must not seal another worker's files, should the merge end here."""
    out = part(whole, "out", list(range(6)))
    (out / whole.shards[0].states).unlink()

    def stop(source, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", stop)
        with pytest.raises(KeyboardInterrupt):
            merge_stores(out, [whole.folder])
    assert not (out / whole.shards[0].record).exists()
    assert merge_stores(out, [whole.folder]).taken == [0]
    assert bytes_of(out) == bytes_of(whole.folder)


def test_a_full_disk_keeps_what_is_there(tmp_path, whole, monkeypatch):
    """(fault kind 34)"""
    real, calls = store_merge.shutil.copyfile, []

    def no_space(source, target):
        calls.append(source)
        real(source, target)
        if len(calls) == 8:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", lambda *paths: (_ for _ in ()).throw(OSError("no links")))
    monkeypatch.setattr(store_merge.shutil, "copyfile", no_space)
    out = tmp_path / "out"
    with pytest.raises(StoreError, match=r"disk is full .*No space left.*the 2 shards there"):
        merge_stores(out, [whole.folder])
    assert not list(out.glob("*.tmp"))
    merge_stores(out, [whole.folder])
    assert bytes_of(out) == bytes_of(whole.folder)


@pytest.mark.parametrize("fits", [True, False])
def test_a_limit_on_files_is_explained_and_keeps_what_is_there(tmp_path, whole, monkeypatch, fits):
    """A real one, in a process of its own; with one byte more all is merged (fault kind 34)."""
    refuse = OSError(errno.EXDEV, "Invalid cross-device link")
    monkeypatch.setattr(os, "link", lambda *paths: (_ for _ in ()).throw(refuse))
    out, said = tmp_path / "out", tmp_path / "said"
    limit = max(path.stat().st_size for path in whole.folder.iterdir()) - (not fits)
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            merge_stores(out, [whole.folder])
        except StoreError as exc:
            said.write_text(str(exc))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert said.exists() != fits and not list(out.glob("*.tmp"))
    if not fits:
        words = said.read_text()
        assert "disk is full or a limit is reached (File too large); the 0 shards there" in words
        assert words.endswith("are kept: free space and rerun the same command")
        merge_stores(out, [whole.folder])
    assert bytes_of(out) == bytes_of(whole.folder)
