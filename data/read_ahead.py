"""Read ahead: what will be wanted next is loaded by threads while the present is being used.

Guarantee: what is taken is what loading it directly would have given, errors included; at most
``_AHEAD`` loaded things wait to be taken, and what is no longer expected is dropped. Cost: a few
idle threads; reading several samples at a time is also what keeps a disk busy.
"""

import threading
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

# More than cores: they wait for the disk, and neither reading nor hashing holds the interpreter.
_THREADS = 8
_AHEAD = 2 * _THREADS

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class ReadAhead(Generic[_Key, _Value]):
    """Loads things before they are asked for.

    ``load`` is an argument of the methods and not of the object, so that the owner of both is not
    kept alive by what it owns.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._expected: dict[_Key, None] = {}
        self._loading: dict[_Key, Future[_Value]] = {}

    def expect(self, keys: Iterable[_Key], load: Callable[[_Key], _Value]) -> None:
        """Say what will be taken next, in this order; it replaces what was said before."""
        with self._lock:
            wanted = dict.fromkeys(keys)
            for key in self._loading.keys() - wanted.keys():
                self._loading.pop(key).cancel()
            self._expected = {key: None for key in wanted if key not in self._loading}
            self._fill(load)

    def take(self, key: _Key, load: Callable[[_Key], _Value]) -> _Value:
        """The loaded thing; loads it now if it was not expected."""
        with self._lock:
            future = self._loading.pop(key, None)
            self._expected.pop(key, None)
            self._fill(load)
        return load(key) if future is None else future.result()

    def _fill(self, load: Callable[[_Key], _Value]) -> None:
        while self._expected and len(self._loading) < _AHEAD:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_THREADS, "read-ahead")
            key = next(iter(self._expected))
            del self._expected[key]
            self._loading[key] = self._pool.submit(load, key)
