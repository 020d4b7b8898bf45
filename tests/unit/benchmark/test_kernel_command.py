"""What the kernel benches' commands share. Oracle: the arguments given, and the rows of the results."""

import pytest

torch = pytest.importorskip("torch")

from benchmark.kernels import command  # noqa: E402


def table(content):
    return f"{len(content['rows'])} rows"


def test_a_bench_tells_how_it_was_called_and_fails_with_its_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command.deadline, "watchdog", lambda seconds, at_end: ended.append((seconds, at_end)))
    monkeypatch.setattr(command.sys, "argv", ["x", "--rows", "3"])
    monkeypatch.setattr(command.read_bandwidth, "measure", lambda gigabytes: {"read_gb_s": 4000.4, "copy_gb_s": gigabytes})
    ended = []
    args = command.parser("words", "kernel-x", deadline_s=120).parse_args(["--out", str(tmp_path), "--commit", "0" * 40])
    assert (args.name, args.groups, args.group_ms, args.deadline) == ("kernel-x", 7, 30.0, 120)
    results = command.begin(args, "x", "random", table)
    assert results.content["command"] == ["python3", "-m", "benchmark.kernels.x", "--rows", "3"]
    assert command.measure_bandwidth(results, 2.0) == 4000.4 and results.content["bandwidth_gb_s"] == {"read_gb_s": 4000, "copy_gb_s": 2}
    row = {"model": "m", "dtype": "bf16", "tp": 1, "mode": "decode", "kernel": "x", "metric": "step", "batch": 1, "rows": 1,
           "off_ms": [2.0, 2.0], "on_ms": [1.0, 1.0]}  # fmt: skip
    results.add(**row, problems=[])
    assert command.end(results, table) == 0
    results.add(**row, problems=["wrong"])
    assert command.end(results, table) == 1
    ((seconds, at_end),) = ended
    at_end()
    assert seconds == 120 and capsys.readouterr().out == "1 rows\n2 rows\n2 rows\n"
    assert (tmp_path / "kernel-x.json").exists()


def test_a_machine_that_cannot_measure_is_named(monkeypatch, capsys):
    monkeypatch.setattr(command, "missing", lambda: "no GPU is visible")
    assert command.refused("x") and capsys.readouterr().err == "x: no GPU is visible\n"
    monkeypatch.setattr(command, "missing", lambda: None)
    assert not command.refused("x") and capsys.readouterr().err == ""
