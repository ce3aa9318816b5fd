"""mkdocs hook: `bench/results/` becomes `results/` of the site.

Pages link to `../bench/results/NAME`, which works where the repository is read; mkdocs alone knows files in docs/ only.
"""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_IN_REPOSITORY, _IN_SITE = "../bench/results/", "results/"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the results to the site's files."""
    for path in sorted((Path(config.docs_dir) / _IN_REPOSITORY).resolve().iterdir()):
        files.append(File.generated(config, _IN_SITE + path.name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to the results point into the site."""
    return markdown.replace(f"]({_IN_REPOSITORY}", f"]({_IN_SITE}")
