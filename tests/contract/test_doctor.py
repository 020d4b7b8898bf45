"""The doctor over the real SGLang. Oracle: what the server's own resolution says (the refusals fixture)."""

import json
import os
import subprocess
import sys
from unittest import mock

import pytest

from sgl_lowlatency.cli import verdict
from sgl_lowlatency.cli.main import main
from sgl_lowlatency.specs.nvidia.dense import MAX_ROWS

NAME = "sgl_lowlatency decode_step (Qwen3 dense)"
MOE = "sgl_lowlatency decode_step (Qwen3-MoE)"
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # beside QWEN3_8B
FULL = {"emulation": ["host"], "cuda": ["sm_90a", "sm_100a", "sm_103a"]}


@pytest.fixture
def doctor(capsys):
    """doctor(arguments, assume, backends) runs `sgl-lowlatency doctor --json` and returns (exit code, report)."""

    def run(arguments, assume="sm_90", backends=FULL):
        words = ["doctor", "--json", *(["--assume-gpu", assume] if assume else []), "--", *arguments]
        with mock.patch("sgl_lowlatency.guard.device.compiled_backends", lambda: backends), mock.patch.dict(os.environ):
            code = main(words)
        return code, json.loads(capsys.readouterr().out)

    return run


BAD = [
    *["--tp", "3", "--dtype", "float16", "--page-size", "7", "--kv-cache-dtype", "fp8_e4m3", "--watchdog-timeout", "8"],
    *["--prefill-attention-backend", "flashinfer", "--enable-amd-monokernel"],
]


def test_a_good_command(doctor, model_dir):
    code, report = doctor(["python", "-m", "sglang.launch_server", "--model-path", model_dir(), "--enable-nvidia-megakernel"])
    assert (code, report["ok"], report["reasons"], report["notes"]) == (0, True, [], [])
    assert (report["spec"], report["isa"], report["versions"]["sglang"] is not None) == (NAME, "sm_90", True)


def test_the_same_reasons_as_the_server(doctor, refusals, model_dir):
    code, report = doctor(["sglang", "serve", model_dir(), "--enable-nvidia-megakernel", *BAD])
    assert code == 1
    assert sorted(report["reasons"]) == sorted(refusals(["--model-path", model_dir(), *BAD]))
    assert len(report["reasons"]) == 7


NGRAM = ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4"]


@pytest.mark.parametrize("arguments, reasons", [([], 1), (["--speculative-ngram-max-bfs-breadth", "1"], 0)])
def test_the_same_verdict_on_speculation(doctor, refusals, model_dir, arguments, reasons):
    command = ["--model-path", model_dir(), *NGRAM, *arguments]
    code, report = doctor([*command, "--enable-nvidia-megakernel"])
    assert report["reasons"] == refusals(command) and len(report["reasons"]) == reasons
    assert code == bool(reasons)
    width = f"decode_step verifies up to {MAX_ROWS // 4} requests of 4 tokens at once; a step of more runs SGLang's forward"
    assert (width in report["notes"]) is (reasons == 0)


@pytest.mark.parametrize(
    ("scheme", "num_reasons"), [({"activation_scheme": "dynamic", "weight_block_size": [128, 128]}, 0), ({"activation_scheme": "static"}, 1)]
)
def test_the_same_verdict_on_fp8_checkpoints(doctor, refusals, model_dir, scheme, num_reasons):
    model = model_dir(quantization_config={"quant_method": "fp8", **scheme})
    code, report = doctor(["--model-path", model, "--enable-nvidia-megakernel"])
    assert report["reasons"] == refusals(["--model-path", model])
    assert (code, len(report["reasons"])) == (int(num_reasons > 0), num_reasons)


