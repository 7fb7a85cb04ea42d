"""Draws a step by layers: ``python -m docs.passes`` writes the picture of evaluator.md.

It is ``docs/_static/passes-light.svg``, and ``passes-dark.svg`` for dark pages, as the
pictures of ``benchmarks`` are.
"""

import itertools
import pathlib

from benchmarks.plot import WIDTH, save

OUT = pathlib.Path(__file__).parent / "_static/passes"
NUMBERS, COLUMNS = "₀₁₂", (2.7, 4.7, 6.7)
DENSE, LOSS = 0.75, 8.65  # The columns beside the layers.
READ, FORWARD, BACKWARD, UPDATE, WRITTEN = 8.2, 6.6, 4.4, 2.6, 0.9
HALF = 0.38  # Of a box's height.


def draw(theme):
    """The figure, in the colours of a theme."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure((WIDTH, 4.4))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-0.1, 9.5), ylim=(0.2, 9.3))
    axes.axis("off")
    there, back, grey = theme["gx"], theme["keras"], theme["text"]

    def box(x, y, text, color):
        corner, size = (x - 0.68, y - HALF), (1.36, 2 * HALF)
        axes.add_patch(Rectangle(corner, *size, fill=False, edgecolor=color))
        axes.text(x, y, text, ha="center", va="center")

    def arrow(start, end, color, text="", style="-|>"):
        line = {"arrowstyle": style, "color": color, "shrinkA": 1, "shrinkB": 1}
        axes.annotate("", end, start, arrowprops=line)
        x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        beside = {"va": "center", "ha": "left"} if x == end[0] else {"ha": "center"}
        axes.text(x + 0.1 * (x == end[0]), y + 0.12 * (x != end[0]), text, **beside)

    box(DENSE, FORWARD, "dense", there)
    box(LOSS, FORWARD, "loss", there)
    box(DENSE, BACKWARD, "vjp", back)
    box(LOSS, BACKWARD, "vjp", back)
    box(DENSE, UPDATE, "update", back)
    arrow((DENSE, BACKWARD - HALF), (DENSE, UPDATE + HALF), back, "g")
    for number, x in zip(NUMBERS, COLUMNS, strict=True):
        box(x, READ, f"w{number}", grey)
        arrow((x, READ - HALF), (x, FORWARD + HALF), there)
        box(x, FORWARD, f"layer{number}", there)
        arrow((x, FORWARD - HALF), (x, BACKWARD + HALF), grey, f"x{number}")
        box(x, BACKWARD, f"vjp{number}", back)
        arrow((x, BACKWARD - HALF), (x, UPDATE + HALF), back, f"g{number}")
        box(x, UPDATE, f"update{number}", back)
        arrow((x, UPDATE - HALF), (x, WRITTEN + HALF), back, style="<|-|>")
        box(x, WRITTEN, f"w{number}  s{number}", grey)
    columns = (DENSE, *COLUMNS, LOSS)
    for left, right in itertools.pairwise(columns):
        arrow((left + 0.68, FORWARD), (right - 0.68, FORWARD), there)
        arrow((right - 0.68, BACKWARD), (left + 0.68, BACKWARD), back)
    arrow((LOSS, FORWARD - HALF), (LOSS, BACKWARD + HALF), grey)
    arrow((DENSE, FORWARD - HALF), (DENSE, BACKWARD + HALF), grey)
    axes.text(DENSE, READ, "the stack", ha="center", va="center")
    axes.text(DENSE, WRITTEN, "stack, state", ha="center", va="center")
    axes.text(LOSS, READ, "forward ▸", ha="center", va="center", color=there)
    axes.text(LOSS, UPDATE, "◂ backward", ha="center", va="center", color=back)
    return figure


if __name__ == "__main__":
    save(draw, OUT, 9)
