"""Kernels keep to the limits of cdna/limits.py, and the gate finds one that does not.

Compiled kernels need clang, which CI has not; that the gate measures and finds is tested on the committed code objects. Oracle of a measure: what
the source says, and the metadata that the compiler wrote.
"""

import dataclasses

import pytest

import cdna
from cdna import fixtures, toolchain
from cdna.limits import CLEAN, LIMITS
from cdna.resources import Limits, measure


def test_a_measure_is_what_the_source_says():
    ring = measure(fixtures.load("ring", "gfx950"), "ring_right")
    assert (ring.lds_bytes, ring.workgroups, ring.vgpr_spills, ring.scratch_bytes, ring.mfma) == (16384, 8, 0, 0, 0)
    assert (ring.lds_dma, ring.atomics, ring.flat) == (4, 0, 0)  # three ahead, one in the loop
    product = measure(fixtures.load("sums", "gfx942"), "product")
    assert product.mfma % 2 == 0 and product.mfma >= 2 and product.lds_bytes == 0
    assert measure(fixtures.load("sums", "gfx950"), "exp_sums").atomics == 1
    handover = fixtures.load("handover", "gfx950")
    agent, system = measure(handover, "agent"), measure(handover, "system")
    assert (agent.agent_releases, agent.agent_acquires, agent.system_releases, agent.system_acquires) == (1, 1, 0, 0)
    assert (system.agent_releases, system.agent_acquires, system.system_releases, system.system_acquires) == (0, 0, 1, 1)
    assert (measure(handover, "agent_no_release").agent_releases, measure(handover, "agent_bare_invalidate").agent_acquires) == (0, 0)
    assert (measure(handover, "deadline").traps, measure(handover, "deadline").barriers) == (1, 0)


@pytest.mark.parametrize(
    ("isa", "vgprs", "lds", "threads", "workgroups", "waves"),
    [
        ("gfx950", 128, 0, 256, 4, 4),
        ("gfx950", 130, 0, 256, 3, 3),
        ("gfx950", 256, 163840, 512, 1, 2),
        ("gfx950", 96, 65536, 256, 2, 2),
        ("gfx942", 96, 65536, 256, 1, 1),
        ("gfx950", 8, 0, 64, 32, 8),
        ("gfx950", 264, 0, 512, 0, 0),  # eight waves of more than half a SIMD's registers each
    ],
)
def test_occupancy(isa, vgprs, lds, threads, workgroups, waves):
    """Oracle: 512 registers a SIMD in steps of 8, 8 waves a SIMD, 4 SIMDs and the LDS of a CU, by hand."""
    program = fixtures.load("ring", "gfx950")
    kernel = dataclasses.replace(program.code_object.kernels["ring_right"], vgprs=vgprs, lds_bytes=lds, max_workgroup=threads)
    changed = cdna.Program.__new__(cdna.Program)
    changed.code_object, changed.isa = cdna.CodeObject(isa, {"ring_right": kernel}, ()), isa
    changed.instructions = program.instructions
    found = measure(changed, "ring_right")
    assert (found.workgroups, found.waves) == (workgroups, waves)


def test_the_gate_finds_a_kernel_that_spills():
    found = measure(fixtures.load("regressed", "gfx950"), "spilled")
    broken = Limits(CLEAN | {"vgprs": 128}, {"mfma": 1, "lds_dma": 1}).broken(found)
    assert f"vgpr_spills {found.vgpr_spills} is more than 0" in broken and found.vgpr_spills > 0
    assert f"scratch_bytes {found.scratch_bytes} is more than 0" in broken and found.scratch_bytes > 0
    assert f"scratch_accesses {found.scratch_accesses} is more than 0" in broken and found.scratch_accesses > 0
    assert broken[-2:] == ["mfma 0 is less than 1", "lds_dma 0 is less than 1"] and len(broken) == 5


def test_the_gate_finds_flat_accesses_and_fences():
    program = fixtures.load("regressed", "gfx950")
    assert Limits(CLEAN, {}).broken(measure(program, "flat")) == ["flat 1 is more than 0"]
    limits = LIMITS["k1", "gfx950"]
    broken = limits.broken(measure(program, "fenced"))
    assert "agent_releases 1 is more than 0" in broken and "agent_acquires 1 is more than 0" in broken


def test_every_limit_names_a_resource():
    names = {field.name for field in dataclasses.fields(measure(fixtures.load("ring", "gfx950"), "ring_right"))}
    for limits in LIMITS.values():
        assert limits.most.keys() | limits.least.keys() <= names


@pytest.fixture
def sources(repo_root):
    return sorted((repo_root / "csrc/launch").glob("*.hip"))


def test_every_kernel_has_its_limits(sources):
    assert {(path.stem, isa) for path in sources for isa in ("gfx942", "gfx950")} == set(LIMITS)


@pytest.mark.parametrize(("name", "isa"), LIMITS)
def test_kernels_keep_to_their_limits(repo_root, tmp_path, name, isa):
    source = repo_root / f"csrc/launch/{name}.hip"
    reason = toolchain.missing("clang", "llvm-objdump")
    if reason:
        pytest.skip(reason)
    csrc = repo_root / "csrc"
    path = toolchain.compile_hip(source, tmp_path / f"{name}.co", isa, f"-I{csrc}", f"-I{csrc / 'include'}")
    program = cdna.Program.load(path)
    assert LIMITS[name, isa].broken(measure(program, name)) == []
    assert program.unknown() == []
