"""What a kernel starts with, who runs when, and how a run ends."""

import dataclasses
import struct

import numpy as np
import pytest

import cdna
from cdna import fixtures
from cdna.handmade import handmade
from cdna.wave import POISON

U = np.uint32


def store_v0(value):
    """Lines that store a vector register to x + 4 * its lane number of the grid; x is the first argument."""
    return ["s_load_dwordx2 s[20:21], s[0:1], 0x0", "s_lshl_b32 s22, s2, 8", "v_lshlrev_b32_e32 v10, 2, v0", "v_add_u32_e32 v10, s22, v10"] + [
        f"global_store_dword v10, {value}, s[20:21]"
    ]


def test_a_workgroup_knows_its_place_and_its_arguments():
    memory = cdna.Memory(1 << 16)
    x = memory.alloc(3 * 256)
    program = handmade(["s_load_dword s23, s[0:1], 0x8", "s_add_i32 s23, s23, s2", "v_mov_b32_e32 v5, s23", *store_v0("v5")])
    run = cdna.Machine(memory).run([cdna.Launch(program, "k", 3, 64, struct.pack("<QII", x, 100, 0))])
    assert list(memory.get(x, U, (3, 64))[:, 9]) == [100, 101, 102]
    assert run.instructions == 3 * 9


