"""Base against tuned on suites: the slots, the statistics of hand-made evaluations, and the command on a small run."""

import json
import math

import numpy as np
import pytest
import torch
from run_cases import KEYS

from stepcredit.cli import main
from stepcredit.errors import UserError
from stepcredit.rewards import get
from stepcredit.tasks import Prompt, suites
from stepcredit.training.evaluation import Evaluation, slots
from stepcredit.training.suite import compare, outlook, per_tag, slots_of
from stepcredit.training.telemetry import make_display
from stepcredit.training.trainer import train

NAN = math.nan
PROMPTS = [Prompt(text, {"tag": tag}) for text, tag in (("a", "x"), ("b", "x"), ("c", "x"), ("d", "y"))]


def evaluation(on, rewards, exact=None, **components):
    return Evaluation(
        slots=tuple(on),
        rewards=torch.tensor(rewards, dtype=torch.float32),
        exact=None if exact is None else torch.tensor(exact, dtype=torch.float32),
        images=torch.empty(0, 0, 0, 3, dtype=torch.uint8),
        statistics={"brightness": 0.5},
        components={name: torch.tensor(values, dtype=torch.float32) for name, values in components.items()},
    )


def test_noise_names_the_suite_the_prompt_and_the_image_and_nothing_else():
    on = slots_of("s", PROMPTS, 2)
    assert [(slot.prompt.text, slot.key[-1]) for slot in on[:3]] == [("a", 0), ("a", 1), ("b", 0)]
    shape = (2, 3)
    assert torch.equal(on[5].noise(shape), slots_of("s", PROMPTS[2:], 3)[1].noise(shape))  # c, second image
    distinct = [on[0], on[1], on[2], slots_of("t", PROMPTS, 1)[0], slots(PROMPTS)[0]]
    drawn = torch.stack([slot.noise(shape) for slot in distinct])
    assert len(drawn.flatten(1).unique(dim=0)) == 5
    with pytest.raises(ValueError, match="at least 1"):
        slots_of("s", PROMPTS, 0)


def test_a_comparison_by_hand():
    on = slots(PROMPTS)
    base = evaluation(on, [0.0, 0.0, 1.0, 0.5], [0, 0, 1, 0])
    tuned = evaluation(on, [1.0, 0.5, 1.0, 0.0], [1, 0, 1, 0])
    found = compare(base, tuned, "r", macro=False)
    assert list(found) == ["r", "exactly right"]
    reward = found["r"]
    assert (reward.base.mean, reward.tuned.mean, reward.change.mean) == (0.375, 0.625, 0.25)
    # changes 1, .5, 0, -.5: of eight sign vectors those with |sum| >= 1 are +++, ++-, +-+ ... : sums 2, 1, 1, 0
    sums = [abs(a + b * 0.5 + c * 0.5) for a in (1, -1) for b in (1, -1) for c in (1, -1)]
    assert reward.p == np.mean([value >= 1 for value in sums]) == 0.75
    assert found["exactly right"].p == 1.0
    assert reward.p_holm == 1.0
    macro = compare(base, tuned, "r", macro=True)["r"]
    assert macro.base.mean == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert macro.change.mean == pytest.approx((0.5 - 0.5) / 2, abs=1e-12)
    tags = per_tag(base, tuned)
    assert (tags["x"]["base"]["mean"], tags["y"]["change"]["mean"]) == (pytest.approx(1 / 3), -0.5)


def test_pairs_that_failed_leave_both_sides():
    on = slots(PROMPTS)
    base = evaluation(on, [0.0, NAN, 0.5, 1.0])
    tuned = evaluation(on, [1.0, 1.0, 0.5, NAN])
    reward = compare(base, tuned, "r")["r"]
    assert (reward.failed, reward.base.mean, reward.tuned.mean, reward.change.mean) == (2, 0.25, 0.75, 0.5)
    assert compare(evaluation(on, [NAN] * 4), tuned, "r")["r"].failed == 4
    with pytest.raises(ValueError, match="same slots"):
        compare(base, evaluation(slots(PROMPTS[::-1]), [0.0] * 4), "r")


def test_a_quantity_under_two_names_is_tested_once_and_several_rewards_have_no_common_figure():
    on = slots(PROMPTS)
    base = evaluation(on, [0, 1, 0, 1], [0, 1, 0, 1], official=[0, 1, 0, 1], other=[3, 1, 4, 1])
    tuned = evaluation(on, [1, 1, 0, 1], [1, 1, 0, 1], official=[1, 1, 0, 1], other=[3, 1, 4, 2])
    assert list(compare(base, tuned, "r")) == ["r", "r.other"]
    assert list(compare(base, tuned, None)) == ["exactly right", "other"]


def test_what_can_be_detected_is_said_with_its_source():
    on = slots_of("s", [Prompt(str(k)) for k in range(100)], 4)
    compose = get("compose")
    told = str(outlook(on, False, compose, None))
    assert "100 prompts, 400 pairs of images: a change of 0.14 would be found" in told  # 2.80 * .5 / 10
    assert "deviate by 0.5 (assumed)" in told
    told = str(outlook(on, False, compose, 0.2))
    assert "a change of 0.056 " in told
    assert "measured in this run's own evaluations" in told
    assert "0.28 deviations of the paired differences" in str(outlook(on, False, get("jpeg_size"), None))


