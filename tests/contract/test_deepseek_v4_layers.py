"""Steps of DeepSeek-V4.1 with slices that are ours, in emulation, inside SGLang's own loop, decoder layers, boundaries and attention
(tests/deepseek_served.py). Oracle: the same model without them. Eight layers, one of every kind that the cut-down model has."""

import contextlib
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

import deepseek_layers as small  # noqa: E402
from deepseek_served import ALL, FAR, Served, assert_near, distances, is_near, sglang  # noqa: E402, F401  sglang: for every test
from sglang.kernels.plugin_kernels.nvidia.spec import BuildContext  # noqa: E402
from sglang.srt.kernel_plugins.nvidia import binding  # noqa: E402
from sglang.srt.model_executor.forward_context import ForwardContext, set_forward_context  # noqa: E402

from sgl_lowlatency import config  # noqa: E402
from sgl_lowlatency.guard import attention_slices, fused_moe  # noqa: E402
from sgl_lowlatency.runtime.deepseek_v4_check import row_errors  # noqa: E402
from sgl_lowlatency.runtime.deepseek_v4_step import DeepseekV4Step  # noqa: E402
from sgl_lowlatency.specs.nvidia.deepseek_v4 import BOUNDS, DEEPSEEK_V4_SPEC  # noqa: E402


def test_the_guard_has_nothing_against_these_layers():
    for layer in small.Model().layers:
        assert list(attention_slices.layer_reasons(layer)) == [] == list(fused_moe.layer_reasons(layer.mlp))


@pytest.mark.parametrize("rows", [1, 6, 12, 48])
def test_decode_steps_of_all_slices(rows):
    served = Served(check=rows == 6)
    assert_near(served, small.batch_of(rows))
    assert_near(served, small.batch_of(rows, seed=1))
    assert [layer.mlp.calls for layer in served.model.layers] == [3 if rows == 6 else 2] * 8, "SGLang's MoE ran without ours, and in the check"


@pytest.mark.parametrize("requests", [1, 2, 8])
def test_verify_steps_of_all_slices(requests):
    assert_near(Served(tokens=6, check=requests == 2, widths=(6, 12, 48)), small.batch_of(requests, tokens=6))


@pytest.mark.parametrize("names", [("attention_in",), ("attention_out",), ("moe",), ("attention_in", "attention_out"), ("attention_in", "moe"),
                                   ("attention_out", "moe")], ids="+".join)  # fmt: skip
