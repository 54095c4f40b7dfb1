"""`make docs`: the site builds without a warning, and its pages are complete and fit screens."""

import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOADED = re.compile(r"""<(?:script|img|link|iframe)[^>]+(?:src|href)=["']?(https?:)?//""")

pytestmark = pytest.mark.slow
pytest.importorskip("mkdocs", reason="needs the extra docs")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return the folder of the site; strict, so that a missing page or anchor ends the build."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", folder]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return folder


def test_every_page_of_the_navigation_exists_and_loads_nothing_from_elsewhere(site):
    names = re.findall(r"([\w./-]+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(names) > 25
    for name in names:
        page = site / ("index.html" if name == "index" else f"{name}/index.html")
        assert not LOADED.search(page.read_text()), name


def test_reference_has_every_command_and_public_name(site):
    from rcir import risk
    from rcir.cli import COMMANDS, JOBS

    commands = (site / "reference" / "commands" / "index.html").read_text()
    assert all(f'id="rcir-{name}"' in commands for name in COMMANDS | JOBS)
    assert "usage: rcir train" in commands
    names = (site / "reference" / "rcir.risk" / "index.html").read_text()
    assert all(f'id="rcir.risk.{name}"' in names for name in risk.__all__)


def test_pages_fit_a_telephone_and_can_be_searched(site):
    playwright = pytest.importorskip("playwright.sync_api")
    if (chromium := shutil.which("chromium")) is None:
        pytest.skip("there is no chromium on this machine")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=site)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with playwright.sync_playwright() as started:
            browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 390, "height": 800})
            page.set_default_timeout(120_000)  # other tests run beside it
            for name in ("", "concepts/", "guarantee/", "alternatives/", "reference/rcir/"):
                page.goto(f"http://127.0.0.1:{server.server_port}/{name}")
                width = page.evaluate("document.documentElement.scrollWidth")
                assert width == 390, name
            page.set_viewport_size({"width": 1280, "height": 800})
            # Key by key, because the page searches when a key is released.
            page.locator(".md-search__input").press_sequentially("StaleCalibration", delay=50)
            page.locator(".md-search-result__item").first.wait_for()
            browser.close()
    finally:
        server.shutdown()
        server.server_close()
