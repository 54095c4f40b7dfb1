"""The page of a server, used by a browser: sets, refusals, feedback."""

import re

import numpy as np
import pytest

import rcir
from tests.serving.browsing import DELTAS, NEEDED, asked, expect, give, ids, slide

pytestmark = NEEDED


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


def test_feedback_arrives_once(visit, address, picture):
    page = visit()
    asked(page, picture)
    slide(page, "alpha", 0.42)

    def known():
        metrics = page.request.get(f"{address}/metrics").text()
        return [line for line in metrics.splitlines() if line.startswith("rcir_feedback_total")]

    assert known() == []
    page.click("#none")
    expect(page.locator("#feedback-words")).to_contain_text("Thank you. Noted for alpha 0.42")
    assert known() == ['rcir_feedback_total{match="false"} 1.0']
    # Alpha was chosen after looking: of such sets any share may miss.
    assert page.request.get(f"{address}/monitor").json()["guarantees"] == []
    expect(page.locator("#match")).to_be_disabled()
    slide(page, "alpha", 0.43)
    expect(page.locator("#match")).to_be_enabled()
    slide(page, "alpha", 0.42)
    expect(page.locator("#match")).to_be_disabled()  # the same query tells nothing new
