"""The viewer's pages in a headless Chromium, opened from disk."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from page_waits import settle
from runs import HOSTILE, write_long, write_run

from rlflow.observe.records import RunFolder
from rlflow.observe.viewer import write_view

PLACES = (
    *("", "#/steps", "#/steps/3", "#/trajectories", "#/trajectory/e0r5a0_2_0", "#/group/e0r5a0", "#/config"),
    "#/trajectory/v3r0a0_0_0",
)
OpenPage = Callable[..., Any]
NAMELESS = """() => [...document.querySelectorAll("a[href], button, input, select, [tabindex='0']")]
    .filter((n) => n.checkVisibility() && !(n.textContent.trim() || n.ariaLabel || n.labels?.length))
    .map((n) => n.outerHTML)"""
TOO_SMALL = """() => [...document.querySelectorAll("main *")]
    .filter((n) => n.checkVisibility() && n.childNodes.length && !n.closest("svg") && !n.classList.contains("esc"))
    .filter((n) => parseFloat(getComputedStyle(n).fontSize) < 11.5).map((n) => n.outerHTML.slice(0, 80))"""
# Milliseconds from an address to all 200 tokens of its trajectory, one address after the other.
TIME_TO_TOKENS = """async (keys) => {
    const there = (key) => document.querySelector("#h-trajectory").textContent === key
        && document.querySelectorAll("[role=listbox] .tok").length === 200;
    const took = [];
    for (const key of keys) {
        const begin = performance.now();
        location.hash = `#/trajectory/${key}`;
        while (!there(key)) await new Promise(requestAnimationFrame);
        took.push(performance.now() - begin);
    }
    return took;
}"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("view")
    changes = {"actor_rollout_ref.rollout.n": 1}
    return write_view(RunFolder(write_run(folder / "run")), folder / "out", changes=changes).index.parent


