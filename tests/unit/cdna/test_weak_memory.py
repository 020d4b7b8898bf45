"""Weak memory finds hand-overs that leave something out, and lets right ones pass under every schedule. Oracle: the values that were handed over.

Each kernel of handover.hip and ring.hip without its one wait, scope or barrier must go wrong under some of the seeds; the whole one under none.
"""

import dataclasses
import struct

import numpy as np
import pytest

import cdna
from cdna import fixtures
from cdna.handmade import handmade
from cdna.single import run, wave

U = np.uint32
SEEDS = range(6)
DATA = 3 * np.arange(256, dtype=U) + 1


@pytest.fixture(scope="module")
def handover():
    return fixtures.load("handover", "gfx950")


def handed_over(program, kernel, seed, *, gpus=1, workgroups=3, **weak):
    """Whether every consumer read what the producer stored."""
    memory = cdna.WeakMemory(1 << 18, seed=seed, **weak)
    data, out = memory.put(np.zeros(512, U)), memory.alloc(512 * 4)
    flag = memory.put(np.zeros(1, U))
    if gpus == 1:
        launches = [cdna.Launch(program, kernel, workgroups, 256, struct.pack("<3Qi", data, flag, out, -1))]
    else:
        launches = [cdna.Launch(program, kernel, 1, 256, struct.pack("<3Qi", data, flag, out, role), gpu=role) for role in range(gpus)]
    cdna.Machine(memory, seed=seed).run(*([launch] for launch in launches), budget=60_000)
    expected = 5 * np.arange(256, dtype=U) if kernel == "agent_flag_first" else DATA
    return bool((memory.get(out, U, (256,)) == expected[::-1]).all())


def outcomes(program, kernel, **options):
    """For each seed "right", "wrong", or "hangs" where the flag never came."""
    found = set()
    for seed in SEEDS:
        try:
            found.add("right" if handed_over(program, kernel, seed, **options) else "wrong")
        except cdna.BudgetSpent:
            found.add("hangs")
    return found


@pytest.mark.parametrize("kernel", ["agent", "system"])
def test_a_whole_handover_is_right_under_every_schedule(handover, kernel):
    assert outcomes(handover, kernel) == {"right"}


def test_system_scope_reaches_another_gpu(handover):
    assert outcomes(handover, "system", gpus=2) == {"right"}


def test_agent_scope_does_not_reach_another_gpu(handover):
    """The flag stays on the GPU that stored it."""
    assert "right" not in outcomes(handover, "agent", gpus=2)


@pytest.mark.parametrize(
    "kernel", ["agent_no_store_wait", "agent_no_release", "agent_no_acquire", "agent_bare_invalidate", "agent_flag_first", "system_no_store_wait"]
)
def test_a_handover_that_leaves_something_out_is_found(handover, kernel):
    assert "wrong" in outcomes(handover, kernel), "no schedule shows what is missing"


def test_memory_without_weakness_shows_none_of_it(handover):
    """So it is the weak memory that finds them, not the schedule."""
    for kernel in ("agent_no_store_wait", "agent_no_acquire", "agent_flag_first"):
        memory = cdna.Memory(1 << 18)
        data, out, flag = memory.put(np.zeros(512, U)), memory.alloc(512 * 4), memory.put(np.zeros(1, U))
        cdna.Machine(memory).run([cdna.Launch(handover, kernel, 2, 256, struct.pack("<3Qi", data, flag, out, -1))])
        expected = 5 * np.arange(256, dtype=U) if kernel == "agent_flag_first" else DATA
        assert (memory.get(out, U, (256,)) == expected[::-1]).all()


def ring(isa, kernel, seed, landing):
    words = 4 if isa == "gfx950" else 1
    memory = cdna.WeakMemory(1 << 18, seed=seed, landing=landing)
    chunks = np.random.default_rng(seed).integers(0, 1000, (7 + 3, 256, words)).astype(U)
    out = memory.alloc(256 * words * 4)
    arguments = struct.pack("<QQi", memory.put(chunks), out, 7)
    cdna.Machine(memory, seed=seed).run([cdna.Launch(fixtures.load("ring", isa), kernel, 1, 256, arguments)])
    return bool((memory.get(out, U, (256, words)) == chunks[:7].sum(axis=0, dtype=U)[np.arange(256) ^ 64]).all())


@pytest.mark.parametrize("landing", ["late", "early", "coin"])
@pytest.mark.parametrize("isa", ["gfx942", "gfx950"])
def test_a_ring_with_the_right_count_is_right(isa, landing):
    assert all(ring(isa, "ring_right", seed, landing) for seed in SEEDS)


