"""Steps of a model whose layers' MoE fused_moe takes, in emulation: what is covered, what stays SGLang's, the check of the first step. Attention's
slices, in SGLang's own layers: tests/contract/test_deepseek_v4_layers.py."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from moe_stand_ins import DeepseekV2MoE  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402

from sgl_lowlatency.build.deepseek_v4 import build_slices  # noqa: E402
from sgl_lowlatency.kernels.decode_step import EmulationOptions  # noqa: E402
from sgl_lowlatency.runtime import sglang_state  # noqa: E402
from sgl_lowlatency.runtime.deepseek_v4_step import DeepseekV4Step  # noqa: E402

NEXT_EXPERT, UNWEIGHTED_EXPERT = 26, 24  # dialect::Planted
BOUNDS = {"moe.relative_l2": 0.1, "routing.gap": 1e-3}


@pytest.fixture(autouse=True)
def no_metrics(monkeypatch):
    monkeypatch.setattr(sglang_state, "metrics_enabled", lambda: False)


class Model:
    """Two layers: x + MoE of x, twice."""

    def __init__(self, planted=0, check=True, tokens_per_request=1):
        self.layers = [DeepseekV2MoE(seed=seed) for seed in range(2)]
        layers = [SimpleNamespace(mlp=mlp) for mlp in self.layers]
        slices = build_slices(layers, ("moe",), 16, torch.device("cpu"), 3, 2.0, EmulationOptions(planted=planted))
        self.step = DeepseekV4Step(slices, (1, 6, 12), tokens_per_request, BOUNDS, check)

    def original(self, x, token_ids):
        for mlp in self.layers:
            x = x + mlp(x, None, input_ids=token_ids, input_ids_global=token_ids, leave_output_sum=True)
        return x

    def calls(self):
        return [mlp.calls for mlp in self.layers]


MODES = {"decode": ForwardMode.DECODE, "verify": ForwardMode.TARGET_VERIFY, "prefill": ForwardMode.EXTEND}


def batch_of(mode, rows, tokens=1, spec_info=None):
    """Of `rows` rows, `tokens` a request."""
    if mode == "verify" and spec_info is None:
        spec_info = SimpleNamespace(is_verify_input=lambda: True, ragged_verify_layout=None, draft_token_num=tokens, topk=1)
    ids = torch.zeros(rows, dtype=torch.int64)
    return SimpleNamespace(
        forward_mode=MODES[mode], spec_info=spec_info, batch_size=rows // tokens, input_embeds=None, replace_embeds=None, lora_ids=None,
        tbo_children=None, input_ids=ids, positions=ids, seq_lens=ids, req_pool_indices=ids, out_cache_loc=ids,
    )  # fmt: skip


def inputs(rows):
    x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(rows)).bfloat16()
    return x, torch.where(torch.arange(rows) % 3 == 1, 77, torch.arange(rows))


@pytest.mark.parametrize(("mode", "rows", "tokens", "spec_info", "reason"), [
    ("decode", 6, 1, None, None), ("decode", 5, 1, None, "5 rows, built for 1, 6, 12"), ("decode", 6, 1, object(), "a speculative step"),
    ("decode", 6, 6, None, "a decode step in a speculative server"), ("verify", 12, 6, None, None),
    ("verify", 12, 1, None, "a verify step without draft tokens"), ("prefill", 6, 1, None, "prefill"),
])  # fmt: skip
def test_which_steps_are_covered(mode, rows, tokens, spec_info, reason):
    served = Model(tokens_per_request=tokens).step
    step = served.plan(torch.zeros(rows, dtype=torch.int64), batch_of(mode, rows, tokens, spec_info))
    assert (step is None, served.coverage.counts().fallbacks) == (reason is not None, {} if reason is None else {reason: 1})
    assert step is None or (step.rows, step.mode) == (rows, "decode" if mode == "decode" else "target_verify")


@pytest.mark.parametrize("rows", [1, 6])
def test_a_covered_step_runs_the_kernel_once_it_was_checked(rows):
    model, reference = Model(), Model()
    x, token_ids = inputs(rows)
    wanted = reference.original(x, token_ids)
    assert reference.calls() == [1, 1]
    step = model.step.plan(token_ids, batch_of("decode", len(token_ids)))
    for repeat in range(2):
        got = model.step.forward(step, model.original, x, token_ids)
        assert model.calls() == [1, 1], f"launch {repeat}: the check asks each layer once, in the first step alone"
        error = float((got.float() - wanted.float()).norm() / wanted.float().norm())
        assert 0 < error < 0.02
    assert torch.equal(model.original(x, token_ids), wanted), "outside a covered step SGLang's forward is as it was"


def test_rows_that_a_graph_pads_have_no_experts():
    model = Model(check=False)
    for mlp in model.layers:
        mlp.bound = torch.tensor(4, dtype=torch.int32)
    x, token_ids = inputs(6)
    wanted = model.original(x, token_ids)
    got = model.step.forward(model.step.plan(token_ids, batch_of("decode", len(token_ids))), model.original, x, token_ids)
    assert float((got.float() - wanted.float()).norm() / wanted.float().norm()) < 0.02


@pytest.mark.parametrize("planted", [NEXT_EXPERT, UNWEIGHTED_EXPERT])
def test_the_check_finds_a_wrong_kernel(planted):
    model = Model(planted)
    x, token_ids = inputs(6)
    with pytest.raises(RuntimeError, match="slices differ from SGLang's launches in a step of 6 rows: moe.relative_l2 [0-9.]+ in layer 0"):
        model.step.forward(model.step.plan(token_ids, batch_of("decode", len(token_ids))), model.original, x, token_ids)
    assert not model.step.running.is_on


def test_the_check_finds_choices_that_are_not_sglangs():
    """The kernel ranks by another bias than the layer has."""
    model, other = Model(), torch.linspace(0, 3, 32)
    params = model.layers[1].forward.prepared.params
    params.bias = params.bias_alt = other.data_ptr()
    x, token_ids = inputs(12)
    with pytest.raises(RuntimeError, match=r"routing.gap \d\.\d+ in layer 1"):
        model.step.forward(model.step.plan(token_ids, batch_of("decode", len(token_ids))), model.original, x, token_ids)


def test_steps_are_counted_on_the_device_as_replays_run():
    """The check and a capture's warm-up serve nobody. A replay calls no Python of ours: its last layer's launch counts the step, no other layer's does."""
    model = Model()
    x, token_ids = inputs(6)
    step = model.step.plan(token_ids, batch_of("decode", 6))
    model.step.forward(step, model.original, x, token_ids)
    assert model.step.coverage.counts().executed == {6: 1} and model.step.issued == {6: 1}
    model.step.forward(step, model.original, x, token_ids)
    assert model.step.coverage.counts().executed == {6: 2}
    for mlp, wanted in zip(model.layers, (2, 3), strict=True):
        mlp.forward._launch(x, torch.empty_like(x), token_ids, None)
        assert model.step.coverage.counts().executed == {6: wanted}
    assert model.step.issued == {6: 2}


def test_a_captures_warm_ups_are_not_counted(monkeypatch):
    model = Model()
    x, token_ids = inputs(6)
    step = model.step.plan(token_ids, batch_of("decode", 6))
    monkeypatch.setattr(sglang_state, "capturing_graphs", lambda: True)
    for _ in range(2):  # the first one checks
        model.step.forward(step, model.original, x, token_ids)
    assert model.step.coverage.counts().executed.get(6, 0) == 0 and model.step.issued[6] == 0
    monkeypatch.setattr(sglang_state, "capturing_graphs", lambda: False)
    model.step.forward(step, model.original, x, token_ids)
    assert model.step.coverage.counts().executed == {6: 1}
