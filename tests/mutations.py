"""What the suite can catch: small faults, built into a copy of the library one by one.

``python -m tests.mutations _gates/gate.py`` changes one place of that module at a time:
``<`` becomes ``<=``, ``+`` becomes ``-``, a condition is always true or never, a call
gives its argument, a number grows by 1, a statement does nothing. For each fault
it runs the tests of a copy up to the first that fails, and says which one that was. The
tests of the file's own subpackage come first, then those of every subpackage, then the
others. Those marked ``slow`` run only if no quick one has failed. Its exit code is 1 if
a fault has survived. Such a fault asks for a test, unless it changes nothing that a
user can see.

    python -m tests.mutations _gates/gate.py --list
    python -m tests.mutations _gates/gate.py --only 3 17 -n 2 --part quick
    python -m tests.mutations _gates _server/core.py --sample 60 --seed 1

The last one draws 60 of all faults of a folder and of a file, the same each time.

    python -m tests.mutations _gates --sample 60 --seed 1 --part quick --sole
    python -m tests.mutations _gates --sample 60 --seed 1 --sole tests/late tests/trees

With ``--sole`` no run stops at the first failure. For each fault it says all files
whose tests notice, and at the end which faults a file alone has noticed. If a file has
noticed none alone, others find what its tests find. It may name the tests to run.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import contextlib
import itertools
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import NamedTuple

REPOSITORY = pathlib.Path(__file__).parents[1]
PACKAGE = REPOSITORY / "gradxform"
OF_EVERY_SUBPACKAGE = [
    f"tests/test_{x}.py" for x in ("guards", "sharded", "compiled", "contract")
]
# Where the tests of a subpackage are, unless a folder has its name.
TESTS = {"_slices": "draw", "_gates": "late", "_numbers": "trees", "_rows": "training"}
LIMIT = 3600  # Seconds for one run of pytest; a run that hangs has caught the fault.

PAIRS = (
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),
    (ast.Add, ast.Sub),
    (ast.Mult, ast.Div),
    (ast.And, ast.Or),
    (ast.BitAnd, ast.BitOr),
)
OTHER = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}
# Nothing is computed there, or a message is written.
SKIPPED = ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom
NO_FAULT = re.compile(
    r"strict=True|if TYPE_CHECKING|\w+: TypeAlias|\w+ = TypeVar|__version__"
)
NOT_COMPUTED = {"annotation", "returns", "decorator_list", "type_params"}


class Mutation(NamedTuple):
    """One fault: a place of a file in gradxform/, and what stands there instead."""

    file: str
    line: int
    before: str
    after: str
    source: str  # Of the whole file, with the fault.

    @property
    def title(self) -> str:
        """One line, even if the place has several."""
        before, after = (" ".join(x.split()) for x in (self.before, self.after))
        return f"{self.file}:{self.line}: {before}  ->  {after}"


def computed(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes that compute something, in the order of the source."""
    is_named = isinstance(node, ast.stmt | ast.keyword)
    if isinstance(node, SKIPPED) or (is_named and NO_FAULT.match(ast.unparse(node))):
        return
    yield node
    for field, value in ast.iter_fields(node):
        if field not in NOT_COMPUTED:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from computed(child)


