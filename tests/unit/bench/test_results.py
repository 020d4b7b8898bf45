import json

import pytest

from sgl_lowlatency.bench import provenance
from sgl_lowlatency.bench.results import Results


def make(tmp_path, **changes):
    fields = {"what": "served-decode", "name": "run", "weights": "random", "command": ["python3", "x"], "commit": "abc"}
    return Results(tmp_path, **(fields | changes))


def test_the_file_exists_after_every_row(tmp_path):
    results = make(tmp_path)
    results.add(batch=1, off_ms=[4.0, 4.2, 4.1], on_ms=[2.0, 2.1, 2.05], floor_ms=1.845)
    first = json.loads((tmp_path / "run.json").read_text())
    results.add(batch=2, on_ms=[3.0])
    second = json.loads((tmp_path / "run.json").read_text())
    assert (len(first["rows"]), len(second["rows"])) == (1, 2)
    row = second["rows"][0]
    assert row["ratio"] == 2.0
    assert row["ratio_ci95"][0] <= 2.0 <= row["ratio_ci95"][1]
    assert row["on_floor_share"] == pytest.approx(0.9)
    assert "ratio" not in second["rows"][1]


def test_every_field_of_the_schema_is_there(tmp_path):
    make(tmp_path).write()
    content = json.loads((tmp_path / "run.json").read_text())
    wanted = {
        "schema",
        "what",
        "name",
        "date",
        "commit",
        "dirty",
        "gpu",
        "num_gpus",
        "driver",
        "clocks_mhz",
        "versions",
    }
    assert wanted | {"command", "weights", "notes", "rows"} <= set(content)
    assert content["schema"] == 1


def test_an_unknown_kind_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'speed' is not one of"):
        make(tmp_path, what="speed")


def test_commands_keep_no_folders():
    command = ["python3", "-m", "benchmark.x", "--out", "/home/me/out/", "--model=/data/models/q8", "--bs", "1,2"]
    assert provenance.sanitized(command) == [
        "python3",
        "-m",
        "benchmark.x",
        "--out",
        "out",
        "--model=q8",
        "--bs",
        "1,2",
    ]


@pytest.mark.parametrize(("given", "expected"), [("a1b2", ("a1b2", False)), ("a1b2-dirty", ("a1b2", True))])
def test_a_given_commit_is_taken_as_it_is(given, expected):
    assert provenance.commit(given) == expected


def test_gpu_fields_are_read_from_nvidia_smi(monkeypatch):
    line = "NVIDIA H200, 580.159.04, 1980, 3201, 1980, 143771"
    monkeypatch.setattr(provenance.shutil, "which", lambda name: name)
    monkeypatch.setattr(provenance, "_output", lambda command, cwd=None: f"{line}\n{line}")
    found = provenance.gpu()
    assert found == {
        "gpu": "NVIDIA H200",
        "num_gpus": 2,
        "driver": "580.159.04",
        "clocks_mhz": {"sm": 1980, "mem": 3201, "max_sm": 1980},
    }


def test_a_machine_without_a_gpu_says_so(monkeypatch):
    monkeypatch.setattr(provenance.shutil, "which", lambda name: None)
    assert provenance.gpu()["gpu"] == "none"