@pytest.mark.parametrize(
    ("arguments", "reasons"),
    [
        ([], []),
        (["--moe-runner-backend", "triton"], []),
        (["--moe-runner-backend", "triton_kernel"], ["moe_runner_backend 'triton_kernel' is not one of ['auto', 'triton']"]),
        (["--enable-return-routed-experts"], [f"--enable-return-routed-experts is in use and {MOE} does not accept it"]),
        (["--expert-distribution-recorder-mode", "stat"], ["--expert-distribution-recorder-mode 'stat' is not served: the kernel does not tell which "
                                                           "experts it took"]),
        (["--quantization", "fp8"], ["FP8 weights of a MoE model without blocks: the kernel reads FP8 experts of a checkpoint whose weight_block_size is "
                                     "[128, 128], SGLang would give each one scale"]),
        ([*NGRAM, "--speculative-ngram-max-bfs-breadth", "1"], []),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_the_same_verdict_on_qwen3_moe(doctor, refusals, model_dir, arguments, reasons):
    command = ["--model-path", model_dir(**QWEN3_30B_A3B), *arguments]
    code, report = doctor([*command, "--enable-nvidia-megakernel"])
    assert report["reasons"] == refusals(command) == reasons
    assert (code, report["spec"]) == (bool(reasons), MOE)


def test_the_same_verdict_on_qwen3_moe_in_fp8(doctor, refusals, model_dir):
    blocks = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    model = model_dir(**QWEN3_30B_A3B, quantization_config=blocks)
    code, report = doctor(["--model-path", model, "--enable-nvidia-megakernel"])
    assert (code, report["reasons"]) == (0, refusals(["--model-path", model])) and report["reasons"] == []


def test_qwen3_moe_is_served_on_hopper_alone(doctor, model_dir):
    code, report = doctor(["--model-path", model_dir(**QWEN3_30B_A3B), "--enable-nvidia-megakernel"], assume="sm_100")
    assert code == 1 and any("sm_100" in reason for reason in report["reasons"]), report["reasons"]


@pytest.mark.parametrize("isa", ["sm_100", "sm_103"])
def test_the_same_defaults_as_on_blackwell(doctor, refusals, model_dir, isa):
    code, report = doctor(["--model-path", model_dir(), "--page-size", "1"], assume=isa)
    assert (code, report["reasons"]) == (0, refusals(["--model-path", model_dir(), "--page-size", "1"], isa=isa))


def test_reasons_that_sglang_gives_one_at_a_time_come_together(doctor, model_dir):
    code, report = doctor(["SGLANG_PLUGINS=another", "--model-path", model_dir(head_dim=96), "--enable-amd-monokernel"], "sm_89")
    assert code == 1
    assert report["reasons"] == [
        "SGLANG_PLUGINS='another' does not list the 'nvidia_megakernel' plugin",
        "--enable-amd-monokernel is also set; use one of the two",
        "sgl_lowlatency.specs.nvidia.dense:QWEN3_SPEC supports ['sm_100', 'sm_103', 'sm_90'], not sm_89",
        "config.head_dim 96 is not one of 64, 128",
    ]


def test_no_gpu_here_and_none_assumed(doctor, model_dir, monkeypatch):
    monkeypatch.setattr("sglang.srt.kernel_plugins.nvidia.binding.device_isa", lambda: None)
    code, report = doctor(["--model-path", model_dir(), "--page-size", "7"], assume=None)
    assert code == 1 and report["isa"] == verdict.DEFAULT_ISA
    assert [reason.split(" (")[0] for reason in report["reasons"]] == [
        "no GPU is visible",
        "page_size 7 is not one of ['1', '128', '16', '32', '64']",
    ]


def test_flag_absent_is_said(doctor, model_dir):
    code, report = doctor(["--model-path", model_dir()])
    assert (code, report["notes"]) == (0, ["--enable-nvidia-megakernel is not in the command; judged as if it were"])


def test_another_sglang_is_said(doctor, model_dir, monkeypatch):
    monkeypatch.setattr("sgl_lowlatency.TESTED_SGLANG", "0.5.0")
    code, report = doctor(["--model-path", model_dir(), "--enable-nvidia-megakernel"])
    version = report["versions"]["sglang"]
    assert (code, report["notes"]) == (0, [f"sglang {version} is installed; this release is tested with 0.5.0"])


def test_a_host_only_installation_is_a_note_for_another_machine_and_a_reason_here(doctor, model_dir, monkeypatch):
    host_only = {"emulation": ["host"]}
    command = ["--model-path", model_dir(), "--enable-nvidia-megakernel"]
    code, report = doctor(command, backends=host_only)
    assert code == 0 and "on this machine this installation has no CUDA kernels" in report["notes"][0]
    monkeypatch.setattr("sglang.srt.kernel_plugins.nvidia.binding.device_isa", lambda: None)
    code, report = doctor(command, assume=None, backends=host_only)
    assert code == 1 and any("no CUDA kernels" in reason for reason in report["reasons"])


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (["--model-path", "/no/such/model"], "the model path '/no/such/model' does not exist"),
        (["--model-path", "./missing"], "the model path './missing' does not exist"),
        (["--no-such-flag"], "SGLang does not accept the arguments: "),
        (["--model-path", os.path.dirname(__file__)], f"{os.path.dirname(__file__)!r} has no config.json"),
    ],
)
def test_a_command_that_cannot_be_judged_says_why(doctor, arguments, start):
    code, report = doctor(arguments)
    assert code == 1 and len(report["reasons"]) == 1 and report["reasons"][0].startswith(start)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("{}", "names no architectures"), ('{"architectures": null}', "names no architectures"), ("[1]", "is not a JSON object"), ("{", "is not a JSON object")],
)
def test_a_config_that_sglang_would_trip_over_is_named(doctor, tmp_path, text, reason):
    (tmp_path / "config.json").write_text(text)
    code, report = doctor(["--model-path", str(tmp_path)])
    assert code == 1 and len(report["reasons"]) == 1
    assert report["reasons"][0].startswith(f"{str(tmp_path / 'config.json')!r} {reason}")


