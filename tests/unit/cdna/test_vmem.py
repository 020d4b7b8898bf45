"""Global, flat, buffer and scratch memory, atomics and LDS-DMA, on memory that reorders nothing. Oracle: numpy on the same bytes."""

import numpy as np
import pytest

from cdna.errors import MemoryFault, UnknownInstruction
from cdna.memory import BASE, Memory
from cdna.operands import SHARED_BASE
from cdna.single import run, wave

U = np.uint32
LANE = np.arange(64, dtype=U)
M32 = (1 << 32) - 1


def pair(addresses):
    """A 64-bit address a lane as two registers."""
    addresses = np.asarray(addresses, np.uint64)
    return {0: (addresses & np.uint64(M32)).astype(U), 1: (addresses >> np.uint64(32)).astype(U)}


def base(address, at=2):
    return {at: address & M32, at + 1: address >> 32}


@pytest.fixture
def data():
    return np.random.default_rng(0).integers(0, 256, 2048).astype(np.uint8)


@pytest.mark.parametrize(("kind", "registers"), [("dword", 1), ("dwordx2", 2), ("dwordx3", 3), ("dwordx4", 4)])
@pytest.mark.parametrize("family", ["global", "global saddr", "flat", "buffer", "buffer offen"])
def test_loads(data, family, kind, registers):
    memory = Memory(1 << 16)
    address = memory.put(data)
    target = f"v[4:{3 + registers}]" if registers > 1 else "v4"
    distance = LANE[::-1].astype(np.uint64) * np.uint64(16)
    texts = {
        "global": f"global_load_{kind} {target}, v[0:1], off offset:-16",
        "global saddr": f"global_load_{kind} {target}, v0, s[2:3] offset:-16",
        "flat": f"flat_load_{kind} {target}, v[0:1]",
        "buffer": f"buffer_load_{kind} {target}, off, s[4:7], s8 offset:16",
        "buffer offen": f"buffer_load_{kind} {target}, v0, s[4:7], 0 offen",
    }
    shift = -16 if "global" in family else 0
    v = pair(address + distance) if family in ("global", "flat") else {0: distance.astype(U)}
    if shift:
        v = pair(address + 16 + distance) if family == "global" else {0: distance.astype(U) + U(16)}
    s = base(address) | base(address, 4) | {6: 2048, 7: 0x27000, 8: 32}
    w = run(texts[family], wave(memory), v=v, s=s)
    starts = np.full(64, 48) if family == "buffer" else distance.astype(int)
    expected = np.stack([data[start : start + 4 * registers] for start in starts]).view(U)
    assert (w.v[4 : 4 + registers].T == expected).all()


@pytest.mark.parametrize(
    ("kind", "view", "half"),
    [
        ("ubyte", np.uint8, None),
        ("sbyte", np.int8, None),
        ("ushort", np.uint16, None),
        ("sshort", np.int16, None),
        ("short_d16", np.uint16, 0),
        ("short_d16_hi", np.uint16, 16),
    ],
)
def test_loads_of_less_than_a_dword(data, kind, view, half):
    memory = Memory(1 << 16)
    address, old = memory.put(data), LANE + U(0x12340000)
    w = run(f"global_load_{kind} v4, v0, s[2:3]", wave(memory), v={0: LANE * U(2), 4: old}, s=base(address))
    for lane in range(64):
        value = int(data[2 * lane : 2 * lane + np.dtype(view).itemsize].view(view)[0]) & M32
        if half is not None:
            value = int(old[lane]) & (0xFFFF0000 >> half) | value << half
        assert w.v[4][lane] == value


