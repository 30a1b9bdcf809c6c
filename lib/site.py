"""The website: executed chapters and pages, gathered in one folder and rendered by Jupyter Book."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import yaml

from lib import browser, chapters, pages, reference
from lib.config import InputError
from lib.store import results_folder


def stage(executed: Path, source: Path) -> None:
    """Lay out in `source` what Jupyter Book reads: configuration, pages, bibliography and the executed notebooks."""
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(chapters.book(), source, ignore=shutil.ignore_patterns("*.ipynb", "results", ".*", "__pycache__"))
    shutil.copytree(results_folder(), source / "results", ignore=shutil.ignore_patterns("*.json"))
    shutil.copy2(chapters.book().parent / "_toc.yml", source)
    config = yaml.safe_load((chapters.book().parent / "_config.yml").read_text(encoding="utf-8"))
    theme = config["sphinx"]["config"]["html_theme_options"]
    repository = theme.get("repository_url", "")
    if not repository:  # then no launch buttons: the theme would fail on them
        for name in ("repository_url", "repository_branch", "path_to_docs", "launch_buttons"):
            theme.pop(name, None)
    (source / "_config.yml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    for name in chapters.names():
        if not (executed / f"{name}.ipynb").exists():
            raise InputError(f"{name}: not executed yet; run `python -m lib run {name}` or `make book` first")
        notebook = nbformat.read(executed / f"{name}.ipynb", as_version=4)
        figures = pages.offer_data(notebook, name, source / "data" / name)
        pages.mark_wide(notebook)
        pages.about(notebook, name, pages.offer_files(name, executed / f"{name}.ipynb", source), figures, repository)
        nbformat.write(notebook, source / f"{name}.ipynb")
    pages.fill(source)
    reference.write(source)


# 'self' is the book's own server, file: the book's own folder when it is opened from disk; a served page may not load file:.
POLICY = (
    "default-src 'none'; script-src 'self' file:{scripts}; style-src 'self' file: 'unsafe-inline'; img-src 'self' file: data:; "
    "font-src 'self' file: data:; connect-src 'self' file:; form-action 'self' file:; base-uri 'none'"
)


class _Scripts(HTMLParser):
    """The scripts that stand in a page, attributes that are scripts, and links that are."""

    def __init__(self, text: str):
        super().__init__()
        self.inline, self.handlers, self.links, self._open = [], [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        of = dict(attributes)
        self.handlers += [value for name, value in of.items() if name.startswith("on") and value]
        self.links += [value for value in of.values() if value and value.strip().lower().startswith("javascript:")]
        self._open = tag == "script" and "src" not in of and of.get("type") in (None, "", "text/javascript", "module")
        if self._open:
            self.inline.append("")

    def handle_data(self, data):
        if self._open:
            self.inline[-1] += data

    def handle_endtag(self, tag):
        self._open = False


def protect(html: Path) -> None:
    """Write into every page what it may load: this site's own files, and the scripts that stand in it by their hashes."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(html.rglob("*.html"))}
    found = {path: _Scripts(text) for path, text in texts.items()}
    handlers = {handler for scripts in found.values() for handler in scripts.handlers}  # the search page shows pieces of all
    for path, text in texts.items():
        if found[path].links:
            raise chapters.BookError(f"site: {path.name}: the link {found[path].links[0]} is a script, which the page's policy forbids")
        digests = sorted({base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in [*found[path].inline, *handlers]})
        allowed = [f"'sha256-{digest}'" for digest in digests] + (["'unsafe-hashes'"] if handlers else [])
        text = text.replace(' role="list" class="citation-list"', ' class="citation-list"')  # whose children are no list items
        policy = POLICY.format(scripts="".join(f" {source}" for source in allowed))
        if "<html" in text and "<head>" not in text:
            raise chapters.BookError(f"site: {path.name}: has no <head> to write the page's policy into")
        meta = f'<head>\n<meta http-equiv="Content-Security-Policy" content="{policy}">'
        path.write_text(text.replace("<head>", meta, 1), encoding="utf-8")


_ICON = re.compile(r'"?([a-z0-9-]+)"?:\[\d+,\d+,\[([^\]]*)\],"[0-9a-f]+",(?:"[^"]*"|\[[^\]]*\])\],?')


def lighten(html: Path) -> None:
    """Leave in the theme's icons, a megabyte and a half on every page, those that the site shows."""
    icons = html / "_static" / "scripts" / "fontawesome.js"
    where = [*html.rglob("*.html"), *(path for path in html.glob("_static/**/*.js") if path != icons and "mathjax" not in path.parts)]
    used = {name for path in where for name in re.findall(r"fa-([a-z0-9-]+)", path.read_text(encoding="utf-8"))}

    def kept(icon: re.Match) -> str:
        return icon[0] if used & {icon[1], *re.findall(r'"([a-z0-9-]+)"', icon[2])} else ""

    icons.write_text(_ICON.sub(kept, icons.read_text(encoding="utf-8")), encoding="utf-8")
    icons.with_suffix(".js.map").unlink(missing_ok=True)


def build(folder: Path | None = None, *, strict: bool = True) -> Path:
    """Render the site from <folder>/chapters into <folder>/html (default: _build); returns its first page.

    Strict: a warning (a broken reference, a missing figure) is a BookError, raised once everything has been rendered.
    """
    from jupyter_book.sphinx import build_sphinx

    folder = folder or chapters.build_folder()
    source, html = folder / "site-src", folder / "html"
    stage(folder / "chapters", source)
    for old in (html, folder / ".doctrees"):  # Sphinx misses changed styles and keeps pages that are gone
        shutil.rmtree(old, ignore_errors=True)
    failed = build_sphinx(
        source,
        html,
        noconfig=True,
        path_config=source / "_config.yml",
        doctreedir=folder / ".doctrees",
        confoverrides={"external_toc_path": "_toc.yml", "latex_individualpages": False},
        quiet=True,
        warningiserror=strict,
        keep_going=True,
    )
    if failed:
        raise chapters.BookError("site: rendering warned or failed, as said above")
    browser.export(folder / "chapters", html / "runs")
    lighten(html)
    protect(html)
    for extra in folder.glob("scorecard.json"):
        shutil.copy2(extra, html)
    return html / "index.html"
