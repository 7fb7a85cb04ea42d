"""What the suite can catch: small faults, built into a copy of the library one by one.

``python -m tests.mutations _gates/gate.py`` changes one place of that module at a time:
``<`` becomes ``<=``, ``+`` becomes ``-``, a condition is always true or never, a call
gives its argument, a number grows by 1, a statement does nothing. For each fault
it runs the tests of a copy up to the first that fails, and says which one that was.
Those marked ``slow`` run only if no quick one has failed. Its exit code is 1 if a fault
has survived. Such a fault asks for a test, unless it changes nothing that a user can
see.

    python -m tests.mutations _gates/gate.py --list
    python -m tests.mutations _gates/gate.py --only 3 17 -n 2 --part quick
    python -m tests.mutations _gates _server/core.py --sample 60 --seed 1

The last one draws 60 of all faults of a folder and of a file, the same each time.

First all quick tests run without a fault, and it is recorded which lines each test
runs. That takes some minutes. For a fault those tests come first that run its line,
those of the cheapest file first, then the others of their files. They may use what an
earlier test has traced. A line may run only while modules are imported, as a constant
or a default does: then those come first that run any line of its module, and that of
the public names. If no test runs the line, all run: some start processes.
``--record FOLDER`` keeps the record, and reads it the next time if nothing in the
repository has changed.

    python -m tests.mutations _gates --sample 60 --seed 1 --part quick --sole
    python -m tests.mutations _gates --sample 60 --seed 1 --sole tests/late tests/trees

With ``--sole`` no run stops at the first failure, and no file runs that does not run
the line. For each fault it says all files whose tests notice, and at the end which
faults a file alone has noticed. If a file has noticed none alone, others find what its
tests find. It may name the tests to run.

Python 3.12 is needed: it can say which lines run.
"""

from __future__ import annotations

import argparse
import ast
import collections
import concurrent.futures
import contextlib
import hashlib
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
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tests import lines

REPOSITORY = pathlib.Path(__file__).parents[1]
PACKAGE = REPOSITORY / "gradxform"
PUBLIC = "tests/test_public_api.py"
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
    place: slice  # Of the file's bytes.
    lines: range  # Of the expression around the place: they run together.
    line: int
    before: str
    after: str

    @property
    def title(self) -> str:
        """One line, even if the place has several."""
        before, after = (" ".join(x.split()) for x in (self.before, self.after))
        return f"{self.file}:{self.line}: {before}  ->  {after}"

    def of(self, source: bytes) -> bytes:
        """The file with the fault."""
        before, after = source[: self.place.start], source[self.place.stop :]
        return before + self.after.encode() + after


