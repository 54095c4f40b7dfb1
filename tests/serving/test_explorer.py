"""The page of a server, used by a browser."""

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
from rcir.serving.server import _listen
from rcir.serving.sources import source_of

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright.expect
CHROMIUM = shutil.which("chromium")

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine"),
]
SERVED_DATA = {"train": 400, "validation": 100, "gallery": 300, "tuning": 200, "test": 100}
DELTAS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
TOKEN = "a-token-of-enough-letters"


@pytest.fixture(scope="module")
def chromium():
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def running(folder, **settings):
    """The address of a server of a retriever."""
    settings = Settings(**({"port": 0, "poll": 0} | settings))
    with _listen(settings) as listening:
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


def test_a_picture_gets_the_set_of_each_alpha_without_another_request(visit, pictures, picture):
    page, retriever = visit(), rcir.load(pictures)
    asked(page, picture)
    requests = []
    page.on("request", lambda request: requests.append(request.url))
    sizes = set()
    for alpha in (0.5, 0.2, 0.35, 0.1, 0.05):
        slide(page, "alpha", alpha)
        answer = retriever.retrieve(picture, alpha, 0.1, simultaneous=True)
        assert ids(page) == list(answer.ids)
        assert page.inner_text("#sentence") == str(answer.guarantee)
        assert page.inner_text("#size") == f"{answer.size} item{'s' * (answer.size > 1)}"
        sizes.add(answer.size)
    assert len(sizes) > 2
    page.wait_for_timeout(400)  # longer than changes of delta wait
    assert [url for url in requests if not re.search(r"^blob:|/items/|/ready$", url)] == []


def test_delta_asks_again_once_and_the_newest_answer_counts(visit, pictures, picture):
    page, retriever = visit(), rcir.load(pictures)
    asked(page, picture)
    held, bodies = [], []

    def hold_the_first(route):
        bodies.append(route.request.post_data_buffer)
        held.append(route) if not held else route.continue_()

    page.route("**/explore", hold_the_first)
    slide(page, "delta", 2)
    page.wait_for_timeout(500)
    for place in (3, 5, 4):  # faster than the page asks
        slide(page, "delta", place)
    answer = retriever.retrieve(picture, 0.1, DELTAS[4], simultaneous=True)
    expect(page.locator("#sentence")).to_have_text(str(answer.guarantee))
    held[0].abort()
    assert len(bodies) == 2
    assert b"0.02" in bodies[1]
    assert ids(page) == list(answer.ids)


def test_items_of_each_label_and_groups_are_asked_for(visit, pictures, picture):
    page, retriever = visit(), rcir.load(pictures)
    asked(page, picture)
    for name, value in (("distinct", "label"), ("group", "True")):
        page.select_option(f"#{name}", value)
        chosen = {"distinct": "label"} | ({"group": value} if name == "group" else {})
        answer = retriever.retrieve(picture, 0.1, 0.1, simultaneous=True, **chosen)
        expect(page.locator("#sentence")).to_have_text(str(answer.guarantee))
        assert ids(page) == list(answer.ids)


def test_a_random_query_shows_pictures_and_tells_true_matches_in_words(visit):
    page = visit()
    page.click("#sample")
    expect(page.locator("#answer")).to_be_visible()
    slide(page, "alpha", 0.1)
    label = page.inner_text("#known").removeprefix("Its label: ")
    rows = page.locator("#items li:visible").all()
    told = []
    for row in rows:
        told.append(row.locator(".label").inner_text() == f"label {label}")
        words = "✓ true match" if told[-1] else "✗ no match"
        assert row.locator("p").last.inner_text() == words
    shown = page.inner_text("#matches")
    assert shown.startswith("No true match" if not any(told) else f"{sum(told)} of {len(told)} ")
    first = page.locator("#items li:visible img").first
    expect(first).to_be_visible()
    assert first.evaluate("image => [image.naturalWidth, image.naturalHeight]") == [16, 8]


def test_pictures_are_dropped_and_pasted(visit, picture):
    page = visit()
    put(page, "drop", picture)
    expect(page.locator("#answer")).to_be_visible()
    page.reload()
    expect(page.locator("#answer")).to_be_hidden()
    expect(page.locator("#drop")).to_be_visible()
    put(page, "paste", picture)
    expect(page.locator("#answer")).to_be_visible()


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


