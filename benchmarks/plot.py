"""Draws what ``benchmarks.step --json`` wrote: speed against optax, chain by chain.

``python -m benchmarks.plot gpt2.json resnet.json --out benchmarks/results/step.png``
gives each file a panel. A bar is the ratio of the medians, the tick on it that of the
minima; 1 is optax. Steps whose reference is not optax's are left out.
"""

import argparse
import json
import pathlib

# Okabe and Ito's: apart in grey and to the colour-blind too.
COLORS = {"gx": "#0072b2", "keras": "#e69f00", "torch": "#cc79a7"}
NAMES = {"gx": "gradxform", "keras": "Keras 3 on JAX", "torch": "torch"}


def lines_of(results):
    """The rows with a bar, by (reference, name)."""
    return {
        (row["against"], row["name"]): row
        for row in results["rows"]
        if row.get("against", "").startswith("optax")
    }


def draw(files):
    """The figure of some files' results, a panel each."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    panels = [lines_of(results) for results in files]
    if not any(panels):
        raise SystemExit("no row is held against optax: not from benchmarks.step?")
    places, labels = layout(dict.fromkeys(key for rows in panels for key in rows))
    width, height = 4 + 4.5 * len(files), 1.4 + 0.27 * max(labels)
    figure = Figure((width, height), layout="constrained")
    axes = figure.subplots(1, len(files), sharex=True, sharey=True, squeeze=False)[0]
    for ax, results, rows in zip(axes, files, panels, strict=True):
        ax.set_xscale("log", base=2)
        for key, row in rows.items():
            bar(ax, places[key], row)
        ax.axvline(1, color="black", linewidth=0.8)
        ax.margins(x=0.14)
        ax.xaxis.set_major_formatter(
            lambda x, _: f"{x:g}" if x >= 1 else f"1/{1 / x:g}"
        )
        ax.set_xlabel("times as fast as optax (log scale)")
        ax.set_title(results["title"], fontsize=9)
        ax.grid(axis="x", linewidth=0.4)
        ax.set_axisbelow(True)
        ax.spines[["top", "right", "left"]].set_visible(False)
        ax.tick_params(axis="y", length=0)
    axes[0].invert_yaxis()
    axes[0].set_yticks(list(labels), list(labels.values()), fontsize=9)
    for text in axes[0].get_yticklabels():
        text.set_fontweight("bold" if text.get_text().endswith(":") else "normal")
    shown = {name.split()[0] for _, name in places}
    handles = [Patch(color=COLORS[k], label=NAMES[k]) for k in COLORS if k in shown]
    figure.legend(handles=handles, loc="outside lower right", ncols=3, frameon=False)
    return figure


def layout(keys):
    """Where each bar stands, from the top, and what is written where."""
    places, labels, place, before = {}, {}, 0.0, None
    for against, name in keys:
        if against != before:
            place += 1.15  # Chains stand apart.
            labels[place] = f"against {against}:"
        place += 0.85
        places[against, name], labels[place], before = place, name, against
    return places, labels


def bar(ax, y, row):
    """One bar, from 1, with its tick and its number."""
    median, fastest = row["speed, median"], row["speed, min"]
    color = COLORS[row["name"].split()[0]]
    ax.barh(y, median - 1, left=1, color=color, height=0.68)
    ax.plot([fastest] * 2, [y - 0.34, y + 0.34], color="black", linewidth=1.2)
    end = max(median, fastest, 1)
    ax.annotate(f" {median:.3g} x", (end, y), va="center", fontsize=9)


def main():
    """Writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=pathlib.Path, nargs="+", help="JSON files")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the picture")
    options = parser.parse_args()
    figure = draw([json.loads(path.read_text()) for path in options.results])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out, dpi=150)


if __name__ == "__main__":
    main()