@pytest.mark.parametrize("tokens", [1, 6])
def test_each_slice_by_itself(names, tokens):
    served = Served(names, tokens, widths=(6,))
    assert_near(served, small.batch_of(6 // tokens, tokens))
    assert served.step.summary().startswith(f"{', '.join(names)} in 8 layers, up to 6 rows; ")


@pytest.fixture
def environment(monkeypatch):
    """Of a worker: which slices its operator asks for."""

    def ask(slices):
        monkeypatch.setenv("SGL_LOWLATENCY_DEEPSEEK_SLICES", slices)
        monkeypatch.setenv("SGL_LOWLATENCY_EMULATE", "1")
        config.get.cache_clear()

    yield ask
    config.get.cache_clear()


@pytest.mark.parametrize("slices", ["attention_in,attention_out", "moe", "attention_out,moe"])
def test_sglangs_dispatch_runs_what_the_spec_builds(environment, slices, monkeypatch, caplog):
    """Its BuildContext of a server with five drafts a request, its binding and view, behind the checks of the loaded model."""
    environment(slices)
    caplog.set_level("INFO")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    target = small.Target()
    assert DEEPSEEK_V4_SPEC.model_disable_reasons(target, None) == []
    sglangs = binding.MegakernelBinding(model=target)
    context = BuildContext(widths=tuple(range(6, DEEPSEEK_V4_SPEC.max_rows + 1, 6)), tokens_per_request=6, deadline_s=5.0, binding=sglangs)
    built = DEEPSEEK_V4_SPEC.build(target, None, context)
    assert built.widths == (6, 12, 18, 24, 30, 36, 42, 48) and built.draft_sampler is None
    assert caplog.messages[0] == f"{slices.replace(',', ', ')} of every layer of DeepSeek-V4.1: SGL_LOWLATENCY_DEEPSEEK_SLICES names fewer, or none"
    assert built.summary().startswith(slices.replace(",", ", "))
    dispatch, batch = binding._Dispatch(built=built, original=target.forward, binding=sglangs), small.batch_of(2, tokens=6)
    set_forward_context(ForwardContext(attn_backend=small.Backend()))
    theirs = target(*batch)
    set_forward_context(ForwardContext(attn_backend=small.Backend()))
    ours = dispatch.wrapped()(*batch)
    assert built.coverage.counts().executed == {12: 1} and float(row_errors(ours, theirs).max()) < FAR


@pytest.mark.parametrize("slices", ["moe", "attention_out", "attention_out,moe"])
def test_the_moes_hyper_connection_is_asked_for_where_its_post_is_ours(environment, slices):
    environment(slices)
    target = small.Target()
    target.model.layers[4].hc_ffn_base = torch.nn.Parameter(torch.zeros(24).bfloat16(), requires_grad=False)
    wanted = ["layer 4: hc_ffn_base is bfloat16, not float32"] if slices == "attention_out,moe" else []
    assert DEEPSEEK_V4_SPEC.model_disable_reasons(target, None) == wanted


@pytest.mark.parametrize("slices", ["attention_in", "attention_out", "moe"])
def test_a_loaded_model_is_asked_what_its_slices_need(environment, slices):
    environment(slices)
    target = small.Target()
    target.model.layers[2].self_attn.wo_a_fp8, target.model.layers[5].mlp.is_hash = True, True
    attention, moe = "layer 2: self_attn.wo_a is kept in FP8", "layer 5: mlp routes by hash"
    assert DEEPSEEK_V4_SPEC.model_disable_reasons(target, None) == [moe if slices == "moe" else attention]


def test_slices_are_chosen_between_steps():
    served, before = Served(widths=(6,)), [0, 0, 0]
    for names in (("moe",), ("attention_in",), (), ALL, ("attention_out",)):
        served.step.take(names)
        ids, positions, batch = small.batch_of(6)
        theirs, ours = served.run(ids, positions, batch, is_on=False), served.run(ids, positions, batch)
        assert is_near(distances(ours, theirs, batch.slots)), names
        ran, before = [b - a for a, b in zip(before, served.launches())], served.launches()
        assert ran == [16 if name in names else 0 for name in ALL], f"{names}: eight layers, and their check"
        assert names or all(torch.equal(a, b) for a, b in zip(ours, theirs)), "SGLang's forward to the bit"
    with pytest.raises(ValueError, match="experts is not one of the slices that were built: attention_in, attention_out, moe"):
        served.step.take(["experts"])


WRONG_ROPE, WRONG_SCALE_BLOCK, NEXT_EXPERT, TRANSPOSED_MIX, SHORT_SINKHORN = 7, 13, 26, 42, 43  # dialect::Planted


@pytest.mark.parametrize(("names", "planted", "figure"), [
    (("attention_in",), WRONG_ROPE, "attention_in.q_rope"), (("attention_in",), WRONG_ROPE, "attention_in.kv_rope"),
    (("attention_in",), WRONG_SCALE_BLOCK, "attention_in.q_lora"),
    (("attention_out",), WRONG_ROPE, "attention_out.streams"), (("attention_out",), TRANSPOSED_MIX, "attention_out.streams"),
    (("moe",), NEXT_EXPERT, "moe.relative_l2"),
])  # fmt: skip
@pytest.mark.parametrize("rows", [1, 6])
def test_a_wrong_kernel_is_refused_with_figures(names, planted, figure, rows):
    served = Served(names, planted=planted, widths=(rows,))
    said = f"slices differ from SGLang's launches in a step of {rows} rows: .*{figure} [0-9.inf]+ in layer [0-7]"
    with pytest.raises(RuntimeError, match=said) as error:
        served.run(*small.batch_of(rows))
    assert f" of {BOUNDS[figure]:g}" in str(error.value), "figures stand beside their bounds"
    assert not served.step.running.is_on and served.step._checked == set()


@pytest.mark.parametrize(("planted", "figures"), [
    (0, []), (WRONG_ROPE, ["attention_in.q_rope", "attention_in.kv_rope", "attention_out.streams", "attention_out.out"]),
    (TRANSPOSED_MIX, ["attention_out.streams", "attention_out.out"]),
    (SHORT_SINKHORN, ["attention_out.coefficients", "attention_out.streams", "attention_out.out"]),
])  # fmt: skip
def test_bounds_tell_fp8_activations_from_defects(planted, figures, monkeypatch):
    """SGLang's linears as on a GPU: the bounds are twice what they do to the worst row, and what is wrong is three times as far as the bounds."""
    monkeypatch.setattr(small.Linear, "has_fp8_activations", True)
    found = {}

    def judge(self, rows):
        for figure in self.running.figures:
            found[figure.name] = max(found.get(figure.name, 0.0), figure.value)

    monkeypatch.setattr(DeepseekV4Step, "_judge", judge)
    Served(("attention_in", "attention_out"), planted=planted, widths=(48,)).run(*small.batch_of(48))
    assert len(found) == 9
    for name, value in found.items():
        assert value > 2.5 * BOUNDS[name] if name in figures else value < BOUNDS[name] / 2, (name, value)
    if not planted:
        rounded = ("attention_in.x", "attention_out.coefficients")  # without an FP8 matrix in front
        assert all(value > BOUNDS[name] / 4 for name, value in found.items() if name not in rounded), found


@pytest.mark.parametrize(("names", "planted"), [(("attention_in",), WRONG_SCALE_BLOCK), (("attention_out",), TRANSPOSED_MIX)])
def test_this_comparison_would_see_it_too(names, planted):
    served = Served(names, planted=planted, widths=(12,), check=False)
    ids, positions, batch = small.batch_of(12)
    found = distances(*(served.run(ids, positions, batch, is_on) for is_on in (True, False)), batch.slots)
    assert not is_near(found), found


def test_layers_must_all_have_been_compared():
    served = Served(("attention_out",), widths=(6,))
    del served.model.layers[3].forward
    with pytest.raises(RuntimeError, match="attention_out.coefficients of 7 layers out of 8"):
        served.run(*small.batch_of(6))


def test_rows_that_are_captured_before_their_check_are_refused(monkeypatch):
    served = Served(("attention_out",), widths=(6,))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="attention_out: 6 rows are being captured before their self-check ran"):
        served.run(*small.batch_of(6))


def test_another_layout_of_keys_is_refused(monkeypatch):
    monkeypatch.setattr(small.Pool, "kv_layout", SimpleNamespace(value="v41"))
    with pytest.raises(RuntimeError, match="attention_in cannot write SGLang's KV pool:\n  - the KV pool has the layout v41, not v4"):
        Served(("attention_in",), widths=(6,), check=False).run(*small.batch_of(6))
    Served(("attention_out",), widths=(6,), check=False).run(*small.batch_of(6))


def test_a_capturing_layer_without_compressed_keys_prepares_as_sglang_does(monkeypatch):
    """On streams of its own: SGLang's function for it is asked where ours is not, and ours in its place."""
    from sglang.srt.models import deepseek_v4

    asked = []

    def on_streams(self, x, positions, forward_batch, backend, q_out=None, x_quant=None):
        asked.append(self.layer_id)
        return self._forward_prepare(x, positions, forward_batch, backend, q_out, x_quant=x_quant)[0]

    monkeypatch.setattr(deepseek_v4.MQALayer, "_forward_prepare_multi_stream", on_streams)
    monkeypatch.setattr(deepseek_v4, "get_is_capture_mode", lambda: True)
    monkeypatch.setattr("sglang.srt.model_executor.runner_utils.capture_mode.get_is_capture_mode", lambda: True)
    for names, wanted in ((("attention_out",), [0, 1, 0, 1]), (("attention_in",), [0, 1]), (("attention_in", "attention_out"), [0, 1])):
        served = Served(names, widths=(6,), check=False)
        for layer in served.model.layers:
            layer.self_attn.alt_streams, layer.self_attn._multi_stream_bs_limit = object(), 64
        asked.clear()
        assert_near(served, small.batch_of(6))
        assert asked == wanted, names


def test_a_model_without_drafts():
    served = Served(check=False, widths=(6,))
    served.model.dspark_layers_to_capture = None
    ids, positions, batch = small.batch_of(6)

    def forward(is_on):
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, served.model, "forward", served.model.forward)
            original = served.model.forward
            served.model.forward = lambda *args: (original(*args), torch.zeros(6, 1))
            return served.run(ids, positions, batch, is_on)

    theirs, ours = forward(False), forward(True)
    assert all(float(row_errors(a, b).max()) < FAR for a, b in zip(ours[:2], theirs[:2]))


