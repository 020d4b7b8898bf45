"""What a start of the two servers cost: seconds until each answered, and GPU memory that the plugin adds, from their logs.

Both servers start together, so each slows the other down. Where kernels were compiled meanwhile the start was cold: its times are a
compiler's, and no difference is taken from them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from benchmark.serve.server import STARTUP, Server

KERNEL_SUFFIXES = (".so", ".cubin")
_TIMINGS = re.compile(r"Engine startup timings \(s\): (.*)")
_WEIGHTS = re.compile(r"Load weight end\..* mem usage=([\d.]+) GB")
_BUILT = re.compile(r"NVIDIA megakernel: active .*; ([\d.]+) MiB beside the model; .*built in ([\d.]+) s")  # SGLang's own MiB there count both servers
_SELF_CHECK = re.compile(r"decode_step self-check: .*?, ([\d.]+) s: (?:passed|FAILED)")


def cached_kernels() -> int:
    """How many compiled kernels SGLang, DeepGEMM, Triton and FlashInfer keep on this host."""
    home = Path.home()
    roots = {Path(os.environ.get("SGLANG_CACHE_DIR") or home / ".cache" / "sglang"), Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton")}
    roots |= {home / ".cache" / "flashinfer", home / ".cache" / "tvm-ffi"}
    return sum(name.endswith(KERNEL_SUFFIXES) for root in roots for _, _, names in os.walk(root) for name in names)


def lines(one: Server) -> list[str]:
    """What the plugin and SGLang's binding of it logged at start."""
    return [line[:500] for line in one.grep(STARTUP) if "server_args=" not in line][:20]


def arm(ready_s: float | None, log: str) -> dict:
    """One server's costs: `ready_s`, SGLang's own timings in seconds, weights_gib of GPU memory, and of the plugin built_s, plugin_mib
    and self_check_s. What the log does not say is left out."""
    found = {} if ready_s is None else {"ready_s": round(ready_s, 1)}
    if timings := _TIMINGS.search(log):
        found["timings_s"] = {name: float(value) for name, value in re.findall(r"(\w+)=([\d.]+)", timings[1])}
    if sizes := _WEIGHTS.findall(log):
        found["weights_gib"] = float(sizes[0])
    if built := _BUILT.search(log):
        found |= {"plugin_mib": float(built[1]), "built_s": float(built[2])}
    if checks := _SELF_CHECK.findall(log):
        found["self_check_s"] = round(sum(map(float, checks)), 2)
    return found


def costs(off: dict, on: dict, compiled: int) -> dict:
    """JSON field `start` of a results file. off, on: of `arm`. compiled: kernels that were not cached before.

    added_s is the plugin's, left out of a cold start. plugin_memory_share is what the plugin allocated over the model's weights.
    """
    found = {"off": off, "on": on, "compiled_kernels": compiled, "cold": compiled > 0}
    if not compiled and "ready_s" in off and "ready_s" in on:
        found["added_s"] = round(on["ready_s"] - off["ready_s"], 1)
    return found | {name: value for name, value in memory(off, on).items() if name == "plugin_memory_share"}


def memory(off: dict, on: dict) -> dict:
    """plugin_mib, weights_gib and the share of the one in the other, of the arms' costs; {} where a log did not tell."""
    if "plugin_mib" not in on or not off.get("weights_gib"):
        return {}
    share = round(on["plugin_mib"] / 1024 / off["weights_gib"], 5)
    return {"plugin_mib": on["plugin_mib"], "weights_gib": off["weights_gib"], "plugin_memory_share": share}


def sentence(start: dict) -> str:
    """The costs on one line of a table."""
    off, on = start["off"], start["on"]
    text = f"start: ready after {off.get('ready_s')} s off, {on.get('ready_s')} s on, both started together"
    if start["cold"]:
        text += f"; cold, {start['compiled_kernels']} kernels compiled: no difference taken"
    elif "added_s" in start:
        text += f", {start['added_s']:+.1f} s with caches warm"
    text += f"; built in {on.get('built_s')} s, self-check {on.get('self_check_s')} s"
    if "plugin_memory_share" in start:
        text += f"; memory {on['plugin_mib']} MiB, {start['plugin_memory_share']:.2%} of the weights"
    return text
