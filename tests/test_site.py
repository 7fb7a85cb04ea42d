"""The pages of the site: nothing public is missing, nothing is far, no link is dead.

These tests read the sources alone. Sphinx finds references and pages that lead nowhere:
`.ci/site` runs it with its warnings as errors, and looks through the built pages.
"""

import collections
import json
import pathlib
import re
import tomllib

import pytest

from tests import built_site

ROOT = pathlib.Path(__file__).resolve().parents[1]
SITE = ROOT / "docs"
PAGES = sorted(
    path
    for path in SITE.rglob("*.md")
    if path.relative_to(SITE).parts[0] not in ("_build", "notebooks")
)
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
BESIDE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/NOTES.md"]
TEXTS = [*BESIDE, *PAGES, *NOTEBOOKS]

FENCE = re.compile(r"^```(.*)\n((?:.*\n)*?)```$", re.M)
LINK = re.compile(r"\]\(([^)\s]+)\)")
PICTURE = re.compile(r'<picture>.*?srcset="(.*?)".*?alt="(.+?)" src="(.*?)"', re.S)
# Pages with blocks of code that are no doctests: test_pages.py runs them.
RUN_ELSEWHERE = {
    *("README.md", "start.md", "sparse.md"),
    *("frameworks.md", "tensorflow.md", "novograd.md"),
}


def prose(path):
    """The text of a page, without its code."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join(
            "".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"
        )
    return FENCE.sub("", text)


def parts(path):
    """The file of a page, and those that it includes."""
    names = re.findall(r"^```\{include\} (.*)$", path.read_text(), re.M)
    return [path, *((path.parent / name).resolve() for name in names)]


def anchors(path):
    """What a link can point at in a page: its headings, in GitHub's spelling."""
    text = "\n".join(map(prose, parts(path)))
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def links(path):
    """The files of this repository that a page links to, with their anchors."""
    for link in LINK.findall(re.sub("`[^`]*`", "", prose(path))):
        if not re.match(r"\w+:", link):
            name, _, anchor = link.partition("#")
            yield (path.parent / name).resolve() if name else path, anchor


def clicks():
    """How many clicks each page is from the start page."""
    far, waiting = {SITE / "index.md": 0}, collections.deque([SITE / "index.md"])
    while waiting:
        page = waiting.popleft()
        listed = [
            (page.parent / f"{name}.md").resolve()
            for head, body in FENCE.findall(page.read_text())
            if head == "{toctree}"
            for name in re.findall(r"^[\w/]+$", body, re.M)
        ]
        linked = [target for part in parts(page) for target, _ in links(part)]
        for there in linked + listed:
            if there not in far and there.suffix == ".md" and there.exists():
                far[there] = far[page] + 1
                waiting.append(there)
    return far


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(path):
    for there, anchor in links(path):
        assert there.exists(), there
        assert not anchor or anchor in anchors(there), (there, anchor)


@pytest.mark.parametrize(
    ("page", "what"),
    [
        ("start.md", "gx.minimize(loss_fn, tx)"),
        ("frameworks.md", "nnx.Optimizer(model, tx"),
        ("coming_from/keras.md", '`get_slot(var, "accumulator")`'),
        ("api/late.md", ":: drop_stale"),
        ("sharding.md", "NamedSharding"),
        ("design.md", "## Add a transformation"),
    ],
)
def test_it_is_two_clicks_away_at_most(page, what):
    assert what in (SITE / page).read_text()
    assert clicks()[SITE / page] <= 2


def test_no_page_is_out_of_reach():
    assert clicks().keys() >= {*PAGES}


@pytest.mark.parametrize(
    "path", [*BESIDE, *PAGES], ids=lambda path: str(path.relative_to(ROOT))
)
def test_every_block_of_code_is_run(path):
    scripts = [*(ROOT / ".ci").iterdir(), *(ROOT / ".github/workflows").iterdir()]
    lines = {
        line.strip().removeprefix("- run: ")
        for script in scripts
        for line in script.read_text().splitlines()
    }
    for language, code in FENCE.findall(path.read_text()):
        if language == "python":
            assert code.startswith(">>> ") or path.name in RUN_ELSEWHERE
        elif language == "sh" and path.name == "README.md":  # .ci/readme reads these.
            assert re.fullmatch(r"python -m pip install .*\n", code)
        elif language == "sh":
            assert {*code.splitlines()} <= lines
        elif language:
            assert language.startswith("{")


def test_the_readme_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 200


@pytest.mark.parametrize("path", [ROOT / "README.md", SITE / "costs.md"], ids=str)
def test_every_picture_is_there_for_light_and_dark_pages(path):
    text = path.read_text()
    pictures = PICTURE.findall(text)
    assert pictures
    assert len(pictures) == text.count("<picture>")
    for dark, _, light in pictures:
        assert dark == light.replace("-light.svg", "-dark.svg") != light
        assert (path.parent / dark).exists()
        assert (path.parent / light).exists()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_first_cell_installs_from_the_repository(path):
    """One line makes a notebook run where nothing is installed, as on Colab."""
    cells = json.loads(path.read_text())["cells"]
    code = "".join(next(c["source"] for c in cells if c["cell_type"] == "code"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (line,) = re.findall(r"^ *%pip install -q (.*)$", code, re.M)
    address = project["urls"]["Repository"]
    assert re.match(rf'"gradxform\[demo(,\w+)*\] @ git\+{address}"', line)


@pytest.mark.every
@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            '<p id="here"><a href="#here">a</a> <a href="https://x.y/z#a">b</a></p>',
            None,
        ),
        ('<a href="other.html#there">a</a><img src="pictures/a%20b.png">', None),
        ('<a href="06_local_steps.ipynb">a</a>', "no such file: 06_local_steps.ipynb"),
        ('<a href="other.html#here">a</a>', "no such place: other.html#here"),
        (
            "<p>| a | b |\n|:\u2013|\u2013:|\n| 1 | 2 |</p>",
            "left as text: |:\u2013|\u2013:|",
        ),
        ("<p>| a | b |\n| --- | --- |\n</p>", "left as text: | --- | --- |"),
        ("<pre>| a | b |\n| --- | --- |</pre> <p>a | b |</p>", None),
    ],
)
def test_a_fault_of_a_built_page_is_found(text, fault, tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/a b.png").touch()
    (tmp_path / "other.html").write_text('<h1 id="there">A page</h1>')
    (tmp_path / "page.html").write_text(text)
    expected = [f"page.html: {fault}"] if fault else []
    found = [x.replace("a table is ", "") for x in built_site.faults(tmp_path)]
    assert found == expected


def test_every_notebook_has_an_answer_and_a_time():
    page = (SITE / "notebooks.md").read_text()
    parts = re.findall(r"^## \[.+\]\((.*)\)\n\n((?:.+\n)+)", page, re.M)
    assert [(SITE / name).resolve() for name, _ in parts] == NOTEBOOKS
    for _, text in parts:
        question, answer = re.fullmatch(r"\*\*(.+)\*\*(.+)\n", text, re.S).groups()
        assert question.endswith("?")
        assert re.search(r"\b[\d.]+\sminutes?\.$", answer)
    listed = re.findall(r"^notebooks/(\w+)$", page, re.M)
    assert listed == [path.stem for path in NOTEBOOKS]
