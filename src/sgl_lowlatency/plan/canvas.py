"""A list of rectangles, lines and texts, written as SVG or, with Pillow, as PNG."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape


@dataclass
class Canvas:
    """Coordinates and sizes in pixels from the top left. Colours are `#rrggbb`."""

    width: int
    height: int
    shapes: list[tuple] = field(default_factory=list)

    def rect(self, x: float, y: float, w: float, h: float, fill: str, outline: str | None = None) -> None:
        self.shapes.append(("rect", x, y, w, h, fill, outline))

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str, width: int = 1) -> None:
        self.shapes.append(("line", x1, y1, x2, y2, colour, width))

    def arrow(self, x1: float, y: float, x2: float, colour: str) -> None:
        """Horizontal, pointing from x1 to x2."""
        tip = 7 if x2 > x1 else -7
        self.line(x1, y, x2, y, colour, 2)
        self.line(x2 - tip, y - 5, x2, y, colour, 2)
        self.line(x2 - tip, y + 5, x2, y, colour, 2)

    def text(self, x: float, y: float, text: str, size: int = 13, colour: str = "#1f2933", anchor: str = "start") -> None:
        """`y` is the base line; anchor start, middle or end."""
        self.shapes.append(("text", x, y, text, size, colour, anchor))

    def to_svg(self) -> str:
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}" font-family="Helvetica, Arial, sans-serif">',
            f'<rect width="{self.width}" height="{self.height}" fill="#ffffff"/>',
        ]
        for kind, *a in self.shapes:
            if kind == "rect":
                stroke = f' stroke="{a[5]}"' if a[5] else ""
                parts.append(f'<rect x="{a[0]:.1f}" y="{a[1]:.1f}" width="{a[2]:.1f}" height="{a[3]:.1f}" fill="{a[4]}"{stroke}/>')
            elif kind == "line":
                parts.append(
                    f'<line x1="{a[0]:.1f}" y1="{a[1]:.1f}" x2="{a[2]:.1f}" y2="{a[3]:.1f}" stroke="{a[4]}" stroke-width="{a[5]}"/>'
                )
            else:
                parts.append(
                    f'<text x="{a[0]:.1f}" y="{a[1]:.1f}" font-size="{a[3]}" fill="{a[4]}" text-anchor="{a[5]}">{escape(a[2])}</text>'
                )
        return "\n".join([*parts, "</svg>"]) + "\n"

    def save(self, path: str | Path) -> None:
        """Writes `.svg`, or `.png` when Pillow is installed. Raises ValueError for another ending or a missing Pillow."""
        path = Path(path)
        require_format(path)
        if path.suffix == ".svg":
            path.write_text(self.to_svg(), encoding="utf-8")
        else:
            self._save_png(path)

    def _save_png(self, path: Path) -> None:
        from PIL import Image, ImageDraw, ImageFont

        image = Image.new("RGB", (self.width, self.height), "#ffffff")
        draw = ImageDraw.Draw(image)
        for kind, *a in self.shapes:
            if kind == "rect":
                draw.rectangle((a[0], a[1], a[0] + a[2], a[1] + a[3]), fill=a[4], outline=a[5])
            elif kind == "line":
                draw.line((a[0], a[1], a[2], a[3]), fill=a[4], width=a[5])
            else:
                pillow_anchor = {"start": "ls", "middle": "ms", "end": "rs"}[a[5]]
                draw.text((a[0], a[1]), a[2], fill=a[4], anchor=pillow_anchor, font=ImageFont.load_default(a[3]))
        image.save(path)


def require_format(path: Path) -> None:
    """Raises ValueError unless a canvas can be saved at `path`: .svg, or .png where Pillow is installed."""
    if path.suffix not in (".svg", ".png"):
        raise ValueError(f"picture {path} ends in neither .svg nor .png")
    if path.suffix == ".png" and importlib.util.find_spec("PIL") is None:
        raise ValueError(f"picture {path}: a .png needs Pillow (pip install pillow); .svg needs nothing")
