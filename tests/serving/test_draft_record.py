"""deepseek_ab.py as it runs on a GPU, of a tiny dense model with a DSPARK draft: two real servers one after the other, whose drafts the recorder
takes from SGLang's own worker. The kernel is in emulation, cpu_speculation.py in place of what SGLang has for CUDA only; there SGLang proposes
eagerly, so decode_step is what the plugin adds, and sampled acceptance, a CUDA kernel, is left out.

Oracle: the forced text (benchmark/forced_text.py), which the draft proposes: every draft is accepted.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import cpu_speculation
import pytest
import torch

from benchmark import drafts, forced_text, models
from benchmark.serve import draft_record

ROOT = Path(__file__).parents[2]
DRAFTS, PERIOD, CONTEXT, TOKENS = 3, 16, 90, 21
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU has deepseek_ab.py itself")


def test_recorded_drafts_are_the_texts_and_both_arms_have_the_same(tmp_path, request):
    if not request.config.getoption("--all-drafts"):
        pytest.skip("takes two minutes: --all-drafts serves it")
    shape = dataclasses.replace(models.named_shape("qwen3-tiny", 8), tied_head=False)
    models.write_model(tmp_path / "model", shape, period=PERIOD)
    drafts.write_draft(tmp_path / "draft", "dspark", shape, drafts=DRAFTS + 1, period=PERIOD)
    path = [*cpu_speculation.install(tmp_path / "stand-in"), str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "SGL_LOWLATENCY_EMULATE": "1", "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-m", "benchmark.serve.deepseek_ab", "--device", "cpu", "--slug", "qwen3-tiny", "--plugin", cpu_speculation.NAME]
    command += ["--model", str(tmp_path / "model"), "--draft", str(tmp_path / "draft"), "--block-size", str(DRAFTS), "--expect", "step"]
    command += ["--turns", "off,on", "--modes", "greedy", "--context", str(CONTEXT), "--compare-tokens", str(TOKENS), "--short", "4", "--long", "20"]
    command += ["--batches", "1,2", "--repeats", "1", "--out", str(tmp_path), "--commit", "test", "--deadline", "580"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    content = json.loads((tmp_path / "served-dspark-qwen3-tiny.json").read_text())
    assert content["problems"] == [] and content["skipped_turns"] == []
    # the prefill makes the first token, five steps four more each
    assert [(entry["batch"], entry["tokens_compared"], entry["blocks_compared"], entry["drafts_compared"]) for entry in content["tokens"]] == [
        (1, TOKENS, 5, 5 * DRAFTS), (2, 2 * TOKENS, 10, 10 * DRAFTS),
    ]  # fmt: skip
    for entry in content["tokens"]:
        assert entry["accept_length"] == [4.0, 4.0] and entry["same_acceptance"] and entry["draft_differences"] == []
    assert content["turns"][1]["coverage"]["steps"].keys() == {"4", "8"}
    for turn in content["turns"]:
        for request_blocks in draft_record.blocks(tmp_path / "work" / f"{turn['turn']}.jsonl").values():
            assert [block.prefix for block in request_blocks[:5]] == [CONTEXT + 4 * step for step in range(5)]
            for block in request_blocks[:5]:
                text = forced_text.text(block.anchor, DRAFTS, vocab=shape.vocab, period=PERIOD)
                assert list(block.drafts) == text