def test_what_sglang_itself_refuses(doctor, model_dir):
    command = ["--model-path", model_dir(), "--enable-hierarchical-cache", "--disable-radix-cache"]
    code, report = doctor(command)
    assert code == 1 and report["reasons"][0].startswith("SGLang itself refuses this command: ValueError: The arguments")


def test_text_output(capsys, model_dir):
    with mock.patch("sgl_lowlatency.guard.device.compiled_backends", lambda: FULL):
        code = main(["doctor", "--assume-gpu", "sm_90", "--", "--model-path", model_dir(), "--tp", "3", "--page-size", "7"])
    text = capsys.readouterr().out
    assert code == 1 and text.endswith(
        "verdict: refused, 2 reasons\n  - tp_size 3 is not one of ['1', '2', '4', '8']\n"
        "  - page_size 7 is not one of ['1', '128', '16', '32', '64']\n"
    )
    assert "GPU: sm_90 (assumed)\n" in text and text.startswith("sgl-lowlatency ")


def test_host_emulation_is_judged_for_the_cpu(model_dir):
    """The demo's kind of command, in a process of its own: emulation replaces SGLang's device probes for good."""
    command = ["SGL_LOWLATENCY_EMULATE=1", "python", "-m", "sglang.launch_server", "--model-path", model_dir()]
    command += ["--device", "cpu", "--attention-backend", "torch_native", "--cuda-graph-backend-decode=disabled"]
    command += ["--cuda-graph-backend-prefill=disabled", "--enable-nvidia-megakernel"]
    reports = {}
    for device in ("cpu", "cuda"):
        done = subprocess.run(
            [sys.executable, "-m", "sgl_lowlatency.cli.main", "doctor", "--json", "--", *command, "--device", device],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=300,
        )
        reports[device] = (done.returncode, json.loads(done.stdout))
    code, report = reports["cpu"]
    assert (code, report["reasons"], report["emulated"], report["isa"]) == (0, [], True, "sm_90")
    code, report = reports["cuda"]
    assert code == 1
    assert report["reasons"] == [
        "--device 'cuda' is not 'cpu': SGL_LOWLATENCY_EMULATE=1 runs the kernels on the CPU"
    ]