def faults(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yields nodes, and what may stand there by mistake."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in OTHER:
            yield (
                node,
                ast.unparse(
                    ast.Compare(node.left, [OTHER[type(op)]()], node.comparators)
                ),
            )
        case ast.BinOp(left, op, right) if type(op) in OTHER:
            yield node, f"({ast.unparse(ast.BinOp(left, OTHER[type(op)](), right))})"
        case ast.BoolOp(op, values):
            yield node, f"({ast.unparse(ast.BoolOp(OTHER[type(op)](), values))})"
        case ast.UnaryOp(_, operand):
            yield node, f"({ast.unparse(operand)})"
        case ast.Constant(bool() as value):
            yield node, str(not value)
        case ast.Constant(int() | float() as value):
            yield node, str(value + 1)
        case ast.Call(args=[ast.Constant(str()) | ast.JoinedStr(), value, *_]):
            yield node, f"({ast.unparse(value)})"  # A check, after a name for errors.
        case ast.Call(args=[value, *_]) if not isinstance(value, ast.Starred):
            yield node, f"({ast.unparse(value)})"
        case ast.Call(ast.Attribute(value), args=[]):
            yield node, f"({ast.unparse(value)})"
        case ast.Expr(ast.Call()) | ast.AugAssign():
            yield node, "pass"
        case ast.Assign([ast.Name(name)], value):
            if any(isinstance(x, ast.Name) and x.id == name for x in ast.walk(value)):
                yield node, "pass"  # It keeps its value.
    if isinstance(node, ast.If | ast.IfExp):
        yield node.test, "True"
        yield node.test, "False"


def mutations(file: str, source: str) -> list[Mutation]:
    """The faults of a file, in the order of its lines; each changes the program."""
    lines = source.encode().splitlines(keepends=True)
    starts = [sum(map(len, lines[:n])) for n in range(len(lines))]
    found = {}
    for node in computed(ast.parse(source)):
        for place, after in faults(node):
            begin = starts[place.lineno - 1] + place.col_offset
            end = starts[place.end_lineno - 1] + place.end_col_offset
            text = source.encode()
            before, mutated = (
                text[begin:end],
                text[:begin] + after.encode() + text[end:],
            )
            new = Mutation(file, place.lineno, before.decode(), after, mutated.decode())
            found.setdefault(ast.dump(ast.parse(new.source)), new)
    found.pop(ast.dump(ast.parse(source)), None)
    return sorted(found.values(), key=lambda mutation: mutation.line)


def of_files(names: list[str], sample: int | None, seed: int) -> list[Mutation]:
    """All faults of these files and folders, or a sample of all of them."""
    paths = [PACKAGE / name for name in names or ["."]]
    modules = [m for p in paths for m in (sorted(p.rglob("*.py")) or [p])]
    files = {str(m.relative_to(PACKAGE)): m.read_text() for m in modules}
    found = [x for file, source in files.items() for x in mutations(file, source)]
    if sample is None:
        return found
    kept = random.Random(seed).sample(range(len(found)), min(sample, len(found)))
    return [found[i] for i in sorted(kept)]


def copied(folder: pathlib.Path) -> pathlib.Path:
    """Copies the tracked files of the repository; the tests import no others."""
    listed = ["git", "ls-files", "-z"]
    names = subprocess.check_output(listed, cwd=REPOSITORY, text=True).split("\0")
    for name in filter(None, names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, folder / name)
    command = [sys.executable, "-c", "import gradxform; print(gradxform.__file__)"]
    path = subprocess.check_output(command, cwd=folder, env=env(folder), text=True)
    if pathlib.Path(path.strip()) != folder / "gradxform/__init__.py":
        raise RuntimeError(f"the tests would import {path.strip()}, and not the copy.")
    pytest(folder, "--collect-only")
    return folder


def env(folder: pathlib.Path) -> dict[str, str]:
    """The environment for the tests of a copy."""
    return {**os.environ, "PYTHONPATH": str(folder)}


def nearest_first(folder: pathlib.Path, file: str) -> list[list[str]]:
    """Tests of the file's subpackage, then those of every one, then all others."""

    def found(pattern: str) -> list[str]:
        paths = sorted(folder.glob(pattern))
        return [str(p.relative_to(folder)) for p in paths]

    subpackage, _, module = file.removesuffix(".py").rpartition("/")
    name = f"test_{module.strip('_')}.py"
    tests = TESTS.get(subpackage, subpackage.strip("_"))
    own = found(f"tests/{tests}/test_*.py" if subpackage else f"tests/{name}")
    own.sort(key=lambda path: not path.endswith(name))
    own.append(f"gradxform/{file}")  # Its doctests.
    rest = [*found("tests/*/test_*.py"), *found("tests/test_*.py"), "gradxform"]
    rest += ["README.md", *found("docs/*.md"), *found("docs/*/*.md")]
    rest = [path for path in rest if path not in [*own, *OF_EVERY_SUBPACKAGE]]
    return [own, OF_EVERY_SUBPACKAGE, rest]


def pytest(folder: pathlib.Path, *options: str) -> str | None:
    """Runs tests of a copy. Returns the name of the first that fails, or None."""
    return next(iter(failures(folder, "-x", *options)), None)


def failures(folder: pathlib.Path, *options: str) -> list[str]:
    """Runs tests of a copy. Returns the names of those that fail."""
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "--tb=line", "-rfE"]
    command += ["--continue-on-collection-errors", *options]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    try:
        process = subprocess.run(
            command, cwd=folder, env=env(folder), timeout=LIMIT, check=False, **pipe
        )
    except subprocess.TimeoutExpired:
        return [f"none within {LIMIT} seconds"]
    failed = re.findall(
        r"^(?:FAILED|ERROR) (\S+(?:::.*?)?)(?: - |$)", process.stdout, re.M
    )
    if process.returncode in (1, 2) and failed:  # 2 if some could not be collected.
        return failed
    if process.returncode in (0, 5):  # There may be no such tests.
        return []
    # No test has failed: pytest was called wrongly.
    raise RuntimeError(f"{' '.join(options)}:\n{process.stdout}")


