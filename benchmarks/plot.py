"""Draws the output of ``benchmarks.step --json``: speed against optax, by chain.

``python -m benchmarks.plot gpt2.json resnet.json --out benchmarks/results/step`` gives
each file a panel, one below the other, and writes two pictures: ``step-light.svg`` for
light pages, ``step-dark.svg`` for dark ones. They are 440 pixels wide: on a phone they
shrink a little, and their print can still be read. A bar is the ratio of the medians.
The tick on it is the ratio of the minima. 1 is optax. Rows that have no optax reference
are left out. ``--only NAME …`` draws these alone.
"""

import argparse
import json
import pathlib

WIDTH = 4.58  # inches; at CSS's 96 pixels an inch, 440 pixels.
# Okabe and Ito's colours: they differ in grey and for the colour-blind too. Those for
# dark pages are lighter.
THEMES = {
    "light": {
        **{"gx": "#0072b2", "keras": "#b36b00", "torch": "#b0558a"},
        **{"text": "#1f2328", "grid": "#d1d9e0"},
    },
    "dark": {
        **{"gx": "#56b4e9", "keras": "#e69f00", "torch": "#cc79a7"},
        **{"text": "#f0f6fc", "grid": "#3d444d"},
    },
}
NAMES = {"gx": "gradxform", "keras": "Keras 3 on JAX", "torch": "torch"}


def save(draw, out, size=11):
    """Writes the figures of ``draw(theme)``, for light pages and for dark ones."""
    import matplotlib as mpl

    out.parent.mkdir(parents=True, exist_ok=True)
    for name, theme in THEMES.items():
        ink = ("text.color", "axes.edgecolor", "axes.labelcolor")
        settings = dict.fromkeys((*ink, "xtick.color", "ytick.color"), theme["text"])
        settings |= {"grid.color": theme["grid"], "svg.hashsalt": out.name}
        settings |= {"font.size": size, "axes.grid": True, "axes.facecolor": "none"}
        settings |= {"axes.axisbelow": True}
        with mpl.rc_context(settings):
            path = out.with_name(f"{out.name}-{name}.svg")
            draw(theme).savefig(path, transparent=True, metadata={"Date": None})


def lines_of(results, only):
    """The rows with a bar, by (reference, name)."""
    return {
        (row["against"], row["name"]): row
        for row in results["rows"]
        if row.get("against", "").startswith("optax")
        and (not only or row["name"] in only)
    }


def draw(files, theme, only=()):
    """The figure of the results in some files, with a panel for each."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    panels = [lines_of(results, only) for results in files]
    if not any(panels):
        raise SystemExit("no such row is held against optax: not from benchmarks.step?")
    places, labels = layout(dict.fromkeys(key for rows in panels for key in rows))
    height = (0.7 + 0.23 * max(labels)) * len(files) + 0.4
    figure = Figure((WIDTH, height), layout="constrained")
    axes = figure.subplots(len(files), 1, sharex=True, sharey=True, squeeze=False)
    for ax, results, rows in zip(axes[:, 0], files, panels, strict=True):
        ax.set_xscale("log", base=2)
        for key, row in rows.items():
            bar(ax, places[key], row, theme)
        ax.axvline(1, color=theme["text"], linewidth=0.8)
        ax.margins(x=0.14)
        ax.xaxis.set_major_formatter(
            lambda x, _: f"{x:g}" if x >= 1 else f"1/{1 / x:g}"
        )
        ax.set_title(results["title"].split(", N")[0])
        ax.grid(visible=False, axis="y")
        ax.spines[["top", "right", "left"]].set_visible(False)
        ax.tick_params(axis="y", length=0)
        ax.set_yticks(list(labels), list(labels.values()))
        for text in ax.get_yticklabels():
            text.set_fontweight("bold" if text.get_text().endswith(":") else "normal")
    axes[0, 0].invert_yaxis()
    axes[-1, 0].set_xlabel("times as fast as optax")
    shown = [k for k in NAMES if k in {name.split()[0] for _, name in places}]
    if len(shown) > 1:
        handles = [Patch(color=theme[k], label=NAMES[k]) for k in shown]
        figure.legend(
            handles=handles, loc="outside lower right", ncols=3, frameon=False
        )
    return figure


def layout(keys):
    """The place of each bar, from the top, and the labels with their places."""
    places, labels, place, before = {}, {}, 0.0, None
    for against, name in keys:
        if against != before:
            place += 1.15  # Chains stand apart.
            labels[place] = f"vs {against}:"
        place += 0.85
        places[against, name], labels[place], before = place, name, against
    return places, labels


def bar(ax, y, row, theme):
    """One bar, from 1, with its tick and its number."""
    median, fastest = row["speed, median"], row["speed, min"]
    ax.barh(y, median - 1, left=1, color=theme[row["name"].split()[0]], height=0.68)
    ax.plot([fastest] * 2, [y - 0.34, y + 0.34], color=theme["text"], linewidth=1.2)
    ax.annotate(f" {median:.3g} x", (max(median, fastest, 1), y), va="center")


def main():
    """Writes the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=pathlib.Path, nargs="+", help="JSON files")
    parser.add_argument(
        "--out", type=pathlib.Path, required=True, help="path without suffix"
    )
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="rows")
    options = parser.parse_args()
    files = [json.loads(path.read_text()) for path in options.results]
    save(lambda theme: draw(files, theme, options.only), options.out, 9)


if __name__ == "__main__":
    main()