@pytest.mark.parametrize(("change", "reason"), [
    ({"lora_ids": ["a"]}, "LoRA"), ({"input_embeds": torch.zeros(1)}, "input embeddings"), ({"spec_info": object()}, "a speculative step"),
    ({"batch_size": 5}, "5 rows, built for 6 to 6"),
])  # fmt: skip
def test_other_steps_are_sglangs_and_counted(change, reason):
    served = Served(widths=(6,), check=False)
    ids, positions, batch = small.batch_of(6)
    theirs = served.run(ids, positions, batch, is_on=False)
    for name, value in change.items():
        setattr(batch, name, value)
    ours = served.run(ids, positions, batch)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs)), "as without the plugin, to the bit"
    assert served.step.coverage.counts().fallbacks == {reason: 1}


def test_a_hook_on_a_replaced_module_keeps_sglangs_forward():
    served = Served(("attention_out",), widths=(6,), check=False)
    ids, _, batch = small.batch_of(6)
    assert served.step.plan(ids, batch) is not None
    served.model.layers[3].self_attn.wq_b.register_forward_hook(lambda *args: None)
    assert served.step.plan(ids, batch) is not None, "attention_out calls wq_b through SGLang"
    served.model.layers[3].self_attn.wo_b.register_forward_hook(lambda *args: None)
    assert served.step.plan(ids, batch) is None
    assert served.step.coverage.counts().fallbacks == {"a forward hook on layer 3, self_attn.wo_b": 1}


def test_a_step_is_counted_and_its_check_made_once():
    served = Served(("attention_in",), widths=(1,))
    for _ in range(3):
        served.run(*small.batch_of(1))
    assert served.step.coverage.counts().executed == {1: 3}
    assert served.step.running.figures == [] and served.step._checked == {1}
