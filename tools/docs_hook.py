"""Pages of `make docs` that stand outside docs/: mkdocs reads one folder, and a README belongs where its code is."""

from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from re import Match, compile
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PROJECT = Path(__file__).resolve().parents[1]
OUTSIDE = ("README.md", "CONTRIBUTING.md", "gym/README.md", "benchmarks/RESULTS.md")
LINK = compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")


def on_files(files: Files, *, config: MkDocsConfig, **_: Any) -> Files:
    """Add the pages outside docs/ under the paths that they have in the project."""
    for name in (*OUTSIDE, "benchmarks/memory.svg"):
        files.append(File.generated(config, name, abs_src_path=str(PROJECT / name)))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Turn links, which are right in the project, into links that are right in the site, where docs/ is the top."""
    here = PurePosixPath(page.file.src_uri)
    in_project = here if str(here) in OUTSIDE else "docs" / here

    def in_site(link: Match[str]) -> str:
        target = normpath(in_project.parent / link[1]).removeprefix("docs/")
        return f"]({relpath(target, here.parent)}"

    return LINK.sub(in_site, markdown)
