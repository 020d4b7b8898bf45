"""`doctor` on commands that ask for AMD's kernels. Oracle: the reasons of SGLang's own check, as tests/contract/test_amd_refusals.py has them."""

import importlib.metadata
import json
from unittest import mock

import pytest

pytest.importorskip("sglang")

from sgl_lowlatency.cli import amd_verdict  # noqa: E402
from sgl_lowlatency.cli.main import main  # noqa: E402
from sgl_lowlatency.kernels import code_objects  # noqa: E402

BUILT = {"k1": ["gfx942", "gfx950"], "k2": ["gfx942", "gfx950"]}


@pytest.fixture
def built():
    """Code objects are there."""
    with mock.patch.object(code_objects, "installed", lambda: BUILT):
        yield


@pytest.mark.parametrize(
    ("arguments", "is_amd"),
    [
        (["--enable-amd-monokernel"], True),
        (["--monokernel-backend", "amd"], True),
        (["--monokernel-backend=amd"], True),
        (["--enable-nvidia-megakernel"], False),
        (["--enable-nvidia-megakernel", "--enable-amd-monokernel"], False),
        ([], False),
    ],
)
def test_which_commands_ask_for_amd(arguments, is_amd):
    assert amd_verdict.asked_for(arguments) is is_amd


@pytest.mark.parametrize("flag", [["--enable-amd-monokernel"], ["--monokernel-backend", "amd"]])
def test_a_served_command_has_no_reason(model_dir, flag):
    """Whatever is installed here: the server is to start where the GPU is."""
    verdict = amd_verdict.judge(["--model-path", model_dir(), *flag, "--tp", "8"], "gfx942")
    assert (verdict.reasons, verdict.isa, verdict.spec) == ([], "gfx942", "sgl_lowlatency monokernel (Qwen3 dense)")


@pytest.mark.parametrize(("assumed", "is_note"), [("gfx950", True), (None, False)])
def test_objects_that_are_not_here_are_a_note_of_an_assumed_gpu(model_dir, assumed, is_note):
    """Of the GPU that is here they are a reason."""
    missing = f"kernels k1/k2 not built for gfx950: {code_objects.HOW_TO_BUILD}"
    with (
        mock.patch.object(code_objects, "installed", lambda: {"k1": [], "k2": ["gfx942"]}),
        mock.patch("sglang.srt.kernel_plugins.amd.binding.device_isa", lambda: assumed or "gfx950"),
    ):
        verdict = amd_verdict.judge(["--model-path", model_dir(), "--enable-amd-monokernel", "--device", "cuda"], assumed)
    assert (missing in verdict.reasons, f"on this machine {missing}" in verdict.notes) == (not is_note, is_note)


def test_every_reason_is_listed(built, model_dir):
    verdict = amd_verdict.judge(["--model-path", model_dir(attention_bias=True), "--enable-amd-monokernel", "--page-size", "7"], None)
    assert verdict.reasons == [
        "no AMD GPU with kernels here is visible (judged as if on gfx950; --assume-gpu names another)",
        "page_size 7 is not one of ['1', '128', '16', '32', '64']",
        "config.attention_bias is true: the kernel adds no bias but that of Qwen2's q, k and v",
    ]


def test_a_model_without_a_spec_and_a_path_without_a_model(built, model_dir, tmp_path):
    mistral = model_dir(architectures=["MistralForCausalLM"], model_type="mistral")
    (line,) = amd_verdict.judge(["--model-path", mistral, "--enable-amd-monokernel"], "gfx950").reasons
    assert line == "monokernel backend 'amd' has no spec for ['MistralForCausalLM'] on gfx950"
    (line,) = amd_verdict.judge(["--model-path", str(tmp_path / "absent"), "--enable-amd-monokernel"], "gfx950").reasons
    assert line.endswith("does not exist")


def test_the_command_line_says_what_is_built(model_dir, capsys):
    words = ["doctor", "--json", "--assume-gpu", "gfx950", "--", "--model-path", model_dir(), "--enable-amd-monokernel"]
    with mock.patch.object(code_objects, "installed", lambda: {"k1": ["gfx950"], "k2": []}):
        assert main(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["code_objects"] == {"k1": ["gfx950"], "k2": []} and report["isa"] == "gfx950" and report["reasons"] == []
    assert report["notes"] == [f"on this machine kernels k2 not built for gfx950: {code_objects.HOW_TO_BUILD}"]


def test_an_assumed_gpu_decides_whose_kernels_are_meant(built, model_dir, capsys):
    def report(gpu, *flags):
        main(["doctor", "--json", "--assume-gpu", gpu, "--", "--model-path", model_dir(), *flags])
        return json.loads(capsys.readouterr().out)

    both = report("gfx950", "--enable-amd-monokernel", "--enable-nvidia-megakernel")
    assert both["reasons"] == ["--enable-nvidia-megakernel is also set; use one of the two"]
    assert report("gfx950")["notes"] == ["--enable-amd-monokernel is not in the command; judged as if it were"]
    assert "--enable-amd-monokernel is also set; use one of the two" in report("sm_90", "--enable-amd-monokernel")["reasons"]


def test_a_plugin_that_sglang_does_not_load_is_a_reason(built, model_dir, monkeypatch):
    words = ["--model-path", model_dir(), "--enable-amd-monokernel"]
    monkeypatch.setenv("SGLANG_PLUGINS", "nvidia_megakernel,other")
    assert amd_verdict.judge(words, "gfx950").reasons == ["SGLANG_PLUGINS='nvidia_megakernel,other' does not list the 'amd_monokernel' plugin"]
    monkeypatch.setenv("SGLANG_PLUGINS", "other, amd_monokernel")
    assert amd_verdict.judge(words, "gfx950").reasons == []
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [])
    (line,) = amd_verdict.judge(words, "gfx950").reasons
    assert line == "the 'amd_monokernel' plugin is not installed: SGLang runs in another environment than sgl-lowlatency"


def test_notes_are_those_of_the_other_flag(built, model_dir, monkeypatch):
    """Another SGLang than the tested one, and what a served command gives up."""
    monkeypatch.setattr("sgl_lowlatency.TESTED_SGLANG", "0.5.0")
    verdict = amd_verdict.judge(["--model-path", model_dir(), "--enable-amd-monokernel", "--load-format", "dummy", "--disable-cuda-graph"], "gfx950")
    installed = importlib.metadata.version("sglang")
    assert verdict.notes == [
        f"sglang {installed} is installed; this release is tested with 0.5.0",
        "decode CUDA graphs are disabled: every step is launched from Python",
        "--load-format dummy: such weights make any comparison of logits meaningless",
    ]
