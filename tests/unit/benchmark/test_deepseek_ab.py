"""The turns of deepseek_ab.py with a server of a few lines in SGLang's place: what it is asked, what is made of its answers, what is a problem."""

import dataclasses
import json
import sys
from types import SimpleNamespace

import pytest

from benchmark.serve import deepseek_ab, draft_record
from benchmark.serve.client import Reply
from benchmark.serve.draft_record import PLUGIN, SGLANG, Block

ON_LOG = "draft_sampler self-check: proposals of 1 to 2 requests, 0.1 s: passed\ndraft_sampler makes the proposals of 1 to 2 requests, 5 tokens each"


class FakeServer:
    """Generates prompt[-1] + 1, + 2, ..., a token a verify step, 10 ms off and 8 ms on. made_by: of the recorded blocks. wrong: (request, step) whose
    first draft is another one. texts_part: the last token is."""

    log_text, made_by, wrong, texts_part, exits = "", SGLANG, None, False, 0

    def __init__(self, name, model, arguments, *, work, env):
        self.name, self.is_on, self.env, self.ready_s = name, deepseek_ab.server.FLAG in arguments, env, 1.0
        self.client, self.asked = self, []

    def wait_ready(self, limit_s):
        return self.ready_s

    def log(self):
        return type(self).log_text if self.is_on else ""

    def grep(self, pattern):
        return self.log().splitlines()

    def tail(self, lines):
        return ""

    def stop(self):
        return type(self).exits

    def _reply(self, prompt, count):
        ids = [prompt[-1] + 1 + i for i in range(count)]
        if self.is_on and type(self).texts_part:
            ids[-1] = 0
        return Reply(ids=ids, logprobs=[], top=[], finish="length", cached=0, verify_steps=count - 1)

    def generate(self, prompts, params):
        self.asked.append(params)
        return [self._reply(prompt, params["max_new_tokens"]) for prompt in prompts]

    def timed_replies(self, prompts, count):
        return (0.008 if self.is_on else 0.01) * count, [self._reply(prompt, count) for prompt in prompts]

    def replies(self, body):
        prompts, made = body["input_ids"], body["sampling_params"]
        found = [self._reply(prompt, made["max_new_tokens"]) for prompt in prompts]
        path = self.env[draft_record.FILE]
        with open(path, "a") as out:
            for row, (name, prompt, reply) in enumerate(zip(body["rid"], prompts, found)):
                for step, anchor in enumerate(reply.ids[:-1]):
                    first = 9 if self.is_on and (row, step) == type(self).wrong else 1
                    made_by = type(self).made_by if self.is_on else SGLANG
                    block = Block(step, row, len(prompts), len(prompt) + step, anchor, (first, 2, 3, 4, 5), None, made_by)
                    out.write(json.dumps({"request": name, **dataclasses.asdict(block)}) + "\n")
        return found


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(*words, **of the plugin's server) -> (exit status, results)."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 20000}}))
    (tmp_path / "work").mkdir()
    monkeypatch.setattr(deepseek_ab.deadline, "watchdog", lambda *_: None)
    monkeypatch.setattr(deepseek_ab, "missing_plugins", lambda args, env: [])
    monkeypatch.setattr(deepseek_ab.server, "gpu_memory_mib", lambda: None)

    def start(*words, **fields):
        fields = {"made_by": PLUGIN, "log_text": ON_LOG, **fields}
        monkeypatch.setattr(deepseek_ab.server, "Server", type("Fake", (FakeServer,), fields))
        head = ["deepseek_ab", "--model", str(tmp_path / "model"), "--out", str(tmp_path), "--work", str(tmp_path / "work")]
        head += ["--batches", "1,2", "--compare-tokens", "6", "--repeats", "2", "--context", "8", "--deadline", "1e9"]
        monkeypatch.setattr(sys, "argv", [*head, *words])
        status = deepseek_ab.main()
        return status, json.loads((tmp_path / f"{'served' if '--no-draft' in words else 'served-dspark'}-dsv41-cut.json").read_text())

    return start


def test_equal_arms_are_timed_and_compared(run):
    status, content = run()
    assert (status, content["problems"]) == (0, [])
    assert [(row["batch"], row["rows"], row["off_ms"], row["on_ms"]) for row in content["rows"]] == [
        (1, 6, [10.0] * 4, [8.0] * 2), (2, 12, [10.0] * 4, [8.0] * 2),
    ]  # fmt: skip
    assert content["rows"][0]["ratio"] == 1.25 and content["rows"][0]["off_by_turn"] == [10.0, 10.0]
    found = {(*entry["turns"], entry["batch"], entry["mode"]): entry for entry in content["tokens"]}
    assert len(found) == 8 and ("1-off", "2-on", 2, "sampled") in found and ("1-off", "3-off", 1, "greedy") in found
    entry = found["1-off", "2-on", 2, "greedy"]
    assert (entry["tokens_compared"], entry["drafts_compared"], entry["accept_length"], entry["same_acceptance"]) == (12, 50, [1.0, 1.0], True)
    assert "Random weights" in content["notes"]


def test_a_draft_that_differs_is_a_problem_by_step_and_row(run):
    status, content = run("--modes", "sampled", "--turns", "off,on", wrong=(1, 3))
    assert status == 1 and content["problems"] == [
        "1-off and 2-on, batch 2, sampled: drafts differ: request 1, step 3 (row 1 of the batch), draft 0: 1 off, 9 on"
    ]


def test_texts_that_part_are_a_problem(run):
    status, content = run("--turns", "off,on", "--batches", "1", "--modes", "greedy", texts_part=True)
    assert status == 1 and content["problems"] == [
        "1-off and 2-on, batch 1, greedy: the served texts part: request 0 at token 5",
        "1-off and 2-on, batch 1: timed texts part: request 0 at token 159",
    ]


@pytest.mark.parametrize(("fields", "problem"), [
    ({"log_text": ""}, "2-on: draft_sampler makes no proposals"),
    ({"log_text": ON_LOG.replace("1 to 2", "1 to 1")}, "2-on: draft_sampler makes the proposals of 1 to 1 requests, not of 2"),
    ({"log_text": ON_LOG.replace("passed", "")}, "2-on: no self-check passed"),
    ({"log_text": ON_LOG + "\nFailed to execute general plugin: x"}, "2-on: SGLang failed to load x"),
    ({"made_by": SGLANG}, "2-on, batch 1, greedy: drafts were made by {'sglang': 5}"),
])  # fmt: skip
def test_a_plugin_that_is_not_active_is_a_problem(run, fields, problem):
    status, content = run("--turns", "off,on", **fields)
    assert status == 1 and content["problems"][0] == problem


def test_a_server_that_dies_is_a_problem_and_what_was_measured_stays(run):
    def die(server, limit_s):
        if server.is_on:
            raise RuntimeError("2-on exited with 1:\nlast words")

    status, content = run("--turns", "off,on", wait_ready=die)
    assert status == 1 and content["problems"] == ["2-on: RuntimeError: 2-on exited with 1:", "no turn on was measured"]
    assert content["rows"][0]["off_ms"] == [10.0, 10.0] and "on_ms" not in content["rows"][0]


def test_slopes_that_no_server_can_have_are_a_problem(run):
    def timed(server, prompts, count):
        return 1.0 / count, [server._reply(prompt, count) for prompt in prompts]

    status, content = run("--turns", "off", "--batches", "1", timed_replies=timed)
    assert status == 1 and content["problems"] == ["1-off, batch 1: a long generation took no longer than a short one"]


def test_plain_decode_has_texts_and_steps(run):
    log = "NVIDIA megakernel: active (x)\ndecode_step self-check: 1 rows: passed"
    metrics = {'sgl_lowlatency:decode_steps_total{mode="decode",rows="1"}': 9.0}
    counts = deepseek_ab.coverage.parse(metrics)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepseek_ab.coverage, "read", lambda one: counts)
        status, content = run("--no-draft", "--turns", "off,on", log_text=log)
    assert (status, content["what"], content["problems"]) == (0, "served-decode", [])
    assert [(row["mode"], row["rows"], row["on_ms"]) for row in content["rows"]] == [("decode", 1, [8.0] * 2), ("decode", 2, [8.0] * 2)]
    assert content["tokens"][0]["drafts_compared"] == 0 and content["turns"][1]["coverage"]["rows"] == 9.0


