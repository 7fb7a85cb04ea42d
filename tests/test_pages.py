"""A reader runs the blocks of a page as they stand, from the first one to the last.

All blocks of a page share one namespace, as in one interpreter. The README and the
start page are typed line by line, as into Python's prompt. Pages whose blocks are all
doctests are not here: ``pytest`` runs them, a page in one namespace.
"""

import code
import doctest
import pathlib
import re

import pytest

from tests.conftest import promotion

ROOT = pathlib.Path(__file__).parents[1]
FENCE = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
# Blocks that only TensorFlow 1 runs, on Python 3.7; test_frameworks.py has its results.
# The last one needs Ray's processes; test_keras_fit.py runs it.
LEFT_OUT = (
    "opt = tf.train.AdagradOptimizer(0.1)\n\n",
    "global_step = tf.train.get_or_create_global_step()",
    "with engines.ray(",
)


def blocks(page):
    """The blocks of a page, and those of them that are left out."""
    found = FENCE.findall((ROOT / page).read_text())
    left = [block for block in found if any(line in block for line in LEFT_OUT)]
    return [block for block in found if block not in left], left


class Prompt(code.InteractiveConsole):
    """Python's prompt. An error ends it."""

    def showtraceback(self):
        raise  # noqa: PLE0704 (It is called where an exception is handled.)

    def showsyntaxerror(self, *_, **__):
        raise  # noqa: PLE0704


def type_in(block, names):
    """Types a block, and Enter behind it."""
    prompt = Prompt(names)
    for line in block.splitlines():
        waits = prompt.push(line)
    assert not waits or not prompt.push("")


def paste(page):
    """Types all blocks of a page into one prompt."""
    found, left = blocks(page)
    assert found
    assert not left
    names = {"__name__": "__main__"}
    with promotion():
        for block in found:
            type_in(block, names)


TYPED = pytest.mark.parametrize("page", ["README.md", "docs/start.md"])


@pytest.mark.slow
@pytest.mark.every
@TYPED
def test_a_page_can_be_pasted_into_a_prompt(page):
    paste(page)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ impl:DeprecationWarning")  # Keras's.
@pytest.mark.parametrize(
    ("page", "left_out"),
    [
        ("docs/sparse.md", 0),
        ("docs/frameworks.md", 0),
        ("docs/keras.md", 1),
        ("docs/coming_from/keras.md", 0),
        ("docs/coming_from/novograd.md", 0),
        ("docs/coming_from/tensorflow.md", 2),
    ],
)
def test_the_blocks_of_a_page_run_in_their_order(page, left_out, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")  # The blocks set it for good.
    found, left = blocks(page)
    assert len(left) == left_out
    names = {"__name__": "__main__"}
    runner, parser = doctest.DocTestRunner(), doctest.DocTestParser()
    with promotion():
        for block in found:
            if block.startswith(">>> "):
                test = parser.get_doctest(block, {}, page, page, 0)
                test.globs = names
                assert runner.run(test, clear_globs=False).failed == 0
            else:
                exec(block, names)
