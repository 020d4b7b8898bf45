"""Device memory as bad as gfx942 and gfx950 may make it: data moves when an instruction tells it to, or when that hurts.

    wave's operations in flight → L1 of the CU → L2 of the XCD → the GPU's level → system memory

- A store waits in its CU, visible to the waves of its workgroup alone, until s_waitcnt vmcnt of its wave asks for it. Between two turns of a
  wave the machine may also let one go, the youngest first, or some of its dwords: a flag overtakes the data before it, and other data of its store.
- From there it goes as far as its scope says: plain and workgroup stores to L2, agent ones (sc1) to the GPU's level, system ones (sc0 sc1) to
  system memory. buffer_wbl2 sc1 moves what its XCD's L2 has on to the GPU's level, buffer_wbl2 sc0 sc1 on to system memory, when it is waited
  for. Nothing is ever written back by itself before the kernel ends.
- A load takes whole lines of 128 bytes and leaves them in every level that it passes. An agent load does not believe L1 and L2, a system load
  no cache at all, save what that cache has of its own. buffer_inv sc1 forgets L1 and L2, sc0 sc1 the GPU's level too; with neither bit L1 alone.
- Scalar loads have a cache of their own, which buffer_inv does not reach.
- Loaded registers are NaN until vmcnt says that they are there. Data of an LDS-DMA lands at once or when it is waited for, as a coin says.
- Atomics act where their scope says, at once, whatever of the wave is still in flight; a returned value is a load.
- Between two launches of a stream L1 and L2 are written back and forgotten, and the GPU's level stays as it is: they are ordered for their own GPU
  alone. Behind a stream's last one the host sees everything.
- At s_trap, what is in flight or in caches is lost.

Stricter than the hardware, on purpose: one GPU's level stands for whatever keeps system scope from agent scope.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from cdna.memory import AGENT, SYSTEM, Memory

LINE = 128  # bytes


class _Cache:
    """A level: what it holds, and which bytes it alone has (dirty)."""

    def __init__(self, size: int):
        self.data = np.zeros(size, np.uint8)
        self.dirty = np.zeros(size, bool)
        self._stamp = np.zeros(size, np.int32)
        self._epoch = 1
        self._written: list[np.ndarray] = []  # places that became dirty, repeats included

    def has(self, places: np.ndarray) -> np.ndarray:
        return (self._stamp[places] == self._epoch) | self.dirty[places]

    def fill(self, places: np.ndarray, data: np.ndarray) -> None:
        self.data[places] = data
        self._stamp[places] = self._epoch

    def write(self, places: np.ndarray, data: np.ndarray, *, dirty: bool) -> None:
        self.fill(places, data)
        self.dirty[places] = dirty
        if dirty:
            self._written.append(places)

    def refresh(self, places: np.ndarray, data: np.ndarray) -> None:
        """Writes through: what it holds already changes, nothing is added."""
        held = self.has(places)
        self.data[places[held]] = data[held]

    def forget(self) -> None:
        """Everything that is not dirty."""
        self._epoch += 1

    def forget_places(self, places: np.ndarray) -> None:
        self._stamp[places] = 0
        self.dirty[places] = False

    def clean(self) -> tuple[np.ndarray, np.ndarray]:
        """(places, data) of the dirty bytes, which are clean from now on."""
        if not self._written:
            return np.empty(0, np.int64), np.empty(0, np.uint8)
        places = np.unique(np.concatenate(self._written))
        places = places[self.dirty[places]]
        self._written.clear()
        self.dirty[places] = False
        self._stamp[places] = self._epoch
        return places, self.data[places]


@dataclasses.dataclass(eq=False)
class _Store:
    places: np.ndarray  # unique, ascending
    data: np.ndarray
    scope: int
    cu: int
    done: bool = False

    def covers(self, places: np.ndarray) -> bool:
        """Whether any of places, ascending, is among its own."""
        if not places.size or not self.places.size or self.places[-1] < places[0] or places[-1] < self.places[0]:
            return False
        return bool(np.isin(self.places, places, assume_unique=True).any())


@dataclasses.dataclass(eq=False)
class _Arrival:
    apply: Callable[[], None]
    done: bool = False


@dataclasses.dataclass(eq=False)
class _WriteBack:
    scope: int
    done: bool = False


class WeakMemory(Memory):
    """seed: of the coins. drain: how often a wave's turn ends with a store that goes by itself; 0 moves nothing unless told.

    landing: "late", "early", or "coin" for each LDS-DMA.
    """

    def __init__(self, size: int = 1 << 22, *, seed: int = 0, drain: float = 0.3, landing: str = "coin", num_xcds: int = 8):
        super().__init__((size + LINE - 1) // LINE * LINE, num_xcds=num_xcds)
        if landing not in ("late", "early", "coin"):
            raise ValueError(f"landing {landing!r} is not late, early or coin")
        self._random = np.random.default_rng(seed)
        self._drain, self._landing = drain, landing
        self._caches: dict[tuple, _Cache] = {}
        self._in_flight: dict[int, list[_Store]] = {}  # by CU, oldest first

    def _cache(self, *key) -> _Cache:
        if key not in self._caches:
            self._caches[key] = _Cache(len(self.bytes))
        return self._caches[key]

    def _levels(self, w) -> tuple[_Cache, _Cache, _Cache]:
        group = w.workgroup
        return self._cache("L1", group.gpu, group.cu), self._cache("L2", group.gpu, group.xcd), self._cache("GPU", group.gpu)

    # --- loads ----------------------------------------------------------------------------------------------------
    def read(self, w, addresses, size, scope, what):
        places = self.places(addresses, size, what)
        l1, l2, gpu = self._levels(w)
        result = self._read_lines([(l1, scope >= AGENT), (l2, scope >= AGENT), (gpu, scope >= SYSTEM)], places)
        pending = self._in_flight.get(w.workgroup.cu, ())
        if pending and places.size:
            low, high = int(places.min()), int(places.max())
            for store in pending:
                if store.places.size and store.places[0] <= high and low <= store.places[-1]:
                    at = np.minimum(np.searchsorted(store.places, places), len(store.places) - 1)
                    result = np.where(store.places[at] == places, store.data[at], result)
        return result

    def read_scalar(self, w, address, size, what):
        places = self.places(np.array([address], np.int64), size, what)
        _, l2, gpu = self._levels(w)
        return self._read_lines([(self._cache("scalar", w.workgroup.gpu, w.workgroup.cu), False), (l2, False), (gpu, False)], places)[0]

    def _read_lines(self, levels: list[tuple[_Cache, bool]], places: np.ndarray) -> np.ndarray:
        lines, which = np.unique(places // LINE, return_inverse=True)
        whole = (lines[:, None] * LINE + np.arange(LINE)).ravel()
        return self._through(levels, whole)[which.reshape(places.shape) * LINE + places % LINE]

    def _through(self, levels: list[tuple[_Cache, bool]], places: np.ndarray) -> np.ndarray:
        if not levels:
            return self.bytes[places]
        (cache, distrusted), *rest = levels
        if distrusted:
            own = cache.dirty[places]
            below = self._through(rest, places)
            return np.where(own, cache.data[places], below) if own.any() else below
        missing = places[~cache.has(places)]
        if missing.size:
            cache.fill(missing, self._through(rest, missing))
        return cache.data[places]

    def land(self, w, apply, poison):
        if poison is not None:
            poison()
        w.queue.append(_Arrival(apply))

    def land_in_lds(self, w, apply):
        early = self._landing == "early" or self._landing == "coin" and self._random.random() < 0.5
        if early:
            apply()
        w.queue.append(_Arrival(apply, done=early))

    # --- stores ---------------------------------------------------------------------------------------------------
    def write(self, w, addresses, data, scope, what):
        places = self.places(addresses, data.shape[1], what).ravel()
        last = len(places) - 1 - np.unique(places[::-1], return_index=True)[1]  # the last lane's byte stays
        store = _Store(places[last], np.ascontiguousarray(data).ravel()[last], scope, w.workgroup.cu)
        w.queue.append(store)
        self._in_flight.setdefault(store.cu, []).append(store)

    def _let_words_go(self, w, store: _Store) -> None:
        """Some aligned dwords of a store, each of them whole; the others stay where they are."""
        words = store.places // 4
        gone = np.isin(words, words[self._random.random(len(words)) < 0.3])
        if gone.any():
            self._move(w, _Store(store.places[gone], store.data[gone], store.scope, store.cu))
            store.places, store.data = store.places[~gone], store.data[~gone]

    def _let_go(self, w, store: _Store) -> None:
        self._move(w, store)
        store.done = True
        self._in_flight[store.cu].remove(store)

    def _move(self, w, store: _Store) -> None:
        """A store leaves its CU and goes as far as its scope says."""
        l1, l2, gpu = self._levels(w)
        l1.refresh(store.places, store.data)
        l2.write(store.places, store.data, dirty=store.scope < AGENT)
        if store.scope >= AGENT:
            gpu.write(store.places, store.data, dirty=store.scope < SYSTEM)
        if store.scope >= SYSTEM:
            self.bytes[store.places] = store.data

    def exchange(self, w, addresses, size, scope, update, what):
        places = self.places(addresses, size, what)
        flat = np.unique(places)
        for store in [store for store in self._in_flight.get(w.workgroup.cu, ()) if store.covers(flat)]:
            self._let_go(w, store)
        l1, l2, gpu = self._levels(w)
        self._push(l2, flat, lambda at, data: gpu.write(at, data, dirty=True))
        l1.forget_places(flat)
        if scope >= SYSTEM:
            self._push(gpu, flat, self._to_system)
        else:
            missing = flat[~gpu.has(flat)]
            gpu.fill(missing, self.bytes[missing])
        home = self.bytes if scope >= SYSTEM else gpu.data
        before = np.empty((len(addresses), size), np.uint8)
        for n, place in enumerate(places):
            before[n] = home[place]
            home[place] = np.frombuffer(update(n, before[n].tobytes()), np.uint8)
        if scope < SYSTEM:
            gpu.write(flat, gpu.data[flat], dirty=True)
        return before

    def _push(self, cache: _Cache, places: np.ndarray, to: Callable) -> None:
        """What a cache alone has of places goes on to the next level, and the cache forgets them."""
        own = places[cache.dirty[places]]
        to(own, cache.data[own])
        cache.forget_places(places)

    def _to_system(self, places: np.ndarray, data: np.ndarray) -> None:
        self.bytes[places] = data

    # --- order ----------------------------------------------------------------------------------------------------
    def wait(self, w, left):
        while len(w.queue) > left:
            self._complete(w, w.queue.pop(0))

    def _complete(self, w, operation) -> None:
        if operation.done:
            return
        if isinstance(operation, _Store):
            self._let_go(w, operation)
        elif isinstance(operation, _Arrival):
            operation.apply()
        else:
            self._write_back(w, operation.scope)
        operation.done = True

    def write_back(self, w, scope):
        w.queue.append(_WriteBack(scope))

    def _write_back(self, w, scope: int) -> None:
        _, l2, gpu = self._levels(w)
        if scope >= AGENT:
            gpu.write(*l2.clean(), dirty=True)
        if scope >= SYSTEM:
            self._to_system(*gpu.clean())

    def invalidate(self, w, scope):
        l1, l2, gpu = self._levels(w)
        l1.forget()
        if scope >= AGENT:
            l2.forget()
        if scope >= SYSTEM:
            gpu.forget()

    def invalidate_scalar(self, w):
        self._cache("scalar", w.workgroup.gpu, w.workgroup.cu).forget()

    def turn(self, w):
        if self._drain and w.queue and self._random.random() < self._drain:
            self._let_youngest_go(w)

    def _let_youngest_go(self, w) -> None:
        """One store or a part of it, if none before it writes a byte of it; it overtakes everything else in flight."""
        waiting = [operation for operation in w.queue if not operation.done]
        for at in range(len(waiting) - 1, -1, -1):
            store = waiting[at]
            if isinstance(store, _Store):
                older = self._in_flight[store.cu]
                if not any(other.covers(store.places) for other in older[: older.index(store)]):
                    if self._random.random() < 0.5:
                        self._let_words_go(w, store)
                    else:
                        self._let_go(w, store)
                    return

    def end(self, w):
        self.wait(w, 0)

    def finish(self, gpu, *, is_last):
        level = self._cache("GPU", gpu)
        for key, cache in self._caches.items():
            if key[0] == "L2" and key[1] == gpu:
                level.write(*cache.clean(), dirty=True)
        if is_last:
            self._to_system(*level.clean())
        kept = set() if is_last else {("GPU", gpu)}
        self._caches = {key: cache for key, cache in self._caches.items() if key[1] != gpu or key in kept}
