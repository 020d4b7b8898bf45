"""A rank's place in its group: what goes into its parameters and its fault record, and faults between ranks in words."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from sgl_lowlatency import _C
from sgl_lowlatency.kernels.decode_step import DecodeStep
from sgl_lowlatency.kernels.fault import describe_fault
from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.kernels.virtual_ranks import VirtualRanks, virtual_groups
from sgl_lowlatency.plan.static_plan import make_plan
from sgl_lowlatency.reference.inputs import random_weights
from sgl_lowlatency.reference.sharding import join_outputs, shard_weights
from sgl_lowlatency.reference.step import StepOutputs

CPU = torch.device("cpu")
WHOLE = Geometry(1, 64, 2, 2, 64, 128, 100, 64, 1e-6, False)
KINDS = _C.abi.kFaultKinds


def record(kind, **fields):
    return SimpleNamespace(kind=KINDS[kind], **{"rank": 1, "sm": 5, "block": 6, "layer": 9, "edge": 3, "expected": 17, "seen": 1, "waited_ns": 0} | fields)


def test_what_a_rank_waits_for_is_named():
    where = "decode_step stopped: rank 1, SM 5, block 6"
    for phase, words in ((_C.abi.kPeerOutProj, "part of tile 17 of out_proj of layer 9"), (_C.abi.kPeerDown, "part of tile 17 of down of layer 9"),
                         (_C.abi.kPeerEmbedding, "rows of the embedding, tile 17")):
        fault = record("peer_tile", expected=phase << 24 | 17, waited_ns=1_500_000_000)
        assert describe_fault(fault) == f"{where} waited 1.50 s for rank 3's {words}"
    word = 1 << 63 | 2 << 56 | 7 << 48 | 11 << 32 | _C.abi.kPeerDown << 24 | 5
    assert _C.abort_reason(word) == (2, 7, 11, 5, _C.abi.kPeerDown)
    gave_up = f"{where}: rank 2 gave up waiting for rank 7's part of tile 5 of down of layer 11"
    assert describe_fault(record("peer_abort", edge=-1, waited_ns=word)) == gave_up
    itself = 1 << 63 | 2 << 56 | 2 << 48 | 11 << 32 | _C.abi.kPeerNothing << 24
    fault = record("peer_abort", expected=_C.abi.kPeerOutProj << 24 | 17, waited_ns=itself)
    assert describe_fault(fault) == f"{where}: rank 2 stopped by itself in layer 11, while it waited for rank 3's part of tile 17 of out_proj of layer 9"


def step_of(rank, groups):
    weights = random_weights(WHOLE, 1)
    local = WHOLE.shard(len(groups))
    return DecodeStep(local, {1: make_plan(local, 1, 2)}, shard_weights(WHOLE, weights, rank, len(groups)), CPU, 0.1, group=groups[rank])


def test_a_rank_knows_its_group():
    groups = virtual_groups(2, 1, WHOLE.hidden, WHOLE.vocab, CPU)
    step = step_of(1, groups)
    params = step._params[1]
    assert (params.rank, params.num_tokens, params.vocab_shard, params.symmetric.num_ranks) == (1, 100, 64, 2)
    mapped = groups[1].workspaces
    group = step._host.address + _C.abi.kFaultRecordBytes + (-_C.abi.kFaultRecordBytes % 64)
    assert ctypes.c_uint64.from_address(step._host.address + _C.abi.kFaultGroupOffset).value == group
    assert [ctypes.c_int32.from_address(group + at).value for at in (0, 4)] == [1, 2]
    assert [ctypes.c_uint64.from_address(group + 8 + 8 * rank).value for rank in range(2)] == [address + mapped.layout.abort for address in mapped.addresses]
    alone = virtual_groups(1, 1, WHOLE.hidden, WHOLE.vocab, CPU)
    assert step.extra_bytes - step_of(0, alone).extra_bytes != 0 and step.extra_bytes > mapped.layout.total_bytes


def test_virtual_ranks_are_one_groups_in_order():
    groups = virtual_groups(2, 1, WHOLE.hidden, WHOLE.vocab, CPU)
    steps = [step_of(rank, groups) for rank in range(2)]
    assert VirtualRanks(steps).grid == 2
    for wrong in (steps[::-1], steps[:1]):
        with pytest.raises(ValueError, match="are not the ranks of one group, in order"):
            VirtualRanks(wrong)
    with pytest.raises(ValueError, match="num_ranks 9 is outside 1..8"):
        virtual_groups(9, 1, 64, 100, CPU)


def test_shares_are_sglangs_and_add_up():
    """q, k and v by heads, gate and up by rows each, out_proj and down by columns, the vocabulary in padded rows."""
    whole = random_weights(WHOLE, 1, has_lm_head=True)
    layer, shares = whole.layers[0], [shard_weights(WHOLE, whole, rank, 2) for rank in range(2)]
    own = [share.layers[0] for share in shares]
    heads = layer.qkv.view(3, 2, 64, 64)
    for rank in range(2):
        assert torch.equal(own[rank].qkv.view(3, 64, 64), heads[:, rank])
        assert torch.equal(own[rank].gate_up.view(2, 64, 64), layer.gate_up.view(2, 2, 64, 64)[:, rank])
        assert own[rank].input_norm is layer.input_norm
    for name in ("out_proj", "down"):
        assert torch.equal(torch.cat([getattr(one, name) for one in own], 1), getattr(layer, name))
    assert torch.equal(torch.cat([share.embedding for share in shares])[:100], whole.embedding)
    assert shares[1].lm_head.shape == (64, 64) and not shares[1].lm_head[36:].any()
    parts = [StepOutputs(torch.ones(1, 2), *(torch.full((1, 1, 1, 2), float(rank)) for _ in "kv"), torch.full((1, 64), float(rank))) for rank in range(2)]
    joined = join_outputs(WHOLE, parts)
    assert joined.k_rows.flatten().tolist() == [0, 0, 1, 1] and joined.logits.shape == (1, 100) and joined.logits.sum() == 36
