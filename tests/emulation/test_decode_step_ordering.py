"""decode_step under the adversarial scheduler: no unordered access, the same bits whatever the schedule, the same bits again."""

import itertools

import pytest
import torch
from decode_step_cases import MIXED, Runner, same_bits
from schedules import CLEAR_OVERTAKES, STARVATION, UNORDERED_CLEAR, races_of, require_the_same_under_every_schedule
from tiny_geometries import TINY, deep

from sgl_lowlatency import _C
from sgl_lowlatency.kernels import abi
from sgl_lowlatency.kernels.decode_step import EmulationOptions
from sgl_lowlatency.plan.validate import validate
from sgl_lowlatency.reference.inputs import random_step, random_weights

SMALL_PANEL_BYTES = 20 * 1024
NUM_REPEATS = 100


@pytest.mark.parametrize("starvation", STARVATION.values(), ids=STARVATION.keys())
@pytest.mark.parametrize(("name", "lengths"), [("group1", MIXED[0]), ("group2", MIXED[2]), ("group4", MIXED[0]), ("group5", MIXED[1]), ("group8", MIXED[1])])
def test_no_race_and_the_same_bits_under_every_schedule(name, lengths, starvation):
    geometry = TINY[name]
    weights = random_weights(geometry, 11)
    inputs = random_step(geometry, lengths, 11)
    options = EmulationOptions(check_order=True, starvation=starvation)
    runner = Runner(geometry, weights, (len(lengths),), 5, panel_budget_bytes=SMALL_PANEL_BYTES, emulation=options)
    require_the_same_under_every_schedule(runner, options, inputs)


@pytest.mark.parametrize("starvation", STARVATION.values(), ids=STARVATION.keys())
@pytest.mark.parametrize(
    ("name", "rows_per_request", "prefixes"),
    [("group1", 8, [0, 63]), ("group1", 16, [250]), ("group2", 3, [1000, 15, 0, 65]), ("group4", 4, [16, 300]), ("group5", 2, [1, 0, 64]), ("group8", 5, [17, 400]),
     ("group2", 4, [0, 300, 1, 15, 16, 65, 500, 63])],
)
def test_verify_steps_have_no_race_and_the_same_bits_under_every_schedule(name, rows_per_request, prefixes, starvation):
    """Rows of a request see one another's new tokens: of the pool, no block reads what another writes in the launch."""
    geometry = TINY[name]
    weights = random_weights(geometry, 11)
    inputs = random_step(geometry, prefixes, 11, rows_per_request=rows_per_request, lengths_are_prefix=True)
    options = EmulationOptions(check_order=True, starvation=starvation)
    runner = Runner(geometry, weights, (inputs.rows,), 21, panel_budget_bytes=SMALL_PANEL_BYTES, emulation=options, rows_per_request={inputs.rows: rows_per_request})
    require_the_same_under_every_schedule(runner, options, inputs)


def test_padded_requests_collide_in_the_padding_slot_only():
    """Requests that a graph pads, with length 1 as a prefix: they read the padding slot as their old token and write it. Nothing
    else is unordered."""
    geometry = TINY["group2"]
    inputs = random_step(geometry, [65, 0], 16, num_padded=2, rows_per_request=4, lengths_are_prefix=True)
    options = EmulationOptions(check_order=True)
    runner = Runner(geometry, random_weights(geometry, 16), (16,), 5, emulation=options, rows_per_request={16: 4})
    slot_bytes = geometry.num_kv_heads * geometry.head_dim * 2
    for seed in range(4):
        options.seed = seed
        runner.run(inputs)
        races = runner.kernel.last_report.races
        assert races, "eight rows write one slot"
        assert all("_cache[" in race.region and race.offset + race.bytes <= slot_bytes for race in races)


def test_padded_rows_collide_in_the_padding_slot_only():
    """Rows that a graph pads all write slot 0, which nobody reads; SGLang's own kernels do the same. Nothing else is unordered."""
    geometry = TINY["group2"]
    inputs = random_step(geometry, MIXED[0], 16, num_padded=5)
    options = EmulationOptions(check_order=True)
    runner = Runner(geometry, random_weights(geometry, 16), (8,), 5, emulation=options)
    slot_bytes = geometry.num_kv_heads * geometry.head_dim * 2
    for seed in range(4):
        options.seed = seed
        runner.run(inputs)
        races = runner.kernel.last_report.races
        assert races, "five rows write one slot"
        assert {race.kind for race in races} == {"unordered writes"}
        assert all("_cache[" in race.region and race.offset + race.bytes <= slot_bytes for race in races)


def test_the_same_bits_over_repeats():
    geometry = TINY["group2"]
    weights = random_weights(geometry, 12)
    inputs = random_step(geometry, MIXED[1], 12)
    options = EmulationOptions()
    runner = Runner(geometry, weights, (5,), 7, emulation=options)
    first = runner.run(inputs)
    for repeat in range(1, NUM_REPEATS):
        options.seed = repeat
        assert same_bits(runner.run(inputs), first), f"repeat {repeat}"
    assert runner.kernel.executed() == {5: NUM_REPEATS}


class Bookkeeping:
    """What a launch leaves, as stages/generations.hpp says: whose turn it is, and how much of each generation is not clear."""

    def __init__(self):
        self.first, self.used_bytes = 0, [0] * abi.GENERATIONS

    def launch(self, plan):
        """After layer l, the generation of l + CLEAR_AHEAD is clear; that of l holds a step of the plan's rows."""
        for layer in range(-1, plan.geometry.num_layers):
            self.used_bytes[(self.first + layer + 1 + abi.CLEAR_AHEAD) % abi.GENERATIONS] = 0
            self.used_bytes[(self.first + layer + 1) % abi.GENERATIONS] = abi.handover_layout(
                plan.geometry, plan.rows, plan.grid, plan.rows_per_request
            ).total_bytes
        self.first = (self.first + plan.geometry.num_layers + 1) % abi.GENERATIONS


