"""The page of a training: what it says, that data stays data, and how a real browser shows it."""

from __future__ import annotations

import copy
import html.parser
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.reporting.browser import rendered
from tiered import MisuseError
from tiered.reporting.page import page, read_run, refuse_foreign, write_page

STEPS = 12
NESTED: Any = 0
for _ in range(80):
    NESTED = [NESTED]
EVIL = "</script><img src=x onerror=alert(1)>&lt;b&gt;\u2028\"'`${alert(1)}"


def run(**changed: Any) -> dict[str, Any]:
    count = range(STEPS)
    mib = 1 << 20
    found: dict[str, Any] = {
        "tiered": "0.1.0",
        "model": "GPT of 85 parameters",
        "tokens_per_second": 10.0,
        "loss": {"first": 5.0, "last": 4.0, "all": [5 - step / 12 for step in count]},
        "peak_rss_bytes": 300 * mib,
        "memory_limit": 512 * mib,
        "series": {
            "step": [step + 1 for step in count], "seconds": [0.5] * STEPS, "tokens": [64] * STEPS,
            "read": [8 * mib] * STEPS, "written": [4 * mib] * STEPS, "waited_reads": [0.1] * STEPS,
            "waited_room": [0.0] * STEPS, "update": [0.1] * STEPS, "compute": [0.3] * STEPS,
            "memory_base": [200 * mib] * STEPS, "memory_pool": [24 * mib] * STEPS, "memory_beyond": [40 * mib] * STEPS,
        },
        "predicted": {"seconds": 0.45, "read": 8.0 * mib, "written": 4.0 * mib, "process": 310.0 * mib, "by": "a plan"},
        "plan": {"ways": {"blocks.0": "store"}, "why": "a warm-up", "predicted": 0.4, "measured": 0.5},
        "timeline": {
            "seconds": 1.0, "steps": [["step 6", 0.0, 0.5], ["step 7", 0.5, 1.0]], "left_out": 0,
            "rows": [
                {"name": "training", "lanes": 1, "items": [[0, 0.0, 0.3, "forward", "", 0], [0, 0.3, 0.9, "backward", "", 0]]},
                {"name": "reads", "lanes": 2, "items": [[1, 0.1, 0.2, "demand", "model/param/a", 4096]]},
                {"name": "dram", "lanes": 1, "level": [[0.0, 0.5], [0.5, 1.0]]},
            ],
        },
    }  # fmt: skip
    return found | changed


