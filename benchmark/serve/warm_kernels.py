"""Compiles, side by side and while servers still import, the kernels that SGLang compiles one after the other at its first forward.

    python3 -m benchmark.serve.warm_kernels MODEL_DIR [--tokens 1,2,4,8,1024] [--algorithm ngram]

On a host whose caches are cold that is most of a server's start. The kernels are those of the standard path of a dense model on one
Hopper GPU (sglang 0.5.23), built by SGLang's own functions into SGLang's own caches, so what a server runs is the same with and without
this. One that cannot be built here is named, and left to the server. algorithm: of speculative decoding, as verify_ab.py names it.

tokens: of an FP8 model, the sizes of the batches that will come. DeepGEMM chooses a kernel by matrix and number of tokens; SGLang's
own way is to run every number up to 16,384 of every matrix before it serves, which takes minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmark.common import deadline

# of a server beside this: DeepGEMM's kernels are compiled when they are first needed, and the same ones run
ENVIRONMENT = {"SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0"}
TREE_ALGORITHMS = ("ngram", "eagle3", "standalone")  # whose drafts SGLang keeps as trees, a chain too
LAST_TOKENS = (64, 2048, 1 << 30)  # numbers of tokens up to these share a process: they share most of DeepGEMM's kernels


def matrices(config: dict) -> list[tuple[int, int]]:
    """(N, K) of a layer's linear layers as SGLang merges them."""
    hidden, inter, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    return [(q + 2 * kv, hidden), (hidden, q), (2 * inter, hidden), (hidden, inter)]


def jobs(config: dict, tokens: list[int]) -> list[list[str]]:
    """Arguments of one process each: "kernels", or "matrix N K TOKENS" of an FP8 model."""
    found = [["kernels"]]
    if "quantization_config" in config:
        firsts = (0, *LAST_TOKENS)
        groups = [[m for m in sorted(set(tokens)) if first < m <= last] for first, last in zip(firsts, LAST_TOKENS)]
        found += [["matrix", str(n), str(k), ",".join(map(str, group))] for n, k in matrices(config) for group in groups if group]
    return found


def start(model: Path, tokens: list[int], *, algorithm: str | None, work: Path) -> list[subprocess.Popen]:
    """The processes, at once; their output is WORK/warm.log. `benchmark.common.deadline` ends them with this process."""
    work.mkdir(parents=True, exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    head, tail = [sys.executable, "-m", "benchmark.serve.warm_kernels", str(model)], ["--algorithm", algorithm] if algorithm else []
    started = []
    with (work / "warm.log").open("wb") as log:
        for job in jobs(config, tokens):
            command = [*head, *tail, "--job", *job]
            started.append(deadline.spawn(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **ENVIRONMENT}))
    return started


def finish(started: list[subprocess.Popen], *, limit_s: float) -> str:
    """Waits until nothing compiles any more, at most `limit_s`, then ends what is left: nothing may run beside a measurement.
    Returns a sentence on how it went."""
    end, late = time.monotonic() + limit_s, 0
    for process in started:
        try:
            process.wait(timeout=max(end - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            late += 1
    codes = [deadline.stop(process, grace_s=1.0) for process in started]
    failed = sum(code != 0 for code in codes) - late
    return f"{len(started)} processes, {late} ended late, {failed} failed"


def kernel_builders(config: dict, *, algorithm: str | None) -> dict[str, Callable[[], object]]:
    """SGLang's builders by the name of what they build."""
    import math

    import torch
    from sglang.kernels.ops.activation import activation
    from sglang.kernels.ops.attention import clamp_position, rope
    from sglang.kernels.ops.kvcache import kvcache
    from sglang.kernels.ops.layernorm import norm

    bf16, dim = torch.bfloat16, config["head_dim"]
    row_bytes = config["num_key_value_heads"] * dim * 2
    found = {
        "activation": lambda: activation.activation_module(bf16),
        "fused_rope": lambda: rope._jit_fused_rope_module(True, dim, bf16, bf16),
        "kvcache": lambda: kvcache._jit_kvcache_module(row_bytes, row_bytes, 0),
        "clamp_position": lambda: clamp_position._jit_clamp_position_module(torch.int64),
    }
    if config["architectures"][0] in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"):
        found["qknorm"] = lambda: norm._jit_qknorm_module(dim, bf16)
    if algorithm in TREE_ALGORITHMS:
        from sglang.kernels.ops.speculative import ngram_corpus, tree

        found["speculative_tree"] = tree._jit_tree_module
        if algorithm == "ngram":
            found["ngram_corpus"] = ngram_corpus.get_ngram_corpus_cls
    if algorithm == "dflash":  # behind its graphs it rehearses the verification of sampled requests, whatever will be asked of it
        from flashinfer.jit.sampling import gen_sampling_module
        from sglang.kernels.ops.speculative import sampling

        found["flashinfer_sampling"] = lambda: gen_sampling_module().build_and_load()
        found["speculative_sampling"] = lambda: sampling._jit_sampling_module(math.gcd(4, config["vocab_size"]), True)
    return found


def build(builders: dict[str, Callable[[], object]]) -> list[str]:
    """Runs the builders at the same time. Returns a sentence for each that failed."""
    def one(name: str) -> str | None:
        try:
            builders[name]()
        except Exception as error:  # noqa: BLE001 - whatever a compiler raises: the server tries again and says it
            return f"{name} not built: {type(error).__name__}: {str(error)[:300]}"
        deadline.say(f"{name} built")
        return None

    with ThreadPoolExecutor(len(builders)) as pool:
        return [sentence for sentence in pool.map(one, builders) if sentence]


def run_matrix(n: int, k: int, tokens: list[int]) -> None:
    """One product of every number of tokens with an FP8 matrix [n, k], by what SGLang runs for it."""
    import deep_gemm
    import torch
    from sglang.srt.environ import envs
    from sglang.srt.layers.quantization.fp8_utils import deepgemm_w8a8_block_fp8_linear_with_fallback as linear

    if envs.SGLANG_DEEPGEMM_PDL.get():
        deep_gemm.set_pdl(True)  # as a server does: it may be part of the kernel
    weight = torch.zeros((n, k), dtype=torch.float8_e4m3fn, device="cuda")
    scale = torch.ones((-(-n // 128), -(-k // 128)), dtype=torch.float32, device="cuda")
    for count in tokens:
        linear(torch.zeros((count, k), dtype=torch.bfloat16, device="cuda"), weight, [128, 128], scale)
        torch.cuda.synchronize()
        deadline.say(f"{n} x {k}: {count} tokens")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", default="1,2,4,8,1024")
    parser.add_argument("--algorithm", default=None, help="of speculative decoding")
    parser.add_argument("--job", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job is None:
        started = start(args.model, [int(word) for word in args.tokens.split(",")], algorithm=args.algorithm, work=Path.cwd())
        print(finish(started, limit_s=300))
        return 0
    if args.job[0] == "matrix":
        run_matrix(int(args.job[1]), int(args.job[2]), [int(word) for word in args.job[3].split(",")])
        return 0
    failed = build(kernel_builders(json.loads((args.model / "config.json").read_text()), algorithm=args.algorithm))
    print("\n".join(failed) or "all built", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
