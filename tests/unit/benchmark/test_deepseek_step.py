"""deepseek_step without a GPU: which choices are measured, what a capture leaves behind, what a case compares. Graphs and times are stand-ins; the
layers and the step are those of tests/deepseek_layers.py, in emulation."""

import functools
import json
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

import deepseek_layers as small  # noqa: E402
from sglang.srt.model_executor.forward_context import ForwardContext, set_forward_context  # noqa: E402

from benchmark.kernels import deepseek_step, sglang_runner  # noqa: E402
from sgl_lowlatency.bench import timing  # noqa: E402
from sgl_lowlatency.runtime import sglang_state  # noqa: E402

ALL = "attention_in+attention_out+moe"


def test_choices_are_each_alone_attentions_two_and_all():
    assert ["+".join(names) for names in deepseek_step.choices(["attention_in", "attention_out", "moe"])] == [
        "attention_in", "attention_out", "moe", "attention_in+attention_out", ALL
    ]  # fmt: skip
    assert deepseek_step.choices(["moe"]) == [("moe",)]
    assert deepseek_step.choices(["attention_out"]) == [("attention_out",)]


class Runner:
    """A model runner whose graphs are the logits that a forward gave when it was captured, of one size."""

    capture_bs = [2]

    def __init__(self):
        self.model, self.backend = small.Target(), SimpleNamespace(_graphs={}, _outputs={})
        self.decode_cuda_graph_runner, self.bs, self._replay_graph_key = self, 2, "key"
        self.capture()

    def capture(self):
        set_forward_context(ForwardContext(attn_backend=small.Backend()))
        logits = self.model.forward(*small.batch_of(2))
        self.backend._graphs["key"], self.backend._outputs["key"] = SimpleNamespace(replay=lambda: None), logits


@pytest.fixture
def bench(monkeypatch):
    """A Bench of all slices. spoilt: logits that another choice than SGLang's gives."""
    small.install(monkeypatch)
    monkeypatch.setattr(sglang_state, "metrics_enabled", lambda: False)
    monkeypatch.setattr("sgl_lowlatency.build.device_limits.device_limits", lambda device: SimpleNamespace(grid=3))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(timing, "in_turn", lambda replays, *, groups, target_ms: [[float(i)] * groups for i in range(len(replays))])

    def forward(runner, within):
        if within is None:
            return SimpleNamespace(in_graph=True, logits=runner.backend._outputs["key"])
        set_forward_context(ForwardContext(attn_backend=(backend := small.Backend())))
        runner.token_to_kv_pool = backend.token_to_kv_pool
        arguments = small.batch_of(2)
        with within(arguments[2]):
            assert runner.decode_cuda_graph_runner is None, "launch by launch"
            return SimpleNamespace(in_graph=False, logits=runner.model.forward(*arguments))

    monkeypatch.setattr(sglang_runner, "decode", lambda runner, within=None, **case: forward(runner, within))
    monkeypatch.setattr(sglang_runner, "again", lambda runner, step, within=None: forward(runner, within))
    monkeypatch.setattr(sglang_runner, "engram_history", lambda runner: None)  # the stand-in hashes nothing
    previous = set_forward_context(None)
    with small.one_gpu(), torch.no_grad():
        yield lambda slices=ALL: deepseek_step.Bench(Runner(), SimpleNamespace(slices=slices.replace("+", ","), groups=3, group_ms=1.0))
    set_forward_context(previous)


def test_every_choice_is_captured_and_compared(bench):
    made = bench()
    assert made.notes == [] and "forward" not in made.runner.model.__dict__
    assert list(made.arms) == ["sglang", "attention_in", "attention_out", "moe", "attention_in+attention_out", ALL]
    times, distances = made.measure(2, 9, 50)
    assert times["moe"] == [3.0] * 3 and distances["sglang"] == 0
    assert 0 < distances[ALL] < 0.06 and made.runner.backend._outputs is not made.arms[ALL].outputs, "SGLang's graphs are in place again"


@pytest.mark.parametrize("arm", ["moe", ALL])
def test_an_arm_is_judged_on_the_experts_that_it_chose(bench, arm, monkeypatch):
    monkeypatch.setattr(small.Linear, "has_fp8_activations", True)
    made = bench()
    found, problems = deepseek_step.judge(made, arm, 2, 9, 50)
    assert problems == [] and 0 < found["same_experts_distance"] < deepseek_step.NEAR / 2 and found["others_chosen"] == 0
    assert len(found["kv_distances"]) == len(made.runner.model.model.layers) and 0 < max(found["kv_distances"]) < deepseek_step.KV_NEAR / 2
    assert len(found["router_distances"]) == len(made.runner.model.model.layers) and 0 < max(found["router_distances"]) < 0.1
    assert made.runner.decode_cuda_graph_runner is made.runner and "forward" not in made.runner.model.__dict__
    assert made.step.running.router_logits is None and all("forward" not in layer.mlp.gate.__dict__ for layer in made.runner.model.model.layers)


TRANSPOSED_MIX, NEXT_EXPERT = 42, 26  # dialect::Planted


