"""Steps of DeepSeek-V4.1 in which fused_moe closes the MoE's hyper-connection behind attention_out, in emulation, inside SGLang's own layers
(tests/deepseek_served.py). Oracle: the same model without slices."""

import contextlib

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

import deepseek_layers as small  # noqa: E402
from deepseek_served import ALL, FAR, Served, assert_near, sglang  # noqa: E402, F401  sglang: for every test

from sgl_lowlatency.kernels.decode_step import EmulationOptions  # noqa: E402
from sgl_lowlatency.runtime.deepseek_v4_check import row_errors  # noqa: E402
from sgl_lowlatency.runtime.deepseek_v4_step import DeepseekV4Step  # noqa: E402
from sgl_lowlatency.specs.nvidia.deepseek_v4 import BOUNDS  # noqa: E402

NEXT_EXPERT, TRANSPOSED_MIX, SHORT_SINKHORN = 26, 42, 43  # dialect::Planted


# Of a step of eight layers, who mixes and posts: the attention's and the MoE's hyper-connection of each.
@pytest.mark.parametrize(("names", "sglangs"), [
    (("attention_in",), 16), (("attention_out",), 8), (("attention_in", "attention_out"), 8), (("attention_in", "moe"), 16),
    (("attention_out", "moe"), 0), (ALL, 0),
])  # fmt: skip
def test_behind_attention_out_fused_moe_leaves_sglang_no_mix_no_post_and_no_fork(names, sglangs, monkeypatch):
    asked = []
    for name in ("mix_stats", "post", "fork_stats_stream"):
        original = getattr(small.mhc, name)
        monkeypatch.setattr(small.mhc, name, lambda *args, name=name, original=original: asked.append(name) or original(*args))
    served = Served(names, check=False, widths=(6,))
    served.run(*small.batch_of(6))
    assert (asked.count("mix_stats"), asked.count("post")) == (sglangs, sglangs)
    assert bool(asked.count("fork_stats_stream")) is bool(sglangs)


@pytest.mark.parametrize("names", [("attention_out", "moe"), ALL], ids="+".join)
def test_what_a_layer_hands_on_behind_fused_moes_post(names):
    """Streams with nothing outstanding and the pre of the MoE's own mix, of SGLang's values: the last layer's too, which the head combines."""
    states, served = {}, Served(names, check=False, widths=(6,))
    for number, layer in enumerate(served.model.layers):

        def keeping(*args, number=number, original=layer.forward, **kwargs):
            out = original(*args, **kwargs)
            state = small.hc_boundary.materialize(out, kwargs["forward_batch"], consume=False)
            states.setdefault(number, []).append((state is out, state.streams.clone(), state.pre.clone()))
            return out

        layer.forward = keeping
    ids, positions, batch = small.batch_of(6)
    for is_on in (False, True):
        served.run(ids, positions, batch, is_on)
    for number, (theirs, ours) in states.items():
        assert (theirs[0], ours[0]) == (False, True), "ours has nothing outstanding"
        assert float(row_errors(ours[1], theirs[1]).max()) < FAR and float(row_errors(ours[2], theirs[2]).max()) < FAR, number
    assert sorted(states) == list(range(8))


def test_rows_that_a_graph_pads_are_posted_too():
    served = Served(check=False, widths=(6,))
    for layer in served.model.layers:
        layer.mlp.bound = torch.tensor(4, dtype=torch.int32)
    assert_near(served, small.batch_of(6))


@pytest.mark.parametrize("names", [("moe",), ("attention_out", "moe")], ids="+".join)
def test_router_logits_are_kept_for_who_wants_them(names):
    served = Served(names, check=False, widths=(6,))
    served.run(*small.batch_of(6))
    assert served.step.running.router_logits is None
    kept, routers = {}, {}
    served.step.running.router_logits = kept
    served.run(*small.batch_of(6))
    assert sorted(kept) == list(range(8)) and all(logits.shape == (6, 32) for logits in kept.values())
    for number, layer in enumerate(served.model.layers):
        layer.mlp.gate.register_forward_hook(lambda gate, args, out, number=number: routers.update({number: out}))
    served.run(*small.batch_of(6), is_on=False)
    assert all(float(row_errors(kept[i], routers[i]).max()) < FAR for i in range(8))


@pytest.mark.parametrize("names", [("attention_out", "moe"), ALL], ids="+".join)
@pytest.mark.parametrize(("planted", "figures"), [
    (0, []), (TRANSPOSED_MIX, ["moe.streams"]), (SHORT_SINKHORN, ["moe.coefficients", "moe.streams"]),
    (NEXT_EXPERT, ["moe.relative_l2", "moe.streams"]),
])  # fmt: skip
def test_a_wrong_post_of_the_moe_is_refused_with_figures(names, planted, figures):
    """Of a kernel that is wrong, those figures and no others: more than 2.5 times their bounds; the right one's are below half of theirs."""
    served = Served(names, widths=(6,))
    served.step._kernels["moe"].emulation = EmulationOptions(planted=planted)
    found, judge = {}, DeepseekV4Step._judge

    def judging(rows):
        for figure in served.step.running.figures:
            found[figure.name] = max(found.get(figure.name, 0.0), figure.value)
        judge(served.step, rows)

    served.step._judge = judging
    with contextlib.nullcontext() if not planted else pytest.raises(RuntimeError, match="slices differ from SGLang's launches in a step of 6 rows"):
        served.run(*small.batch_of(6))
    of_moe = {name: value for name, value in found.items() if name.startswith("moe.") or name == "routing.gap"}
    assert set(of_moe) == {"moe.relative_l2", "routing.gap", "moe.coefficients", "moe.streams"}
    for name, value in of_moe.items():
        assert value > 2.5 * BOUNDS[name] if name in figures else value < BOUNDS[name] / 2, (name, value)


def test_a_hook_on_the_moe_keeps_sglangs_forward_where_its_post_is_ours():
    ids, _, batch = small.batch_of(6)
    for names, is_covered in ((("moe",), True), (("attention_out",), True), (("attention_out", "moe"), False)):
        served = Served(names, widths=(6,), check=False)
        served.model.layers[3].mlp.register_forward_hook(lambda *args: None)
        assert (served.step.plan(ids, batch) is not None) is is_covered, names
    assert served.step.coverage.counts().fallbacks == {"a forward hook on layer 3, mlp": 1}
