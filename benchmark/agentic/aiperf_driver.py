"""Drives a server with aiperf, in a virtual environment of its own, and reads its raw records.

aiperf is 138 wheels, 229 MB, and 1.2 GB installed, with pins (numpy, pandas, pydantic, transformers) that are not SGLang's: it never shares
an environment with the server. Where no package registry is reached, carry the wheels:

    python3 -m pip download aiperf==0.13.0 -d WHEELS      # on a machine with a registry, the same Python and platform
    python3 -m benchmark.replay --aiperf-wheels WHEELS …  # installs from there alone

or take the direct driver, which needs nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmark.agentic import records
from benchmark.agentic.records import Record
from benchmark.common import deadline

NAME = "aiperf"
VERSION = "0.13.0"
FIXED, SCENARIO = "fixed-work", "scenario-timing"
RAW = "profile_export_raw.jsonl"
STOP_GRACE_S = 20.0
INSTALL_LIMIT_S = 1800.0
REGISTRY = ["--timeout", "20", "--retries", "2"]  # a registry that does not answer is an error within minutes
UNSET = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "PYTHONPATH")  # with the first two a tokenizer's folder does not load


class AiperfFailed(RuntimeError):
    """aiperf could not be installed or did not finish; the message ends with its last lines."""


def default_environment() -> Path:
    """The folder of aiperf's environment, one for a version of each."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "sgl-lowlatency" / f"aiperf-{VERSION}-py{sys.version_info.major}.{sys.version_info.minor}"


def install_commands(environment: Path, wheels: Path | None) -> list[list[str]]:
    """What makes the environment. wheels: folder of downloaded wheels, the only source then."""
    source = ["--no-index", "--find-links", str(wheels)] if wheels else []
    pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    return [[sys.executable, "-m", "venv", str(environment)], [*pip, *REGISTRY, *source, f"aiperf=={VERSION}"]]


def install(environment: Path, wheels: Path | None, say: Callable[[str], None]) -> None:
    """Makes the environment unless a complete one is there. Raises AiperfFailed."""
    if wheels is not None and not any(wheels.glob(f"aiperf-{VERSION}-*.whl")):
        raise AiperfFailed(f"--aiperf-wheels {wheels} has no aiperf-{VERSION} wheel; fill it with: pip download aiperf=={VERSION} -d {wheels}")
    complete = environment / "complete"
    if complete.exists():
        return
    say(f"installing aiperf {VERSION} (1.2 GB) into {environment}")
    for command in install_commands(environment, wheels):
        code, said = _finish(command, INSTALL_LIMIT_S)
        if code:
            tail = "\n".join(said.splitlines()[-8:])
            raise AiperfFailed(f"aiperf {VERSION} cannot be installed; carry its wheels (--aiperf-wheels) or use --driver direct:\n{tail}")
    complete.touch()


def _finish(command: list[str], limit_s: float) -> tuple[int, str]:
    """(exit status, output) of a command that is ended with everything it started after `limit_s`, and on an exception."""
    process = deadline.spawn(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=_environment())
    try:
        said, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise AiperfFailed(f"{' '.join(command[:4])} … did not end within {limit_s:.0f} s") from None
    finally:
        deadline.stop(process, grace_s=1.0)
    return process.returncode, said


def profile_command(
    environment: Path, url: str, model: str, tokenizer: str, traces: Path, out: Path, *,
    mode: str, concurrency: int, conversations: int, max_context: int, duration_s: int, seed: int,
) -> list[str]:
    """The command of one run. max_context: tokens beyond which aiperf leaves a trace's turns out."""
    command = [str(environment / "bin" / "aiperf"), "profile", "--model", model, "--url", url, "--endpoint-type", "chat", "--streaming"]
    command += ["--input-file", str(traces), "--custom-dataset-type", "weka_trace", "--tokenizer", tokenizer, "--concurrency", str(concurrency)]
    command += ["--use-server-token-count", "--max-context-length", str(max_context), "--export-level", "raw", "--server-metrics", f"{url}/metrics"]
    command += ["--no-gpu-telemetry", "--ui", "none", "--random-seed", str(seed), "--output-artifact-dir", str(out)]
    command += ["--extra-inputs", "temperature:0"]
    if mode == FIXED:
        return [*command, "--num-conversations", str(conversations), "--ignore-trace-delays", "--extra-inputs", "ignore_eos:true"]
    command += ["--scenario", "inferencex-agentx-mvp", "--benchmark-duration", str(duration_s), "--unsafe-override"]
    command += ["--trajectory-start-min-ratio", "0.25", "--trajectory-start-max-ratio", "0.75"]
    return [*command, "--failed-request-threshold", "0.10", "--warmup-grace-period", "1800"]


