"""Hooks of mkdocs: the links of pages to other files of the repository work on the site too.

A file outside of docs/ that a page links to becomes part of the site as repository/PATH: Markdown and code as pages,
all others as they are. A link to a folder leads to its README.md, and is plain text if it has none.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from posixpath import relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent
ROOT = DOCS.parent
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)|(?<=\]\()(\.\./[^)\s#:]+)(?=\))")
CODE = {".py": "python", ".toml": "toml", ".yaml": "yaml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that pages link to, and those that these link to."""
    pages = [DOCS / file.src_uri for file in files.documentation_pages()]
    seen = set(pages)
    for page in pages:
        for target in _targets(page):
            if target in seen or target.is_dir() or target.is_relative_to(DOCS):
                continue
            seen.add(target)
            if target.suffix == ".md":
                pages.append(target)
            code = CODE.get(target.suffix)
            text = f"# {target.relative_to(ROOT)}\n\n````{code}\n{target.read_text()}\n````\n" if code else None
            source = {"content": text} if text else {"abs_src_path": str(target)}
            files.append(File.generated(config, _place(target), inclusion=InclusionLevel.NOT_IN_NAV, **source))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at the places that files have on the site, and name pages by their titles."""
    if page.file.abs_src_path is None:
        return markdown
    path = Path(page.file.abs_src_path)

    def moved(link: re.Match[str]) -> str:
        text, target, anchor, image = link.groups()
        place = _target(path, target or image)
        if place.is_dir():
            return str(text)
        if text == place.name and place.suffix == ".md":  # a page is named by its title
            text = place.read_text().partition("\n")[0].removeprefix("# ")
        relative = relpath(_place(place), Path(_place(path)).parent)
        return relative if image else f"[{text}]({relative}{anchor or ''})"

    return LINK.sub(moved, markdown)


def _targets(page: Path) -> Iterator[Path]:
    for link in LINK.finditer(page.read_text()):
        yield _target(page, link[2] or link[4])


def _target(page: Path, link: str) -> Path:
    target = (page.parent / link).resolve()
    return target / "README.md" if (target / "README.md").is_file() else target


def _place(target: Path) -> str:
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    return f"repository/{target.relative_to(ROOT).as_posix()}" + (".md" if target.suffix in CODE else "")
