"""A kernel that withholds one hand-over must end the server within its deadline, with a record, and leave the GPU empty.

    SITE_PLANTED first on PYTHONPATH, where the package was built with SGL_LOWLATENCY_PLANTED=3
    python3 -m benchmark.serve.hang --out OUT [--model qwen3-8b] [--layers 8]

One block of that build never hands over tile 0 of layer 0's out_proj. With the self-check on the hang meets the server at start (`start`);
with SGL_LOWLATENCY_SELF_CHECK=0 and no decode graphs it meets a request (`request`). Exit status 0 if in each case a record
was printed in time, the server exited non-zero, and no process and no memory of it is left on the GPU.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from pathlib import Path

from benchmark import models
from benchmark.common import deadline
from benchmark.serve import arguments, server
from benchmark.serve.client import Client, random_prompt
from sgl_lowlatency.bench.results import Results

RECORD = re.compile(r"decode_step stopped: .*waited ([0-9.]+) s for word \d+ of edge '(\w+)' of layer (\d+)")
MEMORY_SLACK_MIB = 64


def ask(client: Client, prompt: list[int]) -> None:
    """One request that is never answered; a dropped connection or an error answer is what must come."""
    try:
        client.timed([prompt], 8)
    except (OSError, RuntimeError) as error:
        deadline.say("the request ended:", str(error)[:120])


def wait_for(what, limit_s: float):
    """Poll `what` every 0.1 s until it is truthy; its last value."""
    limit = time.monotonic() + limit_s
    while not (value := what()) and time.monotonic() < limit:
        time.sleep(0.1)
    return value


def run(case: str, model: Path, shape, work: Path, args) -> dict:
    """One results row."""
    make = server.gpu_arguments if args.device == "cuda" else server.cpu_arguments
    command = make(context=2048, max_batch=8, max_tokens=16384) + [
        "--watchdog-timeout",
        str(args.watchdog),
        *args.server_arg,
    ]
    env = {}
    if case == "request":
        env["SGL_LOWLATENCY_SELF_CHECK"] = "0"
        command += ["--cuda-graph-backend-decode", "disabled", "--skip-server-warmup"]
    before_mib = server.gpu_memory_mib()
    one = server.Server(f"hang-{case}", model, [*command, server.FLAG], work=work, env=env)
    problems = []
    asking = None
    if case == "request":
        one.wait_ready(args.start_limit)
        asking = threading.Thread(target=ask, args=(one.client, random_prompt(40, vocab=shape.vocab, seed=1)), daemon=True)
        began = time.monotonic()
        asking.start()
    else:
        wait_for(lambda: one.grep(r"megakernel: active") or one.process.poll() is not None, args.start_limit)
        began = time.monotonic()

    def settled() -> bool:
        return (
            bool(one.grep(RECORD.pattern)) or one.process.poll() is not None or (asking is not None and not asking.is_alive())
        )

    wait_for(settled, args.watchdog / 2 + (30 if asking else args.start_limit))
    lines = one.grep(RECORD.pattern)
    record_s = time.monotonic() - began
    status = one.wait_exit(args.watchdog + 40) if lines else one.process.poll()
    exit_s = time.monotonic() - began
    row = {
        "case": case,
        "record": lines[0][-300:] if lines else None,
        "record_s": round(record_s, 1),
        "exit_s": round(exit_s, 1),
        "status": status,
    }
    if not lines:
        problems.append("no record; end of log: " + one.tail(6))
    elif args.device == "cuda" and not 1 <= float(RECORD.search(lines[0])[1]) / (args.watchdog / 2) < 1.2:
        problems.append(f"the deadline is {args.watchdog / 2:.0f} s")
    elif case == "request" and record_s > args.watchdog / 2 + 10:
        problems.append(f"the record came after {record_s:.1f} s, the deadline is {args.watchdog / 2:.0f} s")
    if status is None:
        problems.append("the server did not exit")
    elif status == 0:
        problems.append("exit status 0")
    left = wait_for(lambda: not deadline.group_alive(one.process.pid), 20)
    if not left:
        problems.append("processes of the server are left")
    one.stop(grace_s=1)
    after_mib = server.gpu_memory_mib()
    if before_mib is not None and after_mib > before_mib + MEMORY_SLACK_MIB:
        problems.append(f"GPU memory {before_mib} MiB before, {after_mib} MiB after: {server.gpu_processes()}")
    return row | {"gpu_mib": [before_mib, after_mib], "problems": problems}


def main() -> int:
    parser = arguments.parser(__doc__, deadline_s=300, layers=4)
    parser.add_argument("--cases", default="request,start")
    parser.add_argument("--watchdog", type=float, default=20, help="--watchdog-timeout, s; the kernel's deadline is half of it")
    args = arguments.parse(parser)
    results = Results(
        args.out,
        what="check",
        name="hang",
        weights="real-scale random, seed 0",
        command=["python3", "-m", "benchmark.serve.hang", *sys.argv[1:]],
        commit=args.commit,
    )
    deadline.watchdog(args.deadline)
    shape = models.named_shape(args.model, args.layers)
    model = models.write_model(args.work / "model", shape)
    try:
        for case in args.cases.split(","):
            row = results.add(**run(case, model, shape, args.work, args))
            deadline.say(case, "ok" if not row["problems"] else row["problems"])
    finally:
        deadline.kill_all()
    for row in results.content["rows"]:
        print(row)
    return 1 if any(row["problems"] for row in results.content["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
