"""Codecs: what is stored, and what comes back."""

import pytest
import torch

from drafttrain.data.codec import CODECS


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_decode_gives_the_values_in_the_codecs_precision(name, dtype):
    codec = CODECS[name]
    values = torch.randn(7, 3, 16, generator=torch.Generator().manual_seed(0))
    parts = codec.encode(values)
    assert {suffix: part.dtype for suffix, part in parts.items()} == dict(codec.dtypes)
    assert torch.equal(codec.decode(parts), values.to(dtype))


@pytest.mark.parametrize("name", sorted(CODECS))
def test_forecast_is_the_bytes_that_are_stored(name):
    codec = CODECS[name]
    parts = codec.encode(torch.ones(5, 2, 32))
    assert sum(part.nbytes for part in parts.values()) == codec.bytes_per_value * 5 * 2 * 32