def test_suites_by_name(tmp_path):
    assert set(suites.names()) >= {"geneval", "ocr", "pickscore-sfw", "drawbench", "compose"}
    geneval = suites.get("geneval")
    assert (geneval.images, geneval.macro, geneval.rewards) == (4, True, ("geneval",))
    with pytest.raises(UserError, match="did you mean 'drawbench'"):
        suites.get("drawbnch")
    desk = suites.get("compose").prompts(12)
    assert len(desk) == 12
    assert desk == suites.get("compose").prompts(24)[:12]
    own = tmp_path / "own.txt"
    own.write_text("one\ntwo\none\n")
    assert [prompt.text for prompt in suites.get("drawbench").prompts(own=own)] == ["one", "two"]


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_model):
    from stepcredit.training import recipe as recipes

    folder = tmp_path_factory.mktemp("runs") / "first"
    recipe = recipes.load("compose-uniform", {**KEYS, "model": str(tiny_model), "iterations": 2})
    train(recipe, folder, make_display(quiet=True))
    return folder


def evaluate(capsys, run, *flags):
    assert main(["eval", "first", "--out", str(run.parent), "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_suite_on_a_run(run, capsys):
    result = evaluate(capsys, run, "--suite", "compose", "--prompts", "6", "--images", "2", "--rewards", "jpeg_size")
    assert (result["suite"], result["prompts"], result["images"]) == ("compose", 6, 12)
    assert list(result["metrics"]) == ["jpeg_size"]
    assert result["expected"]["source"] == "measured in this run's own evaluations"
    folder = run / "eval-compose-12-5"
    rows = {which: [json.loads(line) for line in (folder / f"{which}.jsonl").read_text().splitlines()]
            for which in ("base", "tuned")}  # fmt: skip
    means = {which: np.mean([row["reward"] for row in some]) for which, some in rows.items()}
    assert result["base"]["mean"] == pytest.approx(means["base"], abs=1e-5)
    assert result["change"]["mean"] == pytest.approx(means["tuned"] - means["base"], abs=1e-5)
    assert json.loads((folder / "result.json").read_text()) == result
    assert set(result["base"]["image_statistics"]) >= {"brightness", "edge_energy", "colour_entropy"}
    assert {row["name"]: row["images"] for row in result["reward_cost"]} == {"jpeg_size": 24}


def test_several_rewards_are_compared_apart_and_corrected_together(run, capsys, tmp_path):
    flags = ["--suite", "compose", "--prompts", "6", "--rewards", "jpeg_size", "tiny_pickscore", "--reward-options",
             "jpeg_size.goal", "large", "--to", str(tmp_path)]  # fmt: skip
    result = evaluate(capsys, run, *flags)
    metrics = result["metrics"]
    assert list(metrics) == ["jpeg_size", "tiny_pickscore"]
    assert metrics["jpeg_size"]["base"]["mean"] > 0  # the goal was passed on: small pictures score negative
    smallest = min(metric["p"] for metric in metrics.values())
    assert min(metric["p_holm"] for metric in metrics.values()) == pytest.approx(min(1, smallest * len(metrics)))
    assert result["expected"]["deviation"] is None


def test_a_table_for_people(run, capsys, tmp_path):
    assert main(["eval", "first", "--out", str(run.parent), "--prompts", "6", "--to", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for words in ("would be found 4 times in 5", "p (Holm)", "colour entropy", "whatever the reward says"):
        assert words in printed
    assert printed.index("would be found") < printed.index("p (Holm)")


def test_prompts_of_a_file(run, capsys, tmp_path):
    own = tmp_path / "mine.txt"
    own.write_text("a red circle on white\na blue square on grey\n")
    result = evaluate(capsys, run, "--prompt-file", str(own), "--images", "3")
    assert (result["suite"], result["prompts"], result["images"]) == ("mine", 2, 6)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--suite", "genevel"], "did you mean 'geneval'"),
        (["--rewards", "jpeg_size", "jpeg_size"], "names 'jpeg_size' twice"),
        (["--rewards", "composite"], "run's own composite alone"),
        (["--reward-options", "goal", "large"], "belongs to --rewards or --suite"),
        (["--rewards", "compose", "--reward-options", "goal", "large"], "must be written compose.OPTION"),
        (["--images", "2"], "--images belongs to --suite or --prompt-file"),
        (["--prompts", "1"], "--prompts must be at least 2"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--rewards", "compose", "--suite", "compose"], "images of shape (4, 3, 32, 32) cannot be read"),
        (["--rewards", "pikscore"], "did you mean 'pickscore'"),
    ],
)
def test_bad_flags(run, capsys, flags, words):
    assert main(["eval", "first", "--out", str(run.parent), *flags]) == 2
    assert words in capsys.readouterr().err
