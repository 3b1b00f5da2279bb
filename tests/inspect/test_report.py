"""The report in a real headless browser, and the drawings in notebooks."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt._inspect.drawing import byte_bars, layout_drawing, show_ids
from jaxckpt._model.records import MeshRecord

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TIMEOUT = 20_000  # milliseconds
HOSTILE = "</script><img src=x onerror=\"document.title='taken'\">"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))

    def put(shape: tuple[int, ...], *spec: Any, dtype: Any = jnp.float32) -> jax.Array:
        values = np.random.default_rng(0).standard_normal(shape).astype(dtype)
        return jax.device_put(values, NamedSharding(mesh, P(*spec)))

    layer = {"kernel": put((64, 64), "data", "model"), "bias": put((64,), "model")}
    tree = {
        "params": {"layers": [layer] * 6, "embed": put((512, 64), "model", dtype=jnp.bfloat16)},
        "opt_state": {"mu": {"layers": [layer] * 6}},
        HOSTILE: np.arange(3),
        "step": 7,
    }
    path = tmp_path_factory.mktemp("report") / "ckpt"
    jaxckpt.save(path, tree, metadata={"note": HOSTILE})
    return path


@pytest.fixture(scope="module")
def page_file(checkpoint: Path) -> Path:
    file = checkpoint.parent / "report.html"
    file.write_text(jaxckpt.report(checkpoint, mesh={"data": 4, "model": 4}, histograms=True), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="drives the browser")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=60_000)
        yield found
        found.close()


class Opened:
    """A page and its console messages."""

    def __init__(
        self, browser: Any, file: Path, *, width: int = 1440, height: int = 900, scheme: str = "light"
    ) -> None:
        self._context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.page = self._context.new_page()
        self.page.set_default_timeout(TIMEOUT)
        self.said: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(f"file://{file}")

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *raised: object) -> None:
        self._context.close()

    def rows(self) -> list[str]:
        return self.page.locator("#rows .line").all_inner_texts()


def test_it_renders_without_console_messages_or_requests(browser: Any, page_file: Path) -> None:
    with Opened(browser, page_file) as opened:
        page = opened.page
        assert page.locator("#map .cell").count() > 10
        assert "27 leaves" in page.locator("#count").inner_text()
        body = page.locator("body").inner_text()
        for expected in ("Save time by process and phase", "Restore plan", "data=2×model=4"):
            assert expected in body
        assert opened.said == []
        assert [url for url in opened.requests if not url.startswith("file://")] == []


def test_a_run_in_a_report(browser: Any, tmp_path: Path) -> None:
    """Metrics at the top, one rectangle for a chain of single children, explained labels, and a complete panel."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    ones = jax.device_put(np.ones((512, 64), np.float32), NamedSharding(mesh, P("data", "model")))
    state = {"params": {"embed": {"kernel": ones}, "head": {"mlp": {"a": np.zeros(9000), "b": np.zeros(9000)}}}}
    with jaxckpt.Checkpointer(tmp_path / "run") as run:
        run.save(40, state, metrics={"loss": 0.125, "bytes": 7})
    file = tmp_path / "report.html"
    file.write_text(jaxckpt.report(tmp_path / "run", mesh={"data": 4, "model": 4}, histograms=True), encoding="utf-8")
    with Opened(browser, file) as opened:
        page = opened.page
        header = page.locator("header").inner_text().split()
        assert {"loss", "0.125", "step", "40"} <= set(header)
        titles = page.locator("header dt").evaluate_all("(all) => all.map((dt) => [dt.textContent, dt.title])")
        assert [title for name, title in titles if name == "objects"] == ["Stored files that hold array data"]
        assert [bool(title) for name, title in titles if name == "bytes"] == [True, False]  # the second is a metric
        cells = page.locator("#map .cell").all_inner_texts()
        assert cells == ["params", "head/mlp", "a", "b", "embed/kernel"]
        page.fill("#search", "embed")
        page.locator("#rows .line").first.click()
        assert page.locator("#leaf .ends").inner_text() == "1"  # all values are 1: not "1 to 1"
        page.locator("#leaf .bin").first.hover()
        assert page.locator("#tip").inner_text().split("\n") == ["1", "32,768 values"]
        panel = page.evaluate(
            "(({ scrollHeight, clientHeight }) => [scrollHeight, clientHeight])(document.querySelector('aside'))"
        )
        assert panel[0] <= panel[1], "the panel is truncated"
        page.locator("#map .cell", has_text="head/mlp").click(position={"x": 5, "y": 5})
        page.keyboard.press("Backspace")
        assert page.locator("#crumbs button").last.inner_text() == "params"  # not "head", which has one child
        assert opened.said == []