def arguments(monkeypatch, tmp_path, *words):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100}))
    monkeypatch.setattr(sys, "argv", ["deepseek_ab", "--model", str(tmp_path), "--out", str(tmp_path), *words])
    return deepseek_ab.parse()


def test_a_list_of_plugins_is_completed(monkeypatch, tmp_path):
    args = arguments(monkeypatch, tmp_path, "--plugin", "dsv41_stream")
    made = deepseek_ab.environment(args, tmp_path / "x.jsonl", {"SGLANG_PLUGINS": "mine, dsv41_stream", "PYTHONPATH": "/p"})
    assert made["SGLANG_PLUGINS"] == "mine,dsv41_stream,benchmark_random_weights,benchmark_draft_record,nvidia_megakernel"
    assert made["PYTHONPATH"].endswith(":/p") and made["SGL_LOWLATENCY_DRAFT_SAMPLER"] == "1"
    assert "SGLANG_PLUGINS" not in deepseek_ab.environment(args, tmp_path / "x.jsonl", {})


def test_plugins_that_no_server_would_find_are_named(monkeypatch, tmp_path):
    args = arguments(monkeypatch, tmp_path, "--plugin", "no_such", "--turns", "off")
    env = deepseek_ab.environment(args, tmp_path / "x.jsonl", {})
    assert deepseek_ab.missing_plugins(args, env) == ["SGLang would find no plug-in no_such on PYTHONPATH"]