def computed(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes that compute something, in the order of the source."""
    is_named = isinstance(node, ast.keyword | ast.If | ast.Assign | ast.AnnAssign)
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


def mutations(file: str, source: bytes) -> list[Mutation]:
    """The faults of a file, in the order of its lines; each changes the program."""
    starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]

    def bytes_of(node: ast.AST) -> slice:
        begin = starts[node.lineno - 1] + node.col_offset
        return slice(begin, starts[node.end_lineno - 1] + node.end_col_offset)

    found = []
    whole, around, seen = slice(0, 0), None, set()
    for node in computed(ast.parse(source)):
        for place, after in faults(node):
            part = bytes_of(place)
            if not whole.start <= part.start <= part.stop <= whole.stop:
                # Two faults that make the same program lie one inside of the other.
                whole, around, seen = part, place, set()
                seen.add(parsed(source[whole], around))
            text = source[whole.start : part.start] + after.encode()
            program = parsed(text + source[part.stop : whole.stop], around)
            if program not in seen:
                seen.add(program)
                lines = range(around.lineno, around.end_lineno + 1)
                before = source[part].decode()
                found.append(Mutation(file, part, lines, place.lineno, before, after))
    return sorted(found, key=lambda mutation: mutation.line)


def parsed(text: bytes, like: ast.stmt | ast.expr) -> str:
    """The program of a text, which stands where a statement or an expression stood."""
    is_expression = isinstance(like, ast.expr)  # It may have line breaks.
    return ast.dump(ast.parse(b"(%s)" % text if is_expression else text))


def of_files(names: list[str], sample: int | None, seed: int) -> list[Mutation]:
    """All faults of these files and folders, or a sample of all of them."""
    paths = [PACKAGE / name for name in names or ["."]]
    modules = [m for p in paths for m in (sorted(p.rglob("*.py")) or [p])]
    files = {str(m.relative_to(PACKAGE)): m.read_bytes() for m in modules}
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


def recorded(
    original: pathlib.Path, options: list[str], jobs: int, known: pathlib.Path | None
) -> dict[str, lines.Run]:
    """What each test runs; "" is their collection. The copy is not mutated.

    A folder of known records has one, or gets it.
    """
    digest = hashlib.sha256(repr([sys.version, options]).encode())
    for path in sorted(x for x in original.rglob("*") if x.suffix in (".py", ".md")):
        digest.update(path.read_bytes())
    record = known and known / digest.hexdigest()[:16]
    if record and record.exists():
        return lines.read(record)
    with tempfile.TemporaryDirectory(prefix="gradxform-") as new:
        command = [
            f"-n{jobs if jobs > 1 else 0}",
            "--dist=loadfile",
            "-p",
            "tests.lines",
        ]
        if fails := failures(original, *command, f"--lines={new}", *options):
            raise RuntimeError(f"without any mutation fails {', '.join(fails)}")
        if record:
            shutil.copytree(new, record)
        return lines.read(pathlib.Path(new))


def nearest(runs: dict[str, lines.Run], mutation: Mutation) -> list[str]:
    """The tests that run a fault's lines, those of the cheapest file first.

    A line that runs while tests are collected, such as a constant, may matter to any
    test that runs its module. A line that nobody was seen to run matters as much.
    """
    found = {test: run.lines.get(mutation.file, set()) for test, run in runs.items()}
    collected = found.pop("", set())
    exact = {x for x in found if not found[x].isdisjoint(mutation.lines)}
    tests = exact
    if not exact or not collected.isdisjoint(mutation.lines):
        # One test compares all public defaults, and runs none of them.
        tests = {x for x in found if found[x]}
        tests |= {x for x in found if lines.file_of(x) == PUBLIC or not tests}
    seconds: collections.Counter[str] = collections.Counter()
    for test in tests:
        seconds[lines.file_of(test)] += runs[test].seconds

    def order(test: str) -> tuple[bool, float, str]:
        return test not in exact, seconds[lines.file_of(test)], lines.file_of(test)

    # Tests of one file keep their order, and share what it sets up.
    return sorted((x for x in found if x in tests), key=order)


def patience(runs: dict[str, lines.Run], tests: Iterable[str]) -> float:
    """How many seconds a run of these tests may take: two minutes more than known."""
    return 120 + 5 * sum(runs[test].seconds for test in tests)


def pytest(folder: pathlib.Path, *options: str, limit: float = LIMIT) -> str | None:
    """Runs tests of a copy. Returns the name of the first that fails, or None."""
    return next(iter(failures(folder, "-x", *options, limit=limit)), None)


def failures(
    folder: pathlib.Path, *options: str, limit: float | None = None
) -> list[str]:
    """Runs tests of a copy. Returns the names of those that fail."""
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "--tb=line", "-rfE"]
    command += ["--continue-on-collection-errors", *options]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    try:
        process = subprocess.run(
            command, cwd=folder, env=env(folder), timeout=limit, check=False, **pipe
        )
    except subprocess.TimeoutExpired:
        return [f"none within {limit:.0f} seconds"]
    failed = re.findall(
        r"^(?:FAILED|ERROR) (\S+(?:::.*?)?)(?: - |$)", process.stdout, re.M
    )
    if process.returncode in (1, 2) and failed:  # 2 if some could not be collected.
        return failed
    if process.returncode in (0, 5):  # There may be no such tests.
        return []
    if process.returncode not in range(6):  # Those of pytest: a test has ended it.
        return [f"none, but the process ended with {process.returncode}"]
    # No test has failed: pytest was called wrongly.
    raise RuntimeError(f"{' '.join(options)}:\n{process.stdout}")


@contextlib.contextmanager
def mutated(mutation: Mutation, original: pathlib.Path) -> Iterator[pathlib.Path]:
    """A copy with the fault."""
    with tempfile.TemporaryDirectory(prefix="gradxform-") as temporary:
        # The copy keeps what Python has compiled, which goes by the times of the files.
        folder = shutil.copytree(original, pathlib.Path(temporary, "copy"))
        path = folder / "gradxform" / mutation.file
        path.write_bytes(mutation.of(path.read_bytes()))
        yield folder


def outcome(
    mutation: Mutation,
    original: pathlib.Path,
    markers: dict[str, str],
    runs: dict[str, lines.Run],
) -> tuple[str, str, float]:
    """The part that catches a mutation, or "none"; its first test to fail; seconds."""
    start = time.perf_counter()
    near = nearest(runs, mutation)
    files = list(dict.fromkeys(map(lines.file_of, near)))
    in_files = [test for test in runs if lines.file_of(test) in files]
    with mutated(mutation, original) as folder:
        for part, marker in markers.items():
            options = ["-m", marker]
            if part == "quick":  # No slow test has been timed.
                test = pytest(folder, *options, *near, limit=patience(runs, near))
                if test is None and len(in_files) > len(near):
                    limit = patience(runs, in_files)
                    test = pytest(folder, *options, *files, limit=limit)
            else:
                ignored = [f"--ignore={x}" for x in files]
                test = pytest(folder, *options, *files)
                test = test or pytest(folder, *options, *ignored)
            if test is not None:
                return part, test, time.perf_counter() - start
    return "none", "", time.perf_counter() - start


def print_files(
    chosen: dict[int, Mutation],
    original: pathlib.Path,
    options: list[str],
    runs: dict[str, lines.Run],
    pool: concurrent.futures.Executor,
) -> None:
    """Prints which files notice each fault, and which faults a file notices alone."""

    def noticed(mutation: Mutation) -> set[str]:
        files = set(map(lines.file_of, nearest(runs, mutation)))
        limit = patience(runs, (test for test in runs if lines.file_of(test) in files))
        with mutated(mutation, original) as folder:
            tests = failures(folder, *options, *sorted(files), limit=limit)
            return set(map(lines.file_of, tests))

    numbers: list[int] = []
    noticed_by: dict[str, list[int]] = {}
    alone: dict[str, list[int]] = {}
    results = pool.map(noticed, chosen.values())
    try:
        for number, files in zip(chosen, results, strict=True):
            title = f"{number:3}  {chosen[number].title}"
            print(title, *sorted(files), sep="\n     ", flush=True)
            numbers.append(number)
            for file in files:
                noticed_by.setdefault(file, []).append(number)
                alone.setdefault(file, []).extend([number] if len(files) == 1 else [])
    finally:  # Also after Ctrl-C.
        print("file, how many faults it notices, and those that it notices alone:")
        for file, noticed in sorted(noticed_by.items()):
            print(
                f"{file}  {len(noticed)}  {' '.join(map(str, alone[file])) or 'none'}"
            )
        missed = set(numbers).difference(*noticed_by.values())
        print(f"No file notices {len(missed)} of {len(numbers)}.")


def print_parts(
    chosen: dict[int, Mutation],
    original: pathlib.Path,
    markers: dict[str, str],
    runs: dict[str, lines.Run],
    pool: concurrent.futures.Executor,
) -> bool:
    """Prints which test notices each fault first. Whether one has survived."""

    def caught(mutation: Mutation) -> tuple[str, str, float]:
        return outcome(mutation, original, markers, runs)

    by_part: dict[str, list[str]] = {"quick": [], "slow": [], "none": []}
    results = pool.map(caught, chosen.values())
    try:
        for number, (part, test, seconds) in zip(chosen, results, strict=True):
            title = f"{number:3}  {chosen[number].title}"
            print(f"{title}\n     {part}, {seconds:.0f} s  {test}", flush=True)
            by_part[part].append(test)
    finally:  # Also after Ctrl-C.
        quick, slow, missed = map(len, by_part.values())
        print(f"The quick part has caught {quick} of {quick + slow + missed}", end="")
        print(f", the whole suite {quick + slow}." if len(markers) == 2 else ".")
    # A test that fails without a fault has caught nothing; the quick ones have passed.
    tests = sorted({test for test in by_part["slow"] if ".py" in test})
    if fails := tests and pytest(original, "-m", "slow", *tests):
        raise RuntimeError(f"without any mutation fails {fails}")
    return missed > 0


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
    parser.add_argument(
        "--record", type=pathlib.Path, metavar="FOLDER", help="for the lines that run"
    )
    args = parser.parse_args()
    chosen = dict(enumerate(of_files(args.files, args.sample, args.seed), 1))
    if args.only:
        chosen = {number: chosen[number] for number in args.only}
    if args.list:
        for number, mutation in chosen.items():
            print(f"{number:3}  {mutation.title}")
        return
    if sys.version_info < (3, 12):
        parser.error("Python 3.12 or newer is needed: it can say which lines run.")
    try:
        survived = run(chosen, args)
    except KeyboardInterrupt:
        sys.exit("interrupted")
    sys.exit(survived)


def run(chosen: dict[int, Mutation], args: argparse.Namespace) -> bool:
    """Builds in one fault after the other. Whether one has survived all tests."""
    markers = {"quick": "not slow"} | ({"slow": "slow"} if args.part == "all" else {})
    with contextlib.ExitStack() as stack:
        enter, folder = stack.enter_context, tempfile.TemporaryDirectory
        if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
            # Only what a mutation has changed is compiled again.
            os.environ["JAX_COMPILATION_CACHE_DIR"] = enter(folder())
        original = copied(pathlib.Path(enter(folder())).resolve())
        # All quick tests take minutes; the slow ones take an hour.
        marker = (
            markers["quick"] if args.sole is None else " or ".join(markers.values())
        )
        options = ["-m", marker, *(args.sole or [])]
        runs = recorded(original, options, args.n, args.record)
        pool = concurrent.futures.ThreadPoolExecutor(args.n)
        stack.callback(pool.shutdown, cancel_futures=True)  # After Ctrl-C, too.
        if args.sole is not None:
            print_files(chosen, original, options[:2], runs, pool)
            return False
        return print_parts(chosen, original, markers, runs, pool)


if __name__ == "__main__":
    main()