def test_search_and_sorting(browser: Any, page_file: Path) -> None:
    with Opened(browser, page_file) as opened:
        opened.page.fill("#search", "mu bias")
        assert [row.split()[0] for row in opened.rows()] == [f"opt_state/mu/layers/{n}/bias" for n in range(6)]
        opened.page.fill("#search", "bfloat16")
        assert [row.split()[0] for row in opened.rows()] == ["params/embed"]
        opened.page.fill("#search", "nothing like it")
        assert opened.rows() == []
        opened.page.fill("#search", "")
        opened.page.locator("#head button", has_text="bytes").click()
        assert opened.rows()[0].split()[0] == "params/embed"
        opened.page.locator("#head button", has_text="bytes").click()
        assert opened.rows()[0].split()[0] == "step"
        assert opened.said == []


def test_hovering_and_selecting_show_a_leaf(browser: Any, page_file: Path) -> None:
    with Opened(browser, page_file) as opened:
        page = opened.page
        page.fill("#search", "params/embed")
        page.locator("#rows .line").first.click()
        leaf = page.locator("#leaf").inner_text()
        assert "params/embed" in leaf
        assert "bfloat16" in leaf
        assert "P('model')" in leaf
        box = page.locator("#leaf .box").first
        box.hover()
        assert page.locator("#tip").is_visible()
        assert "[0:128" in page.locator("#tip").inner_text()
        assert page.locator("#leaf .bin").count() > 3  # the histogram
        page.keyboard.press("Escape")
        assert not page.locator("#tip").is_visible()
        assert opened.said == []


def test_the_treemap_opens_by_mouse_and_keys(browser: Any, page_file: Path) -> None:
    with Opened(browser, page_file) as opened:
        page = opened.page
        page.locator("#map .cell", has_text="opt_state").first.click(position={"x": 5, "y": 5})
        assert "opt_state" in page.locator("#crumbs").inner_text()
        page.locator("#crumbs button").first.click()
        assert "opt_state" not in page.locator("#crumbs").inner_text()
        page.locator("#map .cell").first.focus()
        page.keyboard.press("Enter")
        assert len(page.locator("#crumbs button").all()) == 2
        page.keyboard.press("Backspace")
        assert len(page.locator("#crumbs button").all()) == 1
        assert opened.said == []


def test_arrow_keys_move_in_the_treemap_and_the_table(browser: Any, page_file: Path) -> None:
    with Opened(browser, page_file) as opened:
        page = opened.page
        page.locator("#map .cell").first.focus()
        first = page.evaluate("document.activeElement.getAttribute('aria-label')")
        page.keyboard.press("ArrowRight")
        assert page.evaluate("document.activeElement.getAttribute('aria-label')") != first
        assert page.locator("#map .cell[tabindex='0']").count() == 1  # one stop of the Tab key
        page.locator("#rows").focus()
        page.keyboard.press("End")
        assert page.locator("#leaf h2").inner_text() == "step"
        page.keyboard.press("Home")
        assert page.locator("#leaf h2").inner_text() == HOSTILE.replace("/", "~1")
        page.keyboard.press("ArrowDown")
        assert page.locator("#leaf h2").inner_text() == "opt_state/mu/layers/0/bias"
        assert page.locator("#rows .line.chosen").inner_text().startswith("opt_state/mu/layers/0/bias")
        assert opened.said == []


