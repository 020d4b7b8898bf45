"""Launch commands that must be refused: each by its reasons, in one message, before any weight loads.

    python3 -m benchmark.serve.refusals --out OUT [--parallel 6]

Exit status 0 if every launch ended by itself with a non-zero status and named every reason expected of it.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmark import models
from benchmark.common import deadline
from benchmark.serve import arguments
from benchmark.serve.server import FLAG, Server
from sgl_lowlatency.bench.results import Results

HEADING = re.escape(f"{FLAG} cannot run this setup")
LOADING = re.compile(r"Load weight begin|Loading weights|Capture cuda graph begin")


@dataclasses.dataclass(frozen=True)
class Case:
    """arguments: beside the model and the flag. expected: patterns that one message must hold. model: directory name.
    said_by_sglang: its own error, anywhere in the log, instead of the plugins' message."""

    name: str
    arguments: list[str]
    expected: list[str]
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    model: str = "qwen3"
    said_by_sglang: bool = False


TP3 = (["--tp-size", "3"], [r"tp_size 3 is not one of"])
FP16 = (["--dtype", "float16"], [r"dtype 'float16' is not one of"])
LORA = (["--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj"], [r"LoRA is in use"])
PAGE = (["--page-size", "8"], [r"page_size 8 is not one of"])
KV = (["--kv-cache-dtype", "fp8_e4m3"], [r"kv_cache_dtype 'fp8_e4m3' is not one of"])
WATCHDOG = (["--watchdog-timeout", "8"], [r"--watchdog-timeout 8 s leaves the waits a deadline under"])
BOTH = (["--enable-amd-monokernel"], [r"--enable-amd-monokernel is also set"])


def cases(device: str) -> list[Case]:
    """Every refusal; `device` cpu uses what SGLang offers there."""
    cpu = device == "cpu"
    base = ["--device", "cpu", "--attention-backend", "torch_native"] if cpu else []
    backend = Case(
        "attention backend",
        ["--attention-backend", "flex_attention"],
        [r"attention_backend 'flex_attention' is not one of"],
    )
    mixed_args = [
        "--prefill-attention-backend",
        "torch_native" if cpu else "fa3",
        "--decode-attention-backend",
        "triton",
    ]
    mixed = (mixed_args, [r"prefill and decode attention backends differ"])
    alone = [
        ("tp 3", TP3),
        ("fp16", FP16),
        ("lora", LORA),
        ("page size", PAGE),
        ("kv dtype", KV),
        ("mixed backends", mixed),
        ("watchdog 8 s", WATCHDOG),
        ("both flags", BOTH),
    ]
    several = [TP3, FP16, LORA, PAGE, KV, mixed, WATCHDOG, BOTH]
    found = [Case("all at once", [*base, *sum((a for a, _ in several), [])], sum((e for _, e in several), []))]
    found += [Case(name, [*base, *arguments], expected) for name, (arguments, expected) in alone]
    found += [
        dataclasses.replace(backend, arguments=[*base[:2], *backend.arguments]),
        Case(
            "plugin excluded",
            base,
            [r"SGLANG_PLUGINS='other' does not list the 'nvidia_megakernel' plugin"],
            {"SGLANG_PLUGINS": "other"},
        ),
        Case("wrong model", base, [r"no megakernel spec is registered for \['MistralForCausalLM'\]"], model="mistral"),
    ]
    if not cpu:
        hidden = {"CUDA_VISIBLE_DEVICES": ""}
        found.append(Case("no GPU", ["--device", "cuda"], [r"no GPU is visible"], hidden))
        # without --device SGLang looks for one before it asks any plugin, and says so itself
        found.append(Case("no device", [], [r"No accelerator \(CUDA,"], hidden, said_by_sglang=True))
    return found


def message(log: str) -> str:
    """The refusal in a log: its heading and the reasons below it; empty without one."""
    lines = log.splitlines()
    starts = [i for i, line in enumerate(lines) if re.search(HEADING, line)]
    if not starts:
        return ""
    end = next((i for i in range(starts[0] + 1, len(lines)) if not lines[i].startswith("  - ")), len(lines))
    return "\n".join(lines[starts[0] : end])


def run(case: Case, root: Path, work: Path, limit_s: float) -> dict:
    """One results row of one launch."""
    begin = time.monotonic()
    server = Server(case.name.replace(" ", "-"), root / case.model, [*case.arguments, FLAG], work=work, env=case.env)
    status = server.wait_exit(limit_s)
    seconds = time.monotonic() - begin
    log = server.log()
    server.stop(grace_s=2)
    said = log if case.said_by_sglang else message(log)
    problems = [f"not said: {pattern}" for pattern in case.expected if not re.search(pattern, said)]
    if status is None:
        problems.append(f"still running after {limit_s:.0f} s")
    elif status == 0:
        problems.append("exit status 0")
    if LOADING.search(log):
        problems.append("weights were loading already")
    if not said:
        problems.append("end of log: " + server.tail(4))
    return {
        "case": case.name,
        "status": status,
        "seconds": round(seconds, 1),
        "reasons": [] if case.said_by_sglang else said.splitlines()[1:],
        "problems": problems,
    }


def table(results: Results) -> str:
    lines = [f"{'case':18s} {'exit':>5} {'s':>6} {'reasons':>7} problems"]
    for row in results.content["rows"]:
        lines.append(
            f"{row['case']:18s} {row['status']!s:>5} {row['seconds']:6.1f} {len(row['reasons']):7d} {row['problems'] or '-'}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = arguments.parser(__doc__, deadline_s=300)
    parser.add_argument("--parallel", type=int, default=6)
    parser.add_argument("--only", default=None, help="comma list of case names")
    parser.add_argument("--limit", type=float, default=90, help="seconds a launch may take to be refused")
    args = arguments.parse(parser)
    results = Results(
        args.out,
        what="check",
        name="refusals",
        weights="none loaded",
        command=["python3", "-m", "benchmark.serve.refusals", *sys.argv[1:]],
        commit=args.commit,
    )
    deadline.watchdog(args.deadline, lambda: print(table(results)))
    work = args.work / "refusals"
    models.write_model(work / "models" / "qwen3", models.named_shape(args.model))
    models.write_model(work / "models" / "mistral", models.named_shape(args.model), architecture="MistralForCausalLM")
    chosen = [c for c in cases(args.device) if not args.only or c.name in args.only.split(",")]
    try:
        with ThreadPoolExecutor(args.parallel) as pool:
            for row in pool.map(lambda case: run(case, work / "models", work, args.limit), chosen):
                results.add(**row)
                deadline.say(row["case"], "ok" if not row["problems"] else row["problems"])
    finally:
        deadline.kill_all()
    print("\n".join(next((row["reasons"] for row in results.content["rows"]), [])))
    print(table(results))
    return 1 if any(row["problems"] for row in results.content["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
