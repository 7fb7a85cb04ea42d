"""Compares each step with optax's, for every chain, dtype, loop and compiler.

``python -m benchmarks.grid --targets cpu v5e:2x2`` compiles whole steps: loss,
gradients and update in one donated program. It runs nothing. ``--models`` chooses from
a chain of dense layers, a transformer whose layers are scanned, and an embedding. Their
batches are small beside their parameters. Batches are pushed one a program, and four in
a ``scan``.

``--results FILE`` takes the cells that the file has for this JAX, and adds each missing
one as soon as it is compiled. To measure cells again, remove their lines. ``--page
FILE`` writes the tables of all results between two marks of a page:
``benchmarks/results/grid.md`` has those of ``grid.csv`` beside it. ``--targets`` alone
compiles nothing.

``--gradients`` compiles steps whose gradients are arguments, as in a push to a server,
on a GPT-2-small with two blocks: 28 leaves, with every kind that the whole model has.
``--blocks 12`` takes the whole model. Targets such as ``v5p:2x2x1``, ``v6e:2x2`` and
``v5e:16x16`` need libtpu, and ``h100`` needs ``jax[cuda13]``; ``benchmarks.compilers``
explains that, what a topology stands for, and the figures. ``--all`` adds all other
figures for ours and for optax's, and ``--hlo`` writes the programs.

The columns are exact, in N, the parameters' bytes on one device. Each has our figure,
then a bar, then the figure of optax's chain in the same dtypes, with
``optax.apply_updates``.

- temp: temporary memory.
- moved: of a whole step, ``hbm``. Of micro-batches, the mean of four pushes: one acts,
  three are only added. With ``--all``, ``acts`` and ``added`` have each of them. Of
  gradients as arguments, on CPU the bytes that the loops of the program read and write,
  by the compiler's count, and on TPU ``own``, operands and results in any memory.
- hbm: on TPU the bytes that are read from HBM and written to it.
- worse: the columns above 1.02 times optax's. Temporaries must also be more than 0.03 N
  above, and 3 MB except on CPU: the TPU compiler keeps 32 kB for each instruction, and
  on 256 chips, with 0.4 to 0.8 MB of parameters each, this is most of all temporaries.

Loops: ``gx`` is ``gx.apply_gradients``; ``optax`` is ``tx.update`` and
``optax.apply_updates``. ``nnx.Optimizer.update`` and Flax's
``TrainState.apply_gradients`` use the second one inside.

``wide`` means bfloat16 parameters with float32 state. optax's chain has no argument for
it. There, gradients and parameters are cast in front of the whole chain. The same is
done for optax's optimizers behind our clip.
"""

import csv
import itertools
import pathlib
import re
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import gradxform as gx
from benchmarks.compilers import (
    collectives,
    count,
    figures,
    lower_step,
    lower_training,
    mesh,
    placed,
    size_on_a_chip,
    traffic,
)
from benchmarks.measure import arguments, report
from benchmarks.models import TRAININGS, gpt2_short, size, training
from benchmarks.step import CLIP, OPTAX_CLIP, gx_step, optax_step

MOST = {"global_clipnorm": 1.0}
# Dtypes of parameters and of gradients; of Adagrad's sums, where that is not float32.
DTYPES = {
    "float32": ("float32", "float32", None),
    "bfloat16, wide": ("bfloat16", "bfloat16", None),
    "bfloat16": ("bfloat16", "bfloat16", "bfloat16"),
    "mixed": ("float32", "bfloat16", None),
}
MICRO = 4
SCANNED = ", scanned"
LOOPS = {"gx": gx_step, "optax": optax_step}


def widened(tx):
    """``tx`` on gradients and parameters in float32, with state in float32."""

    def wide(tree):
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def update(grads, state, params):
        updates, state = tx.update(wide(grads), state, wide(params))
        narrow = jax.tree.map(lambda u, g: u.astype(g.dtype), updates, grads)
        return narrow, state

    return optax.GradientTransformation(lambda params: tx.init(wide(params)), update)


