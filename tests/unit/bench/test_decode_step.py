"""The bench's own inputs, driven through the kernel in host emulation at a tiny geometry, and the rows it makes of times."""

import dataclasses
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from sgl_lowlatency import config  # noqa: E402
from sgl_lowlatency.bench import decode_step, floors, provenance, timing  # noqa: E402
from sgl_lowlatency.bench.inputs import Inputs, Pool  # noqa: E402
from sgl_lowlatency.bench.lm_head import LmHead  # noqa: E402
from sgl_lowlatency.bench.results import Results  # noqa: E402
from sgl_lowlatency.bench.shapes import PRESETS, Shape  # noqa: E402
from sgl_lowlatency.kernels.decode_step import DecodeStep, EmulationOptions  # noqa: E402
from sgl_lowlatency.plan.static_plan import make_plan  # noqa: E402
from sgl_lowlatency.reference.inputs import random_weights  # noqa: E402

SHAPE = Shape(
    num_layers=2, hidden=128, num_q_heads=4, num_kv_heads=2, head_dim=64, intermediate=192,
    vocab=300, max_position=64, rms_eps=1e-6, tied_head=True,
)  # fmt: skip
CONTEXT, ROWS, CPU = 21, 3, torch.device("cpu")


@pytest.fixture(scope="module")
def pool():
    return Pool(SHAPE, ROWS, CONTEXT, CPU)


def test_slots_are_scattered_and_nobody_shares_one(pool):
    table = pool.req_to_token[1:, :CONTEXT]
    assert table.unique().numel() == ROWS * CONTEXT
    assert table.min() == 1  # slot 0 is padding
    assert table.max() < pool.k[0].shape[0]
    assert (table[:, 1:] - table[:, :-1] != 1).float().mean() > 0.8


def test_the_new_token_is_the_last_of_its_request(pool):
    inputs = Inputs.make(SHAPE, pool, ROWS, CONTEXT, CPU)
    ids, positions, lengths, requests, slots = inputs.tensors
    assert positions.tolist() == [CONTEXT - 1] * ROWS
    assert lengths.tolist() == [CONTEXT] * ROWS
    assert slots.tolist() == [pool.req_to_token[r, CONTEXT - 1].item() for r in requests.tolist()]
    assert inputs.hidden.isnan().all()
    assert ids.max() < SHAPE.vocab


@pytest.mark.parametrize("flags", [{}, {"has_qk_norm": False}, {"has_qk_norm": False, "has_qkv_bias": True}])
def test_the_kernel_takes_these_inputs_and_its_output_depends_on_every_layer(pool, flags):
    shape = dataclasses.replace(SHAPE, **flags)
    plans = {ROWS: make_plan(shape.geometry, ROWS, 3, 232448)}
    outputs = []
    for damaged_layer in (None, 0, 1):
        weights = random_weights(shape.geometry, 0, CPU, shape.has_qk_norm, shape.has_qkv_bias)
        if damaged_layer is not None:
            weights.layers[damaged_layer].down.mul_(0.5)
        step = DecodeStep(shape.geometry, plans, weights, CPU, deadline_s=60.0)
        step.attach_kv(pool.k, pool.v, pool.req_to_token)
        inputs = Inputs.make(shape, pool, ROWS, CONTEXT, CPU)
        step.launch(ROWS, *inputs.tensors, inputs.hidden)
        assert step.executed() == {ROWS: 1}
        assert inputs.hidden.isfinite().all()
        outputs.append(inputs.hidden.float())
    for other in outputs[1:]:
        assert (outputs[0] - other).norm() / outputs[0].norm() > 0.02


def test_the_head_is_checked_against_float32_of_its_own_hidden_states():
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(1000, 64, generator=generator).bfloat16()
    hidden = torch.randn(ROWS, 64, generator=generator).bfloat16()
    head = LmHead(weight, max_rows=ROWS + 1)
    head.launch(hidden)
    assert head.problems(hidden) == []
    (stale,) = head.problems(hidden.flip(0))
    assert "logits of the LM head are off by" in stale
    head.launch(torch.full_like(hidden, float("nan")))
    assert head.problems(hidden) != []


