"""The evidence page says what its results say."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from evidence import foretold, page, rows

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
    assert recipe.iterations == method.changes["iterations"] in (rows.ITERATIONS, rows.LONGER["iterations"])
    assert method.rate_of is None or method.rate_of in rows.METHODS


def test_every_row_compares_known_methods():
    assert all(name in rows.METHODS for row in rows.ROWS for name in row.methods)
    for row in rows.ROWS:  # over as many updates
        assert len({rows.METHODS[name].changes["iterations"] for name in row.methods}) == 1


def test_rank_correlation_by_hand():
    # ranks 0 1 2 3 against 1 0 2 3: sum of squared differences 2, so 1 - 6 * 2 / (4 * 15) = .8; of the 24 orders one
    # gives 1 and three (a swap of neighbours) give .8
    r, p = foretold.rank_correlation([0.1, 0.2, 0.3, 0.4], [5.0, 4.0, 6.0, 7.0])
    assert r == pytest.approx(0.8)
    assert p == pytest.approx(4 / 24)
    assert foretold.rank_correlation([1.0, 2.0, 3.0], [9.0, 5.0, 1.0]) == (pytest.approx(-1), pytest.approx(1))
    assert foretold.ranks([3.0, 1.0, 3.0]) == [1.5, 0, 1.5]
    with pytest.raises(ValueError, match="3 pairs"):
        foretold.rank_correlation([1.0, 2.0, 3.0], [1.0, 1.0, 1.0])


def test_the_audit_is_held_against_the_curves_of_common_seeds(tmp_path):
    import json

    def told(label, mean):
        return {"label": label, "progress": {"mean": mean, "low": mean - 0.1, "high": mean + 0.1}}

    audit = tmp_path / "audit.json"
    labels = {"uniform": 0.1, "gain, centred": 0.3, "gae 1, centred": 0.2}
    audit.write_text(json.dumps({"schemes": [told(*one) for one in labels.items()]}))
    found = {
        "uniform": [result(seed, [0.0, 0.1, 0.2]) for seed in range(3)],
        "stepwise": [result(seed, [0.0, 0.3, 0.6]) for seed in range(2)],
        "stepwise-gae-1": [result(seed, [0.0, 0.2, 0.4]) for seed in range(3)],
    }
    text = "\n".join(foretold.section(found, audit))
    assert "2 seeds" in text
    assert "| `stepwise` | 0.300 [0.200, 0.400] | 0.300 [0.300, 0.300] |" in text
    assert "**Verdict: not shown.** Spearman's rank correlation +1.00, p = 0.17" in text  # one of six orders
    assert "**Not run yet.**" in foretold.section({"uniform": found["uniform"]}, audit)
