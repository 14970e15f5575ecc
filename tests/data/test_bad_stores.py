"""A table of damaged stores: each is refused with the file's name and with what to do."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from drafttrain.data.errors import StoreError
from drafttrain.data.store_check import verify_store
from drafttrain.data.store_reader import FeatureStore

from .store_factory import change_record, make_store

RECORD, PARQUET, STATES = (f"shard-00001.{end}" for end in ("json", "parquet", "safetensors"))


def edit_json(name: str, **changes) -> Callable[[Path], None]:
    """Change keys of a JSON file; a value of ``...`` removes the key."""

    def edit(folder: Path) -> None:
        value = json.loads((folder / name).read_text())
        value.update(changes)
        kept = {key: entry for key, entry in value.items() if entry is not ...}
        (folder / name).write_text(json.dumps(kept))

    return edit


def overwrite(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def edit_bytes(
    name: str, change: Callable[[bytearray], bytearray | None]
) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        changed = change(data)
        (folder / name).write_bytes(data if changed is None else changed)

    return edit


def flip(place: float) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        data[int(place * (len(data) - 1))] ^= 1

    return change


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def sealed_anew(change: Callable[[Path], None]) -> Callable[[Path], None]:
    """A change under a record that fits it: what checksums cannot see."""

    def edit(folder: Path) -> None:
        change(folder)
        change_record(folder, "shard-00001")

    return edit


def new_record(**changes) -> Callable[[Path], None]:
    return lambda folder: change_record(folder, "shard-00001", **changes)


def edit_states(change: Callable[[dict], dict]) -> Callable[[Path], None]:
    return sealed_anew(
        lambda folder: save_file(change(load_file(folder / STATES)), folder / STATES)
    )


def edit_table(change: Callable[[pa.Table], pa.Table]) -> Callable[[Path], None]:
    return sealed_anew(
        lambda folder: pq.write_table(change(pq.read_table(folder / PARQUET)), folder / PARQUET)
    )


def set_column(name: str, values: Callable[[list], list]) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        field = table.schema.field(name)
        column = pa.array(values(table[name].to_pylist()), field.type)
        return table.set_column(table.schema.get_field_index(name), field, column)

    return change


def copy_record(folder: Path) -> None:
    shutil.copy(folder / "shard-00000.json", folder / RECORD)


# name of the damage: (how to do it, file that the message must name)
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "settings missing": (remove("store.json"), "store.json"),
    "settings are not JSON": (overwrite("store.json", '{"format_version": 1,'), "store.json"),
    "settings are not text": (
        lambda folder: (folder / "store.json").write_bytes(b"\xff\xfe\x00") and None,
        "store.json",
    ),
    "settings are a list": (overwrite("store.json", "[1]"), "store.json"),
    "settings are empty": (overwrite("store.json", ""), "store.json"),
    "newer format": (edit_json("store.json", format_version=4), "store.json"),
    "no format version": (edit_json("store.json", format_version=...), "store.json"),
    "setting missing": (edit_json("store.json", hidden_size=...), "store.json"),
    "setting unknown": (edit_json("store.json", compression="zip"), "store.json"),
    "setting of wrong type": (edit_json("store.json", hidden_size="8"), "store.json"),
    "other layer-id convention": (
        edit_json("store.json", conventions={"layer_id": "L is the input of layer L"}),
        "store.json",
    ),
    "unknown codec": (edit_json("store.json", codec="int3"), "store.json"),
    "taps not ascending": (edit_json("store.json", taps=[3, 1]), "store.json"),
    "no taps": (edit_json("store.json", taps=[]), "store.json"),
    "last layer as tap": (edit_json("store.json", taps=[1, 5]), "store.json"),
    "settings of another store": (edit_json("store.json", rope_theta=5.0), "shard-00000.json"),
    "more shards than written": (edit_json("store.json", num_shards=9), "shard-00004"),
    "head missing": (remove("head.safetensors"), "head.safetensors"),
    "head changed": (edit_bytes("head.safetensors", flip(1.0)), "head.safetensors"),
    "record missing": (remove(RECORD), "shard-00001"),
    "index missing": (remove(PARQUET), PARQUET),
    "states missing": (remove(STATES), STATES),
    "record is not JSON": (overwrite(RECORD, "{"), RECORD),
    "record lacks a field": (edit_json(RECORD, finite=...), RECORD),
    "record edited": (edit_json(RECORD, num_tokens=12), RECORD),
    "record of another shard": (copy_record, RECORD),
    "not marked finite": (new_record(finite=False), RECORD),
    "made from another table": (new_record(table_hash="b" * 32), RECORD),
    "made under other settings": (new_record(store="0" * 16), RECORD),
    "counts do not add up": (new_record(num_samples=3), RECORD),
    "checksum of a sample missing": (
        new_record(sample_checksums={"taps": ["0" * 16] * 2, "final": ["0" * 16]}),
        RECORD,
    ),
    "checksums of a field missing": (new_record(sample_checksums={"taps": ["0" * 16] * 2}), RECORD),
    "checksums are other samples'": (
        new_record(sample_checksums={"taps": ["0" * 16] * 2, "final": ["0" * 16] * 2}),
        STATES,
    ),
    "states cut": (edit_bytes(STATES, lambda data: data[:-64]), STATES),
    "states appended to": (edit_bytes(STATES, lambda data: data + b"\0" * 64), STATES),
    "states changed": (edit_bytes(STATES, flip(0.9)), STATES),
    "states header changed": (edit_bytes(STATES, flip(0.05)), STATES),
    "states empty": (edit_bytes(STATES, lambda data: data[:0]), STATES),
    "index cut": (edit_bytes(PARQUET, lambda data: data[:-64]), PARQUET),
    "index changed": (edit_bytes(PARQUET, flip(0.2)), PARQUET),
    "sealed: states cut": (sealed_anew(edit_bytes(STATES, lambda data: data[:-64])), STATES),
    "sealed: states appended to": (
        sealed_anew(edit_bytes(STATES, lambda data: data + b"\0" * 64)),
        STATES,
    ),
    "sealed: states are not safetensors": (
        sealed_anew(lambda folder: (folder / STATES).write_bytes(b"PK\3\4" * 99) and None),
        STATES,
    ),
    "sealed: one row too few": (
        edit_states(lambda t: {name: states[1:].contiguous() for name, states in t.items()}),
        STATES,
    ),
    "sealed: other precision": (
        edit_states(lambda t: {name: states.bfloat16() for name, states in t.items()}),
        STATES,
    ),
    "sealed: unknown precision": (
        edit_states(lambda t: {name: states.to(torch.int8) for name, states in t.items()}),
        STATES,
    ),
    "sealed: no final hidden state": (edit_states(lambda t: {"taps": t["taps"]}), STATES),
    "sealed: one tap too few": (
        edit_states(lambda t: {**t, "taps": t["taps"][:, :1].contiguous()}),
        STATES,
    ),
    "sealed: index is not Parquet": (sealed_anew(overwrite(PARQUET, "sample_id,length")), PARQUET),
    "sealed: column missing": (edit_table(lambda t: t.drop_columns(["loss_mask"])), PARQUET),
    "sealed: sample missing": (edit_table(lambda t: t.slice(1)), PARQUET),
    "sealed: lengths differ": (
        edit_table(set_column("length", lambda n: [n[0] + 1, *n[1:]])),
        PARQUET,
    ),
    "sealed: offsets differ": (
        edit_table(set_column("offset", lambda n: [1, *n[1:]])),
        PARQUET,
    ),
    "sealed: ids shorter than recorded": (
        edit_table(set_column("input_ids", lambda rows: [rows[0][1:], *rows[1:]])),
        PARQUET,
    ),
}


REMEDIES = ("drafttrain store repair", "drafttrain extract", "extract the store again")


def read_everything(folder: Path) -> None:
    store = FeatureStore(folder)
    store.checked_head()
    for i in range(len(store)):
        store.sample(i)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("use", [verify_store, read_everything])
def test_damaged_store_is_refused_with_file_and_remedy(tmp_path, damage, use):
    """(fault kinds 22, 30, 37)"""
    change, name = DAMAGES[damage]
    folder = make_store(tmp_path / "store").folder
    change(folder)
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(StoreError) as caught:
        use(folder)
    message = str(caught.value)
    assert name in message
    # One line, unless all shards seem to be of another store.
    foreign = use is verify_store and "belongs to a store" in message
    assert foreign or "\n" not in message
    for line in message.splitlines():
        assert any(words in line for words in REMEDIES)
    assert sorted(path.name for path in folder.iterdir()) == before


def test_there_is_no_store(tmp_path):
    with pytest.raises(StoreError, match=r"nowhere is not a feature store.*drafttrain extract"):
        FeatureStore(tmp_path / "nowhere")


def test_a_store_of_another_table_is_refused(tmp_path):
    make_store(tmp_path)
    with pytest.raises(StoreError, match=r"made from sample table aaa.*not from bbb.*extract"):
        FeatureStore(tmp_path, table_hash="bbb")


def test_many_missing_shards_are_summed_up(tmp_path):
    make_store(tmp_path, [10] * 30, shard_tokens=10, num_shards=30)
    for path in [*tmp_path.glob("shard-000[12]*.json")]:
        path.unlink()
    with pytest.raises(StoreError) as caught:
        FeatureStore(tmp_path)
    assert "20 of 30 shards or the head are missing (shard-00010.json" in str(caught.value)
    assert "and 12 more" in str(caught.value)
