"""Make `explorer.png` for the README: the explorer with an easy and a hard query of the demo.

Run `make demo` first, then `.venv/bin/python docs/images/explorer.py`. Needs Chromium (`make
browser`).
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

ROOT = Path(__file__).parents[2]
QUERIES = ROOT / "runs" / "demo" / "queries"
OUTPUT = Path(__file__).with_suffix(".png")
VIEWPORT = {"width": 1280, "height": 560}
COLOURS = 128  # of the palette


def screenshot(page: Page, query: Path) -> Image.Image:
    """Open the query and return the visible part of the page."""
    page.set_input_files("#file", query)
    expect(page.locator("#query-note")).to_have_text("your picture")
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(1000)  # candidates fade in or out
    return Image.open(io.BytesIO(page.screenshot())).convert("RGB")


def main() -> None:
    """Serve the demo's retriever, photograph both answers and write them below each other."""
    command = [sys.executable, "-m", "rcir.cli", "serve", "runs/demo/retriever", "--port", "0"]
    server = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        found = None
        while found is None:
            line = server.stdout.readline()
            if not line:
                raise SystemExit("the server ended: run `make demo` first")
            found = re.search(r"http://[\d.]+:\d+", line)
        with sync_playwright() as started:
            chromium = started.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox"]
            )
            page = chromium.new_page(viewport=VIEWPORT)
            page.goto(found[0])
            shots = [screenshot(page, QUERIES / f"{name}.png") for name in ("easy", "hard")]
            chromium.close()
    finally:
        server.terminate()
        server.wait()
    width, height = shots[0].size
    picture = Image.new("RGB", (width, 2 * height), "white")
    for number, shot in enumerate(shots):
        picture.paste(shot, (0, number * height))
    picture.quantize(COLOURS).save(OUTPUT, optimize=True)
    print(f"{OUTPUT}: {OUTPUT.stat().st_size // 1024} KB")


if __name__ == "__main__":
    main()
