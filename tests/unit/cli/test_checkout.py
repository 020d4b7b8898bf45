"""`sgl-lowlatency bench serve` and `bench replay` as a shell uses them, from any folder. Oracle: what the scripts themselves print."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_lowlatency.bench import provenance
from sgl_lowlatency.cli import checkout
from sgl_lowlatency.cli.main import main

ROOT = Path(__file__).parents[3]


def bench(folder, *words):
    """The finished process of a command run in `folder`."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, "-m", "sgl_lowlatency.cli.main", "bench", *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_replay_prints_the_commands_it_would_run(tmp_path):
    pytest.importorskip("sglang")
    done = bench(tmp_path, "replay", "--out", "out", "--smoke", "--dry-run", "--repeats", "1")
    assert done.returncode == 0, done.stderr
    launches = [line for line in done.stdout.splitlines() if "sglang.launch_server" in line]
    assert ["--enable-nvidia-megakernel" in line for line in launches] == [False, True]
    assert done.stdout.count("--concurrency=") == 4 and (tmp_path / "out/traces/replayed").is_dir()  # of the caller's folder


def test_serve_prints_the_commands_it_would_run(tmp_path):
    pytest.importorskip("torch")
    done = bench(tmp_path, "serve", "--out", "out", "--smoke", "--dry-run")
    assert done.returncode == 0, done.stderr
    launches = [line for line in done.stdout.splitlines() if "sglang.launch_server" in line]
    assert ["--enable-nvidia-megakernel" in line for line in launches] == [False, True]
    assert "# 3 times, off and on in turn: 2 prompts of 64 tokens, 2 and then 6 new tokens each" in done.stdout
    assert not (tmp_path / "out").exists()


def test_arguments_reach_the_script(tmp_path):
    pytest.importorskip("sglang")
    done = bench(tmp_path, "replay", "--out", "out")
    assert done.returncode == 2 and "give one of --model-path, --model and --smoke" in done.stderr


def test_without_a_checkout_there_is_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(provenance, "REPOSITORY", tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "replay", "--smoke"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "sgl-lowlatency bench replay: run it from a checkout: its scripts, benchmark/, are not part of an installed package\n"
    )
    monkeypatch.chdir(ROOT)
    assert checkout.find() == ROOT  # an installed package in the folder of a checkout


def test_kernels_needs_no_gpu_to_say_what_it_would_measure(capsys):
    for words in (["kernels"], []):
        assert main(["bench", *words, "--models", "qwen3-8b", "--rows", "1,8", "--dry-run"]) == 0
        out = capsys.readouterr().out
        assert "qwen3-8b, bf16 weights: 19.4 GB of GPU memory" in out
        assert "1 rows of 1024 tokens: a step reads 15.288 GB" in out and "8 rows of 1024 tokens: a step reads 16.345 GB" in out