def run(command: list[str], out: Path, limit_s: float) -> list[Record]:
    """Runs aiperf, its output in `out`.log, and returns its records; the raw export they come from is removed. Raises AiperfFailed; nothing
    of aiperf is left running."""
    log = out.with_suffix(".log")
    with log.open("wb") as output:
        process = deadline.spawn(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=_environment())
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        raise _failure(f"aiperf did not finish within {limit_s:.0f} s", log) from None
    finally:
        deadline.stop(process, grace_s=STOP_GRACE_S)
    if code:
        raise _failure(f"aiperf exited with {code}", log)
    if not (out / RAW).exists():
        raise _failure(f"aiperf wrote no {RAW}", log)
    found = parse(out / RAW)
    (out / RAW).unlink()  # every prompt and every event of it, gigabytes over a whole replay
    return found


def parse(path: Path) -> list[Record]:
    """The records of the profiling phase in aiperf's raw export. Raises ValueError on a line without the fields that we read."""
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            value = json.loads(line)
            if value["metadata"]["benchmark_phase"] == "profiling":
                found.append(_record(value))
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path.name} line {number} is not a raw record of aiperf {VERSION}: {error!r}") from None
    first = min((record.start_ms for record in found), default=0.0)
    return [Record(**{**vars(record), "start_ms": round(record.start_ms - first, 3)}) for record in found]


def _record(value: dict) -> Record:
    meta, begin = value["metadata"], value["start_perf_ns"]
    arrivals, text, usage = [], "", {}
    for response in value["responses"]:
        for packet in response.get("packets") or ():
            if packet["name"] != "data" or packet["value"] == "[DONE]":
                continue
            event = json.loads(packet["value"])
            usage = event.get("usage") or usage
            delta = event["choices"][0]["delta"] if event.get("choices") else {}
            piece = (delta.get("reasoning_content") or "") + (delta.get("content") or "")
            if piece:
                text += piece
                arrivals.append((response["perf_ns"] - begin) / 1e6)
    tokens = usage.get("completion_tokens", 0)
    error = value.get("error")
    why = None if error is None else str(error.get("message", error))[:300]
    if why is None and not arrivals:
        why = "no token"
    _, _, stream = meta["conversation_id"].partition("::")
    details = usage.get("prompt_tokens_details") or {}
    # a token without text of its own comes with the next: tokens are spread evenly over the events that had text
    counted = [(at, round((index + 1) * tokens / len(arrivals))) for index, at in enumerate(arrivals)]
    return Record(
        meta["source_trace_id"], stream or "root", meta["turn_index"],
        start_ms=meta["request_start_ns"] / 1e6,
        input_tokens=usage.get("prompt_tokens", 0),
        output_tokens=tokens,
        prompt_sha=records.digest({key: item for key, item in value["payload"].items() if key != "model"}),
        output_sha=records.digest(text),
        ttft_ms=round(arrivals[0], 4) if arrivals else 0.0,
        e2e_ms=round(arrivals[-1], 4) if arrivals else 0.0,
        gaps_ms=records.gaps(counted),
        cached_tokens=details.get("cached_tokens"),
        error=why,
    )


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key not in UNSET}


def _failure(what: str, log: Path) -> AiperfFailed:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-20:]
    return AiperfFailed(f"{what}\n--- last lines of {log} ---\n" + "\n".join(line[:300] for line in lines))