class Texts(html.parser.HTMLParser):
    """The elements of a page, and what lies in its block of data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.data = ""
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        self._inside = ("id", "data") in attrs

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.data += data
            self._inside = False


def test_it_is_one_file_that_loads_nothing() -> None:
    text = page(run())
    found = Texts(text)
    assert found.addresses == []
    assert "link" not in found.tags
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text)
    assert "default-src 'none'" in text
    assert text.startswith("<!DOCTYPE html>\n<!-- tiered report ")


def test_it_has_the_numbers() -> None:
    shown = json.loads(Texts(page(run())).data)
    tiles = {name: (value, unit) for name, value, unit, _ in shown["tiles"]}
    assert tiles["A step"] == ("0.5", "s")
    assert tiles["Throughput"] == ("128", "tokens/s")
    assert tiles["Waiting"] == ("20 %", "")
    assert tiles["Drive"] == ("12.0", "MiB")
    assert tiles["Memory"] == ("264.0", "MiB")
    compared = {name: (predicted, measured) for name, _, predicted, measured in shown["compared"]}
    assert compared["a step"] == (0.45, 0.5)
    assert compared["memory of the process"] == (310.0 * (1 << 20), 300 * (1 << 20))
    assert shown["losses"]["values"][0] == 5
    assert "series" not in shown["run"]


def test_data_stays_data() -> None:
    evil = run(model=EVIL, extra={EVIL: [EVIL]})
    evil["plan"] = {"ways": {EVIL: EVIL}, "why": EVIL}
    evil["timeline"]["rows"][1]["items"][0][4] = EVIL
    evil["timeline"]["steps"][0][0] = EVIL
    text = page(evil)
    found = Texts(text)
    assert found.tags.count("script") == 2
    assert "img" not in found.tags
    assert "b" not in found.tags
    assert found.data.isascii()
    shown = json.loads(found.data)
    assert shown["title"] == EVIL
    assert shown["run"]["extra"] == {EVIL: [EVIL]}


@pytest.mark.parametrize("place", ["__DATA__", "__TITLE__", "__VERSION__"])
def test_a_model_may_be_named_as_a_place_of_the_page_is(place: str) -> None:
    found = Texts(page(run(model=place)))
    assert json.loads(found.data)["title"] == place
    assert found.tags == Texts(page(run())).tags


def test_a_run_without_series_has_losses_and_an_old_report_is_shown() -> None:
    old = run()
    for name in ("series", "timeline", "predicted", "plan", "memory_limit", "model"):
        del old[name]
    shown = json.loads(Texts(page(old)).data)
    assert shown["series"] is None
    assert [tile[0] for tile in shown["tiles"]] == ["Loss", "Memory", "Throughput"]
    assert shown["losses"]["steps"] == list(range(1, STEPS + 1))


def test_numbers_that_are_none_are_shown_as_none() -> None:
    odd = run(losses={"steps": [1, 2], "values": [float("nan"), 3.0]}, speed=float("inf"))
    shown = json.loads(Texts(page(odd)).data)
    assert shown["losses"]["values"] == [None, 3.0]
    assert shown["run"]["speed"] is None


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("series", "read"), [1.0], "different lengths"),
        (("series", "read"), ["<b>"] * STEPS, "series.read"),
        (("series", "step"), [], "different lengths"),
        (("losses",), {"steps": [1], "values": []}, "0 losses of 1 steps"),
        (("timeline", "rows"), [{"name": "x", "lanes": 0, "items": []}], "'x' of its timeline"),
        (("timeline", "rows"), [{"name": "x", "lanes": 1}], "'x' of its timeline"),
        (("timeline", "seconds"), 0.0, "no length"),
        (("plan",), 7, "plan"),
        (("plan", "why"), "half a \ud800", "not Unicode"),
        (("model",), "\udfff", "not Unicode"),
        (("extra",), {"\ud800": 1}, "not Unicode"),
        (("extra",), 10**400, "an integer of 1,329 bits"),
        (("peak_rss_bytes",), -(2**140), "an integer of 141 bits"),
        (("series", "read"), [1e308] * STEPS, "series.read"),
        (("series", "seconds"), [-1.0] * STEPS, "series.seconds"),
        (("losses",), {"steps": [1, 2], "values": [1.7e308, 1.7e308]}, "losses.values"),
        (("extra",), NESTED, "nested deeper than 64 levels"),
    ],
)
def test_what_a_training_does_not_write_is_refused(place: tuple[str, ...], value: Any, words: str) -> None:
    changed = copy.deepcopy(run())
    inner = changed
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    with pytest.raises(MisuseError, match=words):
        page(changed, "run.json")


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"tiered": "0.1.0"}', "[" * 100_000, '{"tiered": "\\ud800", "loss": {}}', "{" + '"a":{' * 5000),
        *('{"tiered": "1", "loss": {}, "x": ' + "9" * count + "}" for count in (60, 6000)),
    ],
    ids=lambda text: text[:20],
)
def test_a_file_that_is_no_report_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(MisuseError, match=r"report (of|with) tiered train"):
        read_run(tmp_path / "run.json")


def test_names_and_files_that_cannot_be_read(tmp_path: Path) -> None:
    """One line each, also of a pipe, which is not waited for, and of names that no file has."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "latin").write_bytes(b'{"tiered": "\xe9"}')
    for path, says in (
        (tmp_path / "absent.json", "cannot read"),
        (tmp_path, "not a regular file"),
        (tmp_path / "pipe", "not a regular file"),
        (tmp_path / "latin", "damaged"),
        ("a\0b", "not the name of a file"),
        ("x" * 300, "cannot read"),
    ):
        with pytest.raises(MisuseError, match=says) as refused:
            read_run(path)
        assert str(refused.value).isprintable()
    for name in ("a\0b", "x" * 300):
        with pytest.raises(MisuseError, match="cannot write"):
            refuse_foreign(name)


def test_only_pages_of_its_own_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine.html").write_text("<!DOCTYPE html>\n<p>mine")
    with pytest.raises(MisuseError, match="so it stays"):
        write_page(tmp_path / "mine.html", page(run()))
    assert (tmp_path / "mine.html").read_text().endswith("mine")
    for _ in range(2):
        write_page(tmp_path / "ours.html", page(run()))
    refuse_foreign(tmp_path / "ours.html")
    with pytest.raises(MisuseError, match="cannot write"):
        write_page(tmp_path / "absent" / "ours.html", page(run()))
    with pytest.raises(MisuseError, match="cannot write"):
        refuse_foreign(tmp_path)


@pytest.mark.parametrize(("width", "scheme"), [(500, "light"), (1600, "dark")])
def test_a_browser_draws_all_of_it(tmp_path: Path, width: int, scheme: str) -> None:
    evil = run(model=EVIL, extra={EVIL: EVIL})
    evil["timeline"]["rows"][1]["items"][0][4] = EVIL
    text, found = rendered(page(evil), tmp_path, width, scheme)
    assert "error" not in found
    assert "blocked" not in found
    assert found["drawn"] == "9"
    assert found["overflow"] == "0"
    assert found["width"] == str(width)
    assert found["page"] == ("rgb(18, 18, 17)" if scheme == "dark" else "rgb(246, 246, 243)")
    assert found["images"] == "0"
    assert int(found["painted"]) > 1000
    zoomed, _, whole = found["zoomed"].partition(" | ")
    assert whole == "0 s to 1 s of 1 s"
    assert zoomed not in ("", whole)
    assert text.count("<svg") == 5
    assert text.count("<path") == 2
    assert text.count("<polygon") == 9
    assert "onerror=alert" in html_text(text)


def html_text(text: str) -> str:
    """What a page shows as text."""

    class Shown(html.parser.HTMLParser):
        found = ""

        def handle_data(self, data: str) -> None:
            self.found += data

    shown = Shown()
    shown.feed(text.partition("<h1>")[2].partition("</h1>")[0])
    return shown.found