@pytest.mark.parametrize(("kind", "size", "shift"), [("byte", 1, 0), ("short", 2, 0), ("short_d16_hi", 2, 16), ("dword", 4, 0), ("dwordx4", 16, 0)])
@pytest.mark.parametrize("family", ["global", "flat", "buffer"])
def test_stores_of_active_lanes(data, family, kind, size, shift):
    memory = Memory(1 << 16)
    address = memory.put(data)
    rows = np.random.default_rng(1).integers(0, 2**32, (4, 64), np.uint64).astype(U)
    registers = max(1, size // 4)
    source = f"v[4:{3 + registers}]" if registers > 1 else "v4"
    texts = {
        "global": f"global_store_{kind} v[0:1], {source}, off",
        "flat": f"flat_store_{kind} v[0:1], {source}",
        "buffer": f"buffer_store_{kind} {source}, v8, s[4:7], 0 offen",
    }
    v = pair(address + LANE.astype(np.uint64) * np.uint64(16)) | {4 + n: row for n, row in enumerate(rows)} | {8: LANE * U(16)}
    run(texts[family], wave(memory), v=v, s=base(address, 4) | {6: 2048, 7: 0}, exec_mask=1 << 5 | 1 << 60)
    expected = data.copy()
    for lane in (5, 60):
        expected[16 * lane : 16 * lane + size] = np.ascontiguousarray(rows[:registers, lane] >> U(shift)).view(np.uint8)[:size]
    assert (memory.get(address, np.uint8, (2048,)) == expected).all()


def test_a_buffer_ends_where_its_size_says(data):
    memory = Memory(1 << 16)
    address = memory.put(data)
    s = base(address, 4) | {6: 100, 7: 0}
    w = run("buffer_load_dword v4, v0, s[4:7], 0 offen", wave(memory), v={0: LANE * U(4)}, s=s)
    assert (w.v[4][:25] == data[:100].view(U)).all() and (w.v[4][25:] == 0).all()
    run("buffer_store_dword v4, v0, s[4:7], 0 offen", wave(memory), v={0: LANE * U(4), 4: LANE}, s=s)
    after = memory.get(address, np.uint8, (2048,))
    assert (after[:100].view(U) == LANE[:25]).all() and (after[100:] == data[100:]).all()
    with pytest.raises(UnknownInstruction, match="a buffer with a stride"):
        run("buffer_load_dword v4, v0, s[4:7], 0 offen", wave(memory), v={0: LANE * U(4)}, s=s | {5: s[5] | 4 << 16})


def test_flat_reaches_lds_through_its_window(data):
    memory = Memory(1 << 16)
    address, lds = memory.put(data), np.arange(1024, dtype=np.uint32).view(np.uint8)[:1024].copy()
    where = np.where(LANE % 2 == 0, address + LANE.astype(np.uint64) * 4, SHARED_BASE + LANE.astype(np.uint64) * 4)
    w = run("flat_load_dword v4, v[0:1]", wave(memory, lds.copy()), v=pair(where))
    assert (w.v[4] == np.where(LANE % 2 == 0, data[:256].view(U), lds[:256].view(U))).all()
    w = run("flat_store_dword v[0:1], v4", wave(memory, lds.copy()), v=pair(where) | {4: LANE + U(9)})
    assert (memory.get(address, U, (64,))[::2] == LANE[::2] + 9).all() and (w.workgroup.lds[:256].view(U)[1::2] == LANE[1::2] + 9).all()


@pytest.mark.parametrize(("kind", "size"), [("dword", 4), ("dwordx4", 16)])
@pytest.mark.parametrize("family", ["global", "buffer"])
def test_dma_puts_lanes_side_by_side_in_lds(data, family, kind, size):
    memory = Memory(1 << 16)
    address = memory.put(data)
    lane = LANE[::-1]  # where lanes read from does not matter to where they write
    text = f"global_load_lds_{kind} v0, s[2:3]" if family == "global" else f"buffer_load_{kind} v0, s[4:7], 0 offen lds"
    s = base(address) | base(address, 4) | {6: 2048, 7: 0, 124: 64}
    w = run(text, wave(memory, np.full(2048, 7, np.uint8)), v={0: lane * U(16)}, s=s, exec_mask=(1 << 63) - 1)
    expected = np.full(2048, 7, np.uint8)
    for n in range(63):
        expected[64 + n * size : 64 + (n + 1) * size] = data[16 * int(lane[n]) : 16 * int(lane[n]) + size]
    assert (w.workgroup.lds == expected).all()


def test_an_offset_of_dma_counts_for_both_addresses(data):
    memory = Memory(1 << 16)
    address = memory.put(data)
    w = run("global_load_lds_dword v0, s[2:3] offset:8", wave(memory, np.zeros(512, np.uint8)), v={0: LANE * U(4)}, s=base(address) | {124: 100})
    assert (w.workgroup.lds[108:364] == data[8:264]).all()
    with pytest.raises(UnknownInstruction, match="LDS-DMA of a buffer with an offset"):
        run("buffer_load_dword v0, s[4:7], 0 offen offset:8 lds", wave(memory))


def test_scratch_is_each_lanes_own():
    w = wave()
    run("scratch_store_dwordx2 off, v[0:1], off offset:8", w, v={0: LANE, 1: LANE * U(3)})
    run("scratch_load_dword v4, off, s2", w, s={2: 12})
    assert (w.v[4] == LANE * 3).all()
    with pytest.raises(MemoryFault, match=r"scratch address 64 \+ 4 of 64 bytes"):
        run("scratch_load_dword v4, v0, off offset:4", w, v={0: np.full(64, 60, U)})


ATOMICS = {
    "add": lambda old, x: old + x,
    "sub": lambda old, x: old - x,
    "and": lambda old, x: old & x,
    "or": lambda old, x: old | x,
    "xor": lambda old, x: old ^ x,
    "swap": lambda old, x: x,
    "umax": max,
    "umin": min,
    "inc": lambda old, x: 0 if old >= x else old + 1,
    "dec": lambda old, x: x if old == 0 or old > x else old - 1,
}


@pytest.mark.parametrize("name", ATOMICS)
def test_atomics_act_one_lane_after_another(name):
    source = np.random.default_rng(2)
    start, x = source.integers(0, 2**32, 4, np.uint64).astype(U), source.integers(0, 2**32, 64, np.uint64).astype(U)
    memory = Memory(1 << 16)
    address = memory.put(start)
    w = run(f"global_atomic_{name} v4, v0, v1, s[2:3] sc0", wave(memory), v={0: LANE % U(4) * U(4), 1: x}, s=base(address))
    cells = [int(value) for value in start]
    for lane in range(64):
        assert w.v[4][lane] == cells[lane % 4]
        cells[lane % 4] = ATOMICS[name](cells[lane % 4], int(x[lane])) & M32
    assert list(memory.get(address, U, (4,))) == cells


def test_other_atomics():
    memory = Memory(1 << 16)
    address = memory.put(np.array([5, 0, M32, 7], U))
    v = pair(np.full(64, address)) | {2: LANE + U(10), 3: LANE + U(5)}
    w = run("global_atomic_cmpswap v4, v[0:1], v[2:3], off sc0", wave(memory), v=v, exec_mask=0b1)
    assert w.v[4][0] == 5 and memory.get(address, U, (1,))[0] == 10
    run("global_atomic_add_x2 v[0:1], v[2:3], off", wave(memory), v=pair(np.full(64, address + 8)) | {2: LANE, 3: LANE * U(0)}, exec_mask=0b110)
    assert memory.get(address + 8, np.uint64, (1,))[0] == (7 << 32) + M32 + 3
    floats = memory.put(np.zeros(2, np.float32))
    run("global_atomic_add_f32 v[0:1], v2, off", wave(memory), v=pair(np.full(64, floats)) | {2: np.full(64, 0.25, np.float32)})
    assert memory.get(floats, np.float32, (1,))[0] == 16
    with pytest.raises(UnknownInstruction, match="global_atomic_max_f64 .* has no entry"):
        run("global_atomic_max_f64 v[0:1], v[2:3], off")


def test_scalar_loads(data):
    memory = Memory(1 << 16)
    address = memory.put(data)
    w = run("s_load_dwordx4 s[8:11], s[2:3], 0x10", wave(memory), s=base(address))
    assert w.s[8:12] == [int(word) for word in data[16:32].view(U)]
    w = run("s_load_dword s8, s[2:3], s4 offset:0x8", wave(memory), s=base(address) | {4: 4})
    assert w.s[8] == data[12:16].view(U)[0]
    with pytest.raises(MemoryFault, match="s_buffer_load_dwordx2: offset 96 of 100 bytes"):
        run("s_buffer_load_dwordx2 s[8:9], s[4:7], 0x60", wave(memory), s=base(address, 4) | {6: 100, 7: 0})


@pytest.mark.parametrize(
    ("text", "distance"),
    [("global_load_dword v4, v[0:1], off", 2048), ("global_load_dwordx4 v[4:7], v[0:1], off", 2036), ("global_store_dword v[0:1], v4, off", -4)]
    + [("flat_load_dword v4, v[0:1]", 2200), ("global_atomic_add v[0:1], v4, off", 2046), ("global_load_lds_dword v[0:1], off", 1 << 20)],
)
def test_an_access_outside_every_allocation_is_a_fault(data, text, distance):
    memory = Memory(1 << 16)
    address = memory.put(data)
    memory.put(data)  # a neighbour: not where a red zone ends
    with pytest.raises(MemoryFault, match="outside every allocation"):
        run(text, wave(memory), v=pair(np.full(64, address + distance)), s={124: 0})


def test_the_clock_and_the_place():
    assert run("s_memrealtime s[4:5]", wave(ticks=(3 << 32) + 5)).s[4:6] == [5, 3]
    assert run("s_getreg_b32 s4, hwreg(HW_REG_XCC_ID)", wave(xcd=6)).s[4] == 6
    with pytest.raises(UnknownInstruction, match="HW_REG_MODE"):
        run("s_getreg_b32 s4, hwreg(HW_REG_MODE)")
    assert BASE >> 32