def test_areas_of_the_treemap_are_bytes(browser: Any, page_file: Path) -> None:
    sizes = [1000, 500, 400, 90, 5, 5, 0]
    with Opened(browser, page_file) as opened:
        found = opened.page.evaluate("(sizes) => squarify(sizes, 1, 2, 640, 240)", sizes)
    assert np.allclose([width * height for _, _, width, height in found], np.array(sizes) / 2000 * 640 * 240)
    for x, y, width, height in found:
        assert 1 <= x <= x + width <= 641.001
        assert 2 <= y <= y + height <= 242.001


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_horizontal_scrolling_on_a_phone(browser: Any, page_file: Path, scheme: str) -> None:
    with Opened(browser, page_file, width=390, height=844, scheme=scheme) as opened:
        opened.page.fill("#search", "embed")
        opened.page.locator("#rows .line").first.click()
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= 390
        assert opened.said == []


def test_the_dark_scheme_is_dark(browser: Any, page_file: Path) -> None:
    found: dict[str, float] = {}
    for scheme in ("light", "dark"):
        with Opened(browser, page_file, scheme=scheme) as opened:
            color = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
            found[scheme] = sum(map(int, color.removeprefix("rgb(").removesuffix(")").split(",")))
    assert found["dark"] < 150 < 600 < found["light"]


def test_content_of_a_checkpoint_is_shown_as_text(browser: Any, page_file: Path) -> None:
    with Opened(browser, page_file) as opened:
        opened.page.fill("#search", "onerror")
        assert len(opened.rows()) == 1
        opened.page.locator("#rows .line").first.click()
        assert "onerror" in opened.page.locator("#leaf").inner_text()
        assert opened.page.locator("img").count() == 0
        assert opened.page.locator("pre", has_text="onerror").count() == 1  # the metadata
        for cell in opened.page.locator("#map .cell").all():
            cell.dispatch_event("pointermove")
        assert "taken" not in opened.page.title()
        assert opened.said == []


def test_injected_markup_runs_no_script(browser: Any, page_file: Path) -> None:
    with Opened(browser, page_file) as opened:
        # It would run after the image has failed to load.
        with opened.page.expect_console_message(lambda said: "script-src" in said.text, timeout=TIMEOUT) as refused:
            opened.page.evaluate("(markup) => document.body.insertAdjacentHTML('beforeend', markup)", HOSTILE)
        assert opened.page.locator("img").count() == 1
        assert "Content Security Policy" in refused.value.text
        assert "taken" not in opened.page.title()


def test_twenty_thousand_leaves_stay_usable(browser: Any, tmp_path: Path) -> None:
    tree = {f"block_{n:03d}": {f"w{m:02d}": np.zeros(n + 1, np.int8) for m in range(40)} for n in range(500)}
    jaxckpt.save(tmp_path / "ckpt", tree, options=jaxckpt.Options(sync=False))
    file = tmp_path / "report.html"
    file.write_text(jaxckpt.report(tmp_path / "ckpt"), encoding="utf-8")
    assert file.stat().st_size < 3_000_000
    with Opened(browser, file) as opened:
        assert opened.page.evaluate("document.querySelectorAll('*').length") < 6000  # only the visible part is drawn
        assert opened.page.locator("#map .cell", has_text="499").count() == 1
        opened.page.locator("#rows").focus()
        opened.page.keyboard.press("End")
        assert opened.page.locator("#leaf h2").inner_text() == "block_499/w39"
        opened.page.fill("#search", "block_499/w3")
        assert len(opened.rows()) == 10
        assert opened.said == []


