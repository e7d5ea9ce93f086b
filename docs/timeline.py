"""Draws docs/timeline.svg: one step of training, with Adam after backward and with superadam.

    python docs/timeline.py

The picture is a schematic in which backward takes twice as long as forward and 1.5 times as long as the CPU's Adam.
"""

from __future__ import annotations

from pathlib import Path

WIDTH, LEFT, UNIT, HEIGHT = 920, 118, 158, 30
"""Pixels: of the picture, left of the time axis, of one forward, of a row."""

FONT = "font-family='system-ui, Segoe UI, Helvetica, Arial, sans-serif'"
FORWARD, BACKWARD, COPY, SPECULATE, SHADOW, PUBLISH, COMMIT, ADAM = (
    "#9ecae9",
    "#4c78a8",
    "#d8d3cd",
    "#f58518",
    "#ffd8a8",
    "#54a24b",
    "#88d27a",
    "#e45756",
)
BUCKETS = 4
BACKWARD_UNITS = 2.0
ADAM_UNITS = BACKWARD_UNITS / 1.5
STEP_UNITS = 0.12


def box(begin: float, end: float, top: float, color: str, label: str = "", ink: str = "#222") -> str:
    """Return a bar from `begin` to `end` in units of a forward, `top` pixels below the picture's edge."""
    x, width = LEFT + begin * UNIT, (end - begin) * UNIT
    bar = f"<rect x='{x:.1f}' y='{top}' width='{width:.1f}' height='{HEIGHT - 6}' rx='3' fill='{color}' stroke='#fff'/>"
    return bar + (text(x + width / 2, top + 16, label, "middle", ink) if label else "")


def text(
    x: float, y: float, words: str, anchor: str = "start", ink: str = "#222", size: int = 12, style: str = ""
) -> str:
    """Return words at a point."""
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' text-anchor='{anchor}' fill='{ink}' {style}>{words}</text>"
    )


def row(top: float, name: str) -> str:
    """Return a row's name and its line."""
    line = f"<line x1='{LEFT}' x2='{WIDTH - 12}' y1='{top + HEIGHT - 4}' y2='{top + HEIGHT - 4}' stroke='#e4e4e4'/>"
    return line + text(LEFT - 10, top + 16, name, "end", "#555")


def title(top: float, words: str) -> str:
    """Return the heading of one of the two timelines."""
    return text(12, top, words, size=14, style="font-weight='600'")


def after_backward(top: float) -> list[str]:
    """Return the timeline of an optimizer that steps on the CPU once backward is over."""
    end = 1 + BACKWARD_UNITS
    return [
        title(top, "Adam on the CPU after backward"),
        row(top + 12, "GPU"),
        box(0, 1, top + 12, FORWARD, "forward"),
        box(1, end, top + 12, BACKWARD, "backward", "#fff"),
        text(LEFT + (end + ADAM_UNITS / 2) * UNIT, top + 28, "waits", "middle", "#999"),
        box(end + ADAM_UNITS, end + ADAM_UNITS + 0.5, top + 12, FORWARD, "next …"),
        row(top + 12 + HEIGHT, "CPU"),
        box(end, end + ADAM_UNITS, top + 12 + HEIGHT, ADAM, "norm, NaN check, Adam", "#fff"),
    ]


def during_backward(top: float) -> list[str]:
    """Return superadam's timeline: a row each for the GPU, both directions of the link, and the CPU."""
    end = 1 + BACKWARD_UNITS
    gpu, down, cpu, up = (top + 12 + HEIGHT * n for n in range(4))
    part, work = BACKWARD_UNITS / BUCKETS, ADAM_UNITS / BUCKETS * 0.92
    shapes = [
        title(top, "superadam"),
        row(gpu, "GPU"),
        row(down, "gradients ↓"),
        row(cpu, "CPU worker"),
        row(up, "new values ↑"),
        box(0, 1, gpu, FORWARD, "forward"),
        box(0.04, 0.96, cpu, COMMIT, "commit last step"),
    ]
    for n in range(BUCKETS):
        begin, ready = 1 + part * n, 1 + part * (n + 1)
        if n == BUCKETS - 1:  # a smaller one, as the last is: it is all that is left after backward
            work *= 0.5
        shapes.append(box(begin, ready, gpu, BACKWARD, f"backward {n + 1}", "#fff"))
        shapes += [
            box(ready, ready + 0.1, down, COPY, str(n + 1)),
            box(ready + 0.1, ready + 0.1 + work, cpu, SPECULATE, f"Adam {n + 1}" if n < BUCKETS - 1 else "4"),
            box(ready + 0.1 + work, ready + 0.2 + work, up, SHADOW, str(n + 1)),
        ]
    verdict = end + 0.2 + work
    x = LEFT + verdict * UNIT
    shapes += [
        box(verdict, verdict + STEP_UNITS, gpu, PUBLISH),
        box(verdict + STEP_UNITS, verdict + STEP_UNITS + 0.9, gpu, FORWARD, "next forward"),
        box(verdict + STEP_UNITS + 0.04, verdict + STEP_UNITS + 0.9, cpu, COMMIT, "commit"),
        f"<path d='M{x:.1f} {gpu - 4}V{up + HEIGHT + 4}' stroke='{PUBLISH}' stroke-dasharray='4 3'/>",
        text(x, up + HEIGHT + 20, "step(): verdict, then shadows are published", "middle", "#3a7a33"),
    ]
    return shapes


def legend(top: float) -> list[str]:
    """Return what the colors mean."""
    entries = (
        (SPECULATE, "speculate: compute new values, into memory of their own"),
        (SHADOW, "shadows: new values that wait on the GPU"),
        (PUBLISH, "publish: copy shadows into the parameters"),
        (COMMIT, "commit: masters and moments follow in idle time"),
    )
    shapes = []
    for n, (color, words) in enumerate(entries):
        x, y = LEFT + n % 2 * 400, top + n // 2 * 20
        shapes.append(f"<rect x='{x}' y='{y}' width='14' height='12' rx='2' fill='{color}'/>")
        shapes.append(text(x + 20, y + 10, words, ink="#555"))
    return shapes


def picture() -> str:
    """Return the whole picture as SVG."""
    shapes = [*after_backward(24), *during_backward(126), *legend(296)]
    height = 340
    size = f"width='{WIDTH}' height='{height}' viewBox='0 0 {WIDTH} {height}'"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' {size} {FONT}>"
    return "\n".join([head, f"<rect width='{WIDTH}' height='{height}' rx='8' fill='#fff'/>", *shapes, "</svg>", ""])


if __name__ == "__main__":
    Path(__file__).with_name("timeline.svg").write_text(picture())
