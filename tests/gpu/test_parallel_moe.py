"""Tensor-parallel fused_moe on the GPU with virtual ranks: the gate against the shards' oracle, one rank's choices, bitwise across ranks and repeats,
graphs, aborts. Apart: the instance of a rank's own GPU, a launch and a stream each, which meet in their words alone."""

import os

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # before CUDA starts: ranks of which each has a stream must not share a queue

import re  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from fused_moe_cases import Moe  # noqa: E402
from parallel_moe_cases import MoeRanks, same_bits, same_record  # noqa: E402

SHAPES = [  # ranks, hidden, share, experts, top_k
    (2, 256, 128, 32, 3),
    (2, 5120, 1152, 32, 6),  # DeepSeek-V4.1's widths on two ranks
    (4, 1280, 384, 48, 6),
    (4, 2048, 512, 64, 8),
    (8, 256, 128, 32, 3),
]


def num_sms():
    return torch.cuda.get_device_properties(0).multi_processor_count


def ranks_of(num_ranks, hidden, share, num_experts, top_k, **options):
    return MoeRanks(num_ranks, hidden, share, num_experts, top_k, grid=num_sms() // num_ranks, device="cuda", **options)


@pytest.mark.parametrize("apart", [False, True], ids=["one launch", "apart"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_the_gate(shape, apart):
    ranks = ranks_of(*shape, alt=True)
    for seed, rows in enumerate((1, 6, 12, 48, 8, 1)):
        x, token_ids = ranks.inputs(rows, seed)
        ranks.run(x, token_ids, rows, apart)
        assert ranks.problems(x, token_ids, rows) == [], rows


@pytest.mark.parametrize("apart", [False, True], ids=["one launch", "apart"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_the_gate_with_mix_and_post(shape, apart):
    ranks = ranks_of(*shape)
    for seed, rows in enumerate((1, 6, 12, 48, 8, 1)):
        x, streams = ranks.inputs(rows, seed)[0], ranks.streams_of(rows, seed)
        ranks.run(x, apart=apart, streams=streams)
        assert ranks.problems(x, streams=streams) == [], rows


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_choices_are_one_ranks(num_ranks):
    ranks = ranks_of(num_ranks, 1024, 256, 64, 6)
    alone = Moe(1024, ranks.intermediate, 64, 6, grid=num_sms(), device="cuda", weights=ranks.weights)
    for rows in (1, 12, 48):
        x, _ = ranks.inputs(rows)
        ranks.run(x)
        alone.run(x)
        assert all(same_record(record, alone.record) for record in ranks.records), rows


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_same_bits_over_repeats_however_ranks_are_launched(num_ranks):
    ranks = ranks_of(num_ranks, 1280, 384, 48, 6)
    x, _ = ranks.inputs(12)
    ranks.run(x)
    first = ranks.outs[0]
    for repeat in range(60):
        ranks.run(x, apart=repeat % 2 == 1)
        assert all(same_bits(out, first) for out in ranks.outs), repeat


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_replays_of_alternating_rows_repeat_bit_by_bit(num_ranks):
    """Launches of a graph begin early; five of them, no multiple of the parities, so that replays begin with another one each."""
    ranks, cases = ranks_of(num_ranks, 1280, 384, 48, 6), []
    for rows in (6, 1, 48, 12, 1):
        x, _ = ranks.inputs(rows, rows)
        ranks.run(x)
        cases.append((x, ranks.outs[0], [torch.empty_like(out) for out in ranks.outs]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x, _, outs in cases:
            ranks.ranks.launch(ranks.layers, [{"x": x, "out": out} for out in outs], torch.cuda.current_stream().cuda_stream)
    for replay in range(100):
        for _, _, outs in cases:
            for out in outs:
                out.fill_(float("nan"))
        graph.replay()
        assert all(same_bits(out, wanted) for _, wanted, outs in cases for out in outs), replay
    assert ranks.ranks.faults() == []


def test_more_blocks_than_the_gpu_holds_are_refused():
    with pytest.raises(RuntimeError, match="2 virtual ranks of .* blocks need more than the"):
        MoeRanks(2, grid=num_sms(), device="cuda")


def test_a_dead_rank_stops_the_others_under_their_deadline():
    script = Path(__file__).with_name("faulty_moe_ranks.py")
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("fused_moe stopped: ")]
    assert [int(re.search(r"stopped: rank (\d)", line)[1]) for line in lines] == [0, 1, 2], result.stdout
    assert all(re.search(r"rank 3's part of tile \d+ of the experts of layer 5", line) for line in lines), result.stdout
    assert any(re.search(r" waited 0\.[23]\d s for ", line) for line in lines), result.stdout
    seconds = float(re.search(r"after ([0-9.]+) s", result.stdout)[1])
    assert 0.1 < seconds < 1.0 and "trapped after " in result.stdout, result.stdout
