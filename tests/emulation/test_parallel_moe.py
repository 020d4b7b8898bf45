"""fused_moe on 2, 4 and 8 emulated ranks: the sum through the numerics gate, one rank's choices, the same bits on every rank. Oracle: the shards'
sum in float64 (reference/fused_moe.py)."""

import multiprocessing

import pytest
import torch
from fused_moe_cases import Moe
from parallel_moe_cases import MoeRanks, same_bits, same_record

from sgl_lowlatency import _C
from sgl_lowlatency.kernels.fused_moe import FusedMoe
from sgl_lowlatency.kernels.symmetric_workspace import MappedWorkspaces, prepare
from sgl_lowlatency.kernels.virtual_moe import VirtualMoe, virtual_moe_workspaces

SHAPES = [  # ranks, their sizes, rows of the launches on one set of workspaces
    (2, {}, (1, 6, 12, 48, 8, 1)),
    (2, {"hidden": 1280, "share": 256, "num_experts": 32, "top_k": 6, "grid": 5}, (6,)),
    (4, {"hidden": 128, "num_experts": 16, "top_k": 2, "grid": 3}, (48, 1, 8, 12)),
    (8, {"num_experts": 16, "top_k": 1, "grid": 1}, (6, 1, 8)),
    (8, {"hidden": 128, "num_experts": 16, "top_k": 2, "grid": 1}, (48,)),
]


@pytest.mark.parametrize(("num_ranks", "sizes", "rows"), SHAPES)
def test_the_gate(num_ranks, sizes, rows):
    ranks = MoeRanks(num_ranks, **sizes)
    for seed, count in enumerate(rows):
        ranks.ranks.emulation.seed = seed
        x, _ = ranks.inputs(count, seed)
        ranks.run(x)
        assert ranks.problems(x) == [], count


@pytest.mark.parametrize(("num_ranks", "rows"), [(2, 12), (4, 7)])
def test_choices_are_one_ranks(num_ranks, rows):
    """Bit by bit, with a bias that depends on the token and rows that are not live; the output adds up the same sum in another order."""
    ranks = MoeRanks(num_ranks, alt=True)
    alone = Moe(intermediate=ranks.intermediate, weights=ranks.weights)
    x, token_ids = ranks.inputs(rows)
    ranks.run(x, token_ids, rows - 2)
    alone.run(x, token_ids, rows - 2)
    assert all(same_record(record, alone.record) for record in ranks.records)
    assert ranks.problems(x, token_ids, rows - 2) == [] and alone.problems(x, token_ids, rows - 2) == []
    assert float((ranks.outs[0].double() - alone.out.double()).norm() / alone.out.double().norm()) < 1e-3


def test_a_group_of_one_rank_gives_the_bits_of_a_kernel_without_ranks():
    ranks = MoeRanks(1)
    alone = Moe(weights=ranks.weights)
    for rows in (9, 1):
        x, _ = ranks.inputs(rows)
        ranks.run(x)
        alone.run(x)
        assert same_bits(ranks.outs[0], alone.out) and same_record(ranks.records[0], alone.record)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_row_has_the_same_bits_in_every_repeat_and_beside_any_others(num_ranks):
    ranks = MoeRanks(num_ranks, num_experts=16, top_k=2)
    x, _ = ranks.inputs(12)
    ranks.run(x)
    together = ranks.outs[0]
    for repeat, rows in enumerate((slice(0, 12), slice(3, 4), slice(2, 10), slice(0, 12), slice(11, 12))):
        ranks.ranks.emulation.seed = 50 + repeat
        ranks.run(x[rows].contiguous())
        assert all(same_bits(out, together[rows]) for out in ranks.outs), repeat


def test_ranks_that_are_processes():
    """FusedMoe.launch of each, over memory that both have mapped: a server's ranks on CPUs."""
    ranks, rows = MoeRanks(2, 128, num_experts=16, top_k=2, max_rows=3, deadline_s=60.0), (3, 1, 2, 1)
    inputs = [ranks.inputs(count, launch)[0] for launch, count in enumerate(rows)]
    wanted = []
    for x in inputs:
        ranks.run(x)
        wanted.append(ranks.outs[0])
    layout = ranks.kernels[0].symmetric.layout
    memory = [torch.empty(layout.total_bytes, dtype=torch.uint8).share_memory_() for _ in range(2)]
    assert all(one.data_ptr() % 128 == 0 for one in memory)
    for one in memory:
        prepare(one, layout)
    outs = [[torch.zeros(count, 128, dtype=torch.bfloat16).share_memory_() for count in rows] for _ in range(2)]

    def run(rank):
        symmetric = MappedWorkspaces(rank, tuple(one.data_ptr() for one in memory), layout, memory)
        kernel = FusedMoe(128, 128, 16, 2, 3, ranks.device, 2, 60.0, symmetric=symmetric)
        layer = kernel.prepare(ranks.shards[rank])
        for x, out in zip(inputs, outs[rank], strict=True):
            kernel.launch(layer, x, out)

    other = multiprocessing.get_context("fork").Process(target=run, args=(1,))
    other.start()
    run(0)
    other.join(60)
    assert other.exitcode == 0
    assert all(same_bits(out, one) for of_rank in outs for out, one in zip(of_rank, wanted, strict=True))


