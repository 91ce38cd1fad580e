"""Boxes, arrows and text of the figures, as SVG that is readable on light and dark pages.

Colours are CSS variables. A figure that stands alone (on GitHub, or opened as a file) follows the colour scheme of the system; in the
documentation site, where `mkdocs_hooks` inlines it, `docs/stylesheets/figures.css` sets the variables from the site's palette.
"""

from __future__ import annotations

from html import escape

LIGHT = {
    "paper": "#ffffff", "ink": "#1c2333", "soft": "#5a6478", "line": "#8d96a8", "grid": "#e3e6ec",
    "blue": "#dbe6fd", "green": "#d8f0e0", "amber": "#fdebc8", "rose": "#f9dce4", "grey": "#eceef3",
    "strong-blue": "#2f62d9", "strong-green": "#1f8a4c", "strong-amber": "#c77700", "strong-rose": "#c2375f", "strong-grey": "#78829a",
}  # fmt: skip
DARK = {
    "paper": "#1b1e27", "ink": "#e9ecf3", "soft": "#a7b0c2", "line": "#747e93", "grid": "#323744",
    "blue": "#263b66", "green": "#1f4a33", "amber": "#5a4317", "rose": "#5c2838", "grey": "#2d323e",
    "strong-blue": "#7ba2ff", "strong-green": "#58c78a", "strong-amber": "#f0b04a", "strong-rose": "#f2809f", "strong-grey": "#98a2b8",
}  # fmt: skip


def declarations(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


def stylesheet() -> str:
    """`docs/stylesheets/figures.css`: the colours of inlined figures by the palette of the site, and their size on a narrow screen."""
    return (
        "/* Written by `python scripts/figures`. */\n"
        f'[data-md-color-scheme="default"] svg.figure {{{declarations(LIGHT)}}}\n'
        f'[data-md-color-scheme="slate"] svg.figure {{{declarations(DARK)}}}\n'
        "div.figure {overflow-x: auto; margin: 1.2em 0}\n"
        "div.figure svg.figure {display: block; width: 100%; min-width: 34rem; height: auto}\n"
    )


_STYLE = (
    f".figure{{{declarations(LIGHT)}font-family:system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif}}"
    f"@media (prefers-color-scheme:dark){{.figure{{{declarations(DARK)}}}}}"
    ".figure text{fill:var(--ink);font-size:13px}.figure .small{font-size:11.5px}.figure .soft{fill:var(--soft)}"
    ".figure .bold{font-weight:600}.figure .title{font-size:15px;font-weight:600}"
    ".figure .mono{font-family:ui-monospace,'SF Mono',Menlo,Consolas,'DejaVu Sans Mono',monospace;font-size:12px}"
    ".figure .middle{text-anchor:middle}.figure .end{text-anchor:end}"
)


class Drawing:
    """Collects the elements of one figure. Coordinates are in pixels, from the top left corner."""

    def __init__(self, title: str, description: str, width: int, height: int) -> None:
        self.title = title
        self.description = description
        self.width = width
        self.height = height
        self.elements: list[str] = []

    def text(self, x: float, y: float, text: str, style: str = "") -> None:
        """One line whose baseline is at `y`. Styles: small, soft, bold, title, mono, middle, end."""
        classes = f' class="{style}"' if style else ""
        self.elements.append(f'<text x="{x:g}" y="{y:g}"{classes}>{escape(text, quote=False)}</text>')

    def heading(self, note: str = "") -> None:
        """The title at the top left, and a note at the top right."""
        self.text(24, 32, self.title, "title")
        self.text(self.width - 24, 32, note, "small soft end")

    def rect(self, x: float, y: float, width: float, height: float, colour: str, *, outline: str = "line", radius: float = 5) -> None:
        stroke = f' stroke="var(--{outline})"' if outline else ""
        self.elements.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" fill="var(--{colour})"{stroke}/>'
        )

    def box(self, x: float, y: float, width: float, height: float, colour: str, heading: str, *lines: str) -> None:
        """A rectangle with a bold heading and lines below it."""
        self.rect(x, y, width, height, colour)
        self.text(x + 11, y + 21, heading, "bold")
        for number, line in enumerate(lines):
            self.text(x + 11, y + 40 + 16.5 * number, line, "small")

    def line(self, *points: tuple[float, float], colour: str = "line", width: float = 1.4, dash: str = "", arrow: bool = False) -> None:
        """A polyline; `arrow` puts a head at its last point."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.elements.append(f'<polyline points="{path}" fill="none" stroke="var(--{colour})" stroke-width="{width:g}"{dashes}/>')
        if arrow:
            (x0, y0), (x1, y1) = points[-2:]
            length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
            ux, uy = (x1 - x0) / length, (y1 - y0) / length
            corners = ((x1, y1), (x1 - 8 * ux - 4 * uy, y1 - 8 * uy + 4 * ux), (x1 - 8 * ux + 4 * uy, y1 - 8 * uy - 4 * ux))
            self.elements.append(f'<polygon points="{" ".join(f"{x:.4g},{y:.4g}" for x, y in corners)}" fill="var(--{colour})"/>')

    def dot(self, x: float, y: float, colour: str, radius: float = 3.6) -> None:
        self.elements.append(f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" fill="var(--{colour})"/>')

    def svg(self) -> str:
        label = f"{self.title}. {self.description}"
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="figure" viewBox="0 0 {self.width} {self.height}" '
            f'role="img" aria-label="{escape(label)}">'
        )
        paper = f'<rect width="{self.width}" height="{self.height}" rx="8" fill="var(--paper)"/>'
        return "\n".join([head, f"<style>{_STYLE}</style>", paper, *self.elements, "</svg>"]) + "\n"
