"""`sgl-lowlatency bench` as a shell uses it, up to the GPU; what it measures there is tests/unit/bench's and the GPU's own."""

import json

import pytest

torch = pytest.importorskip("torch")

from sgl_lowlatency.bench import decode_step, provenance, read_bandwidth  # noqa: E402
from sgl_lowlatency.cli import bench  # noqa: E402
from sgl_lowlatency.cli.main import main  # noqa: E402

GB = 10**9


@pytest.fixture
def card(monkeypatch):
    """Stands in for a GPU of 100 GB; returns what can be changed of it."""
    facts = {"free": 100 * GB, "after": None}
    monkeypatch.setattr(bench, "missing", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Card X")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (facts["free"], 100 * GB))
    monkeypatch.setattr(decode_step, "device_id", lambda device: None)
    monkeypatch.setattr(provenance, "gpu", lambda device_id=None: {"gpu": "none", "num_gpus": 1, "driver": "1", "clocks_mhz": {}})
    monkeypatch.setattr(read_bandwidth, "measure", lambda: {"torch_sum": 3900.0, "read_gb_s": 4000.0})

    def measure(name, shape, settings, results, read_gb_s, device, say):
        for index, rows in enumerate(settings.rows):
            if facts["after"] is not None and index == facts["after"][0]:
                raise facts["after"][1]
            row = decode_step.row_of(name, shape, rows, settings.contexts[0], [4.0] * 3, [4.4] * 3, [4.5] * 3, read_gb_s)
            results.add(**row, problems=facts.get("problems", []))

    monkeypatch.setattr(decode_step, "measure", measure)
    return facts


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_one_line_and_no_time(capsys):
    assert main(["bench", "--models", "qwen3-0.6b"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1 and "no GPU is visible" in err


def test_everything_that_is_missing_is_named_at_once(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(bench, "installation_reasons", lambda isa, emulate: [f"no kernels for {isa}, emulate {emulate}"])
    text = bench.missing()
    assert "is built without CUDA" in text and "no kernels for None, emulate False" in text


def test_an_old_gpu_is_named(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Card A")
    assert bench.missing() == "cannot measure here: Card A is sm_80; decode_step needs sm_90 or newer"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rows", "0,2"], "argument --rows: '0' is not a whole number of 1 to 32"),
        (["--rows", "33"], "'33' is not a whole number of 1 to 32"),
        (["--rows", "1,x"], "'x' is not a whole number"),
        (["--rows", "2,2"], "'2,2' names a number twice"),
        (["--contexts", "-5"], "--contexts"),
        (["--layers", "0"], "'0' is not a whole number of 1 or more"),
        (["--emulate"], "unrecognized arguments: --emulate"),
    ],
)
def test_bad_arguments_end_with_the_usage(capsys, arguments, words):
    with pytest.raises(SystemExit) as end:
        main(["bench", *arguments])
    assert end.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--models", "gpt-2"], "gpt-2 is neither one of qwen3-0.6b,"),
        (["--layers", "99"], "--layers 99 is not within 1..36"),
        (["--contexts", "50000"], "--contexts 50000 is more than the 40960 positions of qwen3-8b"),
        (["--out", "x.txt"], "--out x.txt does not end in .json"),
        (["--out", "no/such/x.json"], "there is no folder no/such"),
        (["--picture", "x.gif"], "ends in neither .svg nor .png"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_the_gpu_is_touched(card, capsys, arguments, words):
    assert main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert words in err and out == ""


def test_too_little_memory_says_how_much_is_needed(card, capsys):
    card["free"] = 12 * GB
    assert main(["bench"]) == 2
    out, err = capsys.readouterr()
    assert "qwen3-8b needs" in err and "Card X has 12.0 GB free" in err and "would fit" in err
    assert " ms" not in out


def test_a_measurement_is_printed_written_and_drawn(card, capsys, tmp_path):
    files = ["--out", str(tmp_path / "run.json"), "--picture", str(tmp_path / "run.svg")]
    assert main(["bench", "--rows", "1,2", *files]) == 0
    out = capsys.readouterr().out
    content = json.loads((tmp_path / "run.json").read_text())
    assert (content["what"], content["gpu"], content["name"]) == ("kernel-step", "Card X", "run")
    assert content["bandwidth_gb_s"]["read_gb_s"] == 4000
    assert [row["rows"] for row in content["rows"]] == [1, 2]
    assert "Card X" in out and "4.0000 ms" in out and "█" in out
    assert (tmp_path / "run.svg").read_text().count("<rect") > 4


def test_a_wrong_output_is_exit_code_1(card, capsys):
    card["problems"] = ["output is not finite or not written in full"]
    assert main(["bench"]) == 1
    assert "output is not finite" in capsys.readouterr().out


@pytest.mark.parametrize(("measured", "table"), [(0, False), (2, True)])
def test_ctrl_c_keeps_what_was_measured(card, capsys, tmp_path, measured, table):
    card["after"] = (measured, KeyboardInterrupt())
    assert main(["bench", "--out", str(tmp_path / "run.json")]) == 130
    out, err = capsys.readouterr()
    assert f"interrupted after {measured} of 4 cases" in err
    assert ("4.0000 ms" in out) is table
    assert len(json.loads((tmp_path / "run.json").read_text())["rows"]) == measured


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried\nmore"), "--layers N cuts the model"),
        (RuntimeError("decode_step stopped: block 3 waited"), "the measurement ended: decode_step stopped: block 3 waited"),
    ],
)
def test_an_error_on_the_way_is_named_and_keeps_what_was_measured(card, capsys, error, words):
    card["after"] = (1, error)
    assert main(["bench"]) == 2
    out, err = capsys.readouterr()
    assert words in err and "4.0000 ms" in out and "Traceback" not in err