def chains(dtypes):
    """Ours and optax's, by name, for one entry of ``DTYPES``."""
    is_wide = dtypes.endswith("wide")
    wide = widened if is_wide else lambda tx: tx
    sums = {"accumulator_dtype": DTYPES[dtypes][2]}
    momentum = {"mu_dtype": "float32"} if is_wide else {}
    adagrad, novograd = (
        wide(optax.chain(OPTAX_CLIP, tx))
        for tx in (optax.adagrad(0.1), optax.novograd(0.1))
    )
    others = {
        "adamw": optax.adamw(0.1),
        "sgd": optax.sgd(0.1, momentum=0.9),
        "lion": optax.lion(0.1),
    }
    return {
        "clip + adagrad": (optax.chain(CLIP, gx.adagrad(0.1, **sums)), adagrad),
        "adagrad(global_clipnorm)": (gx.adagrad(0.1, **sums, **MOST), adagrad),
        "clip + novograd": (optax.chain(CLIP, gx.novograd(0.1, **momentum)), novograd),
        "novograd(global_clipnorm)": (gx.novograd(0.1, **momentum, **MOST), novograd),
        **{
            f"clip + optax.{name}": (
                wide(optax.chain(CLIP, tx)),
                wide(optax.chain(OPTAX_CLIP, tx)),
            )
            for name, tx in others.items()
        },
    }


def micro_batches():
    """Ours and optax's for micro-batches, by name."""
    inner = {
        "sgd": (optax.sgd(0.1),) * 2,
        "adam": (optax.adam(0.1),) * 2,
        "clip + adamw": tuple(
            optax.chain(clip, optax.adamw(0.1)) for clip in (CLIP, OPTAX_CLIP)
        ),
        "adam, finite": (optax.adam(0.1),) * 2,
    }
    found = {}
    for name, (ours, theirs) in inner.items():
        finite = name.endswith("finite")
        skip = {"should_skip_update_fn": optax.skip_not_finite} if finite else {}
        found[f"accumulate({name})"] = (
            gx.accumulate(ours, MICRO, skip_nonfinite=finite),
            optax.MultiSteps(theirs, MICRO, **skip).gradient_transformation(),
        )
    return found


def devices(target):
    """The chips of a topology, or this machine's first CPU."""
    if target == "cpu":
        return Mesh(np.array(jax.devices("cpu")[:1]), "chips")
    return mesh(target)


class Cells:
    """The figures of steps for one machine, one model and one choice of dtypes.

    Args:
      target: a topology, or ``cpu``.
      dtypes: a key of ``DTYPES``.
      model: one of ``TRAININGS``, or None for gradients as arguments.
      blocks: of GPT-2-small, whose gradients are arguments.
      hlo: a folder for the compiled programs.
    """

    def __init__(self, target, dtypes, model=None, blocks=2, hlo=None):
        self._named, self._target, self._hlo = f"{target} {dtypes} {model}", target, hlo
        self._dtypes, self._model = dtypes, model
        on = devices(target)
        self._training = None
        if model:
            self._training = training(model, DTYPES[dtypes][0])
            self._params = placed(self._training.params, on)
        else:
            self._params, self._grads = (
                placed(gpt2_short(jnp.dtype(dtype), blocks), on)
                for dtype in DTYPES[dtypes][:2]
            )
        self.n = size_on_a_chip(self._params)
        # Both loops make the same program of most chains. It is compiled once.
        self._known = {}

    def _lowered(self, tx, write, pushes):
        if not self._training:
            return lower_step(tx, self._params, write, self._grads)
        _, batch, loss_fn = self._training
        if pushes > 1:
            batch = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct((pushes, *x.shape), x.dtype), batch
            )
        options = {"write": write, "scanned": pushes > 1}
        return lower_training(tx, self._params, loss_fn, *batch, **options)

    def of(self, name, tx, loop, pushes=1):
        """All figures of a step, or of several pushes in a scan."""
        lowered = self._lowered(tx, LOOPS[loop], pushes)
        text = lowered.as_text()
        if text not in self._known:
            start = time.perf_counter()
            compiled = lowered.compile()
            seconds = time.perf_counter() - start
            hlo = compiled.as_text()
            if self._hlo:
                self._hlo.mkdir(parents=True, exist_ok=True)
                file = re.sub(r"\W+", "_", f"{self._named} {name} {loop} {pushes}")
                (self._hlo / f"{file}.hlo").write_text(hlo)
            if self._training:
                memory = compiled.memory_analysis().temp_size_in_bytes
                found = {"temp": memory / self.n}
                found |= moved(hlo, name, self.n * pushes)
            else:
                found = measured(compiled, hlo, self.n, self._target)
            self._known[text] = found | {"compile s": seconds}
        return self._known[text]

    def compared(self, names):
        """The name of each of these chains, and its figures by loop.

        Those of optax's chain are under "theirs".
        """
        for name, tx, theirs, pushes in steps(self._dtypes, self._model):
            if name in names:
                found = {"theirs": self.of(f"optax {name}", theirs, "optax", pushes)}
                found |= {loop: self.of(name, tx, loop, pushes) for loop in LOOPS}
                yield name, found


