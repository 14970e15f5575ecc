"""Zeros that the system makes, and memory that is used again."""

import torch

from drafttrain.data.host_memory import Buffer, host_zeros


def test_zeros_are_those_of_torch():
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8):
        found = host_zeros((3, 0, 5), dtype)
        assert found.shape == (3, 0, 5)
        found = host_zeros((3, 7), dtype)
        assert found.dtype == dtype
        assert torch.equal(found.float(), torch.zeros(3, 7))


def test_tensors_of_a_buffer_do_not_overlap_and_grow_with_need():
    buffer = Buffer(room=100)
    for rows in (1, 3, 50, 2):
        shapes = {
            "wide": (torch.float32, (rows, 5)),
            "odd": (torch.uint8, (rows, 3)),
            "narrow": (torch.bfloat16, (rows, 2, 4)),
        }
        tensors = buffer.tensors(shapes)
        for number, name in enumerate(shapes):
            tensors[name].fill_(number + 1)
        for number, (name, (dtype, shape)) in enumerate(shapes.items()):
            assert (tensors[name].dtype, tuple(tensors[name].shape)) == (dtype, shape)
            assert (tensors[name] == number + 1).all()


def test_memory_is_used_again():
    buffer = Buffer(room=1000)
    first = buffer.tensors({"a": (torch.float32, (10,))})["a"]
    again = buffer.tensors({"b": (torch.bfloat16, (7, 3))})["b"]
    assert first.data_ptr() == again.data_ptr()
