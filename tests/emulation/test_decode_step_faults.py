"""Inputs that would reach foreign memory end the launch with a record that names row, value and limit."""

import pytest
import torch
from decode_step_cases import Runner, lose_tile
from tiny_geometries import TINY

from sgl_lowlatency.kernels import abi
from sgl_lowlatency.kernels.fault import DecodeStepFault
from sgl_lowlatency.reference.inputs import random_step, random_weights

GEOMETRY = TINY["group1"]
WEIGHTS = random_weights(GEOMETRY, 31)
LENGTHS = [65, 3, 17]


def launch(change):
    """Runs a step whose inputs `change` has spoilt; the kernel's own checks are all that is left."""
    inputs = random_step(GEOMETRY, LENGTHS, 31)
    change(inputs)
    runner = Runner(GEOMETRY, WEIGHTS, (3,), 4)
    runner.attach(inputs)
    runner.launch(inputs, torch.zeros(3, GEOMETRY.hidden, dtype=torch.bfloat16))
    return runner


def test_good_inputs_leave_no_record():
    runner = launch(lambda inputs: None)
    assert runner.kernel.fault() is None
    assert runner.kernel.executed() == {3: 1}


def set_to(name, row, value):
    def change(inputs):
        getattr(inputs, name)[row] = value

    return change


def spoil_old_slot(inputs):
    inputs.req_to_token[inputs.req_pool_indices[0], 40] = inputs.k_buffers[0].shape[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_to("input_ids", 1, 512), "row 1 has input id 512, outside 0..511 "),
        (set_to("input_ids", 1, 2**32 + 5), "row 1 has input id 4294967301, outside 0..511 "),
        (set_to("seq_lens", 1, 2**40), "row 1 has sequence length 1099511627776, outside 0..73 "),
        (set_to("input_ids", 2, -1), "row 2 has input id -1, outside 0..511 "),
        (set_to("positions", 0, 8192), "row 0 has position 8192, outside 0..8191 "),
        (set_to("positions", 0, -5), "row 0 has position -5, outside 0..8191 "),
        (set_to("seq_lens", 1, 74), "row 1 has sequence length 74, outside 0..73 "),  # req_to_token has 65 + 8 columns
        (set_to("req_pool_indices", 2, 7), "row 2 has request row 7, outside 0..6 "),
        (set_to("req_pool_indices", 2, -1), "row 2 has request row -1, outside 0..6 "),
        (set_to("out_cache_loc", 1, 88), "row 1 has KV slot 88, outside 0..87 "),
        (spoil_old_slot, "row 0 has KV slot 88, outside 0..87 "),
    ],
    ids=["token", "token beyond 32 bits", "length beyond 32 bits", "negative token", "position", "negative position", "length", "request row", "negative request row", "new slot", "old slot"],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(DecodeStepFault, match=message):
        launch(change)


def launch_verify(change, lengths_are_prefix=True):
    """As launch, of three requests with four rows each. req_to_token has 65 + 4 + 8 columns, or without the prefix's 4 as many less."""
    inputs = random_step(GEOMETRY, [65, 4, 17], 31, rows_per_request=4, lengths_are_prefix=lengths_are_prefix)
    change(inputs)
    runner = Runner(GEOMETRY, WEIGHTS, (12,), 4, rows_per_request={12: 4})
    runner.attach(inputs)
    runner.launch(inputs, torch.zeros(12, GEOMETRY.hidden, dtype=torch.bfloat16))
    return runner


def test_good_verify_inputs_leave_no_record():
    for prefix in (73, 0):
        runner = launch_verify(set_to("seq_lens", 1, prefix))
        assert runner.kernel.fault() is None


@pytest.mark.parametrize(
    ("change", "lengths_are_prefix", "message"),
    [
        (set_to("input_ids", 7, 512), True, "row 7 has input id 512, outside 0..511 "),
        (set_to("positions", 11, 8192), True, "row 11 has position 8192, outside 0..8191 "),
        (set_to("out_cache_loc", 6, -1), True, "row 6 has KV slot -1, outside 0.."),
        (set_to("seq_lens", 1, 74), True, "row 4 has sequence length 74, outside 0..73 "),  # and four new tokens are beyond 77 columns
        (set_to("seq_lens", 2, -1), True, "row 8 has sequence length -1, outside 0..73 "),
        (set_to("seq_lens", 1, 74), False, "row 4 has sequence length 74, outside 0..73 "),  # 73 columns, the new tokens counted
        (set_to("req_pool_indices", 2, 7), True, "row 8 has request row 7, outside 0..6 "),
        (spoil_old_slot, True, "row 0 has KV slot 101, outside 0..100 "),
    ],
    ids=["token", "position", "new slot", "prefix", "negative prefix", "length", "request row", "old slot"],
)
def test_bad_input_of_a_verify_step_is_named(change, lengths_are_prefix, message):
    """What a request has is named by its first row."""
    with pytest.raises(DecodeStepFault, match=message):
        launch_verify(change, lengths_are_prefix)


