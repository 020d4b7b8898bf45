"""Traces of agentic sessions in the Weka format, one JSON object a file, as aiperf 0.13.0 reads them: whatever it would refuse is refused
here, by name, before a server starts.

A session is a chain of requests. `hash_ids` of a request name its full blocks of `block_size` tokens in order; two requests of one session
whose lists begin alike share that prefix. Ids mean nothing beyond their file (`hash_id_scope` "local").
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

NUMBER, INTEGER, TEXT, OBJECT = "a number", "an integer", "a string", "an object"
OBJECTS, TEXTS, INTEGERS = "a list of objects", "a list of strings", "a list of integers"
_NULLABLE = " or null"

# key -> (kind, required)
_REQUEST = {
    "t": (NUMBER, True), "type": (TEXT, True), "model": (TEXT, True), "in": (INTEGER, True), "out": (INTEGER, True),
    "hash_ids": (INTEGERS, False), "input_types": (TEXTS, False), "output_types": (TEXTS, False), "stop": (TEXT, False),
    "api_time": (NUMBER + _NULLABLE, False), "think_time": (NUMBER + _NULLABLE, False),
}
_STREAMING = _REQUEST | {"ttft": (NUMBER + _NULLABLE, False)}
_SUBAGENT = {
    "t": (NUMBER, True), "type": (TEXT, True), "agent_id": (TEXT, True), "subagent_type": (TEXT, True), "status": (TEXT, True),
    "duration_ms": (INTEGER + _NULLABLE, False), "total_tokens": (INTEGER + _NULLABLE, False), "tool_use_count": (INTEGER + _NULLABLE, False),
    "requests": (OBJECTS, True), "models": (TEXTS, True), "tool_tokens": (INTEGER, False), "system_tokens": (INTEGER, False),
}
_TRACE = {
    "id": (TEXT, True), "models": (TEXTS, True), "block_size": (INTEGER, True), "hash_id_scope": (TEXT, True), "tool_tokens": (INTEGER, False),
    "system_tokens": (INTEGER, False), "requests": (OBJECTS, True), "totals": (OBJECT + _NULLABLE, False),
}
_KEYS = {"n": _REQUEST, "s": _STREAMING, "subagent": _SUBAGENT}


class TraceError(ValueError):
    """A trace that cannot be replayed; the message names the file, the place in it and what is accepted."""


@dataclasses.dataclass(frozen=True)
class Request:
    """input_tokens, output_tokens: lengths. hash_ids: full blocks of the input in order. think_s: pause before it, None if unknown.
    t_s: seconds since the session began."""

    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    t_s: float
    think_s: float | None


@dataclasses.dataclass(frozen=True)
class Trace:
    """root: the session's own requests in order. streams: `root` and behind it the requests of each subagent, with a name each."""

    id: str
    block_size: int
    prefix_tokens: int
    streams: tuple[tuple[str, tuple[Request, ...]], ...]
    path: Path
    sha256: str

    @property
    def root(self) -> tuple[Request, ...]:
        return self.streams[0][1]

    @property
    def peak_tokens(self) -> int:
        """Tokens of the longest request, its output included."""
        return max(request.input_tokens + request.output_tokens for _, requests in self.streams for request in requests)


def read(path: Path) -> list[Trace]:
    """The traces of a .json file or of every .json file in a folder, ordered by file name. Raises TraceError."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not path.exists():
        raise TraceError(f"traces {path}: no such file or folder")
    if not files:
        raise TraceError(f"traces {path}: the folder has no .json file")
    traces = [_read_one(file) for file in files]
    seen: dict[str, Path] = {}
    for trace in traces:
        if trace.id in seen:
            raise TraceError(f"{trace.path.name}: id {trace.id!r} is also that of {seen[trace.id].name}")
        seen[trace.id] = trace.path
    return traces


def digest(traces: list[Trace]) -> str:
    """SHA-256 over the files' own, in order: names the whole set."""
    return hashlib.sha256("".join(trace.sha256 for trace in traces).encode()).hexdigest()