@pytest.mark.parametrize("isa", ["gfx942", "gfx950"])
def test_a_count_that_is_one_too_many_is_found(isa):
    assert not any(ring(isa, "ring_one_too_many", seed, "late") for seed in SEEDS)
    assert not all(ring(isa, "ring_one_too_many", seed, "coin") for seed in SEEDS)


@pytest.mark.parametrize("landing", ["late", "early"])
def test_a_ring_without_a_barrier_is_found(landing):
    """Late: a neighbour's copies are not there yet. Early: a slot is filled while a neighbour still reads it."""
    assert not all(ring("gfx950", "ring_no_barrier", seed, landing) for seed in SEEDS)


def stopped(program, kernel):
    memory = cdna.WeakMemory(1 << 18, seed=1, drain=0.0)
    flag, record = memory.put(np.zeros(1, U)), memory.put(np.zeros(1, U))
    with pytest.raises(cdna.Trap, match="workgroup \\(0, 0, 0\\) of GPU 0, wave 0") as caught:
        cdna.Machine(memory, seed=1).run([cdna.Launch(program, kernel, 1, 64, struct.pack("<3Q", flag, 2000, record))])
    assert any("s_trap" in note for note in caught.value.__notes__)
    return memory.get(record, U, (1,))[0]


def test_a_record_is_out_before_the_trap_only_where_it_was_waited_for(handover):
    assert stopped(handover, "deadline") == 0xFA17
    assert stopped(handover, "deadline_no_wait") == 0


# --- the rules, one by one, on single instructions --------------------------------------------------------------------
def address(a):
    return {0: np.full(64, a & 0xFFFF_FFFF, U), 1: np.full(64, a >> 32, U)}


@pytest.fixture
def cell():
    memory = cdna.WeakMemory(1 << 16, drain=0.0)
    return memory, memory.put(np.array([7], U))


STORE, LOAD = "global_store_dword v[0:1], v2, off", "global_load_dword v3, v[0:1], off"


def store(w, a, value, scope=""):
    run(STORE + scope, w, v=address(a) | {2: np.full(64, value, U)}, exec_mask=1)


def load(w, a, scope=""):
    run([LOAD + scope, "s_waitcnt vmcnt(0)"], w, v=address(a), exec_mask=1)
    return int(w.v[3][0])


def test_how_far_a_store_goes(cell):
    """Readers: the same CU, another CU of the XCD, another XCD, another GPU, the host. None has the line yet."""
    reach = {"": 2, " sc0": 2, " sc1": 3, " sc0 sc1": 5}
    for scope, far in reach.items():
        memory = cdna.WeakMemory(1 << 16, drain=0.0)
        a = memory.put(np.array([7], U))
        writer = wave(memory, cu=0, xcd=0)
        store(writer, a, 9, scope)
        run("s_waitcnt vmcnt(0)", writer)
        seen = [load(wave(memory, cu=0, xcd=0), a), load(wave(memory, cu=1, xcd=0), a), load(wave(memory, cu=2, xcd=1), a)]
        seen += [load(wave(memory, cu=9, xcd=0, gpu=1), a), int(memory.get(a, U, (1,))[0])]
        assert seen == [9] * far + [7] * (5 - far), scope


def test_a_store_that_is_not_waited_for_stays_in_its_cu(cell):
    memory, a = cell
    writer = wave(memory)
    store(writer, a, 9, " sc0 sc1")
    assert load(wave(memory), a) == 9 and load(wave(memory, cu=1), a) == 7
    run("s_endpgm", writer)
    assert load(wave(memory, cu=1), a, " sc1") == 9


@pytest.mark.parametrize(("write_back", "seen"), [("buffer_wbl2", [7, 7]), ("buffer_wbl2 sc1", [9, 7]), ("buffer_wbl2 sc0 sc1", [9, 9])])
def test_how_far_a_write_back_goes(cell, write_back, seen):
    """Readers: another XCD by an agent load, another GPU by a system load."""
    memory, a = cell
    writer = wave(memory)
    store(writer, a, 9)
    run([write_back, "s_waitcnt vmcnt(0)"], writer)
    assert [load(wave(memory, cu=2, xcd=1), a, " sc1"), load(wave(memory, cu=9, gpu=1), a, " sc0 sc1")] == seen


def test_a_write_back_that_is_not_waited_for_has_not_happened(cell):
    memory, a = cell
    writer = wave(memory)
    store(writer, a, 9)
    run("buffer_wbl2 sc1", writer)
    assert load(wave(memory, cu=2, xcd=1), a, " sc1") == 7