def test_what_a_launch_leaves_in_the_workspaces():
    """Of the words that ranks push, those of the last launch are written and no others; the state says which, and how many rows they have."""
    ranks, launched = MoeRanks(2, 128, num_experts=16, top_k=1, max_rows=9, grid=3), []
    for launch, rows in enumerate((9, 1, 3, 9, 2, 2, 1)):
        launched.append(rows)
        ranks.run(ranks.inputs(rows)[0])
        for kernel in ranks.kernels:
            mapped = kernel.symmetric
            memory = mapped.owner.owner[mapped.rank]
            at = mapped.layout.state
            assert int(memory[at + _C.abi.kLaunchesOffset :][:8].view(torch.int64)) == launch + 1
            used = memory[at + _C.abi.kUsedRowsOffset :][:12].view(torch.int32).tolist()
            assert used == [rows if parity == launch % 3 else 0 for parity in range(3)], launch
            words = memory[mapped.layout.tiles :].view(torch.int32).view(3, 2, 8, 9, 16)  # parity, rank, tile, row
            for parity in range(3):
                is_written = words[parity].ne(-1).any(-1)
                assert not bool(is_written[..., used[parity] :].any()) and bool(is_written[..., : used[parity]].all()), (launch, parity)


def test_the_front_refuses_what_is_no_group():
    def kernel(symmetric, hidden=256, max_rows=4, grid=2, rank=0):
        return FusedMoe(hidden, 128, 32, 3, max_rows, torch.device("cpu"), grid, 2.0, rank, symmetric=symmetric)

    mapped = virtual_moe_workspaces(2, 4, 256, torch.device("cpu"))
    with pytest.raises(ValueError, match="the workspaces have hidden 256 and 4 rows; needed are 128 and 4"):
        kernel(mapped[0], hidden=128)
    with pytest.raises(ValueError, match="the workspaces have hidden 256 and 4 rows; needed are 256 and 5"):
        kernel(mapped[0], max_rows=5)
    with pytest.raises(ValueError, match="rank 1 is not 0, the workspaces' own"):
        kernel(mapped[0], rank=1)
    with pytest.raises(ValueError, match="max_rows 49 is outside 1..48"):
        virtual_moe_workspaces(2, 49, 256, torch.device("cpu"))
    first, second = (kernel(one) for one in mapped)
    for kernels in ([first], [second, first], [first, kernel(None)]):
        with pytest.raises(ValueError, match=f"these {len(kernels)} kernels are not the ranks of one group, in order"):
            VirtualMoe(kernels)
    with pytest.raises(ValueError, match=r"virtual ranks disagree: grids \[2, 3\]"):
        VirtualMoe([first, kernel(mapped[1], grid=3)])


def test_the_launch_refuses_what_the_front_never_passes():
    ranks = MoeRanks(2, max_rows=4)
    x, _ = ranks.inputs(2)
    params = ranks.kernels[0].params(ranks.layers[0], x, ranks.empty(2)[0])

    def refusal(**fields):
        changed = _C.abi.ParallelMoeParams(params)
        for name, value in fields.items():
            setattr(changed, name, value)
        with pytest.raises(ValueError) as error:
            _C.parallel_moe_emulate([[changed]], [2])
        return str(error.value)

    assert refusal(rows=0) == "fused_moe: rows 0 is outside 1..48"
    assert refusal(symmetric=_C.symmetric_layout(9, 4, 256)) == "fused_moe: num_ranks 9 is outside 1..8"
    assert refusal(rank=2) == "fused_moe: rank 2 is not below num_ranks 2"
    assert refusal(symmetric=_C.symmetric_layout(2, 4, 128)) == "fused_moe: the workspaces have hidden 128, the layer 256"
    assert refusal(symmetric=_C.symmetric_layout(2, 1, 256)) == "fused_moe: rows 2 is above 1, the most of the kernel and of its workspaces"
    assert refusal(symmetric=_C.symmetric_layout(2, 4, 256, 2)) == "fused_moe: symmetric is not symmetric_layout of num_ranks, max_rows, hidden and 3"
    assert refusal(layer=65536) == "fused_moe: layer 65536 is outside 0..65535"
    assert refusal(symmetric=_C.symmetric_layout(3, 4, 256)) == "fused_moe: the address of the workspace of rank 2 is null or not a multiple of 128"
    with pytest.raises(ValueError, match="^1 grids are not those of 2 ranks$"):
        _C.parallel_moe_emulate([[params], [params]], [2])
    with pytest.raises(ValueError, match="^fused_moe: virtual rank 1 of a launch is rank 0$"):
        _C.check_virtual_moe([params, params], 2)
