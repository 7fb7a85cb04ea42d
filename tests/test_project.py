"""A fact about the project stands in one file, and the others agree with it."""

import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest
import yaml

import gradxform as gx

ROOT = pathlib.Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
ADDRESS = PROJECT["urls"]["Repository"]
PYTHONS = re.findall(r":: (3\.\d+)", str(PROJECT["classifiers"]))
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TEMPLATES = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
SCRIPTS = {f".ci/{p.name}" for p in (ROOT / ".ci").glob("*") if os.access(p, os.X_OK)}

if not (ROOT / ".git").exists():
    pytest.skip("this is no checkout", allow_module_level=True)


def read(name):
    return yaml.safe_load((ROOT / name).read_text())


def read_text(name):
    return (ROOT / name).read_text()


def texts():
    """Every text of the checkout that git keeps, by its path."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        path = ROOT / name
        if path.is_file() and path.suffix != ".png":
            yield name, path.read_text(encoding="utf-8")


def jobs():
    return [job for path in WORKFLOWS for job in read(path)["jobs"].values()]


def commands():
    """Each line that a workflow runs."""
    steps = [step for job in jobs() for step in job.get("steps", ())]
    return [line for step in steps for line in step.get("run", "").splitlines()]


@pytest.mark.slow
def test_one_file_defines_the_address_and_all_others_repeat_it():
    """The address may be on any forge, as pip and git take it."""
    address = re.compile(r"[\w.-]+\.(?:com|org|io|dev)[:/][\w.-]+/gradxform(?![\w-])")
    found = [
        (name, link)
        for name, text in texts()
        for line in text.splitlines()
        if "/gradxform" in line  # The pattern is slow on long lines without it.
        for link in address.findall(line)
    ]
    for name in ("pyproject.toml", "CITATION.cff", "SECURITY.md"):
        assert (name, ADDRESS.removeprefix("https://")) in found
    wrong = {(name, link) for name, link in found if link not in ADDRESS}
    assert not wrong, wrong
    site = re.compile(r"https://[\w.-]+\.github\.io/gradxform/")
    addresses = {link for _, text in texts() for link in site.findall(text)}
    assert addresses == {PROJECT["urls"]["Documentation"]}


def test_a_person_turns_the_publishing_of_the_site_on():
    job = read(".github/workflows/site.yml")["jobs"]["publish"]
    (name, value) = re.fullmatch(r"vars\.(\w+) == '(\w+)'", job["if"]).groups()
    assert f"variable `{name}` with the value `{value}`" in " ".join(
        read_text("CONTRIBUTING.md").split()
    )


def test_pre_commit_has_the_versions_of_the_project():
    extras = PROJECT["optional-dependencies"]
    said = {*PROJECT["dependencies"], *(line for e in extras.values() for line in e)}
    (hooks,) = [repo["hooks"] for repo in read(".pre-commit-config.yaml")["repos"]]
    assert {hook["entry"].split()[0] for hook in hooks} == {"ruff", "mypy"}
    for hook in hooks:
        tool, *others = hook["additional_dependencies"]
        assert tool.startswith(hook["entry"].split()[0] + "==")
        assert {tool, *others} <= said


def test_the_citation_is_of_this_version():
    citation = read("CITATION.cff")
    assert citation["title"] == PROJECT["name"]
    assert citation["version"] == gx.__version__
    assert citation["license"] == PROJECT["license"]
    assert citation["repository-code"] == ADDRESS
    assert citation["keywords"] == PROJECT["keywords"]


def test_the_summary_and_the_citation_say_what_the_readme_says():
    paragraph = read_text("README.md").split("\n\n")[1]
    said = " ".join(paragraph.split())
    assert PROJECT["description"] == said
    assert read("CITATION.cff")["abstract"] == said
    assert len(said) <= 512  # PyPI takes no more.


def test_the_page_on_installing_names_the_extras_for_users():
    rows = re.findall(r"^\| `([\w-]+)` \|", read_text("docs/install.md"), re.M)
    for_work = {"tpu", "benchmarks", "test", "programs", "docs", "dev"}
    assert {*rows} == {*PROJECT["optional-dependencies"]} - for_work


def test_the_sdist_holds_the_whole_repository():
    """Hatchling takes all files, if nobody names some, but those that git ignores.

    `.ci/release` looks into the sdist itself.
    """
    assert "sdist" not in PYPROJECT["tool"]["hatch"]["build"]["targets"]
    command = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    ignored = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    assert ignored.stdout == b""
    assert "comm -23 - " in read_text(".ci/release")


def test_the_newest_version_of_the_changelog_is_this_one():
    changelog = read_text("CHANGELOG.md")
    assert re.search(r"^## \[(.*)\] - ", changelog, re.M)[1] == gx.__version__


@pytest.mark.slow
def test_a_release_stops_until_a_person_has_done_the_list(tmp_path):
    """In a clone, line by line of CONTRIBUTING.md."""
    clone, said = tmp_path / "clone", read_text("CONTRIBUTING.md")
    (program,) = re.findall(
        r"(?s)<<'PYTHON'\n(.*?)\nPYTHON\n", read_text(".ci/release")
    )
    (command,) = re.findall(r"(?m)^ +(git grep -lzE .*)$", said)
    (line,) = re.findall(r"`(maintainers = .*?)`", said)
    title = f"## [{gx.__version__}] - "

    def run(*command, check=True):
        return subprocess.run(
            command, cwd=clone, capture_output=True, text=True, check=check
        )

    def commit():
        run("git", "-c", "user.name=x", "-c", "user.email=x@y.z", "commit", "-qam", "x")

    def edit(name, pattern, new):
        text, count = re.subn(pattern, new, (clone / name).read_text(), flags=re.M)
        (clone / name).write_text(text)
        return count

    def left(tag=f"v{gx.__version__}"):
        done = run(sys.executable, "-c", program, tag, check=False)
        lines = done.stdout.splitlines()
        assert (done.returncode, done.stderr) == (bool(lines), "")
        return [line.removeprefix("before the release: ").split()[0] for line in lines]

    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
    # As before the first release, also when that is long ago.
    edit("CHANGELOG.md", rf"^{re.escape(title)}.*$", f"{title}unreleased")
    edit("pyproject.toml", "^maintainers = .*\n", "")
    edit("SECURITY.md", re.escape(ADDRESS), "https://github.com/OWNER/gradxform")
    edit("SECURITY.md", r"\Z", "x")  # So that there is something to commit.
    commit()
    assert left() == ["CHANGELOG.md", "OWNER", "pyproject.toml"]

    run("bash", "-c", command)
    assert left() == ["CHANGELOG.md", "pyproject.toml", "what"]
    assert edit("pyproject.toml", "^authors = ", f"{line}\nauthors = ") == 1
    project = tomllib.loads((clone / "pyproject.toml").read_text())["project"]
    assert "email" in project["maintainers"][0]
    assert left() == ["CHANGELOG.md", "what"]
    edit("CHANGELOG.md", f"^{re.escape(title)}unreleased$", f"{title}2026-01-31")
    assert left() == ["what"]
    commit()
    assert left() == []
    assert left("v9.9.9") == ["the"]


def test_workflows_run_the_scripts_of_ci():
    """Workflows and .ci/run call each script of .ci, and workflows run little else."""
    beside = [line for line in commands() if line.split()[0] not in SCRIPTS]
    assert all(line.startswith("python -m pip install ") for line in beside)
    called = {line.split()[0] for line in commands()} & SCRIPTS
    assert called == SCRIPTS - {".ci/run"}
    entry = (ROOT / ".ci/run").read_text()
    assert all(re.search(rf"(?m)(^|\s){script}\b", entry) for script in called)


def test_the_site_is_built_as_read_the_docs_builds_it():
    config = read(".readthedocs.yaml")
    assert config["build"]["tools"]["python"] == PYTHONS[-1]  # .ci/run has the newest.
    assert config["sphinx"]["configuration"] == "docs/conf.py"
    (install,) = config["python"]["install"]
    assert (install.pop("method"), install.pop("path")) == ("pip", ".")
    (command,) = re.findall(r"extras=\$\((.*)\)$", read_text(".ci/site"), re.M)
    found = subprocess.check_output(command, shell=True, cwd=ROOT, text=True)
    assert found.replace(",", " ").split() == install.pop("extra_requirements")
    assert not install


def test_workflows_run_on_every_python_that_is_supported():
    matrices = [j["strategy"]["matrix"] for j in jobs() if "strategy" in j]
    assert all(matrix["python"] == PYTHONS for matrix in matrices)
    setups = str([job.get("steps") for job in jobs()])
    named = {*re.findall(r"'python-version': '(3[\d.]+)'", setups)}
    assert named == {PYTHONS[0], PYTHONS[-1]}
    (mac,) = matrices[0]["include"]
    assert mac["os"].startswith("macos")
    assert mac["python"] == PYTHONS[-1]


def test_the_command_for_the_versions_prints_them(capsys):
    texts = [path.read_text() for path in [*TEMPLATES, ROOT / "SECURITY.md"]]
    (command,) = {*re.findall(r'python -c "(.*?)"', " ".join(texts))}
    exec(command)
    assert gx.__version__ in capsys.readouterr().out
