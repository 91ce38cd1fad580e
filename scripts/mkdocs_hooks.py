"""Hooks of mkdocs.yml: pages from the repository's root, inlined figures, and a check that the site loads nothing from other hosts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# Files of the root that are pages of the site.
ROOT_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
}
REPOSITORY_FILES = ("LICENSE",)  # linked by pages, and copied as they are
_LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(\))")
_FIGURE = re.compile(r'<p>\s*<img alt="[^"]*" src="([^"]+\.svg)"\s*/?>\s*</p>')
_LOADED = re.compile(r"""<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=["']((?:https?:)?//[^"']+)""")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the root, with links that are valid in the site."""
    for source, page in ROOT_PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_LINK.sub(_from_root, text)))
    for name in REPOSITORY_FILES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links of pages to files of the root, such as `../CONTRIBUTING.md`."""
    depth = page.file.src_uri.count("/")
    return _LINK.sub(lambda found: _to_root(found, depth), markdown)


def on_page_content(html: str, page: Any, config: Any, **_: Any) -> str:
    """Replace figures by their SVG, so that the site's palette sets their colours."""

    def inline(found: re.Match[str]) -> str:
        path = (Path(config.docs_dir) / page.file.src_uri).parent / found[1]
        if page.file.src_uri in ROOT_PAGES.values():
            path = Path(config.docs_dir) / found[1]
        return f'<div class="figure">{path.read_text(encoding="utf-8")}</div>'

    return _FIGURE.sub(inline, html)


def on_post_build(config: Any) -> None:
    """Fail when a page loads a script, style, picture or frame from another host."""
    site = Path(config.site_dir)
    loaded = sorted({(str(page.relative_to(site)), url) for page in site.rglob("*.html") for url in _LOADED.findall(page.read_text())})
    if wrong := [f"{page}: {url}" for page, url in loaded]:
        raise PluginError("pages load files from other hosts:\n" + "\n".join(wrong))


def _from_root(found: re.Match[str]) -> str:
    target = found[2]
    target = ROOT_PAGES.get(target, target.removeprefix("docs/"))
    return f"{found[1]}{target}{found[3] or ''}{found[4]}"


def _to_root(found: re.Match[str], depth: int) -> str:
    up = "../" * (depth + 1)
    name = found[2].removeprefix(up)
    if found[2].startswith(up) and (name in ROOT_PAGES or name in REPOSITORY_FILES):
        return f"{found[1]}{'../' * depth}{ROOT_PAGES.get(name, name)}{found[3] or ''}{found[4]}"
    return found[0]
