"""The command line as a shell uses it."""

import json
import subprocess
import sys

from sgl_lowlatency.cli.main import main


def test_a_reader_that_leaves_early_ends_the_command_quietly():
    """`sgl-lowlatency plan | head -1`: no traceback, and the status of a broken pipe."""
    command = [sys.executable, "-m", "sgl_lowlatency.cli.main", "plan", "--geometry", "qwen3-8b"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    first = process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    assert first and process.wait(timeout=60) in (0, 141)
    assert errors == ""


def test_plan_shows_the_grid_that_a_server_uses(capsys, tmp_path):
    """A small model takes fewer blocks than an H200 has SMs; the default plan is the one a server would make, and valid."""
    config = dict(num_hidden_layers=12, hidden_size=128, num_attention_heads=2, num_key_value_heads=2, head_dim=64,
                  intermediate_size=256, vocab_size=512, max_position_embeddings=512, rms_norm_eps=1e-6)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", "--geometry", str(tmp_path), "--rows", "4"]) == 0
    assert "4 rows on 24 blocks, 12 layers" in capsys.readouterr().out
    assert main(["plan", "--geometry", str(tmp_path), "--rows", "4", "--grid", "132"]) == 1


def test_plan_of_fp8_weights(capsys):
    assert main(["plan", "--geometry", "qwen3-8b", "--weights", "fp8"]) == 0
    text = capsys.readouterr().out
    assert "36 layers, FP8 weights" in text and "100,663,296" in text, "gate_up of a layer is a byte a weight"