def test_a_dry_run_prints_both_commands(monkeypatch, tmp_path, capsys):
    args = ["--model", str(tmp_path), "--out", str(tmp_path / "o"), "--dry-run"]
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100}))
    monkeypatch.setattr(sys, "argv", ["deepseek_ab", *args])
    assert deepseek_ab.main() == 0
    lines = capsys.readouterr().out.splitlines()
    commands = [line for line in lines if "sglang.launch_server" in line]
    assert [deepseek_ab.server.FLAG in command for command in commands] == [False, True]
    assert all("--speculative-algorithm DSPARK --speculative-dspark-block-size 5" in command for command in commands)


def test_verify_steps_that_sglang_did_not_count():
    with pytest.raises(ValueError, match="counted no verify steps"):
        one = SimpleNamespace(verify_steps=0, ids=[1, 2])
        deepseek_ab.Timing.of((1.0, [one]), (2.0, [one]), drafts=True)




def test_a_forced_text_is_known(run):
    """The servers' texts count up, as those of a long period do."""
    status, content = run("--period", "5000", "--turns", "off,on")
    assert (status, content["problems"]) == (0, [])
    status, content = run("--period", "5000", "--turns", "off,on", "--batches", "1", "--modes", "greedy", texts_part=True)
    assert status == 1 and content["problems"][:3] == [
        "2-on, batch 1, greedy: request 0: the forced text is left at token 5",
        "2-on, batch 1, timed: request 0: the forced text is left at token 159",
        "2-on, batch 1, timed: request 0: the forced text is left at token 159",
    ]


def test_a_forced_text_has_forced_prompts_and_its_hook(monkeypatch, tmp_path):
    args = arguments(monkeypatch, tmp_path, "--period", "10", "--context", "25", "--plugin", "dsv41_stream")
    for prompt in deepseek_ab.prompts_of(2, args):
        assert len(prompt) == 25 and prompt[0] >= 10
        assert all(b == a + 1 or (b, a % 10) == (a - 9, 9) for a, b in zip(prompt, prompt[1:]))
    made = deepseek_ab.environment(args, tmp_path / "x.jsonl", {"SGLANG_PLUGINS": "dsv41_stream"})
    assert made["BENCHMARK_FORCED_PERIOD"] == "10" and "benchmark_forced_head" in made["SGLANG_PLUGINS"].split(",")
    assert deepseek_ab.missing_plugins(arguments(monkeypatch, tmp_path, "--period", "10", "--turns", "off"), made) == []
    assert "BENCHMARK_FORCED_PERIOD" not in deepseek_ab.environment(arguments(monkeypatch, tmp_path), tmp_path / "x.jsonl", {})


@pytest.mark.parametrize("period", ["1", "26"])
def test_a_period_that_is_none_is_refused(monkeypatch, tmp_path, capsys, period):
    with pytest.raises(SystemExit):
        arguments(monkeypatch, tmp_path, "--period", period)
    assert f"--period {period} is outside 2..25, a quarter of the vocabulary" in capsys.readouterr().err
