"""What the store verbs say: a summary of any store, and what a merge still lacks."""

import shutil
from pathlib import Path

import pytest

from drafttrain import store_tools
from drafttrain.data.errors import StoreError
from drafttrain.data.store_info import summarise_store
from tests.data.store_factory import LENGTHS, MadeStore, bytes_of, change_record, make_store, prove
from tests.data.test_store_check import flip


@pytest.fixture
def made(tmp_path) -> MadeStore:
    return make_store(tmp_path / "store")


def test_a_summary_counts_what_is_there(made):
    summary = summarise_store(made.folder)
    assert summary.lengths.tolist() == LENGTHS
    assert not summary.missing and not summary.bad and summary.head
    shards = [*made.folder.glob("shard-*.safetensors"), *made.folder.glob("shard-*.parquet")]
    assert summary.bytes == sum(path.stat().st_size for path in shards)
    groups = {(g.source, g.mode): (g.samples, g.greedy, g.tokens) for g in summary.groups}
    assert groups == {
        ("set0", "no_think"): (4, 2, sum(LENGTHS[0::2])),
        ("set1", "no_think"): (4, 1, sum(LENGTHS[1::2])),
    }


def test_info_shows_a_finished_store(made, capsys):
    store_tools.info(made.folder)
    shown = capsys.readouterr().out
    for words in ("models/tiny", "taps 1, 3 of 6 layers and the final hidden state", "codec fp32"):
        assert words in shown
    for words in ("4 of 4 sealed", "8 of 8", "54 of 54", "set0", "no_think", "tap 3", "final"):
        assert words in shown
    assert "missing" not in shown and "damaged" not in shown
    histogram = [line.split() for line in shown.splitlines() if "█" in line]
    assert [row[:3] for row in histogram] == [
        ["2", "3", "2"],
        ["4", "7", "4"],
        ["8", "15", "1"],
        ["16", "31", "1"],
    ]


def test_info_counts_the_shards_of_each_engine(made, capsys):
    change_record(made.folder, made.shards[2].stem, engine="vllm")
    prove(made.folder, made.meta)
    store_tools.info(made.folder)
    assert "transformers 3, vllm 1" in capsys.readouterr().out
    (made.folder / "parity-vllm.json").unlink()
    store_tools.info(made.folder)
    shown = capsys.readouterr().out
    assert "transformers 3" in shown and "written by engine 'vllm'" in " ".join(shown.split())


def test_info_shows_an_unfinished_and_damaged_store(made, capsys):
    (made.folder / made.shards[1].record).unlink()
    (made.folder / made.shards[2].states).write_bytes(b"")
    (made.folder / "head.safetensors").unlink()
    before = bytes_of(made.folder)
    store_tools.info(made.folder)
    shown = capsys.readouterr().out
    assert "2 of 4 sealed" in shown and "head.safetensors is missing" in shown
    lines = shown.splitlines()
    assert any("missing" in line and "shard-00001" in line for line in lines)
    assert any("damaged" in line and "shard-00002.safetensors" in line for line in lines)
    for path in made.folder.glob("shard-*.json"):
        path.unlink()
    store_tools.info(made.folder)
    assert "0 of 4 sealed" in capsys.readouterr().out
    assert {**before, **bytes_of(made.folder)} == before


def test_merge_says_what_is_missing_and_what_is_bad(made, tmp_path, capsys):
    """(fault kind 37)"""
    part = Path(shutil.copytree(made.folder, tmp_path / "part"))
    (part / made.shards[0].record).unlink()
    (part / made.shards[3].record).unlink()
    out = tmp_path / "merged"
    store_tools.merge(out, (part,))
    said = capsys.readouterr().err
    assert "2 of 4 shards, 2 of them taken now" in said
    assert "still missing: shard-00000, shard-00003" in said
    flip(made.folder / made.shards[0].states)
    with pytest.raises(StoreError, match=made.shards[0].states):
        store_tools.merge(out, (made.folder,))
    assert "still missing: shard-00000" in capsys.readouterr().err
