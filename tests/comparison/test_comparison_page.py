"""The page of a comparison, from numbers made by hand."""

import re
import shutil
import subprocess

import pytest

from stepcredit.comparison import curves, summary
from stepcredit.comparison.curves import Curve
from stepcredit.reports import comparison as page
from stepcredit.training.stats import student


def found(n: int = 3, target: float | None = 0.6) -> dict:
    """A first recipe that reaches .6 after 10, 11, .. iterations, and one that does in twice that, one of it never."""
    its = (0.0, 20.0, 40.0)
    first = [Curve(its, (0.0, 2e3, 4e3), (0.0, 40.0, 80.0), (0.5, 0.7 - 0.01 * k, 0.8)) for k in range(n)]
    second = [Curve(its, (0.0, 1e3, 2e3), (0.0, 30.0, 60.0), (0.5, 0.6, 0.65)) for _ in range(n - 1)]
    second.append(Curve(its, (0.0, 1e3, 2e3), (0.0, 30.0, 60.0), (0.5, 0.5, 0.55)))
    recipes = []
    for label, own in (("one", first), ("<two>", second)):
        ends = [c.reward[-1] for c in own]
        recipes.append(
            {
                "label": label,
                "curves": {axis: summary._band(own, axis) for axis in curves.AXES},
                **summary._to_target(own, first, target),
                "reward": student(ends).as_dict(),
                "change": student([e - 0.5 for e in ends]).as_dict(),
                "to_first": student([e - 0.8 for e in ends]).as_dict(),
                "exact": None,
                "per_tag": {"two_objects": {"before": 0.5, "after": student(ends).as_dict()}},
                "image_statistics": {"brightness": {"before": 0.4, "after": 0.45}},
                "seconds": 80.0,
                "model_evaluations": 4000.0,
                "runs": [
                    {"name": f"{label}-seed-{k}", "seed": k, "iterations": 40, "planned": 40, "reward_after": ends[k],
                     "guard": "max_kl" if k == 1 else None, "skipped_updates": 0}
                    for k in range(n)
                ],
            }
        )  # fmt: skip
    kind = "none" if target is None else "given"
    return {"seeds": list(range(n)), "unfinished_seeds": [7], "failed": {"x-seed-1": "it broke"}, "task": "compose",
            "recipes": recipes, "target": target, "target_kind": kind}  # fmt: skip


def words(text: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", text.split("</style>")[1]).split())


def test_the_page_says_what_the_numbers_say():
    text = page.render("mine", found())
    shown = words(text)
    assert "&lt;two&gt;: at least" in shown
    assert "the target is 0.600, as asked for" in shown.lower()
    assert "2 of 3" in shown
    assert "Not every recipe has finished seed 7" in shown
    assert "x-seed-1 failed: it broke" in shown
    assert "stopped by the guard max_kl after 40 of 40 iterations" in shown
    assert "two objects" in shown
    assert "brightness" in shown
    assert "<two>" not in text
    assert 'href="%3Ctwo%3E-seed-0/report.html"' in text
    assert "http" not in text.replace("http-equiv", "")


def test_ratios_and_bounds_in_words():
    told = found()["recipes"][1]
    # at 20, 20 and never (40) against 10, 10.5 and 11.1
    value = (20 * 20 * 40 / (10 * (20 * 0.1 / 0.19) * (20 * 0.1 / 0.18))) ** (1 / 3)
    assert page.times(told["ratio"]["iterations"]) == f"at least {value:.2f} times"
    assert page.times({"value": None, "kind": "unknown", "low": None, "high": None}) == "an unknown multiple of"
    assert page.times({"value": 0.5, "kind": "equal", "low": 0.25, "high": 1.0}) == "0.50 [0.25, 1.00] times"
    assert "clear of zero over 3 seeds" in page.verdicts(found())[0]
    assert "no interval, so no finding" in page.verdicts(found(1))[0]


def test_without_a_target_or_without_whole_seeds_it_says_so():
    assert "There is no target" in words(page.render("mine", found(target=None)))
    empty = {**found(), "recipes": [], "seeds": [], "target": None}
    assert "nothing is compared" in words(page.render("mine", empty))


def test_many_recipes_are_told_apart():
    roles = [page.role(k) for k in range(8)]
    assert len(set(roles)) == 8


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs a headless chromium")
@pytest.mark.parametrize("width", [1000, 380])
def test_a_browser_lays_it_out_without_overflow(tmp_path, width):
    probe = "<script>addEventListener('load',()=>{document.title=[document.documentElement.scrollWidth,innerWidth," \
            "document.querySelectorAll('svg').length].join(' ')})</script>"  # fmt: skip
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.render("mine", found()))
    (tmp_path / "page.html").write_text(text.replace("</body>", probe + "</body>"), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command = ["chromium", *flags, f"--window-size={width},800", "--dump-dom", (tmp_path / "page.html").as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    match = re.search(r"<title>(\d+) (\d+) (\d+)</title>", dom)
    assert match is not None
    assert int(match[1]) <= int(match[2])
    assert int(match[3]) == 4
