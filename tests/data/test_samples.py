"""Sample tables: what is written is read back, and nothing else is."""

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.data import samples
from drafttrain.data.errors import DataError
from drafttrain.data.samples import Sample, make_sample, manifest_path, read_table, write_table


def sample(ids, mask=None, **fields) -> Sample:
    mask = [True] * len(ids) if mask is None else mask
    return make_sample(ids, mask, **{"source": "s", "mode": "think", "greedy": True, **fields})


def same(a: Sample, b: Sample) -> bool:
    return (
        (a.sample_id, a.source, a.mode, a.greedy) == (b.sample_id, b.source, b.mode, b.greedy)
        and np.array_equal(a.input_ids, b.input_ids)
        and np.array_equal(a.loss_mask, b.loss_mask)
        and (a.input_ids.dtype, a.loss_mask.dtype) == (np.int32, np.bool_)
    )


IDS = st.integers(0, np.iinfo(np.int32).max)
TOKENS = st.lists(st.tuples(IDS, st.booleans()), min_size=1, max_size=20)
TABLES = st.lists(
    st.tuples(TOKENS, st.sampled_from(samples.MODES), st.booleans(), st.text(max_size=3)),
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(TABLES, st.integers(1, 30))
def test_any_table_reads_back_equal_whatever_its_row_groups(tmp_path_factory, rows, group):
    wanted = [
        sample([t for t, _ in tokens], [b for _, b in tokens], mode=mode, greedy=g, source=source)
        for tokens, mode, g, source in rows
    ]
    path = tmp_path_factory.mktemp("table") / "train.parquet"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples, "_GROUP_TOKENS", group)
        write_table(path, iter(wanted), {})
    table = read_table(path)
    assert len(table) == len(wanted)
    assert all(same(a, b) for a, b in zip(table, wanted, strict=True))
    assert table.lengths.tolist() == [len(s.input_ids) for s in wanted]
    assert table.lengths.dtype == np.int64


def test_manifest_counts_what_the_table_holds(tmp_path):
    path = tmp_path / "train.parquet"
    rows = [sample([1, 9, 3], [False, True, True]), sample([7, 2], greedy=False, mode="tool")]
    manifest = write_table(path, rows, {"split": "train"})
    assert manifest == read_table(path).manifest
    assert {key: manifest[key] for key in list(manifest)[:-1]} == {
        "format_version": 1,
        "split": "train",
        "num_samples": 2,
        "num_tokens": 5,
        "supervised_tokens": 4,
        "greedy_samples": 1,
        "modes": {"think": 1, "no_think": 0, "tool": 1},
        "max_id": 9,
    }
    assert manifest["table_hash"] == read_table(path).table_hash


def test_equal_samples_give_equal_bytes(tmp_path):
    rows = [sample([1, 2, 3]), sample([4])]
    first = write_table(tmp_path / "a.parquet", rows, {})
    second = write_table(tmp_path / "b.parquet", rows, {})
    assert first == second


def test_sample_id_depends_on_ids_and_mask_alone():
    base = sample([1, 2, 3])
    assert sample([1, 2, 3], source="other", greedy=False, mode="tool").sample_id == base.sample_id
    assert sample([1, 2, 4]).sample_id != base.sample_id
    assert sample([1, 2, 3], [True, True, False]).sample_id != base.sample_id


def test_lists_have_64_bit_offsets_and_bounded_row_groups(tmp_path, monkeypatch):
    """Arrow's 32-bit offsets overflow on large columns (fault kind 43)"""
    monkeypatch.setattr(samples, "_GROUP_TOKENS", 10)
    path = tmp_path / "train.parquet"
    write_table(path, (sample([i] * 4) for i in range(9)), {})
    file = pq.ParquetFile(path)
    assert str(file.schema_arrow.field("input_ids").type).startswith("large_list")
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [3, 3, 3]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "train.parquet does not exist although its manifest does"),
        (lambda path: manifest_path(path).unlink(), "train.manifest.json does not exist"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "has checksum"),
        (lambda path: path.write_bytes(b"x" + path.read_bytes()[1:]), "has checksum"),
        (lambda path: manifest_path(path).write_text('{"format_version": 99}'), "version 99"),
        (lambda path: manifest_path(path).write_text("{"), "not valid JSON"),
    ],
)
def test_damaged_table_is_refused_with_a_way_out(tmp_path, damage, message):
    path = tmp_path / "train.parquet"
    write_table(path, [sample([1, 2])], {})
    damage(path)
    with pytest.raises(DataError) as caught:
        read_table(path)
    assert message in str(caught.value) or "format_version 99" in str(caught.value)
    assert "drafttrain data prepare" in str(caught.value)


def test_failed_write_leaves_the_finished_table_alone(tmp_path):
    path = tmp_path / "train.parquet"
    before = write_table(path, [sample([1, 2])], {})

    def broken():
        yield sample([3, 4])
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        write_table(path, broken(), {})
    assert read_table(path).manifest == before


def test_index_outside_the_table_raises(tmp_path):
    path = tmp_path / "train.parquet"
    write_table(path, [sample([1, 2])], {})
    for index in (-1, 1):
        with pytest.raises(IndexError):
            read_table(path)[index]
