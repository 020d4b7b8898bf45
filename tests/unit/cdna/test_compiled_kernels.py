"""Kernels of kernels/*.hip as clang compiled them. Oracle: numpy on the same inputs."""

import struct

import numpy as np
import pytest

import cdna
from cdna import fixtures, toolchain
from cdna.formats import bf16_to_f32, f32_to_bf16


def machine(seed):
    return cdna.Machine(cdna.Memory() if seed is None else cdna.WeakMemory(seed=seed), seed=seed)


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("isa", ["gfx942", "gfx950"])
def test_product(isa, seed):
    source = np.random.default_rng(2)
    codes = [f32_to_bf16(source.standard_normal((16, 96)).astype(np.float32)).astype(np.uint16) for _ in range(2)]
    m = machine(seed)
    result = m.memory.alloc(16 * 16 * 4)
    arguments = struct.pack("<3Qi", *(m.memory.put(code) for code in codes), result, 96)
    m.run([cdna.Launch(fixtures.load("sums", isa), "product", 1, 64, arguments)])
    a, b = (bf16_to_f32(code).astype(np.float64) for code in codes)
    np.testing.assert_allclose(m.memory.get(result, np.float32, (16, 16)), a @ b.T, rtol=0, atol=1e-5)


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("isa", ["gfx942", "gfx950"])
def test_sums_across_lanes_waves_and_workgroups(isa, seed):
    x = np.random.default_rng(3).standard_normal(3000).astype(np.float32)
    m = machine(seed)
    result, total = m.memory.alloc(5 * 4), m.memory.put(np.zeros(1, np.uint32))
    arguments = struct.pack("<3Qii", m.memory.put(x), result, total, 3000, 5)
    m.run([cdna.Launch(fixtures.load("sums", isa), "exp_sums", 5, 256, arguments)])
    expected = [np.exp(x[[i for i in range(3000) if i // 256 % 5 == block]].astype(np.float64)).sum() for block in range(5)]
    np.testing.assert_allclose(m.memory.get(result, np.float32, (5,)), expected, rtol=1e-5)
    assert m.memory.get(total, np.uint32, (1,))[0] == sum(range(3000))


@pytest.mark.parametrize("isa", ["gfx942", "gfx950"])
def test_integer_division_a_table_and_a_ballot(isa):
    source = np.random.default_rng(4)
    x, y = source.integers(-(2**31), 2**31, 64).astype(np.int32), source.integers(-1000, 1000, 64).astype(np.int32)
    y[y == 0] = 7
    m = machine(None)
    result, odd = m.memory.alloc(60 * 8), m.memory.alloc(8)
    arguments = struct.pack("<4Qi", m.memory.put(x), m.memory.put(y), result, odd, 60)
    m.run([cdna.Launch(fixtures.load("sums", isa), "quotients", 1, 64, arguments)])

    def toward_zero(a, b):
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)

    table = (3, 1, 4, 1, 5, 9, 2, 6)
    expected = []
    for lane in range(60):
        a, b = int(x[lane]), int(y[lane])
        rest = (a << 20) - toward_zero(a << 20, 1000003) * 1000003
        expected.append(toward_zero(a, b) * table[lane % 8] + rest)
    assert list(m.memory.get(result, np.int64, (60,))) == expected
    assert m.memory.get(odd, np.uint64, (1,))[0] == sum(1 << lane for lane in range(64) if x[lane] & 1)


@pytest.mark.parametrize(("name", "isa"), fixtures.HIP)
def test_the_fixtures_are_what_the_sources_give(name, isa, tmp_path):
    reason = toolchain.missing("clang", "llvm-objdump")
    if reason:
        pytest.skip(reason)
    if toolchain.llvm_version(toolchain.find("clang")) != int(fixtures.CLANG):
        pytest.skip(f"the fixtures are of clang {fixtures.CLANG}")
    path = toolchain.compile_hip(fixtures.KERNELS / f"{name}.hip", tmp_path / f"{name}.co", isa)
    assert fixtures.text_of(path) == (fixtures.FOLDER / f"{name}.{isa}.s").read_text()
    assert cdna.CodeObject.read(path).kernels == cdna.CodeObject.read(fixtures.FOLDER / f"{name}.{isa}.co").kernels