def moved(hlo, name, n):
    """What a push moves: if it acts, if it is only added, and the mean of ``MICRO``.

    Only steps on micro-batches add. A conditional of another step asks, for example,
    whether it is the first one: the branch that moves more counts.
    """
    acts = traffic(hlo)["hbm"] / n
    if "accumulate" not in name:
        return {"moved": acts}
    # The first conditional of such a step asks whether a push is finite.
    taken = (max, min) if "finite" in name else (min,)
    added = traffic(hlo, taken)["hbm"] / n
    mean = (acts + (MICRO - 1) * added) / MICRO
    return {"moved": mean, "acts": acts, "added": added}


def measured(compiled, hlo, n, target):
    """The figures of a compiled step on parameters of ``n`` bytes."""
    if target == "cpu":
        temporary = compiled.memory_analysis().temp_size_in_bytes
        moved = compiled.cost_analysis()["bytes accessed"]
        found = {"temp": temporary / n, "moved": moved / n}
    else:
        found = figures(compiled, n)
        found["moved"] = found.pop("own")
    found["collectives"] = sum(collectives(hlo).values())
    return found | {
        "kinds": ", ".join(f"{n} {kind}" for kind, n in collectives(hlo).items()),
        "fusions": count(hlo, "fusion"),
        "copies": hlo.count(" copy("),
    }


def kept(target, n):
    """What a compiler keeps beside arrays, in parameters of ``n`` bytes."""
    return 0 if target == "cpu" else 3e6 / n


def worse(ours, theirs, kept=0):
    """The names of the columns where ours is worse; ``kept`` is no temporary."""
    slack = {"temp": max(0.03, kept)}
    return [k for k in ours if ours[k] > 1.02 * theirs[k] + slack.get(k, 0)]


COMPARED = "temp", "moved", "hbm", "collectives"


def steps(dtypes, model):
    """The name of each chain, ours, optax's, and the number of pushes."""
    found = chains(dtypes) | (micro_batches() if model else {})
    for pushes in (1, MICRO) if model else (1,):
        scanned = SCANNED if pushes > 1 else ""
        for name, (ours, theirs) in found.items():
            yield f"{name}{scanned}", ours, theirs, pushes


def rows(target, dtypes, only="", everything=False, model=None, **options):
    """The lines of the table for one machine, one model and one choice of dtypes."""
    cells = Cells(target, dtypes, model, **options)
    names = {name for name, *_ in steps(dtypes, model) if only in name}
    for name, found in cells.compared(names):
        for loop in LOOPS:
            ours, its = found[loop], found["theirs"]
            columns = [k for k in COMPARED if k in ours]
            compared = [{k: x[k] for k in columns} for x in (ours, its)]
            more = [k for k in ours if k not in columns] if everything else []
            yield {
                "name": " ".join(
                    filter(None, (target, model, f"{dtypes}: {name}, {loop}"))
                ),
                **{k: f"{ours[k]:.2f} | {its[k]:.2f}" for k in columns},
                "worse": ", ".join(worse(*compared, kept(target, cells.n))),
                **{k: f"{shown(ours[k])} | {shown(its[k])}" for k in more},
            }


def shown(x):
    """A figure in the table."""
    return f"{x:.2f}" if isinstance(x, float) else x