def test_shapes_of_a_verify_step_are_refused_before_the_launch():
    inputs = random_step(GEOMETRY, [65, 4, 17], 31, rows_per_request=4, lengths_are_prefix=True)
    runner = Runner(GEOMETRY, WEIGHTS, (12,), 4, rows_per_request={12: 4})
    hidden = torch.zeros(12, GEOMETRY.hidden, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="req_to_token has 3 columns, a request may have 4 new tokens"):
        runner.kernel.attach_kv(inputs.k_buffers, inputs.v_buffers, inputs.req_to_token[:, :3].contiguous())
    runner.attach(inputs)
    for name, count in (("seq_lens", 12), ("req_pool_indices", 12), ("positions", 3)):
        wrong = type(inputs)(**{**vars(inputs), name: torch.zeros(count, dtype=torch.int64)})
        with pytest.raises(ValueError, match=rf"{name}: shape \({count},\) is not \({15 - count},\)"):
            runner.launch(wrong, hidden)
    assert runner.kernel.executed() == {}


@pytest.mark.parametrize(
    ("op", "edge", "layer"), [(0, "qkv|attention", 0), (1, "out_proj", 0), (2, "gate_up", 0), (3, "down", -1)],
    ids=["qkv", "out_proj", "gate_up", "down"],
)
def test_a_tile_that_nobody_owns_is_missed_by_name(op, edge, layer):
    """The owners of down hand over the embedding too: that is missed first. Blocks without attention items do not wait for qkv;
    their wait for what others should make of it began as early."""
    inputs = random_step(GEOMETRY, LENGTHS, 31)
    runner = Runner(GEOMETRY, WEIGHTS, (3,), 4, deadline_s=0.5)
    lose_tile(runner, 3, op)
    runner.attach(inputs)
    with pytest.raises(DecodeStepFault, match=rf"waited \d\.\d\d s for word \d+ of edge '({edge})' of layer {layer} \("):
        runner.launch(inputs, torch.zeros(3, GEOMETRY.hidden, dtype=torch.bfloat16))
    assert runner.kernel.executed() == {}
    record = runner.kernel.fault()
    assert (record.seen, record.layer) == (abi.UNWRITTEN, layer)
    buffers = {"qkv": "qkv", "out_proj": "mid_scaled", "gate_up": "activation", "down": "end_scaled"}
    if (missed := abi.EDGE_NAMES[record.edge]) == "attention":
        return
    buffer = runner.plans[3].buffer(buffers[missed])
    row_words = buffer.words // 3
    assert record.expected % row_words < row_words // runner.plans[3].ops[op].num_tiles, "of tile 0, the first of its row"


def test_shapes_and_types_are_refused_before_the_launch():
    inputs = random_step(GEOMETRY, LENGTHS, 31)
    runner = Runner(GEOMETRY, WEIGHTS, (3,), 4)
    hidden = torch.zeros(3, GEOMETRY.hidden, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="attach_kv was not called"):
        runner.launch(inputs, hidden)
    runner.attach(inputs)
    with pytest.raises(ValueError, match="hidden_out: shape"):
        runner.launch(inputs, hidden[:2])
    with pytest.raises(ValueError, match="rows 2 has no plan"):
        runner.launch(random_step(GEOMETRY, LENGTHS[:2], 31), hidden[:2])
    short = type(inputs)(**{**vars(inputs), "seq_lens": inputs.seq_lens.int()})
    with pytest.raises(ValueError, match="seq_lens: dtype torch.int32 is not torch.int64"):
        runner.launch(short, hidden)
    assert runner.kernel.executed() == {}


def test_after_a_fault_no_launch_starts_from_what_it_left():
    inputs = random_step(GEOMETRY, LENGTHS, 31)
    inputs.positions[0] = -5
    runner = Runner(GEOMETRY, WEIGHTS, (3,), 4)
    runner.attach(inputs)
    hidden = torch.zeros(3, GEOMETRY.hidden, dtype=torch.bfloat16)
    with pytest.raises(DecodeStepFault, match="row 0 has position -5"):
        runner.launch(inputs, hidden)
    inputs.positions[0] = LENGTHS[0] - 1
    with pytest.raises(DecodeStepFault, match="an earlier launch failed: decode_step stopped: .* row 0 has position -5"):
        runner.launch(inputs, hidden)
    assert runner.kernel.executed() == {}
