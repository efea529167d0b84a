"""Clicks through the site in chromium as a reader would; `make docs-test` builds it and runs this."""

import functools
import http.server
import shutil
import threading
import urllib.parse

import pytest
from pages import ROOT

SITE = ROOT / "build" / "docs"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
WINDOWS = {"wide": {"width": 1400, "height": 900}, "narrow": {"width": 390, "height": 844}}
VIEWS = [(size, scheme) for size in WINDOWS for scheme in ("light", "dark")]

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def site():
    """The address of the built site, served from this machine."""
    if not (SITE / "index.html").exists():
        pytest.fail(f"{SITE} has no site: run make docs")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *about):
            pass

    handler = functools.partial(Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: the site was built and not looked at")
    playwright = pytest.importorskip("playwright.sync_api", reason="make docs installs playwright")
    options = {"executable_path": CHROMIUM, "args": ["--no-sandbox"]}
    with playwright.sync_playwright() as driver, driver.chromium.launch(**options) as chromium:
        yield chromium


@pytest.fixture
def page(browser, site):
    with browser.new_page(viewport=WINDOWS["wide"], base_url=site) as page:
        yield page


def pages():
    return sorted(
        str(path.relative_to(SITE))
        for path in SITE.rglob("*.html")
        if not path.relative_to(SITE).parts[0].startswith("_") and path.name != "genindex.html"
    )


def test_the_front_page_has_what_a_newcomer_needs_and_leads_to_the_project(page):
    page.goto("/index.html")
    article = page.locator("article")
    assert article.locator("img").first.evaluate("image => image.naturalWidth") > 300
    assert article.locator("table").first.get_by_role("row").count() > 4
    assert "pip install" in article.inner_text()
    assert "lc.map_step(train_step" in article.locator(".highlight-python").first.inner_text()
    for title in "Changelog", "Contributing":
        page.locator(".bd-sidebar").get_by_role("link", name=title).click()
        assert page.locator("article h1").inner_text().startswith(title)


def test_the_tutorial_is_one_click_away_and_shows_what_it_printed(page):
    page.goto("/index.html")
    page.locator("article").get_by_role("link", name="tutorial").first.click()
    assert page.locator("article h1").inner_text().startswith("Tutorial")
    said = page.locator(".cell_output").all_inner_texts()
    assert len(said) < 10
    assert any("float32 sends" in text for text in said)
    assert any("votes/agreement" in text for text in said)
    assert page.locator(".cell_output img").evaluate("image => image.naturalWidth") > 300
    notebook = page.locator("a[href$='tutorial.ipynb']").first.get_attribute("href")
    cells = page.request.get(urllib.parse.urljoin(page.url, notebook)).json()["cells"]
    assert sum(bool(cell.get("outputs")) for cell in cells) >= len(said)


def test_the_reference_leads_to_a_function_by_its_kind_and_to_its_source(page):
    page.goto("/reference/api/index.html")
    page.locator("article").get_by_role("link", name="Optimizers").first.click()
    heading = page.locator("dt#lioncub_jax\\.owner_adamw")
    assert "learning_rate: optax.ScalarOrSchedule" in heading.inner_text()
    page.locator("article").get_by_role("link", name="owner", exact=True).first.click()
    assert page.url.endswith("#lioncub_jax.owner")
    heading.get_by_role("link", name="[source]").click()
    assert "def owner_adamw(" in page.locator("#owner_adamw").inner_text()


FOUND = {
    "owner_adamw": "lioncub_jax.owner_adamw",
    "tie": "Zeros, ties",
    "mixed precision": "Mixed precision",
    "profile": "Profile a step",
    "vision": "Images",
    "EMA": "Evaluate",
    "early stopping": "Evaluate",
}


@pytest.mark.parametrize("words", FOUND)
def test_the_search_finds_a_name_and_a_word(page, words):
    page.goto(f"/search.html?q={words}")
    result = page.locator("#search-results li").get_by_text(FOUND[words])
    result.first.wait_for(timeout=10_000)


@pytest.mark.parametrize("size, scheme", VIEWS)
def test_nothing_runs_out_of_the_window(browser, site, size, scheme):
    """Wide tables and code scroll inside their own frame."""
    wide = []
    with browser.new_page(viewport=WINDOWS[size], color_scheme=scheme, base_url=site) as page:
        for name in pages():
            page.goto(f"/{name}", wait_until="domcontentloaded")
            shown = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
            if shown[0] > shown[1]:
                wide.append((name, shown))
            for printed in page.locator(".highlight-console pre").all():  # it wraps
                if printed.evaluate("pre => pre.scrollWidth > pre.clientWidth"):
                    wide.append((name, printed.inner_text()))
        page.goto("/explain/step.html")
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
    assert wide == []