@pytest.mark.parametrize(
    ("invalidate", "scope", "seen"),
    [("", "", 7), ("", " sc1", 9), ("buffer_inv", "", 7), ("buffer_inv sc1", "", 9), ("buffer_inv sc0", "", 7)],
)
def test_what_makes_a_reader_see_an_agent_store(cell, invalidate, scope, seen):
    memory, a = cell
    reader = wave(memory, cu=2, xcd=1)
    assert load(reader, a + 4 * 0) == 7
    writer = wave(memory)
    store(writer, a, 9, " sc1")
    run("s_waitcnt vmcnt(0)", writer)
    if invalidate:
        run(invalidate, reader)
    assert load(reader, a, scope) == seen


def test_an_agent_invalidate_does_not_reach_what_another_gpu_stored(cell):
    memory, a = cell
    reader = wave(memory, cu=9, gpu=1)
    assert load(reader, a) == 7
    writer = wave(memory)
    store(writer, a, 9, " sc0 sc1")
    run("s_waitcnt vmcnt(0)", writer)
    assert load(reader, a, " sc1") == 7
    run("buffer_inv sc1", reader)
    assert load(reader, a) == 7
    run("buffer_inv sc0 sc1", reader)
    assert load(reader, a) == 9


def test_a_load_brings_its_whole_line(cell):
    memory, _ = cell
    a = memory.put(np.zeros(64, U))
    reader, writer = wave(memory, cu=2, xcd=1), wave(memory)
    load(reader, a)
    store(writer, a + 124, 9, " sc1")
    store(writer, a + 128, 9, " sc1")
    run("s_waitcnt vmcnt(0)", writer)
    assert (load(reader, a + 124), load(reader, a + 128)) == (0, 9)


def test_scalar_loads_keep_what_they_read(cell):
    memory, a = cell
    reader = wave(memory, cu=2, xcd=1)

    def scalar():
        return run("s_load_dword s4, s[2:3], 0x0", reader, s={2: a & 0xFFFF_FFFF, 3: a >> 32}).s[4]

    assert scalar() == 7
    writer = wave(memory)
    store(writer, a, 9, " sc1")
    run("s_waitcnt vmcnt(0)", writer)
    run("buffer_inv sc1", reader)
    assert scalar() == 7
    run("s_dcache_inv", reader)
    assert scalar() == 9


def test_loaded_registers_are_nan_until_they_are_waited_for(cell):
    memory, a = cell
    w = wave(memory)
    run([LOAD, "global_load_dword v4, v[0:1], off"], w, v=address(a) | {3: np.zeros(64, U)}, exec_mask=1)
    assert (w.v[3][0], w.v[3][1], w.v[4][0]) == (0xFFFF_FFFF, 0, 0xFFFF_FFFF)
    run("s_waitcnt vmcnt(1)", w)
    assert (w.v[3][0], w.v[4][0]) == (7, 0xFFFF_FFFF)
    run("s_waitcnt vmcnt(0)", w)
    assert w.v[4][0] == 7


def test_stores_of_a_wave_to_one_place_keep_their_order():
    memory = cdna.WeakMemory(1 << 16, seed=0, drain=1.0)
    a = memory.put(np.zeros(1, U))
    w = wave(memory)
    store(w, a, 1, " sc0 sc1")
    store(w, a, 2, " sc0 sc1")
    memory.turn(w)
    assert memory.get(a, U, (1,))[0] == 1
    memory.turn(w)
    assert memory.get(a, U, (1,))[0] == 2


def test_a_store_may_arrive_in_parts_and_never_in_parts_of_a_dword():
    seen = set()
    for seed in range(20):
        memory = cdna.WeakMemory(1 << 16, seed=seed, drain=1.0)
        a = memory.put(np.zeros(4, U))
        w = wave(memory)
        data = {n: np.full(64, 0x01010101 * n, U) for n in range(2, 6)}
        run("global_store_dwordx4 v[0:1], v[2:5], off sc0 sc1", w, v=address(a) | data, exec_mask=1)
        memory.turn(w)
        words = memory.get(a, U, (4,))
        assert all(word in (0, 0x01010101 * (n + 2)) for n, word in enumerate(words))
        seen.add(int(np.count_nonzero(words)))
        run("s_waitcnt vmcnt(0)", w)
        assert list(memory.get(a, U, (4,))) == [0x01010101 * n for n in range(2, 6)]
    assert 4 in seen and seen & {1, 2, 3}


