"""decode_step under the adversarial scheduler: no unordered access, the same bits whatever the schedule, the same bits again."""

import pytest
import torch
from decode_step_cases import MIXED, Runner, same_bits
from tiny_geometries import TINY

from sgl_lowlatency import _C
from sgl_lowlatency.kernels.decode_step import EmulationOptions
from sgl_lowlatency.reference.inputs import random_step, random_weights

STARVATION = {"even": 0, "starved block": 1, "starved warp": 2, "favoured block": 3}
SMALL_PANEL_BYTES = 20 * 1024
NUM_REPEATS = 100


def races_of(runner):
    report = runner.kernel.last_report
    return [f"{r.kind} {r.region}+{r.offset} blocks {r.first_block} {r.second_block}" for r in report.races], report.num_races


@pytest.mark.parametrize("starvation", STARVATION.values(), ids=STARVATION.keys())
@pytest.mark.parametrize(("name", "lengths"), [("group1", MIXED[0]), ("group2", MIXED[2]), ("group4", MIXED[0]), ("group5", MIXED[1]), ("group8", MIXED[1])])
def test_no_race_and_the_same_bits_under_every_schedule(name, lengths, starvation):
    geometry = TINY[name]
    weights = random_weights(geometry, 11)
    inputs = random_step(geometry, lengths, 11)
    options = EmulationOptions(check_order=True, starvation=starvation)
    runner = Runner(geometry, weights, (len(lengths),), 5, panel_budget_bytes=SMALL_PANEL_BYTES, emulation=options)
    first = None
    for seed in range(6):
        options.seed = seed
        outputs = runner.run(inputs)
        assert races_of(runner) == ([], 0), f"seed {seed}"
        first = first or outputs
        assert same_bits(outputs, first), f"seed {seed}"


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


def test_split_tickets_are_zero_after_a_step():
    geometry = TINY["group2"]
    runner = Runner(geometry, random_weights(geometry, 13), (5,), 7)
    runner.run(random_step(geometry, [1000] * 5, 13))
    assert int(runner.kernel.buffer("split_tickets").abs().max()) == 0
    assert not bool(runner.kernel.buffer("partial_out").isnan().any())


def test_counters_may_wrap():
    """Edge counters that pass 2**32 within a launch: targets are compared by signed difference."""
    geometry = TINY["group2"]
    weights = random_weights(geometry, 14)
    inputs = random_step(geometry, MIXED[1], 14)
    runner = Runner(geometry, weights, (5,), 6)
    expected = runner.run(inputs)
    words = runner.kernel._sync.view(torch.int32)
    line = 32
    for edge in range(_C.abi.kNumEdges):
        words[edge * line] = -3  # SyncState::edge[edge][0] three signals before the wrap
        words[_C.abi.kNumEdges * line + edge] = -3  # SyncState::edge_base[edge]
    assert same_bits(runner.run(inputs), expected)
    producers = [edge.producers * geometry.num_layers for edge in runner.plans[5].edges]
    assert [int(words[edge * line]) for edge in range(_C.abi.kNumEdges)] == [n - 3 for n in producers]
    assert [int(words[_C.abi.kNumEdges * line + edge]) for edge in range(_C.abi.kNumEdges)] == [n - 3 for n in producers]
    assert same_bits(runner.run(inputs), expected)


def test_a_dirty_workspace_changes_nothing():
    """Whatever an earlier step left (here NaN in everything but the tickets) is written before it is read."""
    geometry = TINY["group5"]
    weights = random_weights(geometry, 15)
    inputs = random_step(geometry, MIXED[1], 15)
    runner = Runner(geometry, weights, (5,), 6)
    expected = runner.run(inputs)
    for name in ("residual", "qkv", "attention_out", "activation", "partial_out", "partial_max_sum"):
        runner.kernel.buffer(name).fill_(float("nan"))
    assert same_bits(runner.run(inputs), expected)
