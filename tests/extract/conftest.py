"""Shared by the tests of the extraction worker."""

import pytest

from .factory import LENGTHS, make_table, make_target


@pytest.fixture(scope="package")
def target():
    """A tiny target in memory."""
    return make_target("qwen3")


@pytest.fixture
def table(tmp_path):
    """A table of twelve samples."""
    return make_table(tmp_path / "train.parquet", LENGTHS)
