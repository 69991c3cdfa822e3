from __future__ import annotations

import base64
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from synthetic_run import write_run

from stepcredit.errors import UserError
from stepcredit.reports import figures, folder, health, outcome, run, style, svg, tiles, trajectory
from stepcredit.training.stats import Interval

VOID = {"meta", "link", "img", "br", "line", "path", "circle", "rect"}


class Page(HTMLParser):
    """Every element with its attributes, the visible text, and whether tags nest."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert not self.open, f"unclosed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID or tag == "rect":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text += data

    def find(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def words(page: Page) -> str:
    return " ".join(page.text.split())


def report(path: Path) -> Page:
    return Page(run.write(path).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "compose-stepwise")


@pytest.fixture(scope="module")
def page(finished: Path) -> Page:
    return report(finished)


def test_page_is_one_small_file_that_asks_for_nothing(finished: Path, page: Page) -> None:
    text = run.write(finished).read_text(encoding="utf-8")
    assert len(text.encode()) < 500_000
    assert not re.search(r"https?:|//|url\(|@import", re.sub(r"data:[^\"]*", "", text))
    assert not page.find("script")
    assert not page.find("iframe")
    assert all((image["src"] or "").startswith("data:image/png;base64,") for image in page.find("img"))
    assert [m["content"] for m in page.find("meta") if m.get("http-equiv") == "Content-Security-Policy"] == [
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    ]
    assert sorted(p.name for p in finished.iterdir() if "report" in p.name) == ["report.html"]


def test_page_can_be_read_without_seeing_it(page: Page) -> None:
    assert page.find("html")[0]["lang"] == "en"
    assert len(page.find("h1")) == 1
    assert all(image["alt"] for image in page.find("img"))
    assert all(drawing["role"] == "img" and drawing["aria-label"] for drawing in page.find("svg"))
    assert all(cell.get("scope") in ("col", "row") for cell in page.find("th"))
    names = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(names) == len(set(names))
    assert {link["href"] for link in page.find("a")} == {f"#{name}" for name in names}


def test_headline_says_what_the_summary_says(finished: Path, page: Page) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    text = words(page)
    for key in ("reward_before", "reward_after"):
        assert f"{summary[key]['mean']:.3f} [{summary[key]['low']:.3f}, {summary[key]['high']:.3f}]" in text
    gain = summary["improvement"]
    assert f"The improvement of {gain['mean']:.3f} [{gain['low']:.3f}, {gain['high']:.3f}] is clear of zero." in text
    assert f"Exactly right images went from {summary['exact_before']['mean'] * 100:.1f} %" in text.replace("\xa0", " ")
    assert "x86_64, 2 cores, torch 2.13.0" in text


@pytest.mark.parametrize(
    ("interval", "kind", "sentence"),
    [
        ((0.1, 0.05, 0.15), "clear", "The improvement of 0.100 [0.050, 0.150] is clear of zero."),
        ((0.02, -0.01, 0.05), "flat", "The change of +0.020 [−0.010, 0.050] is not distinguishable from zero."),
        ((0.02, 0.0, 0.05), "flat", "The change of +0.020 [0.000, 0.050] is not distinguishable from zero."),
        ((-0.1, -0.15, -0.05), "worse", "The reward fell by 0.100 [0.050, 0.150]: the fall is clear of zero."),
    ],
)
def test_verdict(interval: tuple[float, float, float], kind: str, sentence: str) -> None:
    assert run.judge(Interval(*interval)) == (kind, sentence)


def test_no_verdict_without_an_interval() -> None:
    assert run.judge(None)[0] == "open"
    assert run.judge(Interval(0.1, float("nan"), float("nan")))[0] == "open"


def test_tiles_are_the_pixels_of_the_grids(finished: Path, page: Page) -> None:
    index = json.loads((finished / "samples" / "samples.json").read_text())
    sheets = [np.asarray(Image.open(finished / "samples" / name)) for name in ("before.png", "after.png")]
    images = page.find("img")
    assert len(images) == 2 * len(index["prompts"])
    for k, image in enumerate(images):
        y, x = k // 2 // index["columns"] * 32, k // 2 % index["columns"] * 32
        tile = np.asarray(Image.open(io.BytesIO(base64.b64decode((image["src"] or "").partition(",")[2]))))
        assert np.array_equal(tile, sheets[k % 2][y : y + 32, x : x + 32])
        assert image["alt"] == f"{('Before', 'After')[k % 2]}: {index['prompts'][k // 2]}"


def test_large_pictures_are_reduced_and_kept_within_the_budget(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("before.png", "after.png"):
        Image.fromarray(rng.integers(0, 256, (1024, 2048, 3), dtype=np.uint8)).save(tmp_path / name)
    index = {"prompts": list("abcdefgh"), "columns": 4, "size": [512, 512]}
    (tmp_path / "samples.json").write_text(json.dumps(index))
    samples = tiles.pairs(tmp_path)
    assert samples.total == 8
    assert 1 <= len(samples.pairs) < 8
    assert not samples.sharp
    assert sum(len(p.before) + len(p.after) for p in samples.pairs) <= tiles.BUDGET
    first = Image.open(io.BytesIO(base64.b64decode(samples.pairs[0].before.partition(",")[2])))
    assert (first.format, first.size) == ("JPEG", (224, 224))
    assert samples.pairs[0].reward_before is None


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ({"prompts": ["a"] * 25, "columns": 6, "size": [32, 32]}, "smaller than samples.json says"),
        ({"prompts": ["a"], "columns": 0, "size": [32, 32]}, "does not say"),
        ({"prompts": ["a"], "columns": 6, "size": "32"}, "does not say"),
        ({"prompts": "a red circle", "columns": 6, "size": [32, 32]}, "does not say"),
    ],
)
def test_samples_that_do_not_fit_their_index_are_said(tmp_path: Path, index: dict[str, Any], said: str) -> None:
    path = write_run(tmp_path / "run", iterations=2) / "samples"
    (path / "samples.json").write_text(json.dumps(index))
    assert said in tiles.pairs(path).missing


def test_prompts_and_recipes_are_text_not_markup(tmp_path: Path) -> None:
    hostile = "</style><script>alert('1')</script> & \"quoted\" \x1b[31m"
    path = write_run(tmp_path / "run", iterations=2, first_prompt=hostile)
    (path / "recipe.yaml").write_text("task: </code><script>alert(2)</script>\n")
    text = run.write(path).read_text(encoding="utf-8")
    page = Page(text)
    assert not page.find("script")
    assert "<script>" not in text
    assert text.count("&lt;script&gt;alert") >= 3  # twice as alternative text, once as caption
    assert page.find("img")[0]["alt"] == f"Before: {hostile}"
    assert "task </code><script>alert(2)</script>" in page.text


def test_uniform_credit_has_no_gains_and_says_so(tmp_path: Path) -> None:
    text = words(report(write_run(tmp_path / "run", credit="uniform", kl_beta=0.01)))
    assert "Credit “uniform” judges final images alone" in text
    assert "Spread of gains" not in text
    assert "Not measured, since kl_beta is 0" not in text


def test_a_run_cut_off_claims_only_what_was_evaluated(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", iterations=23, finished=False)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 24, "reward": {"me')  # torn by a crash
    text = words(report(path))
    assert "This run is still going, or was cut off: 23 iterations are logged, and no summary." in text
    assert "At iteration 20, the last one that was evaluated: the improvement of" in text
    assert "this one has no pair of before and after yet" in text
    assert f"stepcredit train --resume {tmp_path.name}/run" in text


def test_a_run_stopped_early_says_why(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", iterations=5, finished=False)
    summary = {"reward_before": {"mean": 0.5, "low": 0.4, "high": 0.6}, "reward_after": None, "stopped": "interrupted"}
    (path / "summary.json").write_text(json.dumps(summary))
    text = words(report(path))
    assert "This run stopped after 5 of 40 iterations: interrupted." in text
    assert "nothing can be said about an improvement" in text


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    text = words(report(write_run(tmp_path / "run", iterations=0, finished=False)))
    assert "No iteration has been logged yet" in text
    assert "not evaluated yet" in text


def test_a_recipe_alone_is_enough(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("task: compose\n")
    assert "Neither times nor the ledger were recorded." in words(report(tmp_path))


def test_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not a run: it has no recipe\.yaml"):
        run.write(tmp_path)


@pytest.mark.parametrize("value", [None, [], {}, "x", True, 1e400, [None, None], [["x"]], {"mean": None}])
def test_no_metric_of_the_wrong_kind_breaks_the_page(tmp_path: Path, value: Any) -> None:
    path = write_run(tmp_path / "run", iterations=3)
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.update({key: value for key in line if key != "iteration"})
    (path / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in [*lines, value]))
    for name in ("summary.json", "ledger.json", "origin.json", "samples/samples.json"):
        content = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps(dict.fromkeys(content, value)))
    report(path)


def test_files_of_garbage_are_passed_over(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", iterations=3)
    for name in ("summary.json", "ledger.json", "recipe.yaml", "samples/before.png", "evaluations/after.jsonl"):
        (path / name).write_bytes(b"\xff\xfe{[: broken")
    assert "cannot be read" in words(report(path))


def test_the_last_line_of_an_iteration_counts(tmp_path: Path) -> None:
    lines = [{"iteration": k, "loss": loss} for k, loss in ((1, 1.0), (2, 2.0), (3, 3.0), (2, 5.0))]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert folder.read(tmp_path).series("loss") == [1.0, 5.0, 3.0]


def small_run(path: Path) -> folder.RunFolder:
    """Evaluations before and after on four slots, one during the run on two of them; rewards worked out by hand."""
    evaluations = {
        "iteration-000000": [0.2, 0.4, 0.6, None],
        "iteration-000005": [0.3, 0.5],
        "after": [0.5, 0.5, 0.1, 1],
    }
    (path / "evaluations").mkdir()
    for stem, rewards in evaluations.items():
        rows = [{"prompt": f"p\u2028{k}", "tag": "ab"[k % 2], "slot": k, "reward": r} for k, r in enumerate(rewards)]
        text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        (path / "evaluations" / f"{stem}.jsonl").write_text(text, encoding="utf-8")
    lines: list[dict[str, Any]] = [{"iteration": 0, "evaluation": {"mean": 0.4, "low": 0.2, "high": 0.6}}]
    lines += [{"iteration": k, "evaluation": {"mean": 0.4} if k == 5 else None} for k in range(1, 11)]
    (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (path / "summary.json").write_text(json.dumps({"reward_after": {"mean": 0.525}}))
    return folder.read(path)


def test_every_point_of_the_curve_is_on_the_same_images(tmp_path: Path) -> None:
    curve = outcome.held_out(small_run(tmp_path))
    assert curve.x == (0, 5, 10)
    assert [e.mean for e in curve.estimates] == pytest.approx([0.3, 0.4, 0.5])  # of slots 0 and 1 alone
    assert curve.prompts == 2


def test_images_are_compared_one_by_one(tmp_path: Path) -> None:
    found = outcome.comparison(small_run(tmp_path))
    assert (found.total, found.better, found.worse, found.same) == (3, 2, 1, 0)  # slot 3 has no reward before
    assert found.change is not None
    assert found.change.mean == pytest.approx((0.3 + 0.1 - 0.5) / 3)
    a, b = found.tags
    assert (a["tag"], a["n"], a["before"], a["after"]) == ("a", 2, pytest.approx(0.4), pytest.approx(0.3))
    assert (b["tag"], b["n"], b["before"], b["after"]) == ("b", 1, pytest.approx(0.4), pytest.approx(0.5))


def test_steps_are_averaged_over_the_first_and_last_quarter(tmp_path: Path) -> None:
    lines = [
        {
            "iteration": k,
            "gain_mean": [0.1 * k, None, -0.1 * k],
            "turning_share": [0, 0.5, 1],
            "trained": [True, k > 4, False],
        }
        for k in range(1, 9)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = trajectory.steps(folder.read(tmp_path))
    assert (found.early, found.late, found.partly) == ("iterations 1–2", "iterations 7–8", True)
    assert found.rows[0]["gain_early"] == pytest.approx(0.15)
    assert found.rows[0]["gain_late"] == pytest.approx(0.75)
    assert found.rows[1]["gain_late"] is None
    assert [row["trained"] for row in found.rows] == [1, 0.5, 0]
    assert [chart.title for chart in found.charts] == ["Mean gain", "Turning points"]


def test_time_and_ledger_add_up(tmp_path: Path) -> None:
    lines = [{"iteration": k, "phase_seconds": {"rollout": 1.0, "update": 3.0, "scoring": None}} for k in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "ledger.json").write_text(json.dumps({"trajectories": 8, "decodes_per_trajectory": 2.5}))
    found = health.cost(folder.read(tmp_path))
    assert found.phases == (("rollout", 2.0, 0.25), ("update", 6.0, 0.75))
    assert found.ledger == (("Decodes", 2.5, 20.0),)


def test_a_curve_that_never_moves_is_a_sentence(tmp_path: Path) -> None:
    lines = [{"iteration": k, "ratio_deviation": 0.0, "lr": 3e-4, "grad_norm": 0.1 * k, "kl": None} for k in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    charts = {chart.title: chart for chart in health.curves(folder.read(tmp_path))}
    assert charts["Gradient norm"].figure
    assert charts["Ratio deviation"].note.startswith("|ratio − 1| was exactly 0 at every first update")
    assert charts["Learning rate"].note == "Constant at 3.0\xa0×\xa010⁻⁴."
    assert charts["KL to the base model"].note == "Not recorded."
    assert "KL of an update" not in charts  # without a trust region nothing is said of it
    assert not any(chart.figure for title, chart in charts.items() if title != "Gradient norm")
    held = [{**line, "update_kl": 1e-5 * k} for k, line in enumerate(lines)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, held)))
    assert any(chart.title == "KL of an update" and chart.figure for chart in health.curves(folder.read(tmp_path)))


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, ["0.00", "0.25", "0.50", "0.75", "1.00"]),
        (0.52, 0.77, ["0.5", "0.6", "0.7", "0.8"]),
        (-0.03, 0.09, ["−0.05", "0.00", "0.05", "0.10"]),
        (21.2, 22.9, ["21.0", "21.5", "22.0", "22.5", "23.0"]),
        (0.0, 1e-7, ["0", "2.5e−8", "5e−8", "7.5e−8", "1e−7"]),
    ],
)
def test_ticks_are_round_and_enclose_the_data(low: float, high: float, expected: list[str]) -> None:
    marks = svg.ticks(low, high)
    assert marks[0] <= low
    assert marks[-1] >= high
    assert svg.tick_labels(marks) == expected


@pytest.mark.parametrize("value", [0.0, 0.5, -3.0, 1e-12, 1e12])
def test_ticks_of_a_single_value_have_a_width(value: float) -> None:
    marks = svg.ticks(value, value)
    assert marks[0] < value < marks[-1] or (marks[0] <= value <= marks[-1] and marks[0] < marks[-1])


def test_a_gap_breaks_a_curve_and_is_never_zero() -> None:
    drawn = figures.lines([figures.Line("late", [1, 2, 3, 4, 5], [1.0, 2.0, None, 2.0, 1.0])], "label")
    assert len(re.findall(r'class="curve late"', drawn)) == 2
    assert figures.lines([figures.Line("late", [1, 2], [None, None])], "label") == ""
    assert figures.step_bars([("late", "all", [None, None])], "label") == ""


def test_bars_stand_on_zero_and_losses_hang_from_it() -> None:
    drawn = figures.step_bars([("late", "all", [1.0, -1.0])], "label")
    (y_up, h_up), (y_down, h_down) = (
        (float(y), float(h)) for y, h in re.findall(r'<rect[^>]* y="([\d.]+)"[^>]* height="([\d.]+)"', drawn)
    )
    assert y_up + h_up == pytest.approx(y_down, abs=0.11)
    assert h_up == pytest.approx(h_down, abs=0.11)


def test_heat_map_shows_strength_and_sign_and_leaves_unknown_cells_blank() -> None:
    drawn = figures.heat_map([[1.0, -0.25], [None, 0.0]], ["1", "2"], "label")
    cells = re.findall(r'<path d="([^"]*)" class="([^"]*)" opacity="([^"]*)"', drawn)
    assert [(d.count("M"), role, strength) for d, role, strength in cells] == [
        (1, "cell", "1.00"),
        (1, "cell minus", "0.50"),
    ]
    assert figures.heat_map([[0.0], [None]], ["1", "2"], "label") == ""


def test_long_curves_are_averaged_in_equal_bins() -> None:
    x, y = figures.binned(list(range(1, 7)), [1.0, 3.0, None, 5.0, None, None], limit=3)
    assert x == [1.5, 3.5, 5.5]
    assert y == [2.0, 5.0, None]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (style.number(0.7124), "0.712"),
        (style.number(-0.0), "0.000"),
        (style.number(-1.5), "−1.500"),
        (style.number(1234.5), "1,234.5"),
        (style.number(None), "–"),
        (style.number(1e-7), "1.0\xa0×\xa010⁻⁷"),
        (style.signed(0.25), "+0.250"),
        (style.signed(0.0), "0.000"),
        (style.percent(0.1234), "12.3\xa0%"),
        (style.count(84160), "84,160"),
        (style.count(9.0625), "9.1"),
        (style.duration(0.84), "0.8 s"),
        (style.duration(59.7), "1 min 00 s"),
        (style.duration(3 * 3600 + 247), "3 h 04 min"),
        (style.bounds(Interval(0.1, float("nan"), 0.2)), ""),
    ],
)
def test_numbers_are_written_as_people_read_them(written: str, expected: str) -> None:
    assert written == expected
