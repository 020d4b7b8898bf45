"""The decode comparison without servers: what it asks them, and what it makes of their answers."""

import importlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmark import models
from benchmark.serve import decode_ab, startup
from benchmark.serve.client import Reply
from sgl_lowlatency.bench import floors
from sgl_lowlatency.bench.results import Results

SHAPE = models.named_shape("qwen3-8b")


def parse(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["decode_ab", "--out", "out", *words])
    return decode_ab.parse()


def option(arguments, name):
    return arguments[arguments.index(name) + 1]


class FakeClient:
    """A second of prefill, `step_s` a step. With a cache, prompts seen before are found in it up to their last token."""

    def __init__(self, step_s, cache=False):
        self.step_s, self.cache, self.seen, self.asked = step_s, cache, set(), []

    def timed_replies(self, prompts, count):
        self.asked.append(([len(prompt) for prompt in prompts], count))
        cached = [len(prompt) - 1 if self.cache and tuple(prompt) in self.seen else 0 for prompt in prompts]
        self.seen |= {tuple(prompt) for prompt in prompts}
        return 1.0 + self.step_s * count, [Reply([], [], [], "length", found) for found in cached]

    def timed(self, prompts, count):
        return self.timed_replies(prompts, count)[0]


@pytest.fixture
def results(tmp_path):
    return Results(tmp_path, what="served-decode", name="run", weights="random", command=["x"], commit="abc")


def test_the_servers_hold_every_case(monkeypatch):
    args = parse(monkeypatch, "--cases", "8x1024,1x32000", "--radix")
    arguments = decode_ab.server_arguments(args)
    assert int(option(arguments, "--context-length")) >= 32000 + args.long
    assert int(option(arguments, "--max-total-tokens")) >= 32000 + args.long + 8 * 1024, "the long prompt stays beside another case's"
    assert option(arguments, "--cuda-graph-max-bs-decode") == "8"
    assert "--disable-radix-cache" not in arguments
    assert "--disable-radix-cache" in decode_ab.server_arguments(parse(monkeypatch, "--cases", "8x1024"))


def test_the_batches_to_come_are_those_of_steps_and_prefills(monkeypatch):
    found = decode_ab.batch_tokens(parse(monkeypatch, "--cases", "1x1024,8x1024"))
    assert found == [1, 3, 8, *range(1024, 7168, 1024), 7156, 7168, 8192], "7156: the eight compared prompts"
    assert decode_ab.batch_tokens(parse(monkeypatch, "--cases", "1x32000"))[-1] == 8192, "a prefill is cut into chunks"


@pytest.mark.parametrize("quantization, slug, dtype", [(None, "qwen3-8b", "bf16"), ("fp8", "qwen3-8b-fp8", "fp8")])
def test_a_row_is_a_slope_and_names_its_weights(monkeypatch, results, quantization, slug, dtype):
    args = parse(monkeypatch, "--cases", "2x1024", *(["--quantization", quantization] if quantization else []))
    pair = [SimpleNamespace(name=name, client=FakeClient(s)) for name, s in (("off", 0.005), ("on", 0.004))]
    decode_ab.measure(pair, SHAPE, args, results, 4500.0)
    (row,) = json.loads(results.path.read_text())["rows"]
    assert (row["model"], row["dtype"], row["batch"], row["context"], row["cached_prompt_tokens"]) == (slug, dtype, 2, 1024, 0)
    assert row["off_ms"] == [5.0] * 3 and row["on_ms"] == [4.0] * 3 and row["ratio"] == 1.25
    assert row["floor_bytes"] == floors.step_bytes(SHAPE, rows=2, context=1024 + 144, with_head=True, fp8=dtype == "fp8")
    assert pair[0].client.asked == pair[1].client.asked == [([1024] * 2, 16)] + [([1024] * 2, 16), ([1024] * 2, 272)] * 3


