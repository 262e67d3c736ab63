"""The site of docs/: it builds without a warning, and a browser on a phone finds nothing wrong on any of its pages."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from shutil import which
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("sphinx", reason='the site needs: pip install "sbpflow[docs]"')

from tools.api_pages import PUBLIC, named, public_names

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WORDS, PAGES = 30_000, 14  # of what there is to read, as a newcomer has it
# How a page looks where it is shown.
LOOK = """() => {
    const ground = getComputedStyle(document.body).backgroundColor, ink = getComputedStyle(document.body).color
    return {
        broken: [...document.images].filter(each => !each.complete || !each.naturalWidth).map(each => each.src),
        wide: document.documentElement.scrollWidth - window.innerWidth,
        widest: [...document.querySelectorAll('article *')].filter(
            each => each.getBoundingClientRect().right > window.innerWidth + 1 && !each.closest('.table-wrapper, pre')
        ).slice(0, 3).map(each => each.outerHTML.slice(0, 120)),
        ground: ground.match(/\\d+/g).map(Number), ink: ink.match(/\\d+/g).map(Number),
    }
}"""


def to_read() -> list[Path]:
    """Pages that the front page lists, in the order of the site; those to look up have a list of their own."""
    listed = re.findall(r"```\{toctree\}\n(.*?)```", (DOCS / "index.md").read_text(), re.DOTALL)
    names = [line for text in listed for line in text.splitlines() if line and not line.startswith(":")]
    return [DOCS / f"{name}.md" for name in names if not name.startswith(("reference/", "evidence/", "inside"))]


def test_the_pages_to_read_are_few_and_short() -> None:
    words = {page.name: len(page.read_text().split()) for page in to_read()}
    assert len(words) <= PAGES, words
    assert sum(words.values()) <= WORDS, words


def test_they_begin_with_what_a_newcomer_needs_first() -> None:
    names = [page.stem for page in to_read()]
    assert names[:4] == ["install", "concepts", "train_llama", "plans"]
    assert names[-5:] == ["dtensor", "fsdp", "deepspeed", "megatron", "oneflow"]


def test_modules_of_the_reference_have_a_page_each() -> None:
    asked = {page.stem: re.findall(r"\{public\} (\S+)", page.read_text()) for page in DOCS.glob("reference/api/*.md")}
    assert asked == {name.rpartition(".")[2]: [name] for name in PUBLIC}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_site_builds_and_is_right_on_a_phone(tmp_path: Path) -> None:
    site = tmp_path / "site"
    build = [sys.executable, "-m", "sphinx", "-b", "html", "-q", "-W", "--keep-going"]
    done = subprocess.run(
        [*build, "-d", str(tmp_path / "trees"), str(DOCS), str(site)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    pages = {str(path.relative_to(site)): Page(path) for path in sorted(site.rglob("*.html"))}
    assert lost(site, pages) == []
    documented = {name for page in pages.values() for name in page.names}
    assert [name for each in PUBLIC for name in expected(each) if name not in documented] == []
    if browser() is None:
        pytest.skip("the site is built, and no browser looked at it: apt-get install chromium")
    with served(site) as address:
        looked_at(address, [name for name in pages if name not in ("genindex.html", "py-modindex.html")])


def test_where_tests_decide_there_is_a_browser() -> None:
    assert browser() or not os.environ.get("CI"), "apt-get install chromium: .ci/run does so where it may"


class Page(HTMLParser):
    """Links of a page, and the names that links may end at."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links, self.names = list[str](), set[str]()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = dict(attrs)
        self.names |= {said[key] or "" for key in ("id", "name") if key in said}
        self.links += [said[key] or "" for key in ("href", "src") if key in said]


def lost(site: Path, pages: dict[str, Page]) -> list[tuple[str, str]]:
    """Links to pages, places on them, files and pictures that are not there."""
    found = []
    for name, page in pages.items():
        for link in page.links:
            to = urlsplit(link)
            if to.scheme or to.netloc:
                continue
            path = os.path.normpath(os.path.join(os.path.dirname(name), unquote(to.path))) if to.path else name
            place = unquote(to.fragment)
            if not (site / path).exists() or (place and path in pages and place not in pages[path].names):
                found.append((name, link))
    return found


def expected(module: str) -> list[str]:
    """Anchors that the page of a module has to have."""
    return [f"{module}.{name}" for name in public_names(named(module))]


def browser() -> str | None:
    return next(filter(None, map(which, BROWSERS)), None)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def looked_at(address: str, names: list[str]) -> None:
    """Each page once, in the dark on a phone; then the search, and the front page in the light on a desk."""
    try:
        import playwright.sync_api as api
    except ImportError:
        if os.environ.get("CI"):
            raise
        pytest.skip("the site is built, and no browser looked at it: pip install playwright")
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser(), args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": 390, "height": 844}, color_scheme="dark")
        wrong: list[str] = []
        page.on("console", lambda said: wrong.append(f"{page.url}: {said.text}") if said.type == "error" else None)
        page.on("pageerror", lambda error: wrong.append(f"{page.url}: {error}"))
        page.on("requestfailed", lambda asked: wrong.append(f"{asked.url}: {asked.failure}"))
        for name in names:
            page.goto(f"{address}/{name}")
            look = page.evaluate(LOOK)
            assert not look["broken"], (name, look)
            assert look["wide"] <= 0, (name, look)
            assert max(look["ground"][:3]) < 80 < 160 < min(look["ink"][:3]), (name, look)
        page.goto(f"{address}/search.html?q=boxing")
        page.wait_for_selector("#search-results li a")
        page.emulate_media(color_scheme="light")
        page.set_viewport_size({"width": 1400, "height": 900})
        page.goto(f"{address}/index.html")
        assert min(page.evaluate(LOOK)["ground"][:3]) > 200
        page.evaluate("document.body.dataset.theme = 'dark'")  # as its toggle does, on a light screen
        assert page.evaluate("getComputedStyle(document.querySelector('article img')).colorScheme") == "dark"
        chromium.close()
    # An icon that is under way when the next page is opened is given up by the browser.
    assert [each for each in wrong if not each.endswith("net::ERR_ABORTED")] == []