def test_thread_indices_are_packed():
    memory = cdna.Memory(1 << 16)
    x = memory.alloc(256)
    lines = ["s_load_dwordx2 s[20:21], s[0:1], 0x0", "v_mbcnt_lo_u32_b32 v1, -1, 0", "v_mbcnt_hi_u32_b32 v1, -1, v1", "v_lshlrev_b32_e32 v1, 2, v1"]
    program = handmade([*lines, "global_store_dword v1, v0, s[20:21]"])
    cdna.Machine(memory).run([cdna.Launch(program, "k", 1, (4, 8, 2), struct.pack("<QII", x, 0, 0))])
    assert list(memory.get(x, U, (64,))) == [t % 4 | t // 4 % 8 << 10 | t // 32 << 20 for t in range(64)]


def test_workgroup_indices_in_three_dimensions():
    memory = cdna.Memory(1 << 16)
    x = memory.put(np.zeros(12, U))
    lines = ["s_load_dwordx2 s[20:21], s[0:1], 0x0", "s_mul_i32 s10, s4, 6", "s_mul_i32 s11, s3, 3", "s_add_i32 s10, s10, s11"]
    lines += ["s_add_i32 s10, s10, s2", "s_lshl_b32 s10, s10, 2", "v_mov_b32_e32 v1, s10", "v_mov_b32_e32 v2, 1", "global_atomic_add v1, v2, s[20:21]"]
    program = handmade(lines, rsrc2=0b111 << 7)
    cdna.Machine(memory).run([cdna.Launch(program, "k", (3, 2, 2), 1, struct.pack("<QII", x, 0, 0))])
    assert list(memory.get(x, U, (12,))) == [1] * 12


def test_a_partial_wave_has_inactive_lanes():
    memory = cdna.Memory(1 << 16)
    x = memory.alloc(512)
    cdna.Machine(memory).run([cdna.Launch(handmade(store_v0("v0")), "k", 1, 70, struct.pack("<QII", x, 0, 0))])
    assert list(memory.get(x, U, (128,))) == [*range(70), *[POISON] * 58]


def test_registers_and_lds_start_as_nan():
    memory = cdna.Memory(1 << 16)
    x = memory.alloc(256)
    lines = ["v_mov_b32_e32 v3, 0", "ds_read_b32 v4, v3", "v_and_b32_e32 v5, v4, v6", *store_v0("v5")]
    cdna.Machine(memory).run([cdna.Launch(handmade(lines), "k", 1, 64, struct.pack("<QII", x, 0, 0))])
    assert (memory.get(x, U, (64,)) == POISON).all()


def test_preloaded_arguments_start_later():
    """Triton's objects have them: their first 256 bytes load what firmware without preloading has not."""
    program = fixtures.load("softmax_rows", "gfx942")
    assert program.code_object.kernels["softmax_rows"].descriptor.preload_dwords == 10
    lines = ["v_mov_b32_e32 v5, s4", *["s_nop 0"] * 63, "v_mov_b32_e32 v5, s5", *store_v0("v5")]
    memory = cdna.Memory(1 << 16)
    x = memory.alloc(3 * 256)
    program = handmade([line.replace("s2, 8", "s6, 8") for line in lines], preload=4, rsrc2=1 << 7)
    cdna.Machine(memory).run([cdna.Launch(program, "k", 1, 64, struct.pack("<QII", x, 11, 22))])
    assert (memory.get(x, U, (64,)) == 22).all()


@pytest.mark.parametrize(("change", "message"), [({"properties": 1}, "enable_sgpr bit 0"), ({"rsrc1": 0x01 << 12}, "float mode 0x1")])
def test_what_a_descriptor_asks_for_and_is_not_modelled_is_an_error(change, message):
    memory = cdna.Memory(1 << 16)
    with pytest.raises(NotImplementedError, match=message):
        cdna.Machine(memory).run([cdna.Launch(handmade(["s_nop 0"], **change), "k", 1, 64, b"\0" * 16)])


def test_arguments_and_threads_are_checked():
    memory = cdna.Memory(1 << 16)
    with pytest.raises(ValueError, match="k takes 16 bytes of arguments, not 12"):
        cdna.Machine(memory).run([cdna.Launch(handmade(["s_nop 0"]), "k", 1, 64, b"\0" * 12)])
    with pytest.raises(ValueError, match="k is built for at most 1024 threads, not 1088"):
        cdna.Machine(memory).run([cdna.Launch(handmade(["s_nop 0"]), "k", 1, 1088, b"\0" * 16)])
    launch = cdna.Launch(handmade(["s_nop 0"]), "k", 1, 64, b"\0" * 16)
    for streams in ([[launch], [launch]], [[launch, dataclasses.replace(launch, gpu=1)]]):
        with pytest.raises(ValueError, match="each stream is of one GPU, and each GPU has one stream"):
            cdna.Machine(memory).run(*streams)


@pytest.mark.parametrize("seed", [None, *range(5)])
def test_a_barrier_opens_when_every_wave_of_its_workgroup_is_there(seed):
    """Each wave writes a word of LDS, and reads that of the wave before it."""
    lines = ["v_and_b32_e32 v1, 0xfc0, v0", "v_lshrrev_b32_e32 v2, 4, v1", "ds_write_b32 v2, v1", "s_barrier"]
    lines += ["v_add_u32_e32 v2, 12, v2", "v_and_b32_e32 v2, 15, v2"]
    memory = cdna.Memory(1 << 16)
    x = memory.alloc(2 * 1024)
    text = [line.replace("s22, s2, 8", "s22, s2, 10") for line in store_v0("v5")]
    program = handmade([*lines, "ds_read_b32 v5, v2", *text])
    cdna.Machine(memory, seed=seed).run([cdna.Launch(program, "k", 2, 256, struct.pack("<QII", x, 0, 0))])
    assert list(memory.get(x, U, (2, 4, 64))[1, :, 0]) == [192, 0, 64, 128]


def test_ends_that_are_not_one():
    memory = cdna.Memory(1 << 16)

    def launch(*lines):
        return [cdna.Launch(handmade(lines), "k", 1, 128, b"\0" * 16)]

    with pytest.raises(cdna.BudgetSpent, match="1000 instructions, 2 waves still run"):
        cdna.Machine(memory).run(launch("s_branch 65535"), budget=1000)
    # One wave goes round the barrier and waits for nobody: it ends, and the other's barrier opens for it alone.
    cdna.Machine(memory).run(launch("v_readfirstlane_b32 s8, v0", "s_cmp_eq_u32 s8, 0", "s_cbranch_scc1 1", "s_barrier"))
    with pytest.raises(cdna.Trap, match="s_trap 2"):
        cdna.Machine(memory).run(launch("s_trap 2"))
    with pytest.raises(cdna.UnknownInstruction, match="s_ttrace has no entry|s_ttracedata .* has no entry") as caught:
        cdna.Machine(memory).run(launch("s_nop 0", "s_ttracedata"))
    assert "in k, workgroup (0, 0, 0) of GPU 0, wave 0: s_ttracedata at 0x1004" in caught.value.__notes__
    with pytest.raises(cdna.MemoryFault, match="no instruction starts at 0x9000"):
        cdna.Machine(memory).run(launch("s_branch 0x1fff"))


def test_a_trap_stops_its_own_gpu_and_the_host_goes_on_meanwhile():
    """GPU 0 traps at once; GPU 1 waits for the host to write a word, and ends."""
    memory = cdna.Memory(1 << 16)
    x = memory.put(np.zeros(2, U))
    wait = ["s_load_dwordx2 s[20:21], s[0:1], 0x0", "v_mov_b32_e32 v1, 0", "global_load_dword v2, v1, s[20:21]", "v_cmp_eq_u32_e32 vcc, 0, v2"]
    wait += ["s_cbranch_vccnz 65533", "global_store_dword v1, v2, s[20:21] offset:4"]
    streams = [cdna.Launch(handmade(lines), "k", 1, 64, struct.pack("<QII", x, 0, 0), gpu=gpu) for gpu, lines in enumerate((["s_trap 2"], wait))]
    rounds = []

    def host():
        rounds.append(None)
        if len(rounds) == 3:
            memory.set(x, np.array([7], U))

    with pytest.raises(cdna.Trap, match="of GPU 0"):
        cdna.Machine(memory, host=host).run(*([launch] for launch in streams))
    assert list(memory.get(x, U, (2,))) == [7, 7]


@pytest.mark.parametrize("seed", range(3))
def test_a_seed_lets_others_overtake(seed):
    """Of two GPUs that each count 200 times, the adversary lets either be ahead by most of its way, in one schedule or another."""
    lines = ["s_load_dwordx2 s[20:21], s[0:1], 0x0", "s_movk_i32 s8, 0xc8", "v_mov_b32_e32 v1, 0", "v_mov_b32_e32 v2, 1"]
    lines += ["global_atomic_add v1, v2, s[20:21]", "s_addk_i32 s8, 0xffff", "s_cmp_lg_u32 s8, 0", "s_cbranch_scc1 65532"]
    ahead = []
    for attempt in range(20):
        memory = cdna.Memory(1 << 16)
        counts = [memory.put(np.zeros(1, U)) for _ in range(2)]
        launches = [cdna.Launch(handmade(lines), "k", 1, 1, struct.pack("<QII", x, 0, 0), gpu=gpu) for gpu, x in enumerate(counts)]
        gaps = []

        def host(memory=memory, counts=counts, gaps=gaps):
            gaps.append(int(memory.get(counts[0], U, (1,))[0]) - int(memory.get(counts[1], U, (1,))[0]))

        cdna.Machine(memory, seed=100 * seed + attempt, host=host).run(*([launch] for launch in launches))
        ahead += gaps
    assert max(ahead) > 150 and min(ahead) < -150


def test_a_seed_repeats_its_schedule():
    def ticks(seed):
        memory = cdna.WeakMemory(1 << 18, seed=seed)
        data, out, flag = memory.put(np.zeros(512, U)), memory.alloc(2048), memory.put(np.zeros(1, U))
        launch = cdna.Launch(fixtures.load("handover", "gfx950"), "agent", 3, 256, struct.pack("<3Qi", data, flag, out, -1))
        return cdna.Machine(memory, seed=seed).run([launch]).ticks

    assert ticks(3) == ticks(3) and len({ticks(seed) for seed in range(4)}) > 1


def test_code_addresses_follow_the_image():
    """s_getpc and a jump back to it; a constant beside the code, read through the same base."""
    memory = cdna.Memory(1 << 16)
    x = memory.alloc(256)
    lines = ["s_getpc_b64 s[8:9]", "s_add_u32 s8, s8, 12", "s_addc_u32 s9, s9, 0", "s_setpc_b64 s[8:9]", "v_mov_b32_e32 v5, 5", *store_v0("v5")]
    with pytest.raises(cdna.MemoryFault, match="no instruction starts"):
        cdna.Machine(memory).run([cdna.Launch(handmade([lines[0], "s_add_u32 s8, s8, 6", *lines[2:]]), "k", 1, 64, struct.pack("<QII", x, 0, 0))])
    cdna.Machine(memory).run([cdna.Launch(handmade(lines), "k", 1, 64, struct.pack("<QII", x, 0, 0))])
    assert (memory.get(x, U, (64,)) == 5).all()
