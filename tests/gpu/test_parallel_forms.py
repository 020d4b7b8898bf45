"""The forms of a tensor-parallel step's sums on the GPU, with virtual ranks: the bits of the served step, and what a timed one leaves."""

import pytest
import torch
from decode_step_cases import MIXED, same_bits
from parallel_cases import outputs_of
from parallel_gpu import cut_runner, rank_runner

from sgl_lowlatency.bench import timeline
from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.kernels.rank_group import FORMS
from sgl_lowlatency.reference.inputs import random_step, random_weights

SEED, NUM_LAUNCHES, PER_GRAPH = 91, 200_000, 500
UNTIMED = {**FORMS, "wide stores, narrow fence": FORMS["wide stores"] + FORMS["narrow fence"]}
TIMED = {"served": 0, "narrow fence": FORMS["narrow fence"], "tagged words": FORMS["tagged words"]}


@pytest.mark.parametrize("apart", [False, True], ids=["one launch", "apart"])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("rows", [1, 8])
def test_every_form_has_the_served_steps_bits(rows, num_ranks, apart):
    steps = None
    for form in (None, *UNTIMED.values()):
        geometry, _, runner = cut_runner("qwen3-8b", SEED, num_ranks, (rows,), form=form)
        if steps is None:
            steps = [random_step(geometry, MIXED[3][:rows], SEED + i, "cuda") for i in range(10)]
            served = [runner.run(step, apart=apart) for step in steps]
            continue
        for step, wanted in zip(steps, served, strict=True):
            assert all(same_bits(one, other) for one, other in zip(runner.run(step, apart=apart), wanted, strict=True)), form


@pytest.mark.parametrize("form", UNTIMED)
def test_many_launches_end(form):
    geometry = Geometry(1, 512, 4, 4, 128, 512, 512, 512, 1e-6, False)
    runner = rank_runner(geometry, random_weights(geometry, SEED, "cuda"), 2, (1,), deadline_s=10.0, form=UNTIMED[form])
    begun = runner.begin(random_step(geometry, [20], SEED, "cuda"))
    runner.launch(begun)
    torch.cuda.synchronize()
    first = [outputs_of(*one).hidden.clone() for one in begun]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(PER_GRAPH):
            runner.launch(begun)
    for replay in range(NUM_LAUNCHES // PER_GRAPH):
        graph.replay()
        if replay % 100 == 99:
            torch.cuda.synchronize()
            assert runner.ranks.faults() == []
            for (_, arguments), wanted in zip(begun, first, strict=True):
                assert torch.equal(arguments["hidden_out"], wanted), replay
                arguments["hidden_out"].fill_(float("nan"))


@pytest.mark.parametrize("form", TIMED)
def test_a_timed_step_passes_every_point_and_changes_no_bit(form):
    geometry, _, served = cut_runner("qwen3-8b", SEED, 2, (1,))
    step = random_step(geometry, [65], SEED, "cuda")
    wanted = served.run(step, apart=True)
    _, _, runner = cut_runner("qwen3-8b", SEED, 2, (1,), form=TIMED[form], is_timed=True)
    assert all(same_bits(one, other) for one, other in zip(runner.run(step, apart=True), wanted, strict=True))
    for of_rank in runner.timelines:
        *parts, layer = timeline.phases(of_rank)
        assert 1.0 < layer.median_us < 1e4 and all(0 <= part.share < 1 for part in parts)
