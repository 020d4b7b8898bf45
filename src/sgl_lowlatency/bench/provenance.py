"""Where a figure comes from: code, card, driver, clocks, versions, command."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]  # in a checkout; of an installed copy, some folder of Python's
GPU_FIELDS = ("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "memory.total")


def _output(command: list[str], cwd: Path | None = None) -> str | None:
    """stdout of a short command, or None if it is absent, fails or takes over 20 s."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def commit(given: str | None = None) -> tuple[str, bool | None]:
    """(full hash, dirty) of this repository. `given` is "HASH" or "HASH-dirty" for a copy without git; a copy with
    neither, also one installed below somebody else's repository, is ("unknown", None)."""
    if given:
        return given.removesuffix("-dirty"), given.endswith("-dirty")
    if _output(["git", "ls-files", "--error-unmatch", __file__], REPOSITORY) is None:
        return "unknown", None
    head = _output(["git", "rev-parse", "HEAD"], REPOSITORY)
    if head is None:
        return "unknown", None
    return head, bool(_output(["git", "status", "--porcelain"], REPOSITORY))


def gpu(device_id: str | None = None) -> dict:
    """{gpu, num_gpus, driver, clocks_mhz} of the first GPU, or of the one that `nvidia-smi --id` knows by `device_id`; `gpu` is
    "none" on a machine without nvidia-smi."""
    query = ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    query += [f"--id={device_id}"] if device_id else []
    text = _output(query) if shutil.which("nvidia-smi") else None
    if not text:
        return {"gpu": "none", "num_gpus": 0, "driver": "none", "clocks_mhz": {}}
    lines = text.splitlines()
    name, driver, sm, mem, max_sm, _ = (field.strip() for field in lines[0].split(","))
    clocks = {key: int(value) for key, value in (("sm", sm), ("mem", mem), ("max_sm", max_sm)) if value.isdigit()}
    return {"gpu": name, "num_gpus": len(lines), "driver": driver, "clocks_mhz": clocks}


def versions() -> dict:
    """Versions of what takes part; a package that is not installed is left out."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for key, package in (("sglang", "sglang"), ("torch", "torch"), ("sgl_lowlatency", "sgl-lowlatency")):
        try:
            found[key] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def sanitized(command: list[str]) -> list[str]:
    """The command without the machine's folders: an absolute path keeps its last component only, also behind `--x=`."""

    def clean(word: str) -> str:
        key, equals, value = word.partition("=")
        if equals and os.path.isabs(value):
            return f"{key}={os.path.basename(value.rstrip('/'))}"
        return os.path.basename(word.rstrip("/")) if os.path.isabs(word) else word

    return [clean(word) for word in command]


def describe(given_commit: str | None, command: list[str]) -> dict:
    """Every provenance field of a results file."""
    hash_, dirty = commit(given_commit)
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "date": now,
        "commit": hash_,
        "dirty": dirty,
        **gpu(),
        "versions": versions(),
        "command": sanitized(command),
    }
