"""The page of a server for whoever uses it: by keyboard, small screens, readers, tokens."""

import re

import numpy as np
import pytest

import rcir
from tests.serving.browsing import NEEDED, TOKEN, asked, expect, give, put, running, slide

pytestmark = NEEDED


def test_pictures_are_dropped_and_pasted(visit, picture):
    page = visit()
    put(page, "drop", picture)
    expect(page.locator("#answer")).to_be_visible()
    page.reload()
    expect(page.locator("#answer")).to_be_hidden()
    expect(page.locator("#drop")).to_be_visible()
    put(page, "paste", picture)
    expect(page.locator("#answer")).to_be_visible()


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