def generations_of(runner, plan):
    """[GENERATIONS, words]"""
    return runner.kernel.workspace.view(torch.int32).view(abi.GENERATIONS, plan.generation_bytes // 4)


@pytest.mark.parametrize("check_order", [False, True], ids=["values", "order"])
@pytest.mark.parametrize("num_layers", range(1, 10))
def test_launches_of_changing_rows_follow_one_another(num_layers, check_order):
    """Generations go round in every way: each launch gives the bits of a fresh workspace, leaves every word behind what it used
    unwritten, and keeps its books."""
    geometry = deep(num_layers)
    weights = random_weights(geometry, 13)
    options = EmulationOptions(check_order=check_order)
    chains = {1: 1, 2: 1, 5: 1, 8: 4, 16: 1, 32: 4}
    shared = Runner(geometry, weights, tuple(chains), 5, emulation=options, rows_per_request=chains)
    books = Bookkeeping()
    for turn, rows in enumerate((1, 5, 2, 8, 1, 1, 16, 1, 5, 32, 1, 2, 8)):
        options.seed = turn
        chain = chains[rows]
        lengths = [chain + (67 * rows + 31 * row) % 300 for row in range(rows // chain)]
        inputs = random_step(geometry, lengths, 13 + turn, rows_per_request=chain)
        outputs = shared.run(inputs)
        assert races_of(shared) == ([], 0), f"launch {turn}"
        assert same_bits(outputs, Runner(geometry, weights, (rows,), 5, rows_per_request=chains).run(inputs)), f"launch {turn} of {rows} rows"
        plan = shared.plans[rows]
        books.launch(plan)
        assert shared.kernel.sync_words(_C.abi.kFirstGenerationOffset, 1) == [books.first]  # SyncState::first_generation
        assert shared.kernel.sync_words(_C.abi.kUsedBytesOffset, abi.GENERATIONS) == books.used_bytes  # SyncState::used_bytes
        for generation, used_bytes in zip(generations_of(shared, plan), books.used_bytes, strict=True):
            assert bool((generation[used_bytes // 4 :] == -1).all()), f"launch {turn}"
        for layer in range(max(num_layers + abi.CLEAR_AHEAD - abi.GENERATIONS, 0), num_layers):
            for buffer in plan.buffers:
                is_written = shared.kernel.buffer(buffer.name, rows, layer).contiguous().view(torch.int32) != -1
                assert buffer.edge == "partial" or bool(is_written.all()), f"{buffer.name} of layer {layer}, launch {turn}"


@pytest.mark.parametrize("num_layers", [1, 3, 4, 7, 9])
def test_whatever_earlier_launches_left_is_cleared_before_it_is_used(num_layers):
    """Every word that the books call used holds foreign data: none of it is taken for this launch's."""
    geometry = deep(num_layers)
    weights = random_weights(geometry, 15)
    runner = Runner(geometry, weights, (5,), 6)
    inputs = random_step(geometry, MIXED[1], 15)
    expected = runner.run(inputs)
    for turn in range(9):
        for generation, used_bytes in zip(generations_of(runner, runner.plans[5]), runner.kernel.sync_words(_C.abi.kUsedBytesOffset, abi.GENERATIONS), strict=True):
            generation[: used_bytes // 4] = 0x7F7F7F7F  # huge, in bf16 and in fp32
        assert same_bits(runner.run(inputs), expected), f"launch {turn}"


@pytest.mark.parametrize("grid", [5, 9, 16])
@pytest.mark.parametrize("rows_per_request", [1, 4])
def test_generations_have_no_race_under_every_schedule(grid, rows_per_request):
    """Also where some blocks own tiles of qkv and gate_up only."""
    geometry = deep(12)
    weights = random_weights(geometry, 17)
    inputs = random_step(geometry, MIXED[1] if rows_per_request == 1 else [300, 63, 17], 17, rows_per_request=rows_per_request)
    options = EmulationOptions(check_order=True)
    runner = Runner(geometry, weights, (inputs.rows,), grid, emulation=options, rows_per_request={inputs.rows: rows_per_request})
    first = runner.run(inputs)
    for seed, starvation in itertools.product(range(3), STARVATION.values()):
        options.seed, options.starvation = seed, starvation
        assert same_bits(runner.run(inputs), first)
        assert races_of(runner) == ([], 0), f"seed {seed} starvation {starvation}"


def test_a_plan_that_the_validator_refuses_has_the_races_it_names():
    """Blocks with attention items but hardly a tile learn of no clear, and tell nobody that they have read."""
    geometry = deep(12)
    inputs = random_step(geometry, [65, 63, 300], 18)
    options = EmulationOptions(check_order=True)
    runner = Runner(geometry, random_weights(geometry, 18), (3,), 60, emulation=options, refused=True)
    assert any("attention of layer" in error and "has cleared them" in error for error in validate(runner.plans[3]))
    kinds = set()
    for seed in range(4):
        options.seed = seed
        runner.run(inputs)
        kinds |= {race.kind for race in runner.kernel.last_report.races}
    assert {UNORDERED_CLEAR, CLEAR_OVERTAKES} <= kinds
