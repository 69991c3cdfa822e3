"""The evidence page says what its results say."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from evidence import page, rows

from stepcredit.training import recipe as recipes


def result(seed, rewards, seconds=10.0, lr=3e-4):
    n = len(rewards)
    return {
        "seed": seed,
        "lr": lr,
        "machine": "one",
        "curve": {
            "iterations": list(range(n)),
            "evaluations": [100.0 * k for k in range(n)],
            "seconds": [seconds * k for k in range(n)],
            "reward": rewards,
        },
        "reward_before": {"mean": rewards[0]},
        "reward_after": {"mean": rewards[-1]},
    }


ROW = rows.Row("some", "A title", "A claim.", ("a", "b"))
SLOW = [0.0, 0.1, 0.2, 0.3, 0.4]


def test_the_area_is_the_mean_height_of_the_curve():
    # 1 update at a mean of .1, then 3 at a mean of .4: (.1 + 1.2) / 4
    assert page.area({"iterations": [0, 1, 4], "reward": [0.0, 0.2, 0.6]}) == pytest.approx(0.325)


def test_twice_as_fast_in_updates_and_as_fast_in_seconds():
    fast = [0.0, 0.2, 0.4, 0.4, 0.4]
    results = {
        "a": [result(seed, [value + seed / 100 for value in SLOW], 10 + seed / 100) for seed in range(3)],
        "b": [result(seed, [value + seed / 100 for value in fast], 20 + seed / 100) for seed in range(3)],
    }
    text = "\n".join(page.section(ROW, results))
    assert "3 seeds; target 0.210" in text  # base .01, end .41 on average
    assert "| `b` | 3.0e-04 | 0.410 [0.385, 0.435] |" in text  # .4, .41, .42: s = .01, t = 4.303, / sqrt 3
    assert "fewer updates; fewer evaluations; seconds not told apart; the end not told apart" in text


def test_a_row_without_results_says_so():
    assert "**Not run yet.**" in page.section(ROW, {"a": [], "b": []})


def test_one_seed_is_no_finding():
    text = "\n".join(page.section(ROW, {"a": [result(0, SLOW)], "b": [result(0, SLOW[::-1])]}))
    assert "updates unknown; evaluations unknown; seconds unknown; the end not told apart" in text


def test_only_the_part_between_the_marks_is_replaced(tmp_path):
    (tmp_path / "evidence.md").write_text(f"before\n{page.BEGIN}\nwhat was there\n{page.END}\nafter\n")
    page.write(tmp_path, [(ROW, {"a": [result(0, SLOW)], "b": [result(0, SLOW)]})])
    text = (tmp_path / "evidence.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "what was there" not in text
    assert (tmp_path / "images" / "evidence-some.svg").is_file()


@pytest.mark.parametrize("name", rows.METHODS)
def test_every_method_is_a_recipe_that_can_be_run(name):
    method = rows.METHODS[name]
    recipe = recipes.load(method.recipe, {**method.changes, "lr": rows.RATES[0]})
    assert recipe.iterations == (rows.ITERATIONS if method.rate is None else rows.LONGER["iterations"])
    assert method.rate_of is None or method.rate_of in rows.METHODS


def test_every_row_compares_known_methods():
    assert all(name in rows.METHODS for row in rows.ROWS for name in row.methods)
    for row in rows.ROWS:  # over as many updates
        assert len({rows.METHODS[name].changes["iterations"] for name in row.methods}) == 1
