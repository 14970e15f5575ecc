"""Reading ahead: the same results as without, in bounded number, and nothing that is not wanted."""

import gc
import threading
import time
import weakref

import pytest

from drafttrain.data.read_ahead import ReadAhead


class Loader:
    """Counts what is loaded; ``gate`` holds it up."""

    def __init__(self) -> None:
        self.loaded: list[int] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, key: int) -> int:
        self.gate.wait(10)
        self.loaded.append(key)
        if key == 13:
            raise ValueError("thirteen")
        return key * key

    def settle(self) -> list[int]:
        """What was loaded, once nothing more comes."""
        before = -1
        while before != len(self.loaded):
            before = len(self.loaded)
            time.sleep(0.05)
        return sorted(self.loaded)


def test_what_was_expected_is_loaded_once_and_in_bounded_number():
    load, ahead = Loader(), ReadAhead[int, int]()
    ahead.expect(range(100, 200), load)
    assert load.settle() == list(range(100, 116))
    assert [ahead.take(key, load) for key in range(100, 110)] == [k * k for k in range(100, 110)]
    assert load.settle() == list(range(100, 126))


def test_what_was_not_expected_is_loaded_too():
    load, ahead = Loader(), ReadAhead[int, int]()
    assert ahead.take(7, load) == 49
    ahead.expect([1, 2], load)
    assert [ahead.take(key, load) for key in (2, 7, 2, 1)] == [4, 49, 4, 1]


def test_a_failure_belongs_to_what_failed():
    load, ahead = Loader(), ReadAhead[int, int]()
    ahead.expect([12, 13, 14], load)
    assert ahead.take(12, load) == 144
    with pytest.raises(ValueError, match="thirteen"):
        ahead.take(13, load)
    assert ahead.take(14, load) == 196


def test_what_is_expected_no_more_makes_room():
    """Else a reader that starts over would read ahead no further."""
    load, ahead = Loader(), ReadAhead[int, int]()
    ahead.expect(range(100, 200), load)
    load.settle()
    ahead.expect([115, *range(200, 300)], load)
    assert load.settle() == [*range(100, 116), *range(200, 215)]
    load.gate.clear()
    ahead.expect(range(300, 400), load)
    ahead.expect(range(400, 402), load)  # what no thread has begun is given up
    load.gate.set()
    assert len([key for key in load.settle() if 300 <= key < 400]) <= 8


def test_dropping_it_drops_what_was_loaded_and_ends_its_threads():
    """(fault kind 44)"""

    class Thing:
        pass

    things: list[weakref.ref[Thing]] = []

    def load(key: int) -> Thing:
        thing = Thing()
        things.append(weakref.ref(thing))
        return thing

    before = threading.active_count()
    ahead = ReadAhead[int, Thing]()
    ahead.expect(range(8), load)
    while len(things) < 8:
        time.sleep(0.01)
    kept = ahead.take(3, load)
    del ahead
    gc.collect()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before
    assert [ref() for ref in things if ref() is not None] == [kept]