def _read_one(path: Path) -> Trace:
    content = path.read_bytes()
    try:
        value = json.loads(content)
    except ValueError as error:
        raise TraceError(f"{path.name}: not JSON: {error}") from None
    return parse(value, path, hashlib.sha256(content).hexdigest())


def parse(value: object, path: Path, sha256: str = "") -> Trace:
    """A decoded trace file. Raises TraceError."""
    _check(value, _TRACE, path.name)
    if value["hash_id_scope"] != "local":
        raise TraceError(f"{path.name}: hash_id_scope is {value['hash_id_scope']!r}, only 'local' is read")
    if value["block_size"] < 1:
        raise TraceError(f"{path.name}: block_size is {value['block_size']}, not 1 or more")
    root, subagents = [], []
    for where, entry in _entries(value["requests"], f"{path.name}: requests"):
        if entry["type"] == "subagent":
            inner = [_request(w, e, value["block_size"]) for w, e in _entries(entry["requests"], f"{where}: requests", subagents=False)]
            if inner:
                subagents.append((f"{entry['agent_id']}#{len(subagents)}", tuple(inner)))
        else:
            root.append(_request(where, entry, value["block_size"]))
    if not root:
        raise TraceError(f"{path.name}: no request of type 'n' or 's'")
    prefix = value.get("tool_tokens", 0) + value.get("system_tokens", 0)
    return Trace(value["id"], value["block_size"], prefix, (("root", tuple(root)), *subagents), path, sha256)


def _entries(values: list[dict], where: str, subagents: bool = True) -> Iterator[tuple[str, dict]]:
    kinds = [kind for kind in _KEYS if subagents or kind != "subagent"]
    for index, entry in enumerate(values):
        at = f"{where}[{index}]"
        if entry.get("type") not in kinds:
            raise TraceError(f"{at}: type is {entry.get('type')!r}, not one of {', '.join(kinds)}")
        _check(entry, _KEYS[entry["type"]], at)
        yield at, entry


def _request(where: str, entry: dict, block_size: int) -> Request:
    if entry["in"] < 1 or entry["out"] < 1:
        raise TraceError(f"{where}: in is {entry['in']} and out {entry['out']}, both must be 1 or more")
    if len(entry.get("hash_ids", ())) > -(-entry["in"] // block_size):
        raise TraceError(f"{where}: {len(entry['hash_ids'])} hash_ids of {block_size} tokens are more than in, {entry['in']} tokens")
    return Request(entry["in"], entry["out"], tuple(entry.get("hash_ids", ())), float(entry["t"]), entry.get("think_time"))


def _check(value: object, keys: dict[str, tuple[str, bool]], where: str) -> None:
    """Every key known, every required one there, every value of its kind."""
    if not isinstance(value, dict):
        raise TraceError(f"{where}: not a JSON object")
    unknown = [key for key in value if key not in keys]
    if unknown:
        raise TraceError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(keys)}")
    for key, (kind, required) in keys.items():
        if key not in value:
            if required:
                raise TraceError(f"{where}: key {key!r} is missing")
        elif not _is(value[key], kind):
            raise TraceError(f"{where}: {key} is not {kind}")


def _is(value: object, kind: str) -> bool:
    if kind.endswith(_NULLABLE):
        return value is None or _is(value, kind.removesuffix(_NULLABLE))
    if kind in (NUMBER, INTEGER):
        return isinstance(value, int if kind == INTEGER else (int, float)) and not isinstance(value, bool)
    if kind in (TEXT, OBJECT):
        return isinstance(value, str if kind == TEXT else dict)
    inner = {OBJECTS: OBJECT, TEXTS: TEXT, INTEGERS: INTEGER}[kind]
    return isinstance(value, list) and all(_is(item, inner) for item in value)
