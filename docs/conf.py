"""The site: ``python -m sphinx -W -n docs docs/_build/html``, without the network.

MyST, because the pages' text is Markdown that the tests execute; myst-nb, because it
shows the notebooks with the outputs they have; furo, because of the themes that do well
on a phone and in the dark it is the smallest; copybutton, because it takes an example
without its prompts; ziamath, because its equations need neither the network nor a font.
The rest is Sphinx's own.
"""

import base64
import builtins
import html
import inspect
import json
import os
import pathlib
import pydoc
import re
import shutil
import textwrap
import tomllib
from importlib.util import find_spec

import jax
import ziamath
from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform
from sphinx.util.inspect import TypeAliasForwardRef

import gradxform

os.environ.setdefault("KERAS_BACKEND", "jax")  # Before gradxform.keras is imported.
HERE = pathlib.Path(__file__).parent
PROJECT = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
REPOSITORY = PROJECT["urls"]["Repository"]

project = "gradxform"
author = "The gradxform authors"
version = release = gradxform.__version__
html_title = f"{project} {version}"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "**/.ipynb_checkpoints"]
html_theme = "furo"
html_static_path = ["_static"]
html_search_scorer = str(HERE / "scorer.js")
html_css_files = ["site.css"]
html_favicon = "_static/favicon.svg"
html_baseurl = os.environ.get("READTHEDOCS_CANONICAL_URL", "")
templates_path = ["_templates"]
html_context = {"repository": REPOSITORY}
html_theme_options = {"top_of_page_buttons": ["view"]}  # The repository: _templates.
html_math_renderer = "paths"
html_copy_source = False
html_show_copyright = False
ziamath.config.svg2, ziamath.config.precision = False, 2
pygments_style, pygments_dark_style = "friendly", "github-dark"

