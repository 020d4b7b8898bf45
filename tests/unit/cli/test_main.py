"""The command line as a shell uses it."""

import subprocess
import sys


def test_a_reader_that_leaves_early_ends_the_command_quietly():
    """`sgl-lowlatency plan | head -1`: no traceback, and the status of a broken pipe."""
    command = [sys.executable, "-m", "sgl_lowlatency.cli.main", "plan", "--geometry", "qwen3-8b"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    first = process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    assert first and process.wait(timeout=60) in (0, 141)
    assert errors == ""