def test_prompts_found_in_the_cache_are_counted(monkeypatch, results):
    args = parse(monkeypatch, "--cases", "1x8000", "--radix")
    pair = [SimpleNamespace(name=name, client=FakeClient(0.005, cache=True)) for name in ("off", "on")]
    decode_ab.measure(pair, SHAPE, args, results, None)
    assert results.content["rows"][0]["cached_prompt_tokens"] == 7999


def test_the_table_tells_the_start_and_what_was_not_compared(monkeypatch, results):
    args = parse(monkeypatch, "--cases", "1x100")
    pair = [SimpleNamespace(name=name, client=FakeClient(0.005)) for name in ("off", "on")]
    decode_ab.measure(pair, SHAPE, args, results, None)
    results.set(tokens=[{"batch": 1, "context": 100, "compared": False}], start=startup.costs({"ready_s": 20.0}, {"ready_s": 24.0}, 0))
    lines = decode_ab.table(results).splitlines()
    assert lines[2].split()[:5] == ["1", "100", "5.000", "5.000", "1.000"]
    assert "'compared': False" in lines[3] and "+4.0 s with caches warm" in lines[4]


SCRIPT = (Path(__file__).parents[3] / "benchmark" / "gpu_checks.sh").read_text().replace("\\\n", "")
PHASES = re.findall(r"phase (\S+) serve\.(decode_ab|verify_ab|start_ab)(.*?) \|\|", SCRIPT)


@pytest.mark.parametrize("name, script, words", PHASES)
def test_the_phases_of_gpu_checks_are_arguments_that_parse(monkeypatch, name, script, words):
    """A typo there would be found on a GPU that is lent by the minute."""
    module = importlib.import_module(f"benchmark.serve.{script}")
    words = re.sub(r'"\$\w+"', "eagle3", words).split()
    monkeypatch.setattr(sys, "argv", [script, "--out", "o", "--work", "w", "--commit", "c", "--deadline", "9", *words])
    args = module.parse()
    assert module.server_arguments(args)
    if name == "long":
        assert args.cases == [(1, 8000), (1, 32000)] and args.radix


def test_the_phases_have_names_of_their_own():
    names = [name for name, _, _ in PHASES]
    expected = {"speed", "profile", "long", "served", "fp8", "moe", "ngram", '"$draft"', '"$name"', "start", "tp2", "tp2-moe", '"tp2-$draft"'}
    assert set(names) == expected and len(names) == len(expected)


def test_experts_are_those_of_the_self_check_of_as_many_rows():
    log = """decode_step self-check: 1 rows, lengths [1, 2], 0.3 s: passed (kv 0.1; 0 of 18 choices of experts are not SGLang's; 8.0 experts a layer)
decode_step self-check: 8 rows, lengths [1], 1.2 s: passed (kv 0.1; 3 of 96 choices of experts are not SGLang's; 51.3 experts a layer)"""
    assert [decode_ab.experts_a_layer(log, rows) for rows in (1, 8, 2)] == [8.0, 51.3, None]


def test_the_floor_of_a_moe_model_counts_the_experts_that_the_log_tells(monkeypatch, results):
    args, shape = parse(monkeypatch, "--model", "qwen3-30b-a3b", "--cases", "8x1024"), models.named_shape("qwen3-30b-a3b")
    log = "self-check: 8 rows, lengths [1], 1 s: passed (kv 0; 3 of 96 choices of experts are not SGLang's; 50.0 experts a layer)"
    pair = [SimpleNamespace(name=name, client=FakeClient(0.004), log=lambda: log) for name in ("off", "on")]
    decode_ab.measure(pair, shape, args, results, 4500.0)
    (row,) = results.content["rows"]
    expert_bytes = 3 * 2048 * 768 * 2
    rest = floors.step_bytes(shape, rows=8, context=1024 + 144, with_head=True, experts=0)
    assert row["experts_a_layer"] == 50.0 and row["floor_bytes"] == rest + 48 * 50 * expert_bytes
