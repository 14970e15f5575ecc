"""Verification names every bad shard, one line each, and sees what checksums cannot."""

import errno

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafttrain.data import store_shard
from drafttrain.data.errors import StoreError
from drafttrain.data.store_check import check_store, name_shards, verify_store

from .store_factory import bytes_of, change_record, make_store


def flip(path, place: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def reseal(made, index: int, change) -> None:
    """Change the states of a shard, under a record that fits them."""
    path = made.folder / made.shards[index].states
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    change_record(made.folder, made.shards[index].stem)


def test_a_whole_store_is_whole(tmp_path):
    made = make_store(tmp_path)
    before = bytes_of(tmp_path)
    check = verify_store(tmp_path)
    assert sorted(check.whole) == [shard.index for shard in made.shards]
    assert not check.bad and not check.missing and check.head is None
    assert bytes_of(tmp_path) == before


def test_every_bad_shard_is_one_line(tmp_path):
    """(fault kinds 33, 37)"""
    made = make_store(tmp_path, [9] * 12, shard_tokens=9, num_shards=12)
    names = [shard.stem for shard in made.shards]
    flip(tmp_path / f"{names[1]}.safetensors")
    (tmp_path / f"{names[2]}.parquet").write_bytes(b"")
    (tmp_path / f"{names[4]}.json").write_text("{")
    (tmp_path / f"{names[5]}.safetensors").unlink()
    with (tmp_path / f"{names[6]}.safetensors").open("r+b") as file:
        file.truncate(100)  # as a kill in the middle of a write would leave it
    for missing in (8, 9, 11):
        (tmp_path / f"{names[missing]}.json").unlink()
    flip(tmp_path / "head.safetensors")
    before = bytes_of(tmp_path)
    with pytest.raises(StoreError) as caught:
        verify_store(tmp_path)
    head, *shards, missing = str(caught.value).splitlines()
    assert "head.safetensors: its bytes have changed" in head
    assert len(shards) == 5
    for index, line in zip((1, 2, 4, 5, 6), shards, strict=True):
        assert names[index] in line
    assert "3 of 12 shards are missing (shard-00008 to shard-00009, shard-00011)" in missing
    assert bytes_of(tmp_path) == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t["taps"][3, 1].fill_(torch.nan), "NaN value in tap 3 at token 3"),
        (lambda t: t["final"][6, 0].fill_(-torch.inf), "infinite value in the final .* token 1"),
        (lambda t: t["taps"][4, 0].zero_(), "all-zero row in tap 1 at token 4"),
        (lambda t: t["taps"][:, 0].copy_(t["taps"][1, 0].clone()), "same row again in tap 1"),
        (lambda t: t["taps"][3, 1].mul_(1e6), "absurd norm .* in tap 3 at token 3"),
        (lambda t: t["taps"][:, 1].mul_(1e6), "tap 3 has norm .* in the median row"),
        (lambda t: t["taps"][:, 1].mul_(1.01), "rms norm of tap 3 is .*, recorded"),
    ],
)
def test_bad_states_under_a_fitting_record_are_seen(tmp_path, change, words):
    """(fault kinds 21, 22)"""
    made = make_store(tmp_path)
    reseal(made, 0, change)
    with pytest.raises(StoreError, match=rf"shard-00000\.safetensors: .*{words}") as caught:
        verify_store(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


def test_a_shard_of_another_scale_is_seen_among_the_others(tmp_path):
    """Its record fits its states: only the other shards can tell (fault kind 21)"""
    made = make_store(tmp_path, [40] * 5, shard_tokens=40, num_shards=5)
    verify_store(tmp_path)
    other = make_store(tmp_path / "other", [40] * 5, shard_tokens=40, num_shards=5)
    reseal(made, 2, lambda tensors: tensors["taps"][:, 1].mul_(8))
    record = check_store(other.folder).whole[2].model_dump(mode="json")
    scaled = {key: value * 8 for key, value in record["taps"]["3"].items()}
    change_record(tmp_path, made.shards[2].stem, taps={**record["taps"], "3": scaled})
    check = check_store(tmp_path)
    assert list(check.bad) == [2] and 2 not in check.whole
    assert "tap 3 has norm" in check.bad[2] and "the other shards" in check.bad[2]


def test_a_shard_on_a_bad_disk_is_one_line_too(tmp_path, monkeypatch):
    made = make_store(tmp_path)
    real = store_shard.file_checksum

    def read(path):
        if path.name == made.shards[1].states:
            raise OSError(errno.EIO, "Input/output error")
        return real(path)

    monkeypatch.setattr(store_shard, "file_checksum", read)
    check = check_store(tmp_path)
    assert list(check.bad) == [1] and "Input/output error" in check.bad[1]


def test_trusted_shards_are_not_read_again(tmp_path):
    made = make_store(tmp_path)
    check = check_store(tmp_path)
    for index in (0, 2):
        flip(tmp_path / made.shards[index].states)
    trusted = {0: check.whole[0]}
    assert list(check_store(tmp_path, trusted).bad) == [2]
    assert list(check_store(tmp_path).bad) == [0, 2]


def test_shards_are_named_in_runs():
    assert name_shards([7, 0, 3, 4, 5]) == "shard-00000, shard-00003 to shard-00005, shard-00007"