@pytest.mark.parametrize(("scope", "others"), [("", 0), (" sc1", 1)])
def test_atomics_act_where_their_scope_says(scope, others):
    """Adds of two GPUs: at system scope they meet, at agent scope each GPU has its own sum until its kernel ends."""
    memory = cdna.WeakMemory(1 << 16, drain=0.0)
    a = memory.put(np.zeros(1, U))
    first, second = wave(memory, cu=0), wave(memory, cu=9, gpu=1)
    for w in (first, second):
        run([f"global_atomic_add v4, v[0:1], v2, off sc0{scope}", "s_waitcnt vmcnt(0)"], w, v=address(a) | {2: np.ones(64, U)}, exec_mask=1)
    assert (first.v[4][0], second.v[4][0]) == (0, others)


def test_an_atomic_sees_what_its_own_cu_and_xcd_have_of_its_place(cell):
    memory, a = cell
    w = wave(memory)
    store(w, a, 40)  # in flight
    run(["global_atomic_add v4, v[0:1], v2, off sc0", "s_waitcnt vmcnt(0)"], w, v=address(a) | {2: np.ones(64, U)}, exec_mask=1)
    assert w.v[4][0] == 40 and load(wave(memory, cu=2, xcd=1), a, " sc1") == 41


def test_a_store_in_front_of_a_barrier_arrives_while_its_wave_waits_there():
    """x is stored by the first wave of workgroup 0, which then waits for its second; that one waits for y, stored by workgroup 1 when it has x."""

    def poll(offset):
        load = f"global_load_dword v3, v1, s[20:21] offset:{offset} sc1"
        return [load, "s_waitcnt vmcnt(0)", "v_cmp_eq_u32_e32 vcc, 0, v3", "s_cbranch_vccnz 65532"]

    stores_x = ["global_store_dword v1, v2, s[20:21] sc1", "s_barrier", "s_endpgm"]
    waits_for_y = [*poll(128), "s_barrier", "s_endpgm"]
    stores_y = [*poll(0), "global_store_dword v1, v2, s[20:21] offset:128 sc1"]
    lines = ["s_load_dwordx2 s[20:21], s[0:1], 0x0", "v_readfirstlane_b32 s8, v0", "v_mov_b32_e32 v1, 0", "v_mov_b32_e32 v2, 1", "s_cmp_lg_u32 s2, 0"]
    lines += [f"s_cbranch_scc1 {len(stores_x) + len(waits_for_y) + 2}", "s_cmp_lg_u32 s8, 0", f"s_cbranch_scc1 {len(stores_x)}"]
    program = handmade([*lines, *stores_x, *waits_for_y, *stores_y])
    for seed in range(4):
        memory = cdna.WeakMemory(1 << 16, seed=seed)
        x = memory.put(np.zeros(64, U))
        cdna.Machine(memory, seed=seed).run([cdna.Launch(program, "k", 2, 128, struct.pack("<QII", x, 0, 0))], budget=100_000)
        assert list(memory.get(x, U, (64,))[[0, 32]]) == [1, 1]


def test_launches_of_a_stream_are_ordered_for_their_own_gpu_alone(handover):
    """Two launches store and read; the last one shows everything to the host, a launch before it to its own GPU."""
    memory = cdna.WeakMemory(1 << 18, drain=0.0)
    data, flag = memory.put(np.zeros(512, U)), memory.put(np.ones(1, U))
    outs = [memory.alloc(512 * 4) for _ in range(2)]
    store = cdna.Launch(handover, "agent_no_release", 1, 256, struct.pack("<3Qi", data, flag, outs[0], 0))
    load = cdna.Launch(handover, "agent_no_acquire", 1, 256, struct.pack("<3Qi", data, flag, outs[0], 1))
    other = dataclasses.replace(load, arguments=struct.pack("<3Qi", data, flag, outs[1], 1), gpu=1)
    seen = []
    finish = memory.finish
    memory.finish = lambda gpu, is_last: (finish(gpu, is_last=is_last), seen.append((gpu, is_last, memory.get(data, U, (256,))[9])))
    cdna.Machine(memory).run([store, load])
    assert (memory.get(outs[0], U, (256,)) == DATA[::-1]).all()
    assert seen == [(0, False, 0), (0, True, DATA[9])]
    cdna.Machine(memory).run([other])
    assert (memory.get(outs[1], U, (256,)) == DATA[::-1]).all()


def test_the_end_of_a_kernel_makes_everything_visible(handover):
    assert handed_over(handover, "agent", 0, drain=0.0)
