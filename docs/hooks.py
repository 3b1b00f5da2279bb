"""What the site adds to the Markdown files: charts, a summary of the API, a page for each source file that they link
to, and links from the names of the API to its reference. The Markdown is published next to the HTML, for llms.txt.

MkDocs calls the functions by their names.
"""

from __future__ import annotations

import ast
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from mkdocs.utils import write_file

ROOT = Path(__file__).parent.parent
SUMMARY = "api/summary.md"

_LINK = re.compile(r"\[(?P<text>[^]]*)\]\((?P<target>\.\./[^)#\s]+)(?:#[^)\s]*)?\)")
_NAME = re.compile(r"<(a|h[1-6])\b.*?</\1>|<code>(?P<name>[\w.]+)(?P<call>\(\))?</code>", re.DOTALL)

# There these words are methods, subcommands, or arguments.
_OTHER_WORDS = ("training-loop.md", "command-line.md", "api/checkpointer.md")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the charts, the summary of the API, and a page for each source that a page links to."""
    sys.path += [str(ROOT / "benchmarks"), str(ROOT / "docs")]
    from api_summary import summary
    from charts import charts

    files.append(File.generated(config, SUMMARY, content=summary(), inclusion=InclusionLevel.NOT_IN_NAV))
    for name, svg in charts().items():
        files.append(File.generated(config, f"pictures/{name}", content=svg))
    for page in files.documentation_pages():
        for match in _LINK.finditer(page.content_string):
            source = _outside(page, match["target"])
            uri = f"{source}.md"
            if source is not None and (ROOT / source).is_file() and uri not in files.src_uris:
                text = (ROOT / source).read_text()
                content = f"---\nsearch:\n  exclude: true\n---\n# {source}\n\n`````{_language(source)}\n{text}\n`````\n"
                files.append(File.generated(config, uri, content=content, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to sources into links to their pages; a link to a folder becomes its text."""

    def turned(match: re.Match[str]) -> str:
        source = _outside(page.file, match["target"])
        if source is None:
            return match[0]
        if (ROOT / source).is_dir():
            return match["text"]
        return f"[{match['text']}]({posixpath.relpath(source, posixpath.dirname(page.file.src_uri))}.md)"

    return _LINK.sub(turned, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link the names of the API that the text has as code."""
    names = set(_public_names())
    if page.file.src_uri in _OTHER_WORDS:
        names = {name for name in names if name[0].isupper()}

    def linked(match: re.Match[str]) -> str:
        name = match["name"] or ""
        known = name.removeprefix("jaxckpt.")
        if known.partition(".")[0] not in (names if known == name else _public_names()):
            return match[0]
        return f'<autoref identifier="jaxckpt.{known}" optional>{match[0]}</autoref>'

    return _NAME.sub(linked, html)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Publish the Markdown of a page."""
    write_file((page.markdown or "").encode(), str(Path(config.site_dir, page.file.src_uri)))
    return output


def _outside(page: File, target: str) -> str | None:
    """The target of a link, from the root of the repository; None if it is within docs/."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.src_uri), target))
    return None if path.startswith("docs/") else path


def _language(source: str) -> str:
    return {".py": "python", ".json": "json", ".toml": "toml"}.get(posixpath.splitext(source)[1], "text")


def _public_names() -> Iterator[str]:
    for node in ast.parse((ROOT / "jaxckpt" / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            yield from ast.literal_eval(node.value)