def test_a_file_that_is_no_picture_is_refused_in_words(visit, picture):
    page = visit(refusals=[400])
    asked(page, picture)
    give(page, b"This is a text.", "text.txt")
    error = page.get_by_role("alert").filter(visible=True)
    expect(error).to_contain_text("This file is no picture that can be read")
    expect(page.locator("#answer")).to_be_hidden()  # it answered another query
    asked(page, picture)
    expect(error).to_have_count(0)


REFUSALS = {
    409: (
        {"error": "risk-unattainable", "message": "too few", "minimum_alpha": 0.123411},
        "This cannot be certified: the smallest alpha possible is 0.1235. Why: too few.",
    ),
    413: (
        {"error": "too-large", "message": "the body is larger than 5 bytes"},
        "That is too large: the body is larger than 5 bytes.",
    ),
    429: ({"error": "busy", "message": "9 wait"}, "The server has more queries than it takes"),
    503: ({"error": "stopping", "message": "it stops"}, "The server is stopping."),
    500: ({"error": "failed", "message": "its log says why"}, "The server failed: its log says"),
    0: (None, "The server does not answer."),
}


def refusing(status, body):
    return lambda route: route.fulfill(status=status, json=body) if status else route.abort()


def test_refusals_are_shown_in_words(visit, picture):
    page = visit(refusals=REFUSALS)
    again = page.locator("#again")
    for status, (body, words) in REFUSALS.items():
        page.route("**/explore", refusing(status, body))
        give(page, picture)
        expect(page.locator("#error")).to_contain_text(words)
        page.unroute("**/explore")
        if status in (409, 413):
            expect(again).to_be_hidden()  # the same would be said again
        else:
            again.click()
            expect(page.locator("#answer")).to_be_visible()


def test_what_nothing_certifies_is_said_with_the_smallest_alpha(visit, few, of_vectors):
    page = visit(of_vectors, refusals=[404])
    page.click("#sample")
    expect(page.locator("#answer")).to_be_visible()
    slide(page, "alpha", 0.01)
    retriever = rcir.load(few)
    vector = retriever.calibration_queries.vectors[0]
    with pytest.raises(rcir.RiskUnattainable) as refused:
        retriever.retrieve(vector, 0.01, 0.1, simultaneous=True)
    smallest = np.ceil(refused.value.minimum_alpha * 100) / 100
    expect(page.locator("#sentence")).to_contain_text(f"the smallest possible is {smallest:.2f}.")
    expect(page.locator("#items li:visible")).to_have_count(0)
    expect(page.locator("#feedback")).to_be_hidden()


def test_a_vector_is_asked_and_what_is_none_is_refused(visit, few, of_vectors):
    page, retriever = visit(of_vectors, refusals=[400, 404]), rcir.load(few)
    vector = np.random.default_rng(5).standard_normal(8).astype(np.float32).tolist()
    page.fill("#vector", str(vector))
    page.get_by_role("button", name="Ask this vector").click()
    expect(page.locator("#answer")).to_be_visible()
    slide(page, "alpha", 0.3)
    answer = retriever.retrieve(np.asarray(vector, np.float32), 0.3, 0.1, simultaneous=True)
    assert ids(page) == list(answer.ids)  # as text, whatever they hold
    assert page.locator("#items img:visible").count() == 0
    for text, words in (
        ("[1, 2", "This is no JSON"),
        ('{"a": 1}', "There is no vector"),
        ("[1, 2]", "8"),
    ):
        page.fill("#vector", text)
        page.get_by_role("button", name="Ask this vector").click()
        expect(page.locator("#error-words")).to_contain_text(words)


def test_all_is_done_by_keyboard_and_the_focus_is_seen(visit):
    page = visit()
    expect(page.locator("#drop")).to_be_visible()
    reached = []

    def forward():
        page.keyboard.press("Tab")
        name, seen = page.evaluate(
            """() => {
                const own = document.activeElement;
                const ring = own.closest(".drop") ?? own;
                return [own.id, getComputedStyle(ring).outlineStyle !== "none"];
            }"""
        )
        assert seen, name
        reached.append(name)
        return name

    while forward() != "sample":
        pass
    page.keyboard.press("Enter")
    expect(page.locator("#answer")).to_be_visible()
    while forward() != "alpha":
        pass
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#alpha-value")).to_have_text("0.09")
    assert page.get_attribute("#alpha", "aria-valuetext").startswith("0.09, ")
    page.keyboard.press("Home")
    expect(page.locator("#alpha-value")).to_have_text("0.01")
    page.keyboard.press("End")
    expect(page.locator("#alpha-value")).to_have_text("0.50")
    forward()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#sentence")).to_contain_text("at least 0.95")
    while forward() != "none":
        pass
    assert reached == [
        *("file", "sample", "alpha", "delta", "distinct", "group", "match", "none"),
    ]
    page.keyboard.press("Enter")
    expect(page.locator("#feedback-words")).to_contain_text("Thank you.")


