"""What is compared of the two servers' texts, bf16 and FP8, and when that counts against the plugin."""

import math
from types import SimpleNamespace

import pytest

from benchmark import models
from benchmark.serve import token_check
from benchmark.serve.client import Reply

torch = pytest.importorskip("torch")
EXACT = torch.tensor([0.0, 2.0, 1.0, -5.0]).log_softmax(0)


class Oracle:
    def logits(self, sequences, first):
        return [EXACT.repeat(len(s) - f, 1) for s, f in zip(sequences, first, strict=True)]


LOGITS = Oracle.logits


class FakeServer:
    """Answers token 1 throughout, its log-probabilities off by `error`; `wrong` puts a token 3 at the first position."""

    def __init__(self, error, wrong=False):
        self.client, self.error, self.wrong = self, error, wrong

    def generate(self, prompts, params, *, top=0):
        params = params if isinstance(params, list) else [params] * len(prompts)
        return [self.reply(p["max_new_tokens"], wrong=self.wrong and bool(top)) for p in params]

    def reply(self, count, wrong):
        ids = [3 if wrong and i == 0 else 1 for i in range(count)]
        best = [[(EXACT[1].item() + self.error, 1), (EXACT[2].item() - self.error, 2)] for _ in ids]
        return Reply(ids, [], best, "length", 0)


def check(off, on, quantization):
    args = SimpleNamespace(compare_tokens=6, bound=None, quantization=quantization)
    prompts = [[7, 8], [9, 7, 8]]
    return token_check.check((off, on), prompts, *token_check.ask((off, on), prompts, args), Oracle(), args)


def test_bf16_is_judged_by_tokens_alone():
    entry, problems = check(FakeServer(0.01), FakeServer(0.4), None)
    assert not problems and entry["tokens_compared"] == 12 and "on_rms_nats" not in entry


def test_a_token_that_float32_decides_is_wrong_in_either_format():
    for quantization in (None, "fp8"):
        entry, problems = check(FakeServer(0.1), FakeServer(0.1, wrong=True), quantization)
        assert problems == ["2 wrong tokens"] and [found["on_id"] for found in entry["wrong_at"]] == [3, 3]


def test_fp8_is_judged_by_its_error_too():
    entry, problems = check(FakeServer(0.4), FakeServer(0.1), "fp8")
    assert not problems and (entry["off_rms_nats"], entry["on_rms_nats"]) == (0.4, 0.1)
    _, problems = check(FakeServer(0.4), FakeServer(0.5), "fp8")
    assert problems == ["log-probabilities off by 0.5 nats, the standard path's by 0.4"]


def test_an_error_that_is_not_a_number_is_a_problem():
    _, problems = check(FakeServer(0.4), FakeServer(math.nan), "fp8")
    assert problems == ["log-probabilities off by nan nats, the standard path's by 0.4"]


def test_long_cases_are_said_not_to_be_compared(monkeypatch, tmp_path):
    kept = {}
    args = SimpleNamespace(compare_tokens=6, bound=None, quantization="fp8", device="cpu", compare_up_to=500, cases=[(1, 100), (1, 9000)])
    results, shape = SimpleNamespace(set=kept.update), models.SHAPES["qwen3-tiny"]
    passes = []
    monkeypatch.setattr(Oracle, "logits", lambda self, sequences, first: passes.append(len(sequences)) or LOGITS(self, sequences, first))
    monkeypatch.setattr("benchmark.oracle.Oracle", lambda model, device: Oracle())
    assert token_check.check_all((FakeServer(0.4), FakeServer(0.1)), tmp_path, shape, args, results) == []
    assert passes == [1], "both servers' texts are the same here, and one pass takes all of them"
    assert [entry.get("compared", True) for entry in kept["tokens"]] == [True, False]
    assert "dequantised" in kept["tokens_compared_by"]
