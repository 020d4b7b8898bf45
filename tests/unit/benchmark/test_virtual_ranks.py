"""The bench of virtual ranks without a GPU: emulated ranks against the whole model's step, what it compares, and the row it writes."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from benchmark.kernels import virtual_ranks  # noqa: E402
from sgl_lowlatency.bench.inputs import Inputs, Pool  # noqa: E402
from sgl_lowlatency.bench.results import Results  # noqa: E402
from sgl_lowlatency.bench.shapes import Shape  # noqa: E402
from sgl_lowlatency.build.device_limits import EMULATED_SHARED_MEMORY_BYTES, DeviceLimits  # noqa: E402
from sgl_lowlatency.kernels.decode_step import DecodeStep  # noqa: E402
from sgl_lowlatency.plan.static_plan import make_plan  # noqa: E402
from sgl_lowlatency.reference.inputs import random_weights  # noqa: E402

CPU, ROWS, CONTEXT = torch.device("cpu"), 3, 20
SHAPE = Shape(2, 128, 4, 2, 64, 256, 500, 64, 1e-6, False)


@pytest.fixture
def measured(monkeypatch):
    """(Ranks, arguments, the whole step's hidden states) of one case."""
    monkeypatch.setattr(virtual_ranks, "device_limits", lambda _device: DeviceLimits(6, EMULATED_SHARED_MEMORY_BYTES, "emulation"))
    weights = random_weights(SHAPE.geometry, 0, has_lm_head=True)
    step = DecodeStep(SHAPE.geometry, {ROWS: make_plan(SHAPE.geometry, ROWS, 6, has_head=True)}, weights, CPU, 5.0)
    whole = SimpleNamespace(shape=SHAPE, device=CPU, step=step, settings=SimpleNamespace(kernel_deadline_s=5.0))
    pool = Pool(SHAPE, ROWS, CONTEXT, CPU)
    step.attach_kv(pool.k, pool.v, pool.req_to_token)
    inputs = Inputs.make(SHAPE, pool, ROWS, CONTEXT, CPU)
    ranks = virtual_ranks.Ranks(whole, 2, (ROWS,))
    ranks.attach(pool)
    step.launch(ROWS, *inputs.tensors, inputs.hidden)
    return ranks, ranks.arguments(inputs), inputs.hidden


def test_ranks_agree_with_each_other_and_with_the_whole_step(measured):
    ranks, arguments, hidden = measured
    assert ranks.grid == 3
    assert virtual_ranks.problems(ranks, arguments, lambda: ranks.launch(arguments), hidden) == []


def test_differences_are_named(measured):
    ranks, arguments, hidden = measured

    def replay():
        ranks.launch(arguments)
        arguments[1]["hidden_out"][1, 7] += 1
        arguments[0]["logits"][0, 0] = float("nan")

    assert virtual_ranks.problems(ranks, arguments, replay, hidden) == ["logits are not written in full", "ranks or replays differ"]
    (reason,) = virtual_ranks.problems(ranks, arguments, lambda: ranks.launch(arguments), hidden.flip(0))
    assert reason.startswith("hidden states are 1.") and reason.endswith(" from the whole step's")


def test_a_row_has_what_a_results_file_needs():
    row = virtual_ranks.row_of("qwen3-8b", SHAPE, 4, 33, 6, 1024, [0.03, 0.031, 0.03], [0.05, 0.05, 0.0501], [])
    results = Results(None, what="kernel-step", name="x", weights="random", command=[], commit="0" * 40)
    added = results.add(**row)
    assert added["a_layer_us"] == 10.0 and added["tp"] == 4 and added["ratio"] == 0.6
    assert virtual_ranks.table(results.content).endswith("      qwen3-8b     4     33    6    1024   0.0300   0.0500      10.00  -")