def test_small_screens_do_not_scroll_sideways(visit, picture):
    page = visit(viewport={"width": 360, "height": 640})
    asked(page, picture)
    slide(page, "alpha", 0.05)
    width = page.evaluate("document.documentElement.scrollWidth")
    widest = page.evaluate(
        "Math.max(...[...document.querySelectorAll('main *')].map(x => "
        "x.getBoundingClientRect().right))"
    )
    assert width == 360
    assert widest <= 360


CONTRAST = """() => {
    const channels = (text) => text.match(/[\\d.]+/g).map(Number);
    const luminance = (color) => {
        const [r, g, b] = color.slice(0, 3).map((value) => {
            const part = value / 255;
            return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
        });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = (element) => {
        for (let own = element; own; own = own.parentElement) {
            const color = channels(getComputedStyle(own).backgroundColor);
            if (color.length === 3 || color[3] === 1) return color;
        }
        throw Error("no background");
    };
    const rows = [];
    for (const element of document.querySelectorAll("body *")) {
        const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
        if (!own || !element.checkVisibility() || element.closest(".unseen, script")) continue;
        const style = getComputedStyle(element);
        const color = element instanceof SVGElement ? style.fill : style.color;
        const pair = [luminance(channels(color)), luminance(ground(element))].sort((a, b) => b - a);
        rows.push([element.textContent.trim().slice(0, 40), (pair[0] + 0.05) / (pair[1] + 0.05)]);
    }
    return rows;
}"""


def test_all_words_have_the_contrast_that_reading_takes(visit):
    page = visit(refusals=[400])
    rows, schemes = [], ("light", "dark")

    def look():
        for scheme in schemes:
            page.emulate_media(color_scheme=scheme)
            ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (int(re.search(r"\d+", ground)[0]) < 128) is (scheme == "dark")
            rows.extend([scheme, *row] for row in page.evaluate(CONTRAST))

    page.click("#sample")
    expect(page.locator("#answer")).to_be_visible()
    slide(page, "alpha", 0.05)
    page.wait_for_timeout(400)  # items have appeared
    look()
    slide(page, "alpha", 0.01)
    look()
    give(page, b"none")
    expect(page.locator("#error")).to_be_visible()
    look()
    assert len(rows) > 160
    assert [row for row in rows if row[2] < 4.5] == []


@pytest.mark.parametrize("kind", ["address", "of_vectors"])
def test_all_controls_have_names_that_are_read_out(visit, kind, request):
    page = visit(request.getfixturevalue(kind), refusals=[404])
    page.click("#sample")
    expect(page.locator("#answer")).to_be_visible()
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "slider", "combobox", "textbox", "image", "list", "region"}
    found = [
        (node["role"]["value"], node["name"]["value"])
        for node in tree
        if not node["ignored"] and node["role"]["value"] in roles
    ]
    assert [pair for pair in found if not pair[1]] == []
    names = {name for _, name in found}
    assert {"Alpha", "Delta", "Random query", "A true match is in this set"} <= names
    assert {"Set", "Uncertainty", "Size over alpha", "Query", "Risk"} <= names
    if kind == "address":
        assert any("Choose a picture" in name for name in names)
    else:
        assert {"Vector, as JSON", "Ask this vector"} <= names


def test_little_moves_where_that_is_preferred(visit, picture):
    page = visit(reduced_motion="reduce")
    asked(page, picture)
    moves = "x => [getComputedStyle(x).animationName, getComputedStyle(x).transitionDuration]"
    assert page.locator("#items li").first.evaluate(moves) == ["none", "0s"]


