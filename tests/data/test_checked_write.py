"""Files written with their checksum: the bytes of the libraries that read them."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from drafttrain.data import checked_write
from drafttrain.data.checked_write import write_checked, write_tensors
from drafttrain.data.files import file_checksum


@pytest.mark.parametrize("piece", [7, 1 << 22])
def test_tensors_have_the_bytes_of_safetensors(tmp_path, monkeypatch, piece):
    """All types a store or head can have, names out of order, an empty tensor."""
    monkeypatch.setattr(checked_write, "_PIECE_BYTES", piece)
    tensors = {
        "taps": torch.randn(5, 2, 3).to(torch.float8_e4m3fn),
        "taps.scale": torch.randn(5, 2),
        "norm": torch.randn(3).to(torch.bfloat16),
        "final": torch.randn(5, 3).to(torch.bfloat16),
        'a name with "quotes" and é': torch.arange(3, dtype=torch.uint8),
        "none": torch.zeros(0, 4),
    }
    save_file(tensors, tmp_path / "theirs")
    record = write_tensors(tmp_path / "ours", tensors)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert record.bytes == (tmp_path / "ours").stat().st_size
    assert record.xxh3_128 == file_checksum(tmp_path / "theirs")


def test_parts_follow_one_another(tmp_path):
    parts = [b"abc", memoryview(np.arange(4, dtype=np.int32)), b""]
    record = write_checked(tmp_path / "file", parts)
    assert (tmp_path / "file").read_bytes() == b"abc" + np.arange(4, dtype=np.int32).tobytes()
    assert (record.bytes, record.xxh3_128) == (19, file_checksum(tmp_path / "file"))


def test_parquet_written_to_memory_has_the_bytes_of_a_file(tmp_path):
    table = pa.table({"ids": [[1, 2], [3]], "name": ["a", "b"]})
    pq.write_table(table, tmp_path / "file", compression="zstd")
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    assert sink.getvalue() == (tmp_path / "file").read_bytes()