@pytest.mark.parametrize("format", ["safetensors", "orbax"])
def test_reports_of_other_formats(browser: Any, checkpoint: Path, tmp_path: Path, format: str) -> None:
    jaxckpt.convert(checkpoint, tmp_path / f"w.{format}", format=format, select="params")
    file = tmp_path / "report.html"
    file.write_text(
        jaxckpt.report(tmp_path / f"w.{format}", mesh={"data": 4, "model": 2}, histograms=True), encoding="utf-8"
    )
    with Opened(browser, file) as opened:
        assert "13 leaves" in opened.page.locator("#count").inner_text()
        assert "Save time by process" not in opened.page.locator("body").inner_text()
        assert opened.page.locator("#leaf .bin").count() > 3
        assert opened.said == []


# Without a browser ----------------------------------------------------------------------------------------


class Balanced(HTMLParser):
    """Fails if elements are not closed in order, or if one could run a script."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "img", "iframe", "object")
        assert not any(name.startswith("on") for name, _ in attrs)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def shown(value: Any) -> str:
    parser = Balanced()
    parser.feed(value._repr_html_())
    parser.close()
    assert not parser.open
    return parser.text


def test_notebooks_show_the_same_charts(checkpoint: Path) -> None:
    opened = jaxckpt.open(checkpoint)
    whole = shown(opened)
    assert "params/embed: 65,536 B" in whole
    assert "opt_state/mu/layers/5: 16,640 B" not in whole  # twelve layers do not fit
    assert "opt_state/mu/layers: " in whole
    assert "<~1script><img" in whole
    leaf = shown(opened["params/layers/0/kernel"])
    assert "float32[64, 64]" in leaf
    assert "data" in leaf
    assert "7" in shown(opened["step"])
    assert shown(opened[HOSTILE.replace("/", "~1")])
    plan = shown(opened.plan(mesh={"data": 4, "model": 4}, devices_per_process=4))
    assert "process 3" in plan
    assert "needed" in plan


def bars_of(sizes: dict[str, int]) -> list[str]:
    return re.findall("<title>(.*?)</title>", byte_bars(sizes))


def test_bars_of_bytes_open_the_largest_containers_that_fit() -> None:
    layers = {f"params/layers/{n}/w": 10 for n in range(12)}
    assert bars_of({"params/embed": 500, **layers, "step": 0}) == ["params/embed: 500 B", "params/layers: 120 B"]
    assert bars_of({f"a/{n}/w": 10 + n for n in range(3)}) == ["a/2/w: 12 B", "a/1/w: 11 B", "a/0/w: 10 B"]
    assert bars_of({f"w{n:02}": 1 for n in range(20)})[-2:] == ["w10: 1 B", "… 9 more: 9 B"]
    assert bars_of({"": 8}) == [": 8 B"]
    assert bars_of({}) == bars_of({"step": 0}) == []


def test_a_layout_over_many_devices_draws_the_first_five_and_the_last_two_cells_of_each_side() -> None:
    mesh = MeshRecord({"x": 16, "y": 32}, list(range(512)), ["Auto", "Auto"])
    drawn = str(layout_drawing(mesh, (("x",), ("y",)), 2, ""))
    boxes = re.findall(r'data-box="(\d+) (\d+)" data-devices="[^"\d]*(\d+)', drawn)
    rows, columns = [0, 1, 2, 3, 4, 14, 15], [0, 1, 2, 3, 4, 30, 31]
    assert [tuple(map(int, box)) for box in boxes] == [(x, y, 32 * x + y) for x in rows for y in columns]
    assert drawn.count("⋯") == drawn.count("⋮") == 1


@pytest.mark.parametrize(
    ("ids", "text"), [(range(4, 9), "4–8"), ([0, 4], "0, 4"), (range(0, 64, 8), "0, 8, …, 56"), ([3], "3")]
)
def test_ids_of_devices_take_few_characters(ids: Sequence[int], text: str) -> None:
    assert show_ids(ids) == text


def test_the_seconds_of_each_process_are_in_the_manifest(checkpoint: Path) -> None:
    manifest = jaxckpt.open(checkpoint)._manifest
    assert set(manifest.phase_seconds) == {"plan", "device_to_host", "write", "sync", "barrier"}
    assert all(len(seconds) == 1 and seconds[0] >= 0 for seconds in manifest.phase_seconds.values())