def test_feedback_arrives_once(visit, address, picture):
    page = visit()
    asked(page, picture)
    slide(page, "alpha", 0.42)

    def known():
        rows = page.request.get(f"{address}/monitor").json()["alphas"]
        return [(row["n"], row["misses"]) for row in rows if row["alpha"] == 0.42]

    assert known() == []
    page.click("#none")
    expect(page.locator("#feedback-words")).to_contain_text("Thank you. Noted for alpha 0.42")
    assert known() == [(1, 1)]
    expect(page.locator("#match")).to_be_disabled()
    slide(page, "alpha", 0.43)
    expect(page.locator("#match")).to_be_enabled()
    slide(page, "alpha", 0.42)
    expect(page.locator("#match")).to_be_disabled()  # the same query tells nothing new


def test_a_server_that_keeps_no_feedback_says_so(visit, of_vectors):
    page = visit(of_vectors, refusals=[404, 409])
    page.click("#sample")
    slide(page, "alpha", 0.3)
    page.click("#match")
    expect(page.locator("#feedback-words")).to_have_text("This server keeps no feedback.")
    expect(page.locator("#match")).to_be_hidden()


def test_a_token_is_asked_for_and_kept(visit, pictures, picture):
    with running(pictures, token=TOKEN) as address:
        page = visit(address, refusals=[401])
        dialog = page.get_by_role("dialog", name="Token")
        dialog.get_by_label("Token").fill("a-wrong-one")
        page.keyboard.press("Enter")
        expect(dialog).to_contain_text("does not take that token")
        dialog.get_by_label("Token").fill(TOKEN)
        dialog.get_by_role("button", name="Use this token").click()
        expect(dialog).to_be_hidden()
        asked(page, picture)
        expect(page.locator("#items li:visible img").first).to_be_visible()
        page.reload()
        asked(page, picture)
        expect(dialog).to_be_hidden()
        page.context.close()


def test_alarm_and_trouble_are_shown_in_words(visit):
    ready = {"ready": True, "source": "here", "version": "1", "alarm": True, "trouble": "no disk"}
    page = visit(
        before=lambda page: page.route("**/ready", lambda route: route.fulfill(json=ready))
    )
    banner = page.locator("#banner")
    expect(banner).to_contain_text("more sets lack a true match than the guarantee allows")
    expect(banner).to_contain_text("A new version of the retriever is not taken. no disk.")


def test_a_query_is_drawn_beside_the_calibration_queries(visit, pictures, address, picture):
    page = visit()
    asked(page, picture)
    form = {"picture": {"name": "q.png", "mimeType": "image/png", "buffer": picture}}
    found = page.request.post(f"{address}/explore", multipart=form).json()
    known = page.request.get(f"{address}/guarantees").json()
    bars = page.locator("#histogram rect")
    assert bars.count() == len(known["histogram"]["counts"])
    share = round(100 * found["uncertainty_rank"])
    assert f" {share} % " in page.inner_text("#rank")
    below = page.locator("#histogram rect.below").count()
    assert known["histogram"]["edges"][below] <= found["largest"]["uncertainty"]

    slide(page, "alpha", 0.2)
    retriever = rcir.load(pictures)
    calibration = retriever.search_labelled(retriever.calibration_queries).known("queries")
    answers = retriever.retrieve(calibration, 0.2, 0.1, simultaneous=True)
    mean = np.mean([each.size for each in answers])
    assert f"; the mean of calibration queries is {mean:.2f}." in page.inner_text("#curve-words")
    size = found["sizes"][found["alphas"].index(0.2)]
    assert page.inner_text("#curve-words").startswith(f"At alpha 0.20: {size} item")
    assert page.get_attribute("#curve svg", "aria-label") == page.inner_text("#curve-words")


def test_the_page_loads_nothing_from_elsewhere_and_runs_no_text(chromium, address):
    context, requests = chromium.new_context(), []
    page = context.new_page()
    page.on("request", lambda one: requests.append(one.url))
    page.goto(address)
    expect(page.locator("#drop")).to_be_visible()
    assert {url.split("/")[2] for url in requests} == {address.split("/")[2]}
    refused = page.evaluate(
        """() => new Promise((resolve) => {
            addEventListener("securitypolicyviolation", (e) => resolve(e.violatedDirective));
            const script = document.createElement("script");
            script.textContent = "window.ran = true";
            document.body.append(script);
        })"""
    )
    assert refused == "script-src-elem"
    assert page.evaluate("window.ran") is None
    context.close()