@pytest.fixture(scope="module")
def long_pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 steps of 64 trajectories of 200 tokens."""
    folder = tmp_path_factory.mktemp("long")
    return write_view(RunFolder(write_long(folder / "run", steps=12)), folder / "out").index.parent


def heading(page: Any) -> str:
    return page.locator("section:not([hidden]) > h1").inner_text()


def focused(page: Any) -> str:
    return page.evaluate("document.activeElement.textContent.trim()")


def press(page: Any, *keys: str) -> None:
    for key in keys:
        page.keyboard.press(key)
        settle(page)


def test_every_page_opens_from_disk_without_network_or_errors(open_page: OpenPage, pages: Path) -> None:
    for place in PLACES:
        page = open_page(pages, place)
        assert page.locator("section:not([hidden])").count() == 1, place
        assert not page.locator("#problem").is_visible(), place
        # What the eye needs is there for the ear too: one first heading, names for all that can be operated.
        assert page.locator("h1:visible").count() == 1
        assert page.evaluate(NAMELESS) == [], place


@pytest.mark.parametrize("place", PLACES)
def test_narrow_screens_scroll_down_only(open_page: OpenPage, pages: Path, place: str) -> None:
    page = open_page(pages, place, width=360, height=740)
    for details in page.locator("details:visible").all():
        details.evaluate("node => { node.open = true; }")
    sizes = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert sizes == [360, 360]
    assert page.evaluate(TOO_SMALL) == []


def test_hostile_text_is_inert(open_page: OpenPage, pages: Path) -> None:
    for place in ("#/trajectory/e0r5a0_2_0", "#/group/e0r5a0", "#/trajectories?q=script", "#/steps/3"):
        page = open_page(pages, place)
        assert page.evaluate("window.pwned") is None
        assert page.locator("main script, main img, main iframe, main object, main style").count() == 0
    page = open_page(pages, "#/trajectory/e0r5a0_2_0")
    text = page.locator("[role=listbox]").inner_text()
    assert HOSTILE[0] in text and HOSTILE[1] in text and HOSTILE[5] in text
    for char in "\x00\x1b\u202e\u2066\u2028":
        assert char not in text
    assert "U+202E" in text and "U+0000" in text and "U+D83D" in text
    assert page.locator("dt", has_text="__proto__").count() == 1
    assert page.evaluate("({}).pwned === undefined && Object.prototype.toString.call({}) === '[object Object]'")


def test_a_curve_is_read_with_pointer_and_keys(open_page: OpenPage, pages: Path) -> None:
    page = open_page(pages)
    figure = page.locator("figure", has_text="Entropy").first
    plot = figure.locator(".plot")
    box = plot.bounding_box()
    before = page.evaluate("document.documentElement.scrollHeight")
    plot.hover(position={"x": box["width"] - 14, "y": 60})
    assert figure.locator(".readout").inner_text().startswith("step 3:")
    assert page.locator("figure", has_text="Reward").first.locator(".readout").inner_text().startswith("step 3:")
    assert page.evaluate("document.documentElement.scrollHeight") == before, "nothing jumps"
    plot.focus()
    press(page, "Home")
    assert figure.locator(".readout").inner_text().startswith("step 1:")
    assert page.locator("#announce").inner_text().startswith("step 1:")
    press(page, "ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft")
    assert figure.locator(".readout").inner_text().startswith("step 2:")
    figure.locator("summary").click()
    figure.locator("table").wait_for()
    assert figure.locator("table tbody tr").count() == 3
    plot.focus()
    press(page, "End", "Enter")
    assert heading(page) == "Step 3"
    assert focused(page) == "Step 3", "the focus goes to the new page's heading"


def test_the_skip_link_comes_first_and_tab_leaves_everything(open_page: OpenPage, pages: Path) -> None:
    page = open_page(pages, "#/trajectory/e0r4a0_0_0")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Tab")
    assert focused(page) == "Skip to content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    assert page.url.endswith("#/trajectory/e0r4a0_0_0"), "the place stays"
    seen = []
    for _ in range(80):
        page.keyboard.press("Tab")
        here = page.evaluate(
            "(() => { const n = document.activeElement; if (n === document.body) return 'end';"
            " const s = getComputedStyle(n.matches('.chooser input') ? n.nextElementSibling : n);"
            " return `${n.tagName} ${n.getAttribute('role')} ${s.outlineStyle}`; })()"
        )
        if here == "end":
            break
        seen.append(here)
    assert here == "end", "no trap"
    assert any("listbox" in item for item in seen)
    assert all(item.endswith((" solid", " auto")) for item in seen), "the focus can be seen"


def test_keys_walk_from_the_list_to_trajectories_and_back(open_page: OpenPage, pages: Path) -> None:
    page = open_page(pages)
    press(page, "3")
    assert heading(page) == "Trajectories"
    press(page, "j", "j", "j")
    assert focused(page) == "e0r0a0_0_0"
    press(page, "k", "j", "Enter")
    assert heading(page) == "e0r0a0_0_0"
    press(page, "j")
    assert heading(page) == "e0r0a0_1_0"
    press(page, "k", "k", "k")
    assert heading(page) == "v0r0a0_0_0"
    press(page, "k")
    assert page.locator("#announce").inner_text() == "This is the first one."
    press(page, "j", "j", "g")
    assert heading(page) == "Group e0r0a0"
    press(page, "u")
    assert heading(page) == "Trajectories"
    press(page, "2")
    assert heading(page) == "Steps"
    press(page, "?")
    assert page.locator("#keys").is_visible()
    page.locator("#single-keys").uncheck()
    page.keyboard.press("Escape")
    assert not page.locator("#keys").is_visible()
    press(page, "1")
    assert heading(page) == "Steps", "single letters can be switched off"


def test_the_order_of_the_list_is_the_order_of_j_and_k(open_page: OpenPage, pages: Path) -> None:
    page = open_page(pages, "#/trajectories?file=train-3&sort=key&dir=desc")
    assert page.locator(".list tbody th").all_inner_texts()[:2] == ["e0r5a0_2_0", "e0r5a0_1_0"]
    page.locator("a", has_text="e0r5a0_2_0").click()
    settle(page)
    press(page, "j")
    assert heading(page) == "e0r5a0_1_0"
    press(page, "u")
    assert "file=train-3&sort=key&dir=desc" in page.url, "back in the same list"
    page.go_back()
    settle(page)
    assert heading(page) == "e0r5a0_1_0"


def test_search_filter_and_sort(open_page: OpenPage, pages: Path) -> None:
    page = open_page(pages)
    press(page, "/")
    page.wait_for_function("() => document.activeElement.id === 'search'")
    page.keyboard.type("javascript:window")
    count = page.locator("#list-count")
    page.wait_for_function("() => document.querySelector('#list-count').textContent.startsWith('1 of 19')")
    assert page.evaluate("document.activeElement.id") == "search", "typing keeps its place"
    assert page.locator(".list tbody th").all_inner_texts() == ["e0r5a0_2_0"]
    assert "q=javascript" in page.url
    page.locator("#search").fill("no such words")
    page.wait_for_function("() => document.querySelector('#list-count').textContent.startsWith('0 of 19')")
    assert page.get_by_text("No trajectory fits.").is_visible()
    page.locator("#search").fill("")
    page.locator("#list-reward").select_option("invalid")
    page.wait_for_function("() => document.querySelector('#list-count').textContent.startsWith('1 of 19')")
    assert page.locator(".list tbody th").all_inner_texts() == ["e0r4a0_1_0"]
    page.locator("#list-reward").select_option("")
    page.locator("#list-file").select_option("train-1")
    page.wait_for_function("() => document.querySelector('#list-count').textContent.startsWith('6 of 19')")
    header = page.locator(".list thead th", has_text="reward")
    header.locator("a").click()
    page.wait_for_function("() => document.querySelector('[aria-sort=ascending]')")
    rewards = [float(text) for text in page.locator(".list td[data-title=reward]").all_inner_texts()]
    assert rewards == sorted(rewards)
    header.locator("a").click()
    page.wait_for_function("() => document.querySelector('[aria-sort=descending]')")
    assert page.locator(".list td[data-title=reward]").all_inner_texts()[0] == "1"
    assert count.inner_text() == "6 of 19 trajectories"


def test_addresses_lead_to_their_page_and_wrong_ones_say_so(open_page: OpenPage, pages: Path) -> None:
    page = open_page(pages, "#/trajectory/e0r2a0_1_0")
    assert heading(page) == "e0r2a0_1_0" and page.title().startswith("e0r2a0_1_0 ·")
    assert page.locator("nav [aria-current=page]").inner_text() == "Trajectories"
    page.get_by_role("link", name="Step 2").click()
    settle(page)
    assert heading(page) == "Step 2" and page.get_by_text("1", exact=True).count() > 0
    page.goto(page.url.split("#")[0] + "#/trajectory/nobody_0_0")
    settle(page)
    assert "no trajectory nobody_0_0" in page.locator("#problem").inner_text()
    page.goto(page.url.split("#")[0] + "#/steps/2")
    settle(page)
    assert not page.locator("#problem").is_visible()
    page.goto(page.url.split("#")[0] + "#/%E0%A4%A/<script>")
    settle(page)
    assert heading(page) == "Overview"


def test_tokens_are_walked_coloured_and_listed(open_page: OpenPage, pages: Path) -> None:
    page = open_page(pages, "#/trajectory/e0r4a0_0_0")
    row = next(row for row in RunFolder(pages.parent / "run").trajectories(3, "train") if row.key == "e0r4a0_0_0")
    box = page.locator("[role=listbox]")
    page.get_by_role("radio", name="Entropy").check()
    box.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    chosen = page.locator("[aria-selected=true]")
    assert chosen.get_attribute("id") == "tok-1" == box.get_attribute("aria-activedescendant")
    assert re.fullmatch(r"token 1: .*, Entropy [\d.]+", chosen.get_attribute("aria-label"))
    numbers = dict(
        zip(
            page.locator(".inspector dt").all_inner_texts(),
            page.locator(".inspector dd").all_inner_texts(),
            strict=True,
        )
    )
    assert float(numbers["old"].replace("−", "-")) == pytest.approx(row.series["old_log_probs"][1], rel=1e-3)
    assert float(numbers["entropy"]) == pytest.approx(row.series["entropy"][1], rel=1e-3)
    page.keyboard.press("End")
    assert page.locator("[aria-selected=true]").get_attribute("id") == f"tok-{len(row.response_ids) - 1}"
    strengths = page.locator(".tok").evaluate_all("nodes => nodes.map(n => Number(n.style.getPropertyValue('--k')))")
    largest = max(range(len(row.response_ids)), key=lambda i: row.series["entropy"][i] or 0)
    assert strengths[largest] == max(strengths) > 0
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("c")
    assert page.locator("[name=quantity]:checked").get_attribute("value") != "entropy"
    page.get_by_role("radio", name="Mask").check()
    assert page.locator("[role=listbox] .tok.off").count() == row.response_mask.count(0) == 2
    page.get_by_text("All tokens as a table").click()
    page.locator(".tight tbody tr").nth(4).wait_for()
    cells = page.locator(".tight tbody tr").nth(4).locator("td").all_inner_texts()
    assert cells[2] == "0" and len(page.locator(".tight tbody tr").all()) == len(row.response_ids)


def test_a_trajectory_shows_its_life_fields_and_group(open_page: OpenPage, pages: Path) -> None:
    page = open_page(pages, "#/trajectory/e0r4a0_1_0")
    assert "The reward is invalid: the scorer took longer" in page.locator(".banner.bad:visible").inner_text()
    assert page.locator(".states b").all_inner_texts()[:3] == ["issued", "session", "finished"]
    line = page.locator("tr", has=page.locator("th", has_text="old_log_probs")).inner_text()
    assert "old_log_prob_worker_0" in line and "update_actor" in line
    group = page.locator("tr.here")
    assert group.count() == 1 and "e0r4a0_1_0" in group.inner_text()
    val = open_page(pages, "#/trajectory/v3r0a0_0_0")
    assert val.locator("[name=quantity]").evaluate_all("nodes => nodes.map(n => n.value)") == [
        *("surprise", "reward", "mask", "none")
    ]


def test_dark_and_light_are_readable(open_page: OpenPage, pages: Path) -> None:
    def luminance(color: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for dark in (False, True):
        page = open_page(pages, "#/trajectory/e0r4a0_1_0", dark=dark)
        ground = luminance(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert (ground < 0.05) == dark
        surface = luminance(page.locator(".tile").first.evaluate("n => getComputedStyle(n).backgroundColor"))
        for selector in ("main h1:visible", ".hint:visible", ".tile dt:visible", "main a:visible", ".bad:visible"):
            text = luminance(page.locator(selector).first.evaluate("n => getComputedStyle(n).color"))
            for under in (ground, surface):
                contrast = (max(text, under) + 0.05) / (min(text, under) + 0.05)
                assert contrast >= 4.5, (selector, dark, contrast)


def test_steps_show_stages_sessions_and_prompts(open_page: OpenPage, pages: Path) -> None:
    page = open_page(pages, "#/steps")
    rows = page.locator(".timeline tbody tr")
    assert [row.inner_text().split("\t")[0] for row in rows.all()] == ["3", "2", "1", "0"]
    assert "1 of 2 trained, 1 dropped" in rows.nth(1).inner_text()
    assert rows.nth(1).locator(".bar").count() == 6
    page.get_by_text("Seconds of each stage").click()
    assert page.locator("td[data-title=update_actor]").first.inner_text() == "4.00 s"
    page.keyboard.press("j")
    press(page, "Enter")
    assert heading(page) == "Step 3"
    assert page.locator(".sessions .lane-row").count() == 8, "six of training, two of validation"


def test_configuration_is_searched(open_page: OpenPage, pages: Path) -> None:
    page = open_page(pages, "#/config")
    page.locator("#config-search").fill("rollout")
    assert page.locator("#config-count").inner_text() == "3 of 9 keys"
    page.get_by_label("only what differs").check()
    assert page.locator("#config-table tbody tr:visible").all_inner_texts()[0].split() == [
        *("actor_rollout_ref.rollout.n", "3", "1")
    ]


def test_long_runs_stay_fast(open_page: OpenPage, long_pages: Path) -> None:
    page = open_page(long_pages)
    loaded = page.evaluate("performance.getEntriesByType('resource').map(entry => entry.name)")
    assert not any("train-" in name or "index.js" in name for name in loaded), "steps are loaded when they are opened"
    page.goto(page.url.split("#")[0] + "#/trajectories")
    settle(page)
    assert page.locator("#list-count").inner_text() == "772 trajectories, 1 to 100 shown"
    took = page.evaluate(TIME_TO_TOKENS, ["e0r80a0_3_0", "e0r80a0_4_0"])
    assert took[0] < 3000 and took[1] < 1500, took
    page.goto(page.url.split("#")[0] + "#/trajectories?page=8")
    settle(page)
    assert page.locator("#page-trajectories .list tbody tr").count() == 72
    assert page.get_by_role("link", name="← Previous").get_attribute("href") == "#/trajectories?page=7"
