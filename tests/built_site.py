"""What Sphinx does not see: ``python -m tests.built_site docs/_build/html``.

It reads the pages that `.ci/site` has built. It prints each link that leads to no file
or to no place in it, each table of Markdown that was left as text, and each page
without a description, an icon or a link to the repository. The page for addresses that
lead nowhere is shown in any folder, so it says where its links begin.
"""

import html.parser
import pathlib
import re
import sys
import tomllib
import urllib.parse

# Of a table. Sphinx may have made one dash of two.
SECOND_ROW = re.compile(r"\|[ :|]*[-\u2013][ :|\u2013-]*\|")


PROJECT = pathlib.Path(__file__).parents[1] / "pyproject.toml"
REPOSITORY = tomllib.loads(PROJECT.read_text())["project"]["urls"]["Repository"]


class Page(html.parser.HTMLParser):
    """The links of a page, its anchors, and the lines of its text."""

    def __init__(self, path):
        super().__init__()
        self.links, self.anchors, self.lines, self.code = [], {""}, [], 0
        self.head = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.head |= {tag, attrs.get("name"), attrs.get("rel")}
        self.anchors |= {attrs.get("id"), attrs.get("name")}
        self.links += [attrs[key] for key in ("href", "src") if attrs.get(key)]
        self.code += tag in ("pre", "script")

    def handle_endtag(self, tag):
        self.code -= tag in ("pre", "script")

    def handle_data(self, data):
        if not self.code:
            self.lines += data.splitlines()


def faults(folder):
    """A line for each fault of the pages in a folder."""
    pages = {path.resolve(): Page(path) for path in sorted(folder.rglob("*.html"))}
    for path, page in pages.items():
        name = path.relative_to(folder.resolve())
        yield from (
            f"{name}: a table is left as text: {line}"
            for line in page.lines
            if SECOND_ROW.fullmatch(line.strip())
        )
        needed = {"description", "shortcut icon"}
        if name.name == "404.html":
            needed.add("base")
        yield from (f"{name}: it has no {what}" for what in needed - page.head)
        if REPOSITORY not in page.links:
            yield f"{name}: no link leads to the repository"
        for link in page.links:
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            there = path.parent / urllib.parse.unquote(parts.path)
            there = there.resolve() if parts.path else path
            anchor = urllib.parse.unquote(parts.fragment)
            if not there.exists():
                yield f"{name}: no such file: {link}"
            elif there in pages and anchor not in pages[there].anchors:
                yield f"{name}: no such place: {link}"


if __name__ == "__main__":
    found = [*faults(pathlib.Path(sys.argv[1]))]
    sys.exit("\n".join(found) if found else 0)
