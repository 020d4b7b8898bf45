"""What the logs of a start say: SGLang's lines of a real start on an H200, shortened."""

import pytest

from benchmark.serve import startup

OFF = """[2026-11-29 22:38:48] Load weight end. elapsed=0.33 s, type=Qwen3ForCausalLM, avail mem=123.85 GB, mem usage=15.28 GB.
[2026-11-29 22:38:52] Capture target decode CUDA graph end. bs=[1, 2, 4, 8], elapsed=3.09 s, mem usage=0.75 GB, avail mem=120.12 GB.
[2026-11-29 22:38:52] Engine startup timings (s): load_weight=0.33, scheduler_e2e=6.93, cuda_graph={prefill=0.00, decode=3.09}, tokenizer_e2e=18.58
"""
CHECK = "decode_step self-check: {} rows, lengths [1, 2], {} s: passed (kv.relative_l2 0.056)"
ON = f"""[2026-11-29 22:38:52] Load weight end. elapsed=0.35 s, type=Qwen3ForCausalLM, avail mem=104.84 GB, mem usage=15.28 GB.
[2026-11-29 22:38:57] NVIDIA megakernel: active (sgl_lowlatency decode_step: LM head inside; 15.4 MiB beside the model; plan 3c55; widths [1, 2]; built in 4.2 s, 26024.0 MiB; wait deadline 60 s)
  0%|          | 0/4 [00:00<?]\r[22:39:00] {CHECK.format(8, "2.04")}
 25%|          | 1/4 [00:00<?]\r[22:39:00] {CHECK.format(4, "0.27")}
[2026-11-29 22:39:02] Capture target verify CUDA graph end. bs=[1, 2], elapsed=4.30 s, mem usage=0.08 GB, avail mem=101.72 GB.
"""


def test_the_costs_of_a_warm_start():
    off, on = startup.arm(23.04, OFF), startup.arm(27.5, ON)
    assert (off["ready_s"], off["weights_gib"]) == (23.0, 15.28)
    assert off["timings_s"] == {"load_weight": 0.33, "scheduler_e2e": 6.93, "prefill": 0.0, "decode": 3.09, "tokenizer_e2e": 18.58}
    assert (on["built_s"], on["plugin_mib"], on["self_check_s"]) == (4.2, 15.4, 2.31)  # not SGLang's difference of free memory
    start = startup.costs(off, on, 0)
    assert start["added_s"] == 4.5 and start["cold"] is False
    assert start["plugin_memory_share"] == pytest.approx(15.4 / 1024 / 15.28, abs=1e-5)
    assert "+4.5 s with caches warm" in startup.sentence(start) and "0.10% of the weights" in startup.sentence(start)


def test_no_difference_is_taken_from_a_cold_start():
    start = startup.costs(startup.arm(23.0, OFF), startup.arm(63.0, ON), 7)
    assert start["cold"] is True and "added_s" not in start
    assert "cold, 7 kernels compiled: no difference taken" in startup.sentence(start)


def test_what_a_log_does_not_say_is_left_out():
    start = startup.costs(startup.arm(None, ""), startup.arm(None, "nothing"), 0)
    assert start == {"off": {}, "on": {}, "compiled_kernels": 0, "cold": False}
    assert "None" in startup.sentence(start)


def test_kernels_of_the_caches_are_counted(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.delenv("SGLANG_CACHE_DIR", raising=False)
    assert startup.cached_kernels() == 0
    for name in (".cache/sglang/jit/a/x.so", ".cache/sglang/deep_gemm/k/kernel.cubin", ".triton/cache/h/f.cubin", ".triton/cache/h/f.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert startup.cached_kernels() == 3
