"""A browser on the page of a server, which fails a test when its console does."""

import io
import re
import shutil
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
import uvicorn
from PIL import Image

import rcir
from rcir.retrieval.storage import save
from rcir.serving import Settings, create_app
from rcir.serving.server import listen
from rcir.serving.sources import source_of

try:
    from playwright.sync_api import expect, sync_playwright
except ModuleNotFoundError:  # tests say so, and are skipped
    expect = sync_playwright = None
CHROMIUM = shutil.which("chromium")
NEEDED = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.skipif(sync_playwright is None, reason="playwright is not installed"),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine"),
]
SERVED_DATA = {"train": 400, "validation": 100, "gallery": 300, "tuning": 200, "test": 100}
DELTAS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
TOKEN = "a-token-of-enough-letters"


@pytest.fixture(scope="module")
def chromium():
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def running(folder, **settings):
    """The address of a server of a retriever."""
    settings = Settings(**({"port": 0, "poll": 0} | settings))
    with listen(settings) as listening:
        app = create_app(source_of(folder), settings)
        config = uvicorn.Config(app, log_level="error", access_log=False, ws="none")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def pictures(retriever, tmp_path_factory):
    """The folder of a retriever that knows its data set."""
    folder = tmp_path_factory.mktemp("pictures")
    loaded = rcir.load(save(retriever, folder / "plain"))
    options = SERVED_DATA | {"calibration": 400}
    loaded.origin = {"data": {"name": "digits", "options": options}}
    return save(loaded, folder / "retriever")


@pytest.fixture(scope="module")
def address(pictures, tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "feedback.db"
    with running(pictures, store=store) as address:
        yield address


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """The folder of a retriever of vectors with hostile ids, calibrated on few queries."""
    rng = np.random.default_rng(0)
    labels = rng.integers(6, size=460)
    vectors = rng.standard_normal((6, 8))[labels] + 0.7 * rng.standard_normal((460, 8))
    ids = [f"<img src=x onerror=alert({place})>/.." for place in range(300)]
    made = rcir.Retriever.from_embeddings(
        vectors[:300].astype(np.float32), ids=ids, labels=labels[:300]
    )
    made.calibrate(vectors[300:].astype(np.float32), labels[300:], score_function="quantile")
    return made.save(tmp_path_factory.mktemp("few") / "retriever")


@pytest.fixture(scope="module")
def of_vectors(few):
    with running(few) as address:
        yield address


@pytest.fixture
def visit(chromium, address):
    """`visit(refusals=(), **options)`: the page, with nothing said in the console but of those."""
    opened, said, allowed = [], [], set()

    def heard(text):
        status = re.search(r"Failed to load resource.*(status of (\d+)|net::)", text)
        if status is None or int(status[2] or 0) not in allowed:
            said.append(text)

    def visit(place=address, refusals=(), before=lambda page: None, **options):
        allowed.update(refusals)
        context = chromium.new_context(**options)
        opened.append(context)
        context.set_default_timeout(10_000)
        page = context.new_page()
        page.on("console", lambda message: message.type == "error" and heard(message.text))
        page.on("pageerror", lambda error: heard(str(error)))
        before(page)
        page.goto(place)
        expect(page.locator("#source")).not_to_be_empty()
        return page

    yield visit
    for context in opened:
        context.close()
    assert said == []


@pytest.fixture(scope="module")
def picture(splits):
    """A hard query, as a file."""
    file = io.BytesIO()
    Image.fromarray(splits.test.images[3]).save(file, "PNG")
    return file.getvalue()


def give(page, content, name="query.png"):
    page.set_input_files("#file", {"name": name, "mimeType": "image/png", "buffer": content})


def asked(page, content):
    give(page, content)
    expect(page.locator("#answer")).to_be_visible()


def ids(page):
    return page.locator("#items li:visible .id").all_text_contents()


def slide(page, name, value):
    page.locator(f"#{name}").fill(str(value))


def put(page, way, picture):
    page.evaluate(
        """([way, bytes]) => {
            const data = new DataTransfer();
            data.items.add(new File([new Uint8Array(bytes)], "q.png", { type: "image/png" }));
            const options = { dataTransfer: data, clipboardData: data, bubbles: true };
            dispatchEvent(way === "drop" ? new DragEvent(way, options)
                                         : new ClipboardEvent(way, options));
        }""",
        [way, list(picture)],
    )