def test_a_row_has_the_floors_of_the_step_and_of_step_and_head():
    shape = PRESETS["llama-3.2-1b"]
    row = decode_step.row_of("llama-3.2-1b", shape, 1, 32, [0.62, 0.61, 0.63], [0.75, 0.77, 0.76], [0.81, 0.8, 0.82], 4000.0)
    head_bytes = 128256 * 2048 * 2
    assert row["step_head_floor_bytes"] - row["floor_bytes"] == head_bytes
    assert row["step_head_floor_ms"] - row["floor_ms"] == pytest.approx(head_bytes / 4000.0 / 1e6)
    assert row["head_ms"] == pytest.approx(0.14)
    assert row["step_head_floor_share"] == pytest.approx(row["step_head_floor_ms"] / 0.76, abs=1e-4)
    assert row["step_cublas_ms"] == [0.81, 0.8, 0.82]
    assert row["floor_bytes"] == floors.step_bytes(shape, rows=1, context=32, with_head=False)


def test_graphs_are_timed_in_turn_with_as_many_replays_as_fill_a_group(monkeypatch):
    calls = []

    def group_ms(replay, count):
        calls.append((replay, count))
        return {"a": 0.5, "b": 2.0}[replay]

    monkeypatch.setattr(timing, "group_ms", group_ms)
    assert timing.in_turn(["a", "b"], groups=3, target_ms=10.0) == [[0.5] * 3, [2.0] * 3]
    assert calls[-6:] == [("a", 20), ("b", 5)] * 3


@pytest.fixture
def emulated(monkeypatch):
    """measure() on the CPU: the kernel in emulation, a graph's replay is its launch, times are made up."""
    monkeypatch.setattr(config, "get", lambda: config.Config(emulate=True))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(timing, "capture", lambda run: SimpleNamespace(replay=run))
    monkeypatch.setattr(timing, "in_turn", lambda replays, groups, target_ms: [[1.0] * groups, [1.5] * groups, [1.75] * groups])
    monkeypatch.setattr(decode_step, "device_id", lambda device: None)
    monkeypatch.setattr(provenance, "gpu", lambda device_id=None: {"gpu": "none", "num_gpus": 0, "driver": "none", "clocks_mhz": {}})
    results = Results(None, what="kernel-step", name="x", weights="w", command=["x"], commit="abc")
    settings = decode_step.Settings(rows=(1, 3), contexts=(5, 21), groups=3)

    def measure(shape):
        said = []
        decode_step.measure("tiny", shape, settings, results, 4000.0, CPU, said.append)
        return results.content["rows"], said

    return measure


@pytest.mark.parametrize("tied", [True, False])
def test_every_case_is_measured_and_passes_its_checks(emulated, tied):
    rows, said = emulated(dataclasses.replace(SHAPE, tied_head=tied))
    assert [(row["rows"], row["context"]) for row in rows] == [(1, 5), (3, 5), (1, 21), (3, 21)]
    assert [row["problems"] for row in rows] == [[]] * 4
    assert [(row["on_ms"], row["step_head_ms"], row["head_ms"]) for row in rows] == [([1.0] * 3, [1.5] * 3, 0.5)] * 4
    assert [row["step_cublas_ms"] for row in rows] == [[1.75] * 3] * 4
    assert len({row["plan"] for row in rows}) == 2 and said[-1].endswith("output checked")


def test_a_replay_that_does_nothing_is_found(emulated, monkeypatch):
    monkeypatch.setattr(timing, "capture", lambda run: SimpleNamespace(replay=lambda: None))
    rows, _ = emulated(SHAPE)
    for row in rows:
        assert {"2 of 7 launches counted", "eager and replayed outputs differ", "eager and replayed logits differ"} <= set(row["problems"])
        assert any(problem.startswith("cuBLAS: logits of the LM head are off by") for problem in row["problems"])


def test_logits_that_the_kernel_gets_wrong_are_found(emulated, monkeypatch):
    """A head without its factor 1 / rms, planted; hidden states and the product behind them stay right."""
    construct = DecodeStep.__init__
    monkeypatch.setattr(DecodeStep, "__init__", lambda *args, **kwargs: construct(*args, **kwargs, emulation=EmulationOptions(planted=21)))
    rows, _ = emulated(SHAPE)
    for row in rows:
        (problem,) = row["problems"]
        assert problem.startswith("logits of the LM head are off by")


def test_a_kernel_that_ends_itself_is_reported_in_its_own_words(emulated, monkeypatch):
    make = Inputs.make

    def with_bad_token(shape, *others):
        inputs = make(shape, *others)
        inputs.tensors[0][0] = shape.vocab + 7
        return inputs

    monkeypatch.setattr(Inputs, "make", with_bad_token)
    with pytest.raises(RuntimeError, match=r"row 0 has input id 307, outside 0..299"):
        emulated(SHAPE)