# The figures of whole steps, as the page calls them.
HEADS = {"temp": "temporaries", "moved": "moved"}
# A line of a file of results: a chain on one machine, and its figures in three loops.
KEYS = "jax", "target", "model", "dtypes", "chain"
FIGURES = [(whose, k) for whose in (*LOOPS, "theirs") for k in HEADS]


def read(path):
    """The results in a file: by ``KEYS``, the figures by loop."""
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    found = {}
    for line in lines:
        whose = {loop: {} for loop, _ in FIGURES}
        for loop, k in FIGURES:
            whose[loop][k] = float(line[f"{loop} {k}"])
        found[tuple(line[key] for key in KEYS)] = whose
    return found


def add(path, target, model, dtypes, only=""):
    """Compiles the cells that the file of results lacks, and adds each to the file."""
    if not path.exists():
        path.write_text(",".join([*KEYS, *map(" ".join, FIGURES)]) + "\n")
    place, known = (jax.__version__, target, model, dtypes), read(path)
    names = {
        name
        for name, *_ in steps(dtypes, model)
        if only in name and (*place, name) not in known
    }
    for name, found in Cells(target, dtypes, model).compared(names):
        figures = (f"{found[loop][k]:.4f}" for loop, k in FIGURES)
        with path.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow([*place, name, *figures])


TITLES = {
    "cpu": "CPU",
    "v5e:2x2": "TPU v5e",
    "v6e:2x2": "TPU v6e",
    "v5p:2x2x1": "TPU v5p",
    "h100": "NVIDIA H100",
}
WRITTEN = {
    "gx": "`gx.apply_gradients`",
    "optax": "`optax.apply_updates`",
    "both": "both",
}
BEGIN, END = "<!-- results: begin -->\n", "<!-- results: end -->\n"


def worse_loops(key, found):
    """The figures that are worse than optax's, for each loop with any."""
    _, target, model, dtypes, _ = key
    n = size(training(model, DTYPES[dtypes][0]).params)
    its, *ours = ({k: found[x][k] for k in HEADS} for x in ("theirs", *LOOPS))
    compared = [worse(x, its, kept(target, n)) for x in ours]
    loops = dict(zip(LOOPS, compared, strict=True))
    return {loop: figures for loop, figures in loops.items() if figures}


def pair(found, figure, loop="gx"):
    """Ours and optax's, as a cell of the page has them."""
    return f"{found[loop][figure]:.2f} / {found['theirs'][figure]:.2f}"


def version(release):
    """A release, so that it can be compared."""
    return tuple(map(int, release.split(".")))


def machines(results):
    """Each target and release, in the order of ``TITLES``, the newest release first."""
    found = {key[:2] for key in results}
    newest_first = sorted(found, key=lambda key: version(key[0]), reverse=True)
    return sorted(newest_first, key=lambda key: list(TITLES).index(key[1]))


def title(machine):
    """The name of a target with a release of JAX."""
    release, target = machine
    return f"{TITLES[target]}, JAX {release}"


def summary(results):
    """How many cells of each machine are worse, as Markdown."""
    yield "| | cells | more temporaries | more is moved |"
    yield "|---|---|---|---|"
    for machine in machines(results):
        cells = [key for key in results if key[:2] == machine]
        loops = [x for key in cells for x in worse_loops(key, results[key]).values()]
        counts = (sum(k in columns for columns in loops) for k in HEADS)
        columns = title(machine), len(LOOPS) * len(cells), *counts
        yield f"| {' | '.join(map(str, columns))} |"


def worse_cells(results):
    """All cells that are worse, as Markdown."""
    yield "| | chain | loop | ours / optax's |"
    yield "|---|---|---|---|"
    lines = {}
    for key, found in results.items():
        loops = worse_loops(key, found)
        texts = [
            f"{key[2]}, {key[3]}: "
            + ", ".join(f"{HEADS[k]} {pair(found, k, loop)}" for k in loops[loop])
            for loop in loops
        ]
        if len(set(texts)) == 1 < len(loops):
            texts, loops = texts[:1], ["both"]
        for loop, text in zip(loops, texts, strict=True):
            lines.setdefault((key[:2], key[4], loop), []).append(text)
    for machine in machines(results):
        for (where, name, loop), texts in lines.items():
            if where == machine:
                columns = title(machine), f"`{name}`", WRITTEN[loop], "; ".join(texts)
                yield f"| {' | '.join(columns)} |"


