"""SGLang's own step beside decode_step: the batch on the CPU with the real SGLang, the graphs and the times with stand-ins."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from benchmark import models  # noqa: E402
from benchmark.kernels import sglang_runner, standard_step  # noqa: E402
from sgl_lowlatency.bench import timing  # noqa: E402
from sgl_lowlatency.bench.results import Results  # noqa: E402

SCRIPT = Path(__file__).with_name("standard_step_on_cpu.py")


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "LlamaForCausalLM"])
def test_a_case_is_the_decode_step_it_says_and_decode_step_takes_its_batch(tmp_path, architecture):
    command = [sys.executable, str(SCRIPT), str(tmp_path), architecture]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(lines[0].removeprefix("RESULT "))
    assert [(entry["rows"], entry["lengths"]) for entry in found] == [(1, [40]), (3, [21] * 3)]
    for entry in found:
        assert entry["without_head"] <= 0.004  # the same product
        assert entry["again"] == 0 and entry["plugin"] <= 0.03 and entry["shuffled"] > 1.2
        if architecture == "Qwen3ForCausalLM":
            assert entry["oracle"] <= 0.03


def test_cases_are_rows_by_context():
    assert standard_step.parse_cases("1x1024, 8x32000") == [(1, 1024), (8, 32000)]
    for bad in ("1024", "0x5", "17x8", "2x1", "1x-3"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not ROWSxCONTEXT"):
            standard_step.parse_cases(bad)


def test_the_pool_holds_the_largest_case():
    words = standard_step.sglang_arguments(Path("m"), [(8, 1024), (1, 32000)], ["--attention-backend", "fa3"])
    value = dict(zip(words, words[1:], strict=False))
    assert int(value["--max-total-tokens"]) >= 32001 and int(value["--context-length"]) > 32000
    assert value["--cuda-graph-max-bs-decode"] == "8" and value["--attention-backend"] == "fa3"
    assert not any("megakernel" in word for word in words)


class Decoder:
    """A model runner whose `capture` keeps what the model's forward gives, as SGLang's does."""

    def __init__(self, fails=False):
        self.model = SimpleNamespace(model=lambda ids, positions, batch: "hidden")
        self.model.forward = self.forward = lambda ids, positions, batch: "logits"
        self.backend = SimpleNamespace(_graphs={}, _outputs={})
        self.decode_cuda_graph_runner, self.fails = self, fails

    def capture(self):
        forward = self.model.__dict__.get("forward", self.forward)
        self.backend._graphs["key"] = f"graph of {forward(None, None, None)}"
        self.backend._outputs["key"] = forward(None, None, None)
        if self.fails:
            raise RuntimeError("capture failed")


def test_the_graph_without_head_leaves_sglangs_own_in_place():
    decoder = Decoder()
    decoder.capture()
    body = sglang_runner.capture_without_head(decoder)
    assert (body.graphs, body.outputs) == ({"key": "graph of hidden"}, {"key": "hidden"})
    assert (decoder.backend._graphs, decoder.backend._outputs) == ({"key": "graph of logits"}, {"key": "logits"})
    assert "forward" not in decoder.model.__dict__


def test_a_failed_capture_leaves_sglangs_own_in_place():
    decoder = Decoder()
    decoder.capture()
    decoder.fails = True
    with pytest.raises(RuntimeError, match="capture failed"):
        sglang_runner.capture_without_head(decoder)
    assert decoder.backend._graphs == {"key": "graph of logits"} and "forward" not in decoder.model.__dict__


@pytest.fixture
def bench(monkeypatch):
    """A Bench on a stand-in: vocab 50, hidden 8, two rows; `outputs` can be spoilt before measure."""
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(2, 8, generator=generator), torch.randn(50, 8, generator=generator)
    logits = hidden @ head.T
    step = SimpleNamespace(in_graph=True, logits=logits, batch=SimpleNamespace(seq_lens=torch.tensor([9, 9])))
    monkeypatch.setattr(sglang_runner, "decode", lambda runner, **case: step)
    monkeypatch.setattr(timing, "in_turn", lambda replays, *, groups, target_ms: [[float(i)] * groups for i in range(1, len(replays) + 1)])
    made = standard_step.Bench.__new__(standard_step.Bench)
    made.args, made.plugin = SimpleNamespace(groups=3, group_ms=1.0), None
    made.runner = SimpleNamespace(
        decode_cuda_graph_runner=SimpleNamespace(_replay_graph_key="key", bs=2),
        model=SimpleNamespace(lm_head=SimpleNamespace(weight=head)),
    )
    graph = SimpleNamespace(replay=lambda: None)
    made.full = sglang_runner.Graphs({"key": graph}, {"key": SimpleNamespace(next_token_logits=logits)})
    made.body = sglang_runner.Graphs({"key": graph}, {"key": hidden})
    made.step = step
    return made


def test_a_case_is_timed_with_and_without_head(bench):
    times, problems, facts = bench.measure(2, 9, 50)
    assert times == {"standard": [1.0] * 3, "standard_body": [2.0] * 3}
    assert problems == [] and facts["head_distance"] < 1e-6


def test_graphs_that_do_not_belong_together_are_a_problem(bench):
    bench.body.outputs["key"] = bench.body.outputs["key"].flip(0)
    _, (problem,), _ = bench.measure(2, 9, 50)
    assert problem.startswith("logits and those of the graph without head differ by")


def test_other_logits_in_a_replay_are_a_problem(bench):
    bench.step.logits = bench.step.logits.flip(0)
    assert bench.measure(2, 9, 50)[1][0].startswith("logits of a replay and of the step differ by")


def test_another_length_is_a_problem(bench):
    assert "sequence lengths are [9, 9]" in bench.measure(2, 10, 50)[1]


@pytest.mark.parametrize(("field", "words"), [("in_graph", "outside of a graph"), ("bs", "padded")])
def test_a_step_outside_of_its_graph_is_not_measured(bench, field, words):
    if field == "bs":
        bench.runner.decode_cuda_graph_runner.bs = 4
    else:
        bench.step.in_graph = False
    with pytest.raises(RuntimeError, match=words):
        bench.measure(2, 9, 50)


ARGS, SHAPE = SimpleNamespace(slug="llama-3.2-1b", quantization=None), models.SHAPES["llama-3.2-1b"]
TIMES = {"standard": [1.4] * 3, "standard_body": [1.2] * 3, "plugin_body": [0.6] * 3, "plugin": [0.75] * 3}


def test_rows_compare_like_with_like():
    with_head, without = standard_step.rows_of(ARGS, SHAPE, 1, 1024, TIMES, [], {}, 4000.0)
    assert (with_head["metric"], with_head["off_ms"][0], with_head["on_ms"][0]) == ("step_head", 1.4, 0.75)
    assert (without["metric"], without["off_ms"][0], without["on_ms"][0]) == ("step", 1.2, 0.6)
    assert with_head["floor_bytes"] - without["floor_bytes"] == 128256 * 2048 * 2
    assert (with_head["off_head_ms"], with_head["on_head_ms"]) == (pytest.approx(0.2), pytest.approx(0.15))
    assert without["off_floor_share"] == pytest.approx(without["floor_ms"] / 1.2, abs=1e-4)


def test_an_fp8_row_has_the_floor_of_fp8_matrices():
    shape, args = models.SHAPES["qwen3-8b"], SimpleNamespace(slug="qwen3-8b-fp8", quantization="fp8")
    (row,) = standard_step.rows_of(args, shape, 1, 1024, {"standard": [3.0] * 3}, [], {}, 4000.0)
    assert (row["model"], row["dtype"], row["metric"]) == ("qwen3-8b-fp8", "fp8", "step_head")
    kv, head = 1024 * 36 * 2 * 8 * 128 * 2, 151936 * 4096 * 2
    matrices = 36 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 12288)
    assert row["floor_bytes"] == pytest.approx(kv + head + matrices * (1 + 4 / 128**2), rel=1e-3)


def test_the_table_shows_ratios_and_failures(tmp_path):
    results = Results(tmp_path, what="kernel-step", name="x", weights="made up", command=["x"], commit="abc")
    for row in standard_step.rows_of(ARGS, SHAPE, 1, 1024, TIMES, ["odd"], {}, 4000.0):
        results.add(**row)
    for row in standard_step.rows_of(ARGS, SHAPE, 2, 1024, {"standard": [1.5]}, [], {}, 4000.0):
        results.add(**row)
    results.set(failures=["8 rows of 5 tokens: no"])
    lines = standard_step.table(results.content).splitlines()
    assert "1.867" in lines[2] and lines[2].endswith("odd")  # 1.4 / 0.75
    assert "2.000" in lines[3]
    assert lines[4].split()[:6] == ["step_head", "2", "1024", "1.5000", "-", "-"]
    assert lines[5] == "8 rows of 5 tokens: no"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("script", ["standard_step", "decode_step"])
def test_no_script_measures_without_a_gpu(tmp_path, script):
    command = [sys.executable, "-m", f"benchmark.kernels.{script}", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[3])
    assert done.returncode == 2 and "no GPU is visible" in done.stderr
    assert not list(tmp_path.iterdir())
