"""LDS accesses. Oracle: the bytes, moved one lane at a time."""

import numpy as np
import pytest

from cdna.errors import MemoryFault
from cdna.single import run, wave

U = np.uint32
LANE = np.arange(64, dtype=U)


@pytest.fixture
def content():
    return np.random.default_rng(0).integers(0, 256, 4096).astype(np.uint8)


def words(content, starts, size):
    return np.stack([content[start : start + size] for start in starts])


@pytest.mark.parametrize(("kind", "registers"), [("b32", 1), ("b64", 2), ("b96", 3), ("b128", 4)])
def test_reads(content, kind, registers):
    address = LANE[::-1] * U(16)
    target = f"v[4:{3 + registers}]" if registers > 1 else "v4"
    w = run(f"ds_read_{kind} {target}, v0 offset:32", wave(lds=content.copy()), v={0: address})
    expected = words(content, address + 32, 4 * registers).view(U)
    assert (w.v[4 : 4 + registers].T == expected).all()


@pytest.mark.parametrize(
    ("text", "offsets", "registers"),
    [
        ("ds_read2_b32 v[4:5], v0 offset0:1 offset1:7", (4, 28), 1),
        ("ds_read2_b64 v[4:7], v0 offset1:9", (0, 72), 2),
        ("ds_read2st64_b32 v[4:5], v0 offset0:2 offset1:3", (512, 768), 1),
        ("ds_read2st64_b64 v[4:7], v0 offset0:1 offset1:2", (512, 1024), 2),
    ],
)
def test_two_reads(content, text, offsets, registers):
    address = LANE * U(8)
    w = run(text, wave(lds=content.copy()), v={0: address})
    for n, offset in enumerate(offsets):
        expected = words(content, address + offset, 4 * registers).view(U)
        assert (w.v[4 + n * registers : 4 + (n + 1) * registers].T == expected).all()


@pytest.mark.parametrize(
    ("kind", "view", "merge"),
    [
        ("u8", np.uint8, lambda old, x: x),
        ("i8", np.int8, lambda old, x: x),
        ("u16", np.uint16, lambda old, x: x),
        ("i16", np.int16, lambda old, x: x),
        ("u16_d16", np.uint16, lambda old, x: old & 0xFFFF0000 | x),
        ("u16_d16_hi", np.uint16, lambda old, x: old & 0xFFFF | x << 16),
        ("u8_d16", np.uint8, lambda old, x: old & 0xFFFF0000 | x),
        ("i8_d16_hi", np.int8, lambda old, x: old & 0xFFFF | (x & 0xFFFF) << 16),
    ],
)
def test_reads_of_less_than_a_dword(content, kind, view, merge):
    address, old = LANE * U(6), LANE + U(0xABCD0000)
    w = run(f"ds_read_{kind} v4, v0", wave(lds=content.copy()), v={0: address, 4: old})
    size = np.dtype(view).itemsize
    for lane in range(64):
        value = int(content[address[lane] : address[lane] + size].view(view)[0])
        assert w.v[4][lane] == merge(int(old[lane]), value) & 0xFFFF_FFFF


@pytest.mark.parametrize(
    ("kind", "size", "shift"), [("b8", 1, 0), ("b16", 2, 0), ("b16_d16_hi", 2, 16), ("b32", 4, 0), ("b64", 8, 0), ("b128", 16, 0)]
)
def test_writes_of_active_lanes(content, kind, size, shift):
    data = np.random.default_rng(1).integers(0, 2**32, (4, 64), np.uint64).astype(U)
    registers = max(1, size // 4)
    source = f"v[4:{3 + registers}]" if registers > 1 else "v4"
    v = {0: LANE * U(16)} | {4 + n: row for n, row in enumerate(data)}
    w = run(f"ds_write_{kind} v0, {source} offset:16", wave(lds=content.copy()), v=v, exec_mask=0b1011)
    expected = content.copy()
    for lane in (0, 1, 3):
        raw = np.ascontiguousarray(data[:registers, lane] >> U(shift)).view(np.uint8)[:size]
        expected[16 * lane + 16 : 16 * lane + 16 + size] = raw
    assert (w.workgroup.lds == expected).all()


def test_two_writes(content):
    data = np.random.default_rng(1).integers(0, 2**32, (2, 64), np.uint64).astype(U)
    w = run("ds_write2st64_b32 v0, v4, v5 offset0:1 offset1:3", wave(lds=content.copy()), v={0: LANE * U(4), 4: data[0], 5: data[1]})
    view = w.workgroup.lds.view(U)
    assert (view[64:128] == data[0]).all() and (view[192:256] == data[1]).all()
    untouched = np.r_[0:256, 512:768, 1024:4096]
    assert (w.workgroup.lds[untouched] == content[untouched]).all()


def test_atomics_act_one_lane_after_another():
    lds = np.zeros(64, np.uint8)
    w = run("ds_add_rtn_u32 v4, v0, v1", wave(lds=lds.copy()), v={0: np.zeros(64, U), 1: LANE})
    assert list(w.v[4]) == [sum(range(lane)) for lane in range(64)] and w.workgroup.lds[:4].view(U)[0] == 2016
    w = run("ds_max_i32 v0, v1", wave(lds=lds.copy()), v={0: np.zeros(64, U), 1: LANE - U(70)})
    assert w.workgroup.lds[:4].view(np.int32)[0] == 0
    w = run("ds_or_b32 v0, v1", wave(lds=lds.copy()), v={0: LANE % U(2) * U(4), 1: U(1) << LANE % U(32)})
    assert list(w.workgroup.lds[:8].view(U)) == [0x5555_5555, 0xAAAA_AAAA]
    w = run("ds_add_f32 v0, v1", wave(lds=lds.copy()), v={0: np.zeros(64, U), 1: np.full(64, 0.5, np.float32)})
    assert w.workgroup.lds[:4].view(np.float32)[0] == 32


@pytest.mark.parametrize("text", ["ds_read_b128 v[4:7], v0", "ds_write_b32 v0, v4 offset:16", "ds_add_u32 v0, v4 offset:16"])
def test_an_access_outside_is_a_fault(text):
    address = np.full(64, 0, U)
    address[17] = 1024 - 12
    with pytest.raises(MemoryFault, match=r"LDS address .* of 1024 bytes"):
        run(text, v={0: address})
    run(text, v={0: address}, exec_mask=1)  # the lane that is outside is not active


def test_an_offset_wraps_the_address(content):
    """clang folds a constant into the offset of a base below zero."""
    w = run("ds_read_b32 v4, v0 offset:16", wave(lds=content.copy()), v={0: LANE * U(4) - U(8)})
    assert (w.v[4] == content[8 : 8 + 256].view(U)).all()


def test_what_nobody_wrote_is_nan():
    assert np.isnan(run("ds_read_b32 v4, v0", v={0: LANE * U(4)}).vf[4]).all()
