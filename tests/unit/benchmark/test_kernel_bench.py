"""The kernel bench's own inputs, driven through the kernel in host emulation at a tiny geometry."""

import pytest

torch = pytest.importorskip("torch")

from benchmark import models  # noqa: E402
from benchmark.kernels import decode_step as bench  # noqa: E402
from sgl_lowlatency.kernels.decode_step import DecodeStep  # noqa: E402
from sgl_lowlatency.plan.static_plan import make_plan  # noqa: E402

SHAPE = models.Shape(2, 128, 4, 2, 64, 192, True, vocab=300, max_position=64)
CONTEXT, ROWS = 21, 3


@pytest.fixture(scope="module")
def pool():
    return bench.Pool(SHAPE, ROWS, CONTEXT, torch.device("cpu"))


def test_slots_are_scattered_and_nobody_shares_one(pool):
    table = pool.req_to_token[1:, :CONTEXT]
    assert table.unique().numel() == ROWS * CONTEXT
    assert table.min() == 1  # slot 0 is padding
    assert table.max() < pool.k[0].shape[0]
    assert (table[:, 1:] - table[:, :-1] != 1).float().mean() > 0.8


def test_the_new_token_is_the_last_of_its_request(pool):
    inputs = bench.Inputs.make(SHAPE, pool, ROWS, CONTEXT, torch.device("cpu"))
    ids, positions, lengths, requests, slots = inputs.tensors
    assert positions.tolist() == [CONTEXT - 1] * ROWS
    assert lengths.tolist() == [CONTEXT] * ROWS
    assert slots.tolist() == [pool.req_to_token[r, CONTEXT - 1].item() for r in requests.tolist()]
    assert inputs.hidden.isnan().all()
    assert ids.max() < SHAPE.vocab


def test_the_kernel_takes_these_inputs_and_its_output_depends_on_every_layer(pool):
    device = torch.device("cpu")
    geometry = bench.geometry_of(SHAPE)
    plans = {ROWS: make_plan(geometry, ROWS, 3, 232448)}
    outputs = []
    for damaged_layer in (None, 0, 1):
        weights = bench.make_weights(SHAPE, device)
        if damaged_layer is not None:
            weights.layers[damaged_layer].down.mul_(0.5)
        step = DecodeStep(geometry, plans, weights, device, deadline_s=60.0)
        step.attach_kv(pool.k, pool.v, pool.req_to_token)
        inputs = bench.Inputs.make(SHAPE, pool, ROWS, CONTEXT, device)
        step.launch(ROWS, *inputs.tensors, inputs.hidden)
        assert step.executed() == {ROWS: 1}
        assert inputs.hidden.isfinite().all()
        outputs.append(inputs.hidden.float())
    for other in outputs[1:]:
        assert (outputs[0] - other).norm() / outputs[0].norm() > 0.02
