"""Measured cases as a table and as bars on a terminal. Input: the content of a results file."""

from __future__ import annotations

from collections.abc import Iterator

from sgl_lowlatency.bench import stats

BAR_COLUMNS = 48
FULL, LIGHT, FLOOR = "█", "▒", "│"
ASCII = str.maketrans({FULL: "#", LIGHT: "-", FLOOR: "|"})


def table(content: dict) -> str:
    """One line a case: the step without the LM head, its floor and share, what the head adds, both in one launch, and both with the head by
    cuBLAS."""
    lines = [machine(content)]
    lines.append(
        f"{'model':14s} {'rows':>4} {'context':>7} {'step ms':>8} {'floor':>8} {'share':>6} {'spread':>7}"
        f" {'head ms':>8} {'step+head':>9} {'floor':>8} {'share':>6} {'by cuBLAS':>9}  problems"
    )
    for row in content["rows"]:
        on, with_head = row["on_ms"], row["step_head_ms"]
        lines.append(
            f"{row['model']:14s} {row['rows']:4d} {row['context']:7d} {stats.median(on):8.4f} {row['floor_ms']:8.4f}"
            f" {row['on_floor_share']:6.3f} {stats.spread(on):7.2%} {row['head_ms']:8.4f} {stats.median(with_head):9.4f}"
            f" {row['step_head_floor_ms']:8.4f} {row['step_head_floor_share']:6.3f} {stats.median(row['step_cublas_ms']):9.4f}"
            f"  {'; '.join(row['problems']) or '-'}"
        )
    return "\n".join(lines)


def machine(content: dict) -> str:
    """The GPU, its measured read bandwidth, and what ran: what a time means nothing without."""
    bandwidth = content.get("bandwidth_gb_s", {}).get("read_gb_s")
    versions = content["versions"]
    return (
        f"{content['gpu']}, driver {content['driver']}, reads {bandwidth} GB/s; "
        f"sgl-lowlatency {versions.get('sgl_lowlatency', 'unknown')}, torch {versions.get('torch', 'unknown')}; {content['weights']}"
    )


def groups(content: dict) -> Iterator[tuple[str, list[dict]]]:
    """(title, rows) of every model and context, in the order measured."""
    found: dict[tuple, list[dict]] = {}
    for row in content["rows"]:
        found.setdefault((row["model"], row["layers"], row["context"]), []).append(row)
    for (model, layers, context), rows in found.items():
        yield f"{model}, {layers} layers, {context} tokens of context", rows


def bar(length: float, floor: float, scale: float) -> str:
    """A bar of `length`, full up to `floor`, light beyond it; both in ms, `scale` columns a ms."""
    floor_columns, columns = round(floor * scale), round(length * scale)
    return FULL * floor_columns + FLOOR + LIGHT * max(columns - floor_columns, 0)


def chart(content: dict, encoding: str | None = "utf-8") -> str:
    """Bars of ms a step, one scale a model and context. Plain ASCII where `encoding`, the terminal's, has no blocks."""
    lines = []
    for title, rows in groups(content):
        scale = BAR_COLUMNS / max(max(stats.median(row["step_head_ms"]), row["step_head_floor_ms"]) for row in rows)
        lines += ["", title]
        for row in rows:
            for label, times, floor, share in (
                ("step", row["on_ms"], row["floor_ms"], row["on_floor_share"]),
                ("+ LM head", row["step_head_ms"], row["step_head_floor_ms"], row["step_head_floor_share"]),
            ):
                rows_label = f"{row['rows']:2d} row{'s' if row['rows'] > 1 else ' '}" if label == "step" else ""
                drawn = bar(stats.median(times), floor, scale)
                lines.append(f"  {rows_label:8s}{label:10s}{drawn:{BAR_COLUMNS + 2}s} {stats.median(times):8.4f} ms, {share:4.0%} of the floor")
    legend = f"{FULL * 3}{FLOOR} up to the floor: the bytes at the measured read bandwidth   {LIGHT * 3} beyond it"
    text = "\n".join([*lines, "", legend])
    try:
        text.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return text.translate(ASCII)
    return text
