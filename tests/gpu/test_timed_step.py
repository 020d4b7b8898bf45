"""A timed tensor-parallel step on the GPU, of virtual ranks whose launches are their own: the bits of the served step, and what the clock said."""

import pytest
from decode_step_cases import MIXED, same_bits
from parallel_gpu import cut_runner

from sgl_lowlatency.bench import timeline
from sgl_lowlatency.reference.inputs import random_step

SEED = 91


@pytest.mark.parametrize("rows", [1, 8])
def test_it_passes_every_point_and_changes_no_bit(rows):
    geometry, _, served = cut_runner("qwen3-8b", SEED, 2, (rows,))
    step = random_step(geometry, MIXED[3][:rows], SEED, "cuda")
    wanted = served.run(step, apart=True)
    _, _, runner = cut_runner("qwen3-8b", SEED, 2, (rows,), is_timed=True)
    assert all(same_bits(one, other) for one, other in zip(runner.run(step, apart=True), wanted, strict=True))
    for of_rank in runner.timelines:
        *parts, layer = timeline.phases(of_rank)
        assert 1.0 < layer.median_us < 1e4 and all(0 <= part.share < 1 for part in parts)


def test_ranks_of_one_launch_are_refused():
    geometry, _, runner = cut_runner("qwen3-8b", SEED, 2, (1,), is_timed=True)
    with pytest.raises(ValueError, match="timed virtual ranks have no launch in common on CUDA"):
        runner.run(random_step(geometry, [65], SEED, "cuda"))
