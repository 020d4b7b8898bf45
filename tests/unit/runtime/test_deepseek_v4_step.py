"""Steps of a model whose layers' MoE fused_moe takes, in emulation: what is covered, what stays SGLang's, and the check of the first step."""

import types

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from moe_stand_ins import DeepseekV2MoE  # noqa: E402

from sgl_lowlatency.build.fused_moe import collect_moe  # noqa: E402
from sgl_lowlatency.kernels.decode_step import EmulationOptions  # noqa: E402
from sgl_lowlatency.kernels.fused_moe import FusedMoe  # noqa: E402
from sgl_lowlatency.runtime.deepseek_v4_step import DeepseekV4Step  # noqa: E402

NEXT_EXPERT, UNWEIGHTED_EXPERT = 26, 24  # dialect::Planted
BOUNDS = {"moe.relative_l2": 0.1, "routing.gap": 1e-3}


class Model:
    """Two layers: x + MoE of x, twice."""

    def __init__(self, planted=0, check=True, tokens_per_request=1):
        self.layers = [DeepseekV2MoE(seed=seed) for seed in range(2)]
        kernel = FusedMoe(128, 128, 32, 2, 16, torch.device("cpu"), 3, 2.0, emulation=EmulationOptions(planted=planted))
        layers = [(mlp, collect_moe(mlp)) for mlp in self.layers]
        self.step = DeepseekV4Step(layers, kernel, (1, 6, 12), tokens_per_request, BOUNDS, check)

    def original(self, x, token_ids):
        for mlp in self.layers:
            x = x + mlp(x, None, input_ids=token_ids, input_ids_global=token_ids, leave_output_sum=True)
        return x

    def calls(self):
        return [mlp.calls for mlp in self.layers]


def batch_of(mode, spec_info=None):
    modes = types.SimpleNamespace(is_target_verify=lambda: mode == "verify", is_decode=lambda: mode == "decode")
    return types.SimpleNamespace(forward_mode=modes, spec_info=spec_info)


def inputs(rows):
    x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(rows)).bfloat16()
    return x, torch.where(torch.arange(rows) % 3 == 1, 77, torch.arange(rows))


@pytest.mark.parametrize(("mode", "rows", "tokens", "spec_info", "is_covered"), [
    ("decode", 6, 1, None, True), ("decode", 5, 1, None, False), ("decode", 6, 1, object(), False), ("decode", 6, 6, None, False),
    ("verify", 12, 6, object(), True), ("verify", 12, 1, object(), False), ("prefill", 6, 1, None, False),
])  # fmt: skip
def test_which_steps_are_covered(mode, rows, tokens, spec_info, is_covered):
    step = Model(tokens_per_request=tokens).step.plan(torch.zeros(rows, dtype=torch.int64), batch_of(mode, spec_info))
    assert (step is not None) is is_covered
    assert step is None or (step.rows, step.mode) == (rows, "decode" if mode == "decode" else "target_verify")


@pytest.mark.parametrize("rows", [1, 6])
def test_a_covered_step_runs_the_kernel_once_it_was_checked(rows):
    model, reference = Model(), Model()
    x, token_ids = inputs(rows)
    wanted = reference.original(x, token_ids)
    assert reference.calls() == [1, 1]
    step = model.step.plan(token_ids, batch_of("decode"))
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
    got = model.step.forward(model.step.plan(token_ids, batch_of("decode")), model.original, x, token_ids)
    assert float((got.float() - wanted.float()).norm() / wanted.float().norm()) < 0.02


@pytest.mark.parametrize("planted", [NEXT_EXPERT, UNWEIGHTED_EXPERT])
def test_the_check_finds_a_wrong_kernel(planted):
    model = Model(planted)
    x, token_ids = inputs(6)
    with pytest.raises(RuntimeError, match="fused_moe differs from SGLang's MoE in a step of 6 rows: relative L2"):
        model.step.forward(model.step.plan(token_ids, batch_of("decode")), model.original, x, token_ids)
    assert not model.step.is_running


def test_the_check_finds_choices_that_are_not_sglangs():
    """The kernel ranks by another bias than the layer has."""
    model, other = Model(), torch.linspace(0, 3, 32)
    model.layers[1].forward._layer.params.bias = model.layers[1].forward._layer.params.bias_alt = other.data_ptr()
    x, token_ids = inputs(12)
    with pytest.raises(RuntimeError, match=r"routing gap [1-9]\.\d+e[-+]0[01] \(layer 1\)"):
        model.step.forward(model.step.plan(token_ids, batch_of("decode")), model.original, x, token_ids)