@pytest.mark.parametrize(("arm", "planted"), [("attention_out", TRANSPOSED_MIX), ("moe", NEXT_EXPERT)])
def test_a_wrong_step_is_far_on_the_same_experts(bench, arm, planted, monkeypatch):
    """One that no check of its slices has stopped."""
    from sgl_lowlatency.build import deepseek_v4
    from sgl_lowlatency.kernels.decode_step import EmulationOptions

    monkeypatch.setattr(deepseek_v4, "build_slices", functools.partial(deepseek_v4.build_slices, emulation=EmulationOptions(planted=planted)))
    monkeypatch.setattr("sgl_lowlatency.runtime.deepseek_v4_step.DeepseekV4Step._misses", lambda self, rows: [])
    found, problems = deepseek_step.judge(bench(arm), arm, 2, 9, 50)
    assert found["same_experts_distance"] > deepseek_step.NEAR
    logits, keys = problems
    assert logits.startswith("logits on the same experts differ by ") and logits.endswith(" of their norm, more than 0.1")
    assert keys.startswith("KV rows of a layer on the same experts differ by ") and keys.endswith(" of their norm, more than 0.11")
    assert max(found["kv_distances"]) > deepseek_step.KV_NEAR


def test_an_arm_that_sglang_ran_is_not_judged(bench, monkeypatch):
    made = bench("moe")
    monkeypatch.setattr(made.step, "widths", (1,))
    assert deepseek_step.judge(made, "moe", 2, 9, 50) == (
        {}, ["not compared on the same experts: RuntimeError: SGLang's own forward ran in place of moe: {'2 rows, built for 1 to 1': 1}"]
    )  # fmt: skip


def test_a_step_of_sglangs_that_does_not_repeat_itself_is_told(bench, monkeypatch):
    made, run = bench("moe"), []

    def again(runner, step, within=None):
        run.append(runner.backend._outputs["key"])
        return SimpleNamespace(in_graph=True, logits=run[-1] * (1 + 0.5 * (len(run) == len(made.arms))))

    monkeypatch.setattr(sglang_runner, "again", again)
    assert (found := made.measure(2, 9, 50)[1]["sglang"]) == pytest.approx(0.5)
    assert deepseek_step.repeat_problems(found) == ["SGLang's own step, run twice, differs by 0.5 of its norm: distances prove nothing"]
    assert deepseek_step.repeat_problems(0.0) == []


def test_a_choice_that_misses_its_check_is_a_note(bench, monkeypatch):
    from sgl_lowlatency.specs.nvidia import deepseek_v4

    monkeypatch.setattr(deepseek_v4, "BOUNDS", {**deepseek_v4.BOUNDS, "attention_out.streams": -1.0})
    made = bench()
    assert list(made.arms) == ["sglang", "attention_in", "moe"] and len(made.notes) == 3
    assert made.notes[0].startswith("attention_out: slices differ from SGLang's launches in a step of 2 rows: attention_out.streams ")


def test_a_profile_names_the_kernels_of_both_ends(bench, monkeypatch, tmp_path):
    made = bench()
    made.args.out, made.args.name = tmp_path, "step"
    made.measure(2, 9, 50)
    kernel = {"name": "k", "stream": 7, "start_us": 0.0, "us": 2.0}
    monkeypatch.setattr(deepseek_step.graph_trace, "record", lambda replay: [kernel] * (1 + [r for r in made.replays.values()].index(replay)))
    monkeypatch.setattr(made, "replays", {name: object() for name in made.replays})
    found = deepseek_step.profiled(made, 2, 9)
    assert {arm: told["kernels"] for arm, told in found["2x9"].items()} == {"sglang": 1, ALL: 6}
    assert json.loads((tmp_path / "step-2x9-kernels.json").read_text())["sglang"] == [kernel]


def test_layers_are_told_from_attention_to_attention():
    names = ["embed", "x::flash_fwd_splitkv_mla_fp8", "moe", "x::flash_fwd_splitkv_mla_fp8", "moe", "post", "x::flash_fwd_splitkv_mla_fp8", "head"]
    step = [{"name": name, "stream": 7, "start_us": 10.0 * i * i, "us": 5.0} for i, name in enumerate(names)]
    found = deepseek_step.layers_of(step)
    assert found["layer_us"] == [80.0, 270.0] and found["layer_kernels"] == [2, 3]
    assert found["layer"] == [(0.0, 5.0, names[1]), (30.0, 5.0, "moe"), (80.0, 5.0, names[3])]
    assert deepseek_step.layers_of(step[:2]) == {"layer_us": [], "layer_kernels": [], "layer": []}


def test_a_step_outside_of_its_graph_is_no_measurement(bench, monkeypatch):
    made = bench()
    made.runner.bs = 4
    with pytest.raises(RuntimeError, match="SGLang ran the step of 2 rows padded"):
        made.measure(2, 9, 50)


def test_layers_that_the_guard_refuses_end_the_run(bench, monkeypatch):
    monkeypatch.setattr("sgl_lowlatency.guard.attention_slices.RATIOS", (0, 1))
    with pytest.raises(ValueError, match="layer 2: self_attn compresses 2 keys into one, which is not one of 0, 1"):
        bench()


def test_every_request_of_the_largest_case_has_pages_of_its_own():
    assert deepseek_step.pool_arguments([(1, 1024), (8, 1024)]) == ["--max-total-tokens", str((8 * 5 + 4) * 256)]
