"""The doctor without SGLang: taking commands apart, and saying clearly what is missing."""

import json
import subprocess
import sys

import pytest

from sgl_lowlatency.cli import launch_command

ARGS = ["--model-path", "m", "--tp", "2"]


@pytest.mark.parametrize(
    "words",
    [
        ["python", "-m", "sglang.launch_server", *ARGS],
        ["/usr/bin/python3.11", "-u", "-m", "sglang.launch_server", *ARGS],
        ["python3", "-m", "sglang", "serve", *ARGS],
        ["sglang", "serve", *ARGS],
        ["sglang", "serve", "m", "--tp", "2"],
        ["/opt/venv/bin/sglang", "serve", "m", "--tp", "2"],
        ARGS,
    ],
)
def test_every_form_of_the_command_gives_the_same_arguments(words):
    assert launch_command.parse(words) == launch_command.LaunchCommand({}, ARGS)


@pytest.mark.parametrize("prefix", [[], ["env"], ["nohup"], ["exec", "env"]])
def test_variables_before_the_command(prefix):
    words = [*prefix, "SGLANG_PLUGINS=a,b", "X=", "python", "-m", "sglang.launch_server", *ARGS]
    assert launch_command.parse(words) == launch_command.LaunchCommand({"SGLANG_PLUGINS": "a,b", "X": ""}, ARGS)


@pytest.mark.parametrize(
    "words", [[], ["python", "server.py"], ["python", "-m", "vllm"], ["vllm", "serve", "m"], ["sglang", "version"], ["sglang"]]
)
def test_anything_else_is_refused_in_words(words):
    with pytest.raises(ValueError, match="sglang"):
        launch_command.parse(words)


def run_doctor(arguments, prelude=""):
    code = f"import sys\n{prelude}\nfrom sgl_lowlatency.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    return subprocess.run([sys.executable, "-c", code, "doctor", *arguments], capture_output=True, text=True, timeout=120)


# A finder in front of the others that knows no sglang, as on a machine that never installed it.
WITHOUT_SGLANG = """
class NoSGLang:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "sglang":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NoSGLang())
"""


LAUNCH = ["python", "-m", "sglang.launch_server", *ARGS]


@pytest.mark.parametrize("words", [["--", *ARGS], ARGS, ["sglang", "serve", *ARGS], ["--", *LAUNCH]])
def test_sglang_not_installed(words):
    done = run_doctor(words, WITHOUT_SGLANG)
    assert done.returncode == 1
    assert "verdict: refused, 1 reason\n  - sglang is not installed: pip install sglang==0.5.23\n" in done.stdout


def test_json_without_sglang():
    done = run_doctor(["--json", "--assume-gpu", "sm_90", "--", *ARGS], WITHOUT_SGLANG)
    report = json.loads(done.stdout)
    assert done.returncode == 1 and report["ok"] is False and report["assumed_gpu"] == "sm_90"
    assert report["reasons"] == ["sglang is not installed: pip install sglang==0.5.23"]
    assert report["versions"]["python"] == sys.version.split()[0]


def test_not_a_launch_command():
    done = run_doctor(["--", "vllm", "serve"])
    assert done.returncode == 1 and "'vllm serve' is not an SGLang launch command" in done.stdout


def test_an_option_of_neither_is_named_and_not_taken_for_the_servers():
    done = run_doctor(["--jsn", "--", *LAUNCH])
    assert done.returncode == 2 and done.stderr.endswith("error: unrecognized arguments: --jsn\n")


def test_no_command_at_all():
    done = run_doctor([])
    assert done.returncode == 1 and "  - the empty command is not an SGLang launch command" in done.stdout


def test_a_bad_variable_in_the_command():
    done = run_doctor(["--", "SGL_LOWLATENCY_SELF_CHECK=off", *ARGS])
    assert done.returncode == 1 and "SGL_LOWLATENCY_SELF_CHECK='off' is not 0 or 1" in done.stdout


def test_a_malformed_gpu_name_is_a_usage_error():
    done = run_doctor(["--assume-gpu", "h200", "--", *ARGS])
    assert done.returncode == 2 and "'h200' is not of the form sm_90" in done.stderr


def test_another_command_takes_no_stray_words():
    done = subprocess.run(
        [sys.executable, "-m", "sgl_lowlatency.cli.main", "version", "--", "x"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and "unrecognized arguments: x" in done.stderr


@pytest.mark.parametrize(("found", "said"), [
    ("multicast.Multicast((True, True))", "offered by 2 of 2 GPUs; unused: servers store once a rank"), ("None", None),
    ("(_ for _ in ()).throw(multicast.DriverError('cuDeviceGetCount failed with 3'))", "cuDeviceGetCount failed with 3"),
])
def test_what_the_driver_says_of_multicast_is_told_and_no_reason(found, said):
    prelude = f"{WITHOUT_SGLANG}\nfrom sgl_lowlatency.kernels import multicast\nmulticast.probe = lambda: {found}"
    report = json.loads(run_doctor(["--json", "--", *LAUNCH], prelude).stdout)
    assert report["multicast"] == said and not any("ulticast" in reason for reason in report["reasons"])
    lines = [line for line in run_doctor(["--", *LAUNCH], prelude).stdout.splitlines() if line.startswith("NVLink multicast: ")]
    assert lines == ([] if said is None else [f"NVLink multicast: {said}"])