myst_enable_extensions = ["attrs_inline", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # The tests run them; here they are shown.
nb_render_markdown_format = "myst"  # Their outputs have tables and links to notebooks.
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

default_role = "literal"
add_module_names = False
toc_object_entries_show_parents = "hide"
maximum_signature_line_length = 72
autodoc_member_order = "bysource"
nitpick_ignore = [("py:class", "P")]  # Arguments of a function: they have no page.
napoleon_custom_sections = [
    ("Attributes", "params_style"),
    ("Extra arguments of update", "params_style"),
]

# Types that are shown by the names that the source has for them.
autodoc_type_aliases = {
    name: name
    for name in (
        "jax.Array",
        "jax.typing.ArrayLike",
        "jax.typing.DTypeLike",
        "optax.GradientTransformation",
        "optax.GradientTransformationExtraArgs",
        "optax.OptState",
        "optax.Params",
        "optax.ScalarOrSchedule",
        "optax.Updates",
    )
}
TypeAliasForwardRef.__repr__ = lambda self: self.name  # Inside of unions and the like.
jax.Array.__qualname__ = "Array"  # JAX 0.10 says jaxlib._jax.Array, which is nowhere.

# A name does not tell its page, so the links lead to a search.
SITES = {
    "jax": "https://docs.jax.dev/en/latest/search.html?q=",
    "optax": "https://optax.readthedocs.io/en/latest/search.html?q=",
    "ray": "https://docs.ray.io/en/latest/search.html?q=",
}


def resolve(app, env, node, contnode):
    """A link to a name of another package. A name that is misspelt is still found.

    A package of `SITES` need not be installed: Read the Docs has no Ray, and takes its
    names as they are. `.ci/oldest` builds the site where Ray is installed.
    """
    name = node["reftarget"]
    if node.get("refdomain") != "py" or re.match(r"gradxform(?!\._)", name):
        return None
    package = name.split(".")[0]
    unknown = package in SITES and find_spec(package) is None
    if not unknown and not hasattr(builtins, name) and pydoc.locate(name) is None:
        return None
    site = SITES.get(package)
    if site is None:  # Everybody knows Python's int; a type variable has no page.
        return contnode
    return nodes.reference("", "", contnode, internal=False, refuri=site + name)


PICTURE = re.compile(
    r'<picture>\s*<source .*srcset="(.*)">\s*<img alt="(.*)" src="(.*)">\s*</picture>'
)


WORDS = re.compile(r"<!-- search: (.*) -->")
ON_GITHUB = re.compile(r"\A> On GitHub.*\n+")
SIGN = re.compile(r"(?<=\w)[(/](?=[\w\[{&])|(?<=[A-Za-z]{4})\.(?=[A-Za-z])")
NOTEBOOK = re.compile(r"^## \[.*\]\(notebooks/(.*)\.ipynb\)$", re.M)
COLAB = REPOSITORY.replace("github.com", "colab.research.google.com/github")


def colab(name):
    """A link that opens a notebook where it runs."""
    return f"[Open in Colab]({COLAB}/blob/main/notebooks/{name}.ipynb)"


def show_notebook(heading):
    """A notebook's heading, with its link to Colab and its first picture."""
    name = heading[1]
    picture = f"![A picture of this notebook](notebooks/{name}.png){{.preview}}"
    return f"{heading[0]}\n\n{colab(name)}\n\n{picture}"


def names_on(text):
    """The names on a page of the API, where they are, with the first line of each."""
    (module,) = re.findall(r"currentmodule:: (\S+)", text)
    for name in re.findall(r"^\.\. auto\w+:: (\w+)", text, re.M):
        doc = inspect.getdoc(pydoc.locate(f"{module}.{name}"))
        line = re.sub(r":\w+:`~?(?:\w+\.)*(.*?)`", r"`\1`", doc.split("\n")[0])
        shown = re.sub(r"^gradxform\.(?!keras)", "gx.", f"{module}.{name}")
        yield f"- {{py:obj}}`{shown} <{module}.{name}>`: {line.replace('``', '`')}\n"


def list_group(heading):
    """A heading of the API's first page, with the names that it links to."""
    page = HERE / "api" / f"{heading[1]}.md"
    return f"{heading[0]}\n\n{''.join(names_on(page.read_text()))}"


def read_page(app, *names_and_source):
    """Takes away what the tests need and a reader does not.

    A first line is for who reads the file on GitHub. Links name texts and notebooks
    where they lie, and the site has pages of its own for them. The empty line at the
    end of a doctest says that nothing is printed. A picture with a twin for dark pages
    follows the theme of the site, which a reader may switch. The list of notebooks gets
    their pictures, and the pages of the API get their names.
    """
    page, source = names_and_source[0], names_and_source[-1]
    source[0] = ON_GITHUB.sub("", source[0])
    source[0] = PICTURE.sub(r"![\2](\3){.only-light} ![\2](\1){.only-dark}", source[0])
    text = re.sub(r"\]\(\.\./((?:\.\./)*notebooks/)", r"](\1", source[0])
    up = "" if len(names_and_source) == 3 else "../"  # Texts are included in docs/.
    text = text.replace("](../docs/", f"]({up}").replace("](../README.md", "](index.md")
    text = re.sub(r"\]\([A-Z]+\.md", lambda link: link[0].lower(), text)
    beside = r"\]\([./]*((?:tests|benchmarks)/[\w/]+\.md)"
    text = re.sub(beside, rf"]({REPOSITORY}/blob/main/\1", text)
    text = text.replace("\n\n```\n", "\n```\n")
    if page == "notebooks":
        text = NOTEBOOK.sub(show_notebook, text)
    if page == "api/index":
        text = re.sub(r"^## \[.*\]\((\w+)\.md\)$", list_group, text, flags=re.M)
    elif str(page).startswith("api/"):
        names = "".join(names_on(text))
        text = text.replace("```{eval-rst}", f"{names}\n```{{eval-rst}}", 1)
    source[0] = text


class IndexWords(SphinxTransform):
    """Makes entries of the index from a comment with words that users type.

    The search puts a section first for a word that is a main entry of the index.
    """

    default_priority = 840  # Just before Sphinx collects the entries.

    def apply(self, **_):
        """Replaces each such comment of a page."""
        for comment in [*self.document.findall(nodes.raw)]:
            if found := WORDS.fullmatch(comment.astext().strip()):
                (section,) = comment.parent["ids"][:1]
                entries = [
                    ("single", word, section, "main", None)
                    for word in found[1].split(", ")
                ]
                comment.replace_self(addnodes.index(entries=entries))


def show_math(self, node):
    """An equation as a picture of paths: no font, no script, the same everywhere."""
    block = isinstance(node, nodes.math_block)
    code = node.astext().replace(r"\iff", r"\;\iff\;")
    code = re.sub(r"\\text\{.*?\}", lambda text: text[0].replace(r"\_", "_"), code)
    if r"\\" in code:
        code = rf"\begin{{aligned}}{code}\end{{aligned}}"
    math = ziamath.Latex(code, size=18, color="currentColor", title=node.astext())
    below = math.getyofst() - 1  # the baseline, and the margin
    style = "" if block else f' style="vertical-align: {below:.1f}px"'
    picture = math.svg().replace("<svg ", f'<svg role="img"{style} ', 1)
    self.body.append(f'<div class="math">{picture}</div>' if block else picture)
    raise nodes.SkipNode


def allow_breaks(app, page, template, context, doctree):
    """Code in tables and headings may break at a sign. Its copy has nothing more."""

    def breaks(cell):
        code = r'(?<=<span class="pre">)[^<]+'
        return re.sub(code, lambda m: re.sub(SIGN, r"\g<0><wbr>", m[0]), cell[0])

    if "body" in context:
        context["body"] = re.sub(r"(?s)<(td|h\d).*?</\1>", breaks, context["body"])


def describe(app, page, template, context, doctree):
    """What a search engine shows of a page: its first words.

    The page for addresses that lead nowhere is shown in any folder. So it says where
    its links begin, if the site has an address.
    """
    found = doctree and doctree.next_node(nodes.paragraph)
    text = " ".join(found.astext().split()) if found else PROJECT["description"]
    short = html.escape(textwrap.shorten(text, 200, placeholder=" …"))
    tags = f'<meta name="description" content="{short}">'
    if page == "404" and html_baseurl:
        tags = f'<base href="{html.escape(html_baseurl)}">{tags}'
    context["metatags"] = context.get("metatags", "") + tags


def copy_notebooks(source, target):
    """Copies the notebooks, each with a link to Colab, and with its first picture."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for path in sorted(source.glob("*.ipynb")):
        notebook = json.loads(path.read_text())
        outputs = [o for cell in notebook["cells"] for o in cell.get("outputs", ())]
        pictures = [
            o["data"]["image/png"] for o in outputs if "image/png" in o.get("data", ())
        ]
        (target / f"{path.stem}.png").write_bytes(base64.b64decode(pictures[0]))
        title = notebook["cells"][0]["source"]
        title.insert(1, f"\n{colab(path.stem)}\n")
        (target / path.name).write_text(json.dumps(notebook))


def setup(app):
    """Connects these to Sphinx."""
    app.add_transform(IndexWords)
    app.add_html_math_renderer("paths", (show_math, None), (show_math, None))
    app.connect("missing-reference", resolve)
    app.connect("source-read", read_page)
    app.connect("include-read", read_page)
    app.connect("html-page-context", allow_breaks)
    app.connect("html-page-context", describe)
    copy_notebooks(HERE.parent / "notebooks", HERE / "notebooks")
