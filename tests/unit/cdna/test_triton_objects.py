"""Whole kernels that Triton made: layouts of the MFMA, of LDS and of lanes that nobody here chose. Oracle: numpy in f64."""

import struct

import numpy as np
import pytest

import cdna
from cdna import fixtures, toolchain
from cdna.formats import bf16_to_f32, f32_to_bf16


def bf16(array):
    """(codes, their values in f64)."""
    codes = f32_to_bf16(array.astype(np.float32)).astype(np.uint16)
    return codes, bf16_to_f32(codes).astype(np.float64)


def memory_and_machine(seed):
    memory = cdna.Memory() if seed is None else cdna.WeakMemory(seed=seed)
    return memory, cdna.Machine(memory, seed=seed)


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_softmax(seed):
    program = fixtures.load("softmax_rows", "gfx942")
    codes, x = bf16(np.random.default_rng(0).standard_normal((3, 700)) * 3)
    memory, machine = memory_and_machine(seed)
    result = memory.alloc(3 * 700 * 4)
    arguments = struct.pack("<QQi4xQQ", memory.put(codes), result, 700, 0, 0)
    machine.run([cdna.Launch(program, "softmax_rows", 3, 256, arguments, dynamic_lds=16)])
    power = np.exp(x - x.max(axis=1, keepdims=True))
    np.testing.assert_allclose(memory.get(result, np.float32, (3, 700)), power / power.sum(axis=1, keepdims=True), rtol=1e-6)


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize(("isa", "lds"), [("gfx942", 2048), ("gfx950", 8192)])
def test_product(isa, lds, seed):
    program = fixtures.load("matmul", isa)
    source = np.random.default_rng(1)
    (a_codes, a), (b_codes, b) = bf16(source.standard_normal((32, 128))), bf16(source.standard_normal((128, 64)))
    memory, machine = memory_and_machine(seed)
    result = memory.alloc(32 * 64 * 4)
    arguments = struct.pack("<3Qi4xQQ", memory.put(a_codes), memory.put(b_codes), result, 128, 0, 0)
    machine.run([cdna.Launch(program, "matmul", 2, 256, arguments, dynamic_lds=lds)])
    np.testing.assert_allclose(memory.get(result, np.float32, (32, 64)), a @ b, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("name", "isa"), fixtures.TRITON_KERNELS)
def test_the_installed_triton_makes_objects_that_can_be_run(name, isa, tmp_path, monkeypatch):
    triton = pytest.importorskip("triton")
    reason = toolchain.missing("llvm-objdump")
    if reason:
        pytest.skip(reason)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from cdna import triton_kernels

    path = triton_kernels.compile_to(tmp_path / f"{name}.co", name, isa)
    assert cdna.Program.load(path).unknown() == []
    if triton.__version__ == fixtures.TRITON:
        assert fixtures.text_of(path) == (fixtures.FOLDER / f"{name}.{isa}.s").read_text()
