"""The pages of the site: nothing public is missing, nothing is far, no link is dead.

These tests read the sources alone. Sphinx finds references and pages that lead nowhere:
`.ci/site` runs it with its warnings as errors, and looks through the built pages.
"""

import json
import pathlib
import re
import tomllib

import pytest

from tests import site_search

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
    *("frameworks.md", "tensorflow.md", "novograd.md", "keras.md"),
}


def from_root(path):
    """The name of a file in the repository."""
    return str(path.relative_to(ROOT))


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


@pytest.mark.parametrize("path", TEXTS, ids=from_root)
def test_every_link_leads_somewhere(path):
    for there, anchor in links(path):
        assert there.exists(), there
        assert not anchor or anchor in anchors(there), (there, anchor)


@pytest.mark.parametrize("path", [*BESIDE, *PAGES], ids=from_root)
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


def test_a_word_for_the_search_leads_to_one_page():
    said = re.compile(r"^<!-- search: (.*) -->$", re.M)
    texts = {path: " , ".join(said.findall(path.read_text())) for path in PAGES}
    words = [word.strip() for text in texts.values() for word in text.split(",")]
    words = [word for word in words if word]
    assert len(words) == len({*words})
    assert all(word == word.lower() for word in words)  # As Sphinx compares them.
    pages = {str(path.relative_to(SITE).with_suffix("")) for path in PAGES}
    assert {*site_search.QUESTIONS.values()} <= pages


SITE_OF = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
DIRECTIVES = [
    path for path in PAGES if re.search(r"\{(eval-rst|include)\}", path.read_text())
]


@pytest.mark.parametrize("path", [*DIRECTIVES, SITE / "api/index.md"], ids=from_root)
def test_a_file_of_directives_says_on_github_where_to_read_it(path):
    first = path.read_text().splitlines()[0]
    page = path.relative_to(SITE).with_suffix(".html")
    assert first.startswith("> On GitHub")
    assert f"]({SITE_OF['Documentation']}{page})" in first


PICTURED = [
    ROOT / "README.md",
    *(SITE / f"{name}.md" for name in ("costs", "late", "larger_model", "evaluator")),
]


@pytest.mark.parametrize("path", PICTURED, ids=from_root)
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
    assert re.match(rf'"gradxform\[notebooks(,\w+)*\] @ git\+{address}"', line)
