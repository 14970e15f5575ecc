"""Sizes as people write them."""

import pytest

from drafttrain.data.sizes import parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2TB", 2 * 10**12),
        ("1.5 TiB", 3 * 2**39),
        ("500GB", 5 * 10**11),
        ("0.5 KB", 500),
        ("7B", 7),
        ("1PiB", 2**50),
    ],
)
def test_number_and_unit(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "2", "2T", "2tb", "2 Tb", "-2TB", "2TB free", "TB", "1,5TB", "1e3GB", "0GB", "2  GB"],
)
def test_anything_else_is_refused_with_the_units(text):
    with pytest.raises(ValueError, match=r"is not a size.*TB, PB, KiB"):
        parse_bytes(text)