def alike_all(results, keys, others):
    """Whether lines of results show what others show, to two hundredths of N."""
    return all(
        other in results
        and all(
            abs(results[key][loop][k] - results[other][loop][k]) <= 0.02
            for loop, k in FIGURES
        )
        for key, other in zip(keys, others, strict=True)
    )


def tables(results, machine):
    """All chains on one machine, as Markdown.

    Without a scanned chain that shows what it shows without the scan, and without the
    cells that show what they show with the newest release.
    """
    newest = next(x for x in machines(results) if x[1] == machine[1])
    columns = list(itertools.product(TRAININGS, ("float32", "bfloat16")))
    shown = {}
    for name, *_ in steps("float32", "dense"):
        keys = [(*machine, *column, name) for column in columns]
        keys = [key for key in keys if key in results]
        one_push = [(*key[:4], name.removesuffix(SCANNED)) for key in keys]
        later = [(*newest, *key[2:]) for key in keys]
        if one_push == keys or not alike_all(results, keys, one_push):
            shown[name] = {
                key[2:4]: results[key]
                for key, other in zip(keys, later, strict=True)
                if machine == newest or not alike_all(results, [key], [other])
            }
    for figure, head in HEADS.items():
        yield f"\n| {head} | {' | '.join(f'{m}, {d}' for m, d in columns)} |"
        yield "|---" * (1 + len(columns)) + "|"
        for name, cells in shown.items():
            texts = []
            for column in columns:
                found = cells.get(column)
                text = pair(found, figure) if found else ""
                key = (*machine, *column, name)
                is_worse = found and figure in worse_loops(key, found).get("gx", ())
                texts.append(f"**{text}**" if is_worse else text)
            if cells:
                yield f"| `{name}` | {' | '.join(texts)} |"


def page(results):
    """The results as Markdown."""
    yield from summary(results)
    yield "\n<details><summary>All cells that are worse</summary>\n"
    yield from worse_cells(results)
    yield "\n</details>"
    for machine in machines(results):
        yield f"\n<details><summary>{title(machine)}</summary>"
        yield from tables(results, machine)
        yield "\n</details>"


def write_page(path, results):
    """Puts the tables between the marks of a page."""
    text = path.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    tables = "\n".join(page(results))
    path.write_text(f"{before}{BEGIN}\n{tables}\n\n{END}{after}")


def main():
    """Prints the tables, and ends with code 1 if a cell is worse than optax's."""
    parser = arguments(__doc__)
    parser.add_argument("--targets", nargs="*", default=["cpu"])
    parser.add_argument("--models", nargs="*", default=TRAININGS, choices=TRAININGS)
    parser.add_argument("--gradients", action="store_true", help="as arguments")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES)
    parser.add_argument("--only", default="", help="chains with this in their name")
    parser.add_argument("--blocks", type=int, default=2, help="of GPT-2-small")
    parser.add_argument("--all", action="store_true", help="all figures")
    parser.add_argument("--hlo", type=pathlib.Path, help="write the programs here")
    parser.add_argument("--results", type=pathlib.Path, help="whole steps, kept here")
    parser.add_argument("--page", type=pathlib.Path, help="write their tables here")
    options = parser.parse_args()
    if options.results and options.gradients:
        parser.error("--results keeps whole steps: leave out --gradients")
    if options.page and not options.results:
        parser.error("--page shows results: say --results FILE")
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    whole = list(DTYPES) if options.gradients else ["float32", "bfloat16"]
    if options.results:
        for cell in itertools.product(
            options.targets, options.models, options.dtypes or whole
        ):
            add(options.results, *cell, options.only)
        if options.page:
            write_page(options.page, read(options.results))
        return
    table = [
        row
        for target in options.targets
        for model in ([None] if options.gradients else options.models)
        for dtypes in options.dtypes or whole
        for row in rows(
            *(target, dtypes, options.only, options.all, model),
            blocks=options.blocks,
            hlo=options.hlo,
        )
    ]
    report("the donated step, ours | optax's", table, options.json)
    sys.exit(any(row["worse"] for row in table))


if __name__ == "__main__":
    main()