@contextlib.contextmanager
def mutated(mutation: Mutation, original: pathlib.Path) -> Iterator[pathlib.Path]:
    """A copy with the fault."""
    with tempfile.TemporaryDirectory(prefix="gradxform-") as temporary:
        # The copy keeps what Python has compiled, which goes by the times of the files.
        folder = shutil.copytree(original, pathlib.Path(temporary, "copy"))
        (folder / "gradxform" / mutation.file).write_text(mutation.source)
        yield folder


def outcome(
    mutation: Mutation, original: pathlib.Path, markers: dict[str, str]
) -> tuple[str, str, float]:
    """The part that catches a mutation, or "none"; its first test to fail; seconds."""
    start = time.perf_counter()
    with mutated(mutation, original) as folder:
        for part, marker in markers.items():
            for tests in nearest_first(folder, mutation.file):
                test = pytest(folder, "-m", marker, *tests)
                if test is not None:
                    return part, test, time.perf_counter() - start
    return "none", "", time.perf_counter() - start


def print_files(
    chosen: dict[int, Mutation],
    original: pathlib.Path,
    options: list[str],
    pool: concurrent.futures.Executor,
) -> None:
    """Prints which files notice each fault, and which faults a file notices alone."""

    def noticed(mutation: Mutation) -> set[str]:
        with mutated(mutation, original) as folder:
            return {test.split("::")[0] for test in failures(folder, *options)}

    if fails := failures(original, *options):
        raise RuntimeError(f"without any mutation fails {', '.join(fails)}")
    noticed_by: dict[str, list[int]] = {}
    alone: dict[str, list[int]] = {}
    for number, files in zip(chosen, pool.map(noticed, chosen.values()), strict=True):
        print(f"{number:3}  {chosen[number].title}", *sorted(files), sep="\n     ")
        for file in files:
            noticed_by.setdefault(file, []).append(number)
            alone.setdefault(file, []).extend([number] if len(files) == 1 else [])
    print("file, how many of the faults it notices, and those that it notices alone:")
    for file, numbers in sorted(noticed_by.items()):
        print(f"{file}  {len(numbers)}  {' '.join(map(str, alone[file])) or 'none'}")
    missed = len(chosen) - len(set(itertools.chain(*noticed_by.values())))
    print(f"No file notices {missed} of {len(chosen)}.")


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="or folders, in gradxform/")
    parser.add_argument("--sample", type=int, metavar="NUMBER", help="of all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--only", nargs="+", type=int, metavar="NUMBER")
    parser.add_argument("--part", choices=("quick", "all"), default="all")
    parser.add_argument("-n", type=int, default=1, metavar="JOBS")
    parser.add_argument(
        "--sole", nargs="*", metavar="TESTS", help="prints the files that notice"
    )
    parser.add_argument("--list", action="store_true", help="prints the faults alone")
    args = parser.parse_args()
    chosen = dict(enumerate(of_files(args.files, args.sample, args.seed), 1))
    if args.only:
        chosen = {number: chosen[number] for number in args.only}
    if args.list:
        for number, mutation in chosen.items():
            print(f"{number:3}  {mutation.title}")
        return
    markers = {"quick": "not slow"} | ({"slow": "slow"} if args.part == "all" else {})
    with contextlib.ExitStack() as stack:
        enter, folder = stack.enter_context, tempfile.TemporaryDirectory
        if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
            # Only what a mutation has changed is compiled again.
            os.environ["JAX_COMPILATION_CACHE_DIR"] = enter(folder())
        original = copied(pathlib.Path(enter(folder())).resolve())
        pool = enter(concurrent.futures.ThreadPoolExecutor(args.n))
        if args.sole is not None:
            options = ["-m", " or ".join(markers.values()), *args.sole]
            print_files(chosen, original, options, pool)
            return
        outcomes = pool.map(lambda m: outcome(m, original, markers), chosen.values())
        by_part: dict[str, list[str]] = {"quick": [], "slow": [], "none": []}
        for number, (part, test, seconds) in zip(chosen, outcomes, strict=True):
            title = chosen[number].title
            print(
                f"{number:3}  {title}\n     {part}, {seconds:.0f} s  {test}", flush=True
            )
            by_part[part].append(test)
        # A test that fails without a fault has caught nothing.
        caught = {test for test in by_part["quick"] + by_part["slow"] if ".py" in test}
        fails = pytest(original, *sorted(caught)) if caught else None
        if fails:
            raise RuntimeError(f"without any mutation fails {fails}")
    quick, slow, missed = map(len, by_part.values())
    print(f"The quick part has caught {quick} of {len(chosen)}", end="")
    print(f", the whole suite {quick + slow}." if len(markers) == 2 else ".")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
