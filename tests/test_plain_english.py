"""Sentences that have to be read twice: the forms of them that a program can find.

The rule is in docs/design.md. A hit is a sentence to say anew, not a word to replace:
"tables of which a batch reads a few rows" is "large tables, and batches that read a few
rows". "No more" is "no longer", unless it is a number.
"""

import json
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
LEFT_OUT = {
    pathlib.Path(__file__).resolve(),  # It has such sentences as examples.
    # The golden JSON file has its sentences.
    ROOT / "tests/golden/make_tf1_accumulators.py",
}
TEXTS = sorted(
    path
    for pattern in (
        *("*.md", "docs/*.md", "docs/*/*.md", "benchmarks/*.md"),
        *("gradxform/**/*.py", "benchmarks/*.py", "notebooks/*.ipynb"),
        *("tests/**/*.md", "tests/**/*.py"),
    )
    for path in ROOT.glob(pattern)
    if "_build" not in path.parts and path not in LEFT_OUT
)
# Where a sentence begins: after another one, in a docstring, in a comment behind code.
BEGIN = r'(?:(?<=[.:;] )|(?<=""")|(?<=[^#] # ))'
TWISTED = re.compile(
    r'(?<!")\b(?:(?<!each )(?<!some )(?<!none )of which|of what)\b'
    r"|\b(?:is|are|was|were|be|it|can|will|now) no more\b(?! than)"
    r"|\bno more (?:\w+ed|reads|needs|knows|waits)\b"
    # "Should", "make sure", "otherwise", and a noun with its verb.
    r"|\bshall\b|\bsee(?:s|n)? to it\b"
    rf"|{BEGIN}(?-i:Else\b|Who\b[^.?!]*\.)"
    # A clause as a subject, and words that say less than they seem to.
    r"|(?-i:(?<=[^\d#][.;] )(?:What|Whatever|Which)\b[^.?!:]*\.(?!\w))"
    r"|(?-i:(?<=[.;] )(?:Nor\b|Of (?:a|an|the|these|those) \w+ that\b))"
    r"|\b(?:is|are|was|were|be|comes?) in time\b|\b(?:do|does|did) as well\b"
    r"|\bother things than\b|\b(?:has|have|had) got\b"
    # A test whose name has no plain subject.
    r"|\bdef test_(?:who|what|that|those|where)(?:ever)?_",
    re.IGNORECASE,
)
# Between the words of a sentence there may be an end of a line, in a comment too, and
# the seam of two pieces of a message.
SEAM = re.compile(r'\s*"\s*\n\s*f?"|\s*\n\s*(?:# )?|\s+')


def read(path):
    """The text of a file; in a notebook, of its cells of text."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        return "\n\n".join(
            "".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"
        )
    return text


def twisted(text):
    """Each such form, with the words around it."""
    flat = SEAM.sub(" ", text)
    return [
        flat[max(hit.start() - 40, 0) : hit.end() + 40]
        for hit in TWISTED.finditer(flat)
    ]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_sentence_is_twisted(path):
    assert twisted(read(path)) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Tables of which a batch reads a few rows.", True),
        ("The sum of\n    # what was pushed.", True),
        ('"It is no "\n    f"more read."', True),
        ('"""Who pulls gets a\n    copy."""', True),
        ("x = 1  # Else nobody\n    # would wait.", True),
        ("def test_what_is_late_reaches_nothing():", True),
        ("def test_a_late_push_is_what_it_was():", False),
        ("The server sees to it that nothing shall be lost.", True),
        ("## Who waits\n\nWho waits? The server, or else a worker.", False),
        ("It takes no more pushes, and no more than one pass.", False),
        ("Two kernels, each of which reads what it needs.", False),
        ("It has two branches. What these produce\n    is left open.", True),
        ("Of the rest. Which part belongs to a table is found by its `init`.", True),
        ("## 4. What it costs\n\nIt costs a pass. What does it cost? A pass.", False),
        ("The sum. Of a leaf that has none it holds zeros.", True),
        ("A push that is in time. A chain does as well.", True),
        ("In that time a chain does well, and other things also.", False),
        ("``mask`` holds other things than bools.", True),
        ("The answer that this push has got before.", True),
    ],
)
def test_the_forms_are_found(text, found):
    assert bool(twisted(text)) == found
