"""Lists the benchmarks, or runs one: ``python -m benchmarks [program [options]]``."""

import ast
import pathlib
import pkgutil
import runpy
import sys


def programs():
    """The first line of each program's docstring, by name; a program has a main()."""
    found = {}
    for module in pkgutil.iter_modules([str(pathlib.Path(__file__).parent)]):
        path = pathlib.Path(__file__).with_name(f"{module.name}.py")
        tree = ast.parse(path.read_text())  # An import would load too much.
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if "main" in names and module.name != "__main__":
            found[module.name] = ast.get_docstring(tree).splitlines()[0]
    return found


def main():
    """Runs the program that the first argument names."""
    found = programs()
    name, *rest = sys.argv[1:] or ["--help"]
    if name in found:
        sys.argv[1:] = rest
        runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
        return
    lines = [f"  {program:10}{line}" for program, line in found.items()]
    lines = ["usage: python -m benchmarks PROGRAM [--help]", "", *lines]
    if name not in ("-h", "--help"):
        raise SystemExit("\n".join([f"no program {name!r}", "", *lines]))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
