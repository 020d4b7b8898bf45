"""Measured cases as a picture: ms a step against the floor, without and with the LM head."""

from __future__ import annotations

from sgl_lowlatency.bench import stats
from sgl_lowlatency.bench.report import groups, machine
from sgl_lowlatency.plan.canvas import Canvas

WIDTH, LEFT, RIGHT = 1180, 60, 300
LABELS = 130  # width of the labels left of the bars
BAR, GAP, TITLE = 16, 26, 44
STEP, HEAD, FLOOR, GREY, PALE = "#4c78a8", "#f58518", "#1f2933", "#7b8794", "#e4e7eb"


def draw(content: dict) -> Canvas:
    """One panel a model and context, one scale a panel; the floor of every bar is a line across it."""
    panels = list(groups(content))
    canvas = Canvas(WIDTH, 118 + sum(TITLE + len(rows) * (2 * BAR + GAP) for _, rows in panels))
    canvas.text(LEFT, 34, "decode_step: milliseconds of a decode step, graph replay, against the bytes it must read", 20)
    canvas.text(LEFT, 56, machine(content), 13, GREY)
    for x, colour, label in ((LEFT, STEP, "step, embedding to final norm"), (LEFT + 250, HEAD, "with the LM head, one launch")):
        canvas.rect(x, 70, 12, 12, colour)
        canvas.text(x + 18, 81, label, 12)
    canvas.line(LEFT + 560, 68, LEFT + 560, 84, FLOOR, 3)
    canvas.text(LEFT + 568, 81, "floor: bytes over the measured read bandwidth", 12)
    top = 104
    for title, rows in panels:
        draw_panel(canvas, title, rows, top)
        top += TITLE + len(rows) * (2 * BAR + GAP)
    return canvas


def draw_panel(canvas: Canvas, title: str, rows: list[dict], top: int) -> None:
    """The bars of one model and context."""
    begin, width = LEFT + LABELS, WIDTH - LEFT - LABELS - RIGHT
    scale = width / max(max(stats.median(row["step_head_ms"]), row["step_head_floor_ms"]) for row in rows)
    canvas.text(LEFT, top + 18, title, 14)
    canvas.line(begin, top + 26, begin, top + TITLE + len(rows) * (2 * BAR + GAP) - GAP, PALE)
    for index, row in enumerate(rows):
        y = top + TITLE - 10 + index * (2 * BAR + GAP)
        canvas.text(begin - 10, y + BAR + 5, f"{row['rows']} row{'s' if row['rows'] > 1 else ''}", 13, FLOOR, "end")
        parts = (
            (y, STEP, row["on_ms"], row["floor_ms"], row["on_floor_share"]),
            (y + BAR, HEAD, row["step_head_ms"], row["step_head_floor_ms"], row["step_head_floor_share"]),
        )
        for bar_y, colour, times, floor, share in parts:
            median = stats.median(times)
            canvas.rect(begin, bar_y, median * scale, BAR - 1, colour)
            canvas.line(begin + floor * scale, bar_y - 2, begin + floor * scale, bar_y + BAR, FLOOR, 2)
            at = begin + max(median, floor) * scale + 10
            canvas.text(at, bar_y + 12, f"{median:.3f} ms, floor {floor:.3f}, {share:.0%} of it", 12)
