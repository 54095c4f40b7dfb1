"""The page of a server in a browser: sets, refusals, feedback, and use by everybody."""

import itertools
import re
import shutil
from copy import copy

import numpy as np
import pytest

import rcir
from tests.serving.conftest import png, running

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect
expect.set_options(timeout=60_000)
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
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


@pytest.fixture(scope="module")
def pictures(retriever, tmp_path_factory):
    """The folder of a retriever of pictures that names its data set."""
    folder = tmp_path_factory.mktemp("pictures")
    loaded = rcir.load(retriever.save(folder / "plain"))
    options = SERVED_DATA | {"calibration": 400}
    loaded.origin = {"data": {"name": "digits", "options": options}}
    return loaded.save(folder / "retriever")


@pytest.fixture(scope="module")
def address(pictures, tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "feedback.db"
    with running(pictures, poll=0, store=store) as port:
        yield f"http://127.0.0.1:{port}"


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
def vector_address(few):
    with running(few, poll=0) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def visit(chromium, address):
    """`visit(refusals=(), **options)`: the page; errors in its console fail the test, other than
    responses with a status that `refusals` names.
    """
    contexts, errors, allowed = [], [], set()

    def record(text):
        status = re.search(r"Failed to load resource.*(status of (\d+)|net::)", text)
        if status is None or int(status[2] or 0) not in allowed:
            errors.append(text)

    def visit(place=address, refusals=(), before=lambda page: None, **options):
        allowed.update(refusals)
        context = chromium.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(120_000)
        page = context.new_page()
        page.on("console", lambda message: message.type == "error" and record(message.text))
        page.on("pageerror", lambda error: record(str(error)))
        before(page)
        page.goto(place)
        expect(page.locator("#source")).not_to_be_empty()
        expect(page.locator("#set")).to_have_attribute("aria-busy", "false")
        return page

    yield visit
    for context in contexts:
        context.close()
    assert errors == []


@pytest.fixture(scope="module")
def picture(splits):
    """A hard query, as a file."""
    return png(splits.test.images[3])


def upload(page, content, name="query.png"):
    page.set_input_files("#file", {"name": name, "mimeType": "image/png", "buffer": content})


def answered(page, content=None):
    """Send the query of a picture, or wait for the first, random one; wait for its answer."""
    if content is not None:
        upload(page, content)
        expect(page.locator("#query-note")).to_have_text("your picture")
    expect(page.locator("#background")).to_be_visible()
    expect(page.locator("#set")).to_have_attribute("aria-busy", "false")
    return page


def search(page, vector):
    page.locator("#vector-input").evaluate("details => { details.open = true }")
    page.fill("#vector", str(vector))
    page.get_by_role("button", name="Search this vector").click()


def ids(page, kind="in"):
    items = page.locator(f"#items li.{kind}")
    return items.evaluate_all("items => items.map(item => item.dataset.item)")


def percent(probability):
    if 0.005 <= probability <= 0.995:
        return f"{probability * 100:.0f}%"
    return "<1%" if probability < 0.5 else ">99%"


def slide(page, name, value):
    page.locator(f"#{name}").fill(str(value))


# Sets


def test_a_picture_gets_the_set_of_each_alpha_without_another_request(visit, pictures, picture):
    page, retriever = answered(visit(), picture), rcir.load(pictures)
    requests, sizes = [], set()
    page.on("request", lambda request: requests.append(request.url))
    for alpha in (0.5, 0.2, 0.35, 0.1, 0.05):
        slide(page, "alpha", alpha)
        answer = retriever.retrieve(picture, alpha, 0.1, simultaneous=True)
        assert ids(page) == list(answer.ids)
        assert page.text_content("#sentence") == str(answer.guarantee)
        assert page.inner_text("#size") == f"{answer.size} image{'s' * (answer.size > 1)}"
        assert page.inner_text("#chance b") == percent(answer.match_probability)
        # Those of further items are of the largest set, see `AtLevels`.
        assert page.text_content("#items .line b") == percent(answer.probabilities[0])
        # The others follow in the order of larger sets, behind the boundary.
        larger, outside = (
            retriever.retrieve(picture, 0.04, 0.5, simultaneous=True),
            ids(page, "out"),
        )
        assert (ids(page) + outside)[: larger.size] == list(larger.ids)
        assert ids(page, "first") == outside[:1]
        expect(page.locator("#items li:visible")).to_have_count(12)
        expect(page.locator("#further")).to_be_visible(visible=answer.size > 12)
        sizes.add(answer.size)
    assert len(sizes) > 2
    page.wait_for_timeout(400)  # longer than changes of delta wait
    assert [url for url in requests if not re.search(r"^blob:|/items/|/ready$", url)] == []


def test_changes_of_delta_send_one_request_and_the_newest_answer_counts(visit, pictures, picture):
    page, retriever = answered(visit(), picture), rcir.load(pictures)
    delayed, bodies = [], []

    def delay_the_first(route):
        bodies.append(route.request.post_data_buffer)
        delayed.append(route) if not delayed else route.continue_()

    page.route("**/explore", delay_the_first)
    with page.expect_request("**/explore", timeout=120_000):
        slide(page, "delta", 2)
    for place in (3, 5, 4):  # faster than the page sends requests
        slide(page, "delta", place)
    answer = retriever.retrieve(picture, 0.1, DELTAS[4], simultaneous=True)
    expect(page.locator("#sentence")).to_have_text(str(answer.guarantee))
    delayed[0].abort()
    assert len(bodies) == 2
    assert b"0.02" in bodies[1]
    assert ids(page) == list(answer.ids)


def test_distinct_labels_and_groups_are_requested(visit, pictures, picture):
    page, retriever, options = answered(visit(), picture), rcir.load(pictures), {}
    for name, value in (("distinct", "label"), ("group", "True")):
        page.select_option(f"#{name}", value)
        options[name] = value
        answer = retriever.retrieve(picture, 0.1, 0.1, simultaneous=True, **options)
        expect(page.locator("#sentence")).to_have_text(str(answer.guarantee))
        assert ids(page) == list(answer.ids)


def test_a_random_query_is_answered_at_once_with_pictures_and_marks(visit):
    page = answered(visit())
    slide(page, "alpha", 0.05)
    label, matches = page.inner_text("#truth").removeprefix("True label: "), []
    for row in page.locator("#items li.in").all():
        mark, name = row.locator(".name").text_content().split(": ")
        matches.append(name == f"label {label}")
        assert mark == ("true match" if matches[-1] else "not a match")
    count = page.inner_text("#matches")
    assert count.startswith(f"{sum(matches)} of {len(matches)} " if any(matches) else "Missed")
    first = page.locator("#items li:visible img").first
    expect(first).to_be_visible()
    assert first.evaluate("image => [image.naturalWidth, image.naturalHeight]") == [16, 8]
    first.click()
    expect(page.get_by_role("dialog").get_by_role("img")).to_have_count(2)


def test_a_vector_gets_its_set_and_other_text_is_refused(visit, few, vector_address):
    page, retriever = answered(visit(vector_address, refusals=[400])), rcir.load(few)
    for name in ("empty", "key", "group", "add", "open", "feedback"):
        expect(page.locator(f"#{name}")).to_be_hidden()
    vector = np.random.default_rng(5).standard_normal(8).astype(np.float32).tolist()
    with page.expect_response("**/explore"):
        search(page, vector)
    answered(page)
    slide(page, "alpha", 0.3)
    answer = retriever.retrieve(np.asarray(vector, np.float32), 0.3, 0.1, simultaneous=True)
    assert ids(page) == list(answer.ids)  # as text, whatever they hold
    assert page.locator("#items li.in .id").all_inner_texts() == ids(page)
    assert page.locator("#items img:visible").count() == 0
    for text, word in (("[1, 2", "JSON"), ('{"a": 1}', "no vector"), ("[1, 2]", "8")):
        search(page, text)
        expect(page.locator("#error-words")).to_contain_text(word)


@pytest.fixture(scope="module")
def strangers(tmp_path_factory):
    """The folder of a retriever of vectors, and queries, some with labels that it does not hold."""
    rng = np.random.default_rng(0)
    labels = np.where(rng.uniform(size=1700) < 0.05, 6, rng.integers(6, size=1700))
    vectors = rng.standard_normal((7, 8))[labels] + 0.7 * rng.standard_normal((1700, 8))
    vectors = vectors.astype(np.float32).round(4)
    known = np.flatnonzero(labels < 6)[:300]
    others = np.setdiff1d(np.arange(1700), known)
    made = rcir.Retriever.from_embeddings(vectors[known], labels=labels[known])
    with pytest.warns(UserWarning, match="no gallery item"):
        made.calibrate(vectors[others[8:]], labels[others[8:]], tuning="queries")
    unlike = 2 * rng.standard_normal((4, 8)).astype(np.float32)
    queries = [*vectors[others[:8]].tolist(), *unlike.round(4).tolist()]
    return made.save(tmp_path_factory.mktemp("strangers") / "retriever"), queries


def test_sets_can_be_empty_and_risk_equal_where_they_are_offered(visit, strangers, tmp_path):
    folder, queries = strangers
    retriever, sizes = rcir.load(folder), set()
    with running(folder, poll=0, store=tmp_path / "feedback.db") as port:
        page = answered(visit(f"http://127.0.0.1:{port}", refusals=[409]))
        for kind, options in (("empty", {"beta": 0.3}), ("balance", {"balance": "uncertainty"})):
            slide(page, "alpha", 0.3)
            page.get_by_role("switch", name=kind if kind == "empty" else "equal risk").click()
            expect(page.locator("#beta")).to_be_visible(visible=kind == "empty")
            if kind == "empty":
                slide(page, "beta", 0.3)
            for vector in queries:
                with page.expect_response("**/retrieve"):
                    search(page, vector)
                expect(page.locator("#set")).to_have_attribute("aria-busy", "false")
                answer = retriever.retrieve(np.asarray(vector, np.float32), 0.3, 0.1, **options)
                words = f"{answer.size} item{'s' * (answer.size > 1)}"
                words = words if answer.size else "Probably no match"
                left = page.locator("#gauge i").evaluate("mark => parseFloat(mark.style.left)")
                assert left == pytest.approx(100 * answer.unlike, abs=0.01)
                assert page.locator("body.odd").count() == (answer.unlike <= 0.05)
                expect(page.locator("#sentence")).to_have_text(str(answer.guarantee))
                assert page.inner_text("#size") == words
                assert ids(page) == list(answer.ids)
                assert len(ids(page) + ids(page, "out")) == 6  # one of each label
                sizes.add(answer.size)
            expect(page.locator("#curve-section")).to_be_hidden()
            with page.expect_request("**/retrieve") as request:
                page.click("#none")
            sent = request.value.post_data_json
            assert {name: sent.get(name) for name in options} == options
            assert (sent["alpha"], sent["monitored"], sent.get("simultaneous")) == (
                0.3,
                False,
                None,
            )
        page.context.close()
    assert {0, 1, 2} <= sizes


def test_added_pictures_belong_to_one_query(visit, retriever, splits, tmp_path):
    labels = np.repeat(splits.calibration.labels[::2], 2)
    visits = np.repeat(np.arange(len(labels) // 2), 2).astype(str)
    made = copy(retriever)
    made.calibrate(list(splits.calibration.images[: len(visits)]), labels, encounters=visits)
    pictures = list(splits.test.images[:3])
    with running(made.save(tmp_path / "encounters"), poll=0) as port:
        page = visit(f"http://127.0.0.1:{port}", refusals=[404])
        expect(page.locator("#error-words")).to_contain_text("random query")
        for number, picture in enumerate(pictures, 1):
            page.click("#add")
            with page.expect_response("**/explore"):
                upload(page, png(picture))
            expect(page.locator("#query-pictures img")).to_have_count(number)
        slide(answered(page), "alpha", 0.5)
        answer = made.retrieve(pictures, 0.5, 0.1, simultaneous=True, together=True)
        assert ids(page) == list(answer.ids)
        page.context.close()


# Refusals


def test_an_unattainable_alpha_is_reported_with_the_smallest_possible(visit, few, vector_address):
    page = answered(visit(vector_address))
    slide(page, "alpha", 0.01)
    retriever = rcir.load(few)
    vector = retriever.calibration.calibration_queries.vectors[0]
    with pytest.raises(rcir.RiskUnattainable) as refused:
        retriever.retrieve(vector, 0.01, 0.1, simultaneous=True)
    smallest = np.ceil(refused.value.minimum_alpha * 100) / 100
    expect(page.locator("#promise")).to_contain_text(f" {smallest:.2f}.")
    expect(page.locator("#items li.in")).to_have_count(0)
    slide(page, "alpha", smallest)
    assert len(ids(page)) >= 1


REFUSALS = {
    409: ({"error": "risk-unattainable", "message": "few", "minimum_alpha": 0.123411}, "0.1235"),
    413: ({"error": "too-large", "message": "more than 5 bytes"}, "more than 5 bytes"),
    429: ({"error": "busy", "message": "9 wait"}, "more queries"),
    503: ({"error": "stopping", "message": "it stops"}, "stopping"),
    500: ({"error": "failed", "message": "its log says why"}, "its log says why"),
    0: (None, "does not answer"),
}


def test_refusals_are_shown_in_words_and_can_be_tried_again(visit, picture):
    page = answered(visit(refusals=[400, *REFUSALS]))
    error, again = page.locator("#error"), page.locator("#again")

    def refuse(status, body):
        return lambda route: route.fulfill(status=status, json=body) if status else route.abort()

    for status, (body, words) in REFUSALS.items():
        page.route("**/explore", refuse(status, body))
        upload(page, picture)
        expect(error).to_contain_text(words)
        page.unroute("**/explore")
        if status in (409, 413):
            expect(again).to_be_hidden()  # the outcome would be the same
        else:
            again.click()
            answered(page)
    upload(page, b"This is a text.", "text.txt")
    expect(page.get_by_role("alert").filter(visible=True)).to_contain_text("not a picture")
    expect(page.locator("#items li")).to_have_count(0)  # they were those of another query
    answered(page, picture)
    expect(error).to_be_hidden()


def test_a_token_is_requested_and_kept(visit, pictures, picture):
    with running(pictures, poll=0, token=TOKEN) as port:
        page = visit(f"http://127.0.0.1:{port}", refusals=[401])
        dialog = page.get_by_role("dialog", name="Token")
        dialog.get_by_label("Token").fill("a-wrong-one")
        page.keyboard.press("Enter")
        expect(dialog).to_contain_text("refused that token")
        dialog.get_by_label("Token").fill(TOKEN)
        dialog.get_by_role("button", name="Use this token").click()
        expect(dialog).to_be_hidden()
        answered(page, picture)
        expect(page.locator("#items li:visible img").first).to_be_visible()
        page.reload()
        answered(page, picture)
        expect(dialog).to_be_hidden()
        page.context.close()


def test_the_page_loads_nothing_from_elsewhere_and_runs_no_text(chromium, address):
    context, requests = chromium.new_context(), []
    page = context.new_page()
    page.on("request", lambda request: requests.append(request.url))
    page.goto(address)
    expect(page.locator("#items img:visible").first).to_be_visible()
    assert {url.split("/")[2] for url in requests} == {address.split("/")[2]}
    violation = page.evaluate(
        """() => new Promise((resolve) => {
            addEventListener("securitypolicyviolation", (e) => resolve(e.violatedDirective));
            const script = document.createElement("script");
            script.textContent = "window.ran = true";
            document.body.append(script);
        })"""
    )
    assert violation == "script-src-elem"
    assert page.evaluate("window.ran") is None
    context.close()


# Feedback


def test_feedback_arrives_once(visit, address, picture):
    page = answered(visit(), picture)
    slide(page, "alpha", 0.42)

    def feedback():
        metrics = page.request.get(f"{address}/metrics").text()
        return sum(map(float, re.findall(r"rcir_feedback_total.*false.* (\S+)", metrics)))

    before = feedback()
    page.click("#none")
    expect(page.locator("#feedback-words")).to_contain_text("0.42")
    assert feedback() == before + 1
    # Alpha was chosen after looking: any share of such sets may miss.
    assert page.request.get(f"{address}/monitor").json()["guarantees"] == []
    expect(page.locator("#match")).to_be_disabled()
    slide(page, "alpha", 0.43)
    expect(page.locator("#match")).to_be_enabled()
    slide(page, "alpha", 0.42)
    expect(page.locator("#match")).to_be_disabled()  # the same query tells nothing new


def test_an_alarm_and_a_refused_version_are_shown(visit):
    ready = {"ready": True, "source": "here", "version": "1", "alarm": True, "trouble": "no disk"}
    ready["drift_alarm"] = True
    page = visit(
        before=lambda page: page.route("**/ready", lambda route: route.fulfill(json=ready))
    )
    expect(page.locator("#banner")).to_contain_text("than the guarantee allows")
    expect(page.locator("#banner")).to_contain_text("no disk")
    expect(page.locator("#banner")).to_contain_text("Queries have changed")


# Use by keyboard, on small screens, by screen readers

PUT = """([way, bytes]) => {
    const data = new DataTransfer();
    data.items.add(new File([new Uint8Array(bytes)], "q.png", { type: "image/png" }));
    const options = { dataTransfer: data, clipboardData: data, bubbles: true };
    dispatchEvent(way === "drop" ? new DragEvent(way, options) : new ClipboardEvent(way, options));
}"""


@pytest.mark.parametrize("way", ["drop", "paste"])
def test_pictures_are_dropped_and_pasted(visit, picture, way):
    page = answered(visit())
    page.evaluate(PUT, [way, list(picture)])
    expect(page.locator("#query-note")).to_have_text("your picture")
    answered(page)


FOCUS = """() => {
    const element = document.activeElement;
    const name = element.id || element.dataset.place || element.parentElement.id;
    return [name, getComputedStyle(element).outlineStyle !== "none"];
}"""


def test_everything_works_by_keyboard_and_the_focus_is_visible(visit):
    page, visited = answered(visit()), []

    def tab_to(name):
        while visited[-1:] != [name]:
            page.keyboard.press("Tab")
            element, visible = page.evaluate(FOCUS)
            assert visible, element
            visited.append(element)

    page.evaluate("document.getElementById('file').onclick = () => { window.opened = true }")
    page.keyboard.press("o")
    assert page.evaluate("window.opened")
    for key in ("r", "Enter"):
        with page.expect_response("**/explore"):
            page.keyboard.press(key)
        expect(page.locator("#random")).to_be_enabled()
        if key == "r":
            tab_to("random")
    tab_to("alpha")
    for key, value in (("ArrowLeft", "0.09"), ("Home", "0.01"), ("End", "0.50")):
        page.keyboard.press(key)
        expect(page.locator("#alpha-value")).to_have_text(value)
        assert page.get_attribute("#alpha", "aria-valuetext").startswith(value)
    tab_to("delta")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#sentence")).to_contain_text("at least 0.95")
    page.keyboard.press("]")
    expect(page.locator("#alpha-value")).to_have_text("0.50")
    page.keyboard.press("[")
    expect(page.locator("#alpha-value")).to_have_text("0.49")
    tab_to("0")
    levels = ["alpha", "delta", "distinct", "group", "balance"]
    assert visited == ["random", "open", *levels, "0"]
    page.keyboard.press("ArrowRight")
    assert page.evaluate(FOCUS) == ["1", True]
    tab_to("background")
    assert visited[-4:] == ["11", "match", "none", "background"]
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#feedback-words")).to_contain_text("Thank you")


def test_small_screens_do_not_scroll_sideways_and_motion_is_reduced(visit, picture):
    page = visit(viewport={"width": 360, "height": 640}, reduced_motion="reduce")
    slide(answered(page, picture), "alpha", 0.05)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    right = "[...document.querySelectorAll('main *')].map(x => x.getBoundingClientRect().right)"
    assert max(page.evaluate(right)) <= 360
    bar = page.locator("#guarantee").bounding_box()
    assert bar["y"] + bar["height"] == 640  # alpha and the size stay in view
    expect(page.locator("#alpha-size")).to_contain_text(page.inner_text("#size"))
    page.get_by_text("More", exact=False).first.click()
    expect(page.locator("#delta")).to_be_visible()
    moves = "x => [getComputedStyle(x).animationName, getComputedStyle(x).transitionDuration]"
    assert page.locator("#items img").first.evaluate(moves) == ["none", "0s"]


def test_no_state_of_the_page_breaks_the_rules_of_axe(visit, vector_address, strangers):
    axe = pytest.importorskip("axe_core_python.sync_playwright").Axe()

    def check(page, state):
        for scheme, width in itertools.product(("light", "dark"), (1280, 390)):
            page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
            page.set_viewport_size({"width": width, "height": 800})
            violations = axe.run(page)["violations"]
            assert {each["impact"] for each in violations} <= {"minor"}, (state, violations)

    page = answered(visit(refusals=[400]))
    page.locator("#background").evaluate("details => { details.open = true }")
    check(page, "answered")
    page.locator("#items button").first.click()
    check(page, "comparison")
    page.keyboard.press("Escape")
    upload(page, b"a text", "text.txt")
    expect(page.locator("#error")).to_be_visible()
    check(page, "refused")
    check(answered(visit(vector_address)), "without pictures")
    with running(strangers[0], poll=0) as port:
        page = answered(visit(f"http://127.0.0.1:{port}"))
        search(page, strangers[1][-1])
        expect(page.locator("body.odd")).to_be_visible()
        check(page, "unlike")
        page.context.close()
