"""The comparison of verify steps without servers: what it asks them, what it makes of their answers, what it calls a problem."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmark import forced_text, models
from benchmark.serve import coverage, tokens, verify_ab
from benchmark.serve.client import Reply
from sgl_lowlatency.bench.results import Results

SHAPE = models.named_shape("qwen3-tiny")


def parse(monkeypatch, *words):
    algorithm = [] if "--algorithm" in words else ["--algorithm", "ngram"]
    monkeypatch.setattr(sys, "argv", ["verify_ab", "--out", "out", *algorithm, *words])
    return verify_ab.parse()


def reply(count, verify_steps, first=5, top=True, ids=None):
    ids = [first + i for i in range(count)] if ids is None else ids
    best = [[(-0.1, token), (-3.0, token + 1)] for token in ids] if top else []
    return Reply(ids=ids, logprobs=[], top=best, finish="length", cached=0, verify_steps=verify_steps)


class FakeClient:
    """Generates forced texts, `step_s` a verify step: a token a step for the first `period`, then `accept`, unless its caches were not
    flushed before. The plugin's counter of `rows` goes up by `counted` for each step."""

    def __init__(self, step_s, accept, counted=0, rows=4, period=16):
        self.step_s, self.accept, self.counted, self.rows, self.period = step_s, accept, counted, rows, period
        self.executed, self.asked, self.flushed = 0, [], False

    def flush(self):
        self.flushed = True

    def steps(self, count):
        alone = min(count, self.period) if self.flushed else 0
        return alone + -(-(count - alone) // self.accept)

    def forced(self, prompt, count):
        return forced_text.text(prompt[-1], count, vocab=SHAPE.vocab, period=self.period)

    def timed_replies(self, prompts, count):
        self.asked.append((len(prompts), count, self.flushed))
        steps = self.steps(count)
        self.executed += self.counted * steps
        self.flushed = False
        return 1.0 + self.step_s * steps, [reply(count, steps, ids=self.forced(prompt, count)) for prompt in prompts]

    def timed(self, prompts, count):
        return self.timed_replies(prompts, count)[0]

    def generate(self, prompts, params, *, top=0):
        count = params["max_new_tokens"] if isinstance(params, dict) else params[0]["max_new_tokens"]
        self.flushed = False
        return [reply(count, -(-count // self.accept), top=bool(top)) for _ in prompts]


def fake_pair(off, on, mode="verify"):
    def server(name, client):
        def metrics():
            if name == "off":
                return {}
            return {f'sgl_lowlatency:decode_steps_total{{mode="{mode}",rows="{client.rows}"}}': float(client.executed)}

        return SimpleNamespace(name=name, client=client, metrics=metrics)

    return server("off", off), server("on", on)


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(coverage, "SETTLE_S", 0.0)


@pytest.fixture
def results(tmp_path):
    return Results(tmp_path, what="served-verify", name="run", weights="random", command=["x"], commit="abc")


def test_the_defaults_are_what_is_asked_for(monkeypatch):
    args = parse(monkeypatch)
    assert (args.model, args.batches, args.drafts, args.long, args.repeats, args.deadline) == ("qwen3-8b", [1, 4, 8], 4, 272, 3, 560)
    arguments = verify_ab.server_arguments(args)
    chain = ["--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "1", "--speculative-num-draft-tokens", "4"]
    assert arguments[-len(chain) :] == chain
    assert arguments[arguments.index("--cuda-graph-max-bs-decode") + 1] == "8"
    assert int(arguments[arguments.index("--context-length") + 1]) >= args.context + args.long + args.drafts


NOTHING = ("--algorithm medusa", "--draft-family llama", "--drafts 1", "--short 300", "--repeats 0", "--period 1", "--batches 1,x")


@pytest.mark.parametrize("words", map(str.split, NOTHING), ids=NOTHING)
def test_arguments_that_measure_nothing_are_refused(monkeypatch, words, capsys):
    with pytest.raises((SystemExit, ValueError)):
        parse(monkeypatch, *words)


def test_no_two_requests_of_a_batch_have_the_same_text(monkeypatch):
    args = parse(monkeypatch, "--context", "50", "--period", "16")
    prompts = verify_ab.prompts_of(8, 1000, args)
    assert [len(prompt) for prompt in prompts] == [50] * 8
    texts = [set(forced_text.text(prompt[-1], 16, vocab=1000, period=16)) for prompt in prompts]
    assert len(set.union(*texts)) == 8 * 16
    assert len({tuple(prompt) for batch in (1, 4, 8) for prompt in verify_ab.prompts_of(batch, 1000, args)}) == 13


def test_prompts_of_drafts_that_copy_are_the_texts_that_go_on(monkeypatch):
    args = parse(monkeypatch, "--algorithm", "dflash", "--context", "50", "--period", "16")
    for request, prompt in enumerate(verify_ab.prompts_of(8, 1000, args)):
        assert len(prompt) == 50
        assert prompt[1:] == forced_text.text(prompt[0], 49, vocab=1000, period=16) and prompt[-1] == 16 * (1 + request)


CHAINS = {
    "eagle3": ["--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"],
    "dflash": ["--speculative-dflash-block-size", "4"],
    "dspark": ["--speculative-dspark-block-size", "3"],
    "standalone": ["--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"],
}


@pytest.mark.parametrize("algorithm", CHAINS)
def test_servers_of_draft_models(monkeypatch, algorithm):
    args = parse(monkeypatch, "--algorithm", algorithm)
    assert (args.batches, args.long, args.compare_tokens, args.slug) == ([1, 4], 400, 0, algorithm)
    head = ["--speculative-algorithm", algorithm.upper(), "--speculative-draft-model-path", str(args.work / "draft")]
    arguments = verify_ab.server_arguments(args)
    assert arguments[-len(head + CHAINS[algorithm]) :] == head + CHAINS[algorithm]
    assert arguments[arguments.index("--cuda-graph-backend-prefill") + 1] == "disabled"


def test_a_standalone_draft_of_another_family_has_a_results_file_of_its_own(monkeypatch):
    assert parse(monkeypatch, "--algorithm", "standalone", "--draft-family", "llama").slug == "standalone-llama"


CHECK = "[x] decode_step self-check: verify of {} rows, 4 a request, lengths [1, 2], 0.3 s: {} (kv.relative_l2 0.05)\n"
LAYERS = "[x] decode_step hands over the inputs of layers 2, 18, 33 as auxiliary hidden states\n"


def test_how_the_plugins_server_started(monkeypatch):
    eagle3, ngram = (parse(monkeypatch, "--algorithm", name) for name in ("eagle3", "ngram"))
    fields, problems = verify_ab.started_as_asked(LAYERS + CHECK.format(4, "passed") + CHECK.format(8, "passed"), eagle3)
    assert fields["captured_layers"] == [2, 18, 33] and not problems
    assert [line.split(" rows")[0] for line in fields["self_checks"]] == [f"decode_step self-check: verify of {rows}" for rows in (4, 8)]
    line = CHECK.format(4, "passed")
    assert verify_ab.started_as_asked(line, ngram) == ({"self_checks": [line[4:-1]], "captured_layers": []}, [])
    assert verify_ab.started_as_asked(CHECK.format(4, "passed"), eagle3)[1] == ["the plugin hands over no layers, which eagle3 drafts read"]
    assert verify_ab.started_as_asked(CHECK.format(4, "FAILED: kv"), ngram)[1] == ["the plugin's server passed no self-check"]


def test_a_sample_is_the_slope_between_two_generations():
    sample = verify_ab.Sample.of((1.5, [reply(16, 5), reply(16, 4)]), (3.5, [reply(272, 68), reply(272, 85)]))
    assert sample.token_ms == pytest.approx(2.0 / 256 * 1e3)
    assert sample.step_ms == pytest.approx(2.0 / 80 * 1e3), "of the request that took the most steps"
    assert sample.accept_length == pytest.approx(544 / 153)
    assert sample.steps == [(5, 68), (4, 85)] and sample.served_steps == 90


def test_a_server_that_does_not_speculate_is_no_sample():
    with pytest.raises(ValueError, match="counted no verify steps"):
        verify_ab.Sample.of((1.0, [reply(16, 4)]), (2.0, [reply(32, 0)]))


def measured(monkeypatch, results, off, on, *words, mode="verify"):
    args = parse(monkeypatch, "--batches", "1", "--short", "8", "--long", "48", "--period", "16", *words)
    pair = fake_pair(off, on, mode)
    return verify_ab.measure(pair, SHAPE, args, results), pair


def test_a_measured_row(monkeypatch, results):
    problems, pair = measured(monkeypatch, results, FakeClient(0.006, accept=4), FakeClient(0.004, accept=4, counted=1), "--batches", "1,4")
    assert problems == []
    first, second = json.loads(results.path.read_text())["rows"]
    assert (first["mode"], first["batch"], first["rows"], first["drafts"], second["rows"]) == ("verify", 1, 4, 4, 16)
    # 8 tokens in 8 steps and 48 in 16 + 8: 40 tokens in 16 steps between them
    assert first["off_ms"] == [2.4] * 3 and first["on_ms"] == [1.6] * 3 and first["ratio"] == 1.5
    assert first["off_step_ms"] == [6.0] * 3 and first["on_step_ms"] == [4.0] * 3 and first["step_ratio"] == 1.5
    assert first["off_accept_length"] == [2.0] * 3
    assert first["equal_work"] is True and first["verify_steps_by_request"] == [[8, 24]] and len(second["verify_steps_by_request"]) == 4
    assert first["on_verify_steps"] == 3 * (8 + 24) and first["on_steps"] == {"4": 96.0} and first["served"] is True
    # a long warm-up, then short and long three times: the same prompts for both arms, and caches flushed before each
    asked = [(1, 48, True)] + [(1, 8, True), (1, 48, True)] * 3
    assert pair[0].client.asked[:7] == pair[1].client.asked[:7] == asked
    assert verify_ab.table(results).splitlines()[2].endswith("yes    equal")


def test_an_arm_that_accepts_more_drafts_decides_nothing(monkeypatch, results):
    (problem,), _ = measured(monkeypatch, results, FakeClient(0.006, accept=3), FakeClient(0.004, accept=4, counted=1))
    assert problem.startswith("bs 1: not decidable: verify steps by request, short and long, differ: off [[(8, 27)]")
    row = results.content["rows"][0]
    assert row["equal_work"] is False and "verify_steps_by_request" not in row
    assert "NOT EQUAL: decides nothing" in verify_ab.table(results)


def test_a_draft_model_whose_drafts_are_refused_is_a_problem(monkeypatch, results):
    words = ("--algorithm", "eagle3", "--drafts", "4")
    problems, _ = measured(monkeypatch, results, FakeClient(0.006, accept=4), FakeClient(0.004, accept=4, counted=1), *words)
    assert problems == [] and results.content["rows"][0]["algorithm"] == "eagle3" and results.content["rows"][0]["tokens_compared"] == 3 * 48
    refused = FakeClient(0.006, accept=1), FakeClient(0.004, accept=1, counted=1)
    (problem,), _ = measured(monkeypatch, results, *refused, *words)
    assert problem == "bs 1: 1.0 tokens accepted a verify step of 4: the draft model's drafts are refused"


def test_one_repeat_with_remembered_drafts_decides_nothing(monkeypatch, results):
    on = FakeClient(0.004, accept=4, counted=1)
    flush, calls = on.flush, []
    on.flush = lambda: calls.append(len(calls)) or (None if len(calls) == 3 else flush())  # the first long generation is not flushed
    (problem,), _ = measured(monkeypatch, results, FakeClient(0.006, accept=4), on)
    assert "on [[(8, 12)], [(8, 24)], [(8, 24)]]" in problem


def test_a_text_that_is_not_the_forced_one_decides_nothing(monkeypatch, results):
    on = FakeClient(0.004, accept=4, counted=1)
    forced = on.forced
    on.forced = lambda prompt, count: [*forced(prompt, count)[:-1], 7]
    (problem,), _ = measured(monkeypatch, results, FakeClient(0.006, accept=4), on)
    assert problem == "bs 1: not decidable: request 0 of arm on left the forced text at token 47"


@pytest.mark.parametrize("counted, mode", [(0, "verify"), (1, "decode")])
def test_steps_that_the_plugin_did_not_run_are_a_problem(monkeypatch, results, counted, mode):
    on = FakeClient(0.004, accept=4, counted=counted, rows=32)
    (problem,), _ = measured(monkeypatch, results, FakeClient(0.006, accept=4), on, "--batches", "8", mode=mode)
    assert problem.startswith("bs 8: the plugin ran ") and problem.endswith(" of 96 verify steps of 32 rows")
    assert results.content["rows"][0]["served"] is False
    assert " NO " in verify_ab.table(results)


class Oracle:
    """Prefers token 5 + i at output position i, by 2 nats over everything else."""

    def __init__(self, favourite=5):
        self.favourite = favourite

    def logits(self, sequences, first):
        torch = pytest.importorskip("torch")
        found = []
        for sequence, begin in zip(sequences, first, strict=True):
            table = torch.zeros(len(sequence) - begin, 64)
            table[range(len(table)), [self.favourite + i for i in range(len(table))]] = 2.0
            found.append(table)
        return found


def test_equal_tokens_pass_and_each_arm_is_judged_by_its_own_text(monkeypatch):
    args = parse(monkeypatch, "--compare-tokens", "6", "--bound", "0.5")
    pair = fake_pair(FakeClient(0.006, 4), FakeClient(0.004, 3))
    verdict, entry = verify_ab.compare_batch(pair, [[1, 2], [3, 4]], args, Oracle())
    assert not verdict.wrong and (entry["tokens_compared"], entry["differences"]) == (12, 0)
    assert (entry["off_overruled"], entry["on_overruled"]) == (0, 0)
    assert (entry["off_verify_steps"], entry["on_verify_steps"]) == (4, 4)
    _, entry = verify_ab.compare_batch(pair, [[1, 2], [3, 4]], args, Oracle(favourite=6))
    assert (entry["off_overruled"], entry["on_overruled"]) == (12, 12), "float32 would have chosen others throughout"


def test_a_token_that_float32_decides_is_wrong(monkeypatch):
    args = parse(monkeypatch, "--compare-tokens", "6", "--bound", "0.5")
    off, on = FakeClient(0.006, 4), FakeClient(0.004, 4)
    pair = fake_pair(off, on)
    right = on.generate

    def generate(prompts, params, *, top=0):
        if not top:  # taken up again behind the standard path's token
            return [reply(params[0]["max_new_tokens"], 1, first=prompts[0][-1] + 1)]
        replies = right(prompts, params, top=top)
        replies[0].ids[2] = 40
        return replies

    on.generate = generate
    verdict, entry = verify_ab.compare_batch(pair, [[1, 2]], args, Oracle())
    assert [(found.position, found.off_id, found.on_id) for found in verdict.wrong] == [(2, 7, 40)]
    assert (entry["off_overruled"], entry["on_overruled"]) == (0, 1)


def test_missing_log_probabilities_are_an_error_not_a_pass(monkeypatch):
    args = parse(monkeypatch, "--compare-tokens", "6")
    off, on = FakeClient(0.006, 4), FakeClient(0.004, 4)
    complete = off.generate

    def generate(prompts, params, *, top=0):
        replies = complete(prompts, params, top=top)
        replies[0].top.pop()
        return replies

    off.generate = generate
    with pytest.raises(ValueError, match="the off server gave log-probabilities of 5 of 6 tokens"):
        verify_ab.compare_batch(fake_pair(off, on), [[1, 2]], args, Oracle())


def test_the_table_has_a_line_a_row(monkeypatch, results):
    measured(monkeypatch, results, FakeClient(0.006, 4), FakeClient(0.004, 4, counted=1))
    results.set(tokens=[{"batch": 1, "error": "no"}])
    lines = verify_ab.table(results).splitlines()
    assert lines[2].split()[:5] == ["1", "4", "2.400", "1.600", "1.500"] and lines[2].endswith("equal")
    assert lines[3].startswith("tokens {'batch': 1, 'error': 'no'}")


def test_overruled_tokens_are_those_beyond_the_bound():
    replies = [reply(3, 1)]
    fp32 = tokens.Fp32(Oracle(), [[1, 2]], replies)
    assert fp32.overruled(replies, 0.5) == 0
    replies[0].ids[1] = 9
    assert fp32.overruled(replies, 1.9) == 1 and fp32.overruled(replies, 2.1) == 0


class FakeServer:
    """What main() asks of a server, and nothing of SGLang."""

    def __init__(self, name, client, log):
        self.name, self.client, self._log = name, client, log

    def log(self):
        return self._log

    def grep(self, pattern):
        return []

    def metrics(self):
        if self.name == "off":
            return {}
        return {
            'sgl_lowlatency:decode_steps_total{mode="verify",rows="4"}': float(self.client.executed),
            'sgl_lowlatency:fallback_steps_total{reason="prefill"}': 9.0,
            'sgl_lowlatency:fallback_steps_total{reason="a draft model\'s step"}': 500.0,
        }


@pytest.mark.parametrize("algorithm", ["eagle3", "standalone"])
def test_a_whole_run(monkeypatch, tmp_path, algorithm):
    """Everything but the servers: a draft's directory, its arguments, the results file. A draft model's own steps are no lost ones."""
    words = ["--algorithm", algorithm, "--batches", "1", "--short", "8", "--long", "48", "--period", "16"]
    words += ["--out", str(tmp_path), "--work", str(tmp_path / "w")]
    monkeypatch.setattr(sys, "argv", ["verify_ab", "--model", "qwen3-tiny", "--layers", "8", *words])
    asked = {}

    def start(args, model, arguments, results, *, batch_tokens, algorithm):
        asked.update(model=model, arguments=arguments, algorithm=algorithm)
        log = LAYERS + CHECK.format(4, "passed")
        return FakeServer("off", FakeClient(0.006, accept=4), ""), FakeServer("on", FakeClient(0.004, accept=4, counted=1), log)

    monkeypatch.setattr(verify_ab.pairs, "start", start)
    monkeypatch.setattr(verify_ab.server, "stop_pair", lambda pair: {one.name: 0 for one in pair})
    monkeypatch.setattr(verify_ab.deadline, "watchdog", lambda *_: None)
    assert verify_ab.main() == 0
    content = json.loads((tmp_path / f"served-{algorithm}-qwen3-tiny.json").read_text())
    assert content["problems"] == [] and content["rows"][0]["served"] and content["rows"][0]["equal_work"]
    assert len(content["self_checks"]) == 1 and content["captured_layers"] == [2, 18, 33]
    assert content["coverage"]["fallbacks"]["a draft model's step"] == 500.0
    draft = asked["arguments"][asked["arguments"].index("--speculative-draft-model-path") + 1]
    target, of_draft = (json.loads((Path(folder) / "config.json").read_text())["architectures"] for folder in (asked["model"], draft))
    assert target == ["Qwen3ForCausalLM"]
    assert of_draft == [{"eagle3": "LlamaForCausalLMEagle3", "standalone": "Qwen3ForCausalLM"}[algorithm]]
    assert asked["algorithm"] == algorithm


def test_ranks_that_share_the_models(monkeypatch):
    arguments = verify_ab.server_arguments(parse(monkeypatch, "--algorithm", "dspark", "--tp", "2"))
    assert arguments[arguments.index("--tp-size") + 1] == "2"
    assert "--tp-size" not in verify_ab.server_arguments(parse(monkeypatch, "--algorithm", "dspark"))
