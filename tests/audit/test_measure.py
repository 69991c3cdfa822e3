"""The audit on a policy whose gradient is known, and against the gradient that training takes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from toy import Linear, scheme, true_gradient

from stepcredit import advantage as advantages
from stepcredit.audit.estimators import alignment, pair_mean, products
from stepcredit.audit.gradients import Sketch
from stepcredit.audit.measure import measure
from stepcredit.audit.result import _window, advice, summarise
from stepcredit.audit.schemes import prepare, reference_advantage, shapes
from stepcredit.errors import UserError
from stepcredit.training.collect import sample, scored
from stepcredit.training.iteration import credit_of
from stepcredit.training.setup import setup
from stepcredit.training.update import accumulate

EXACT = 1 << 20


def kept(*schemes, groups):
    found = shapes(schemes, plain=True)
    return found, measure(found, groups, EXACT)


def assert_mean(rows: np.ndarray, truth: torch.Tensor):
    error = rows.std(0) / len(rows) ** 0.5
    assert (np.abs(rows.mean(0) - truth.numpy()) < 4.5 * error + 1e-9).all()


@pytest.mark.parametrize("window", [(0, 4), (1, 3)])
@pytest.mark.parametrize("credit", ["uniform", "gain"])
def test_the_reference_is_the_true_policy_gradient(credit, window):
    # the closed form and the estimate differ by chance alone, whatever the states' estimates were made for
    advantage = "group" if credit == "uniform" else "centred"
    policy = scheme("it", credit=credit, advantage=advantage, window=window)
    _, (sums,) = kept(policy, groups=100)
    whole, by_step = true_gradient(window=window)
    rows = sums.gradients(-1)
    assert_mean(rows, whole)
    for step in range(*window):
        mean = sums.by_block(-1, step).sum(0) / sums.groups
        assert mean == pytest.approx(by_step[step].numpy(), abs=5 * (sums.powers[-1, step] / 100 / 100) ** 0.5)
    estimate = pair_mean(rows @ rows.T)
    assert estimate.interval().low < float(whole.square().sum()) < estimate.interval().high


def test_a_biased_scheme_is_found_out_and_an_unbiased_one_is_not():
    # the gradient of the last step alone points elsewhere than that of all
    policy = Linear()
    uniform = scheme("uniform", policy=policy, credit="uniform", advantage="group")
    last = scheme("last", policy=policy, credit="gae", lam=1.0, step_weight="table", step_table=(0.0, 0.0, 0.0, 1.0))
    whole, by_step = true_gradient()
    truth = float(by_step[3] @ whole / by_step[3].norm() / whole.norm())
    assert truth < 0.8
    for schemes in ([uniform, last], [last]):
        _, (sums,) = kept(*schemes, groups=100)
        found = [alignment(products(sums.gradients(k), sums.gradients(-1))).interval() for k in range(len(schemes))]
        assert found[-1].low < truth < found[-1].high < 1
    _, (sums,) = kept(uniform, groups=100)
    one = alignment(products(sums.gradients(0), sums.gradients(-1))).interval()
    assert one.low < 1 < one.high


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"credit": "uniform", "advantage": "group", "ratio": "normalised"},
        {"credit": "gain", "advantage": "joint", "kernel": "cps", "step_weight": "std", "shared_noise": False},
        {"credit": "turning_point", "balance": True, "estimate": "full", "window_size": 2},
    ],
)
def test_a_schemes_gradient_is_the_one_that_training_takes(small, keys):
    recipe = small(micro_batch=4, prompts_per_iteration=2, **keys)
    (one,) = prepare({"it": recipe}, 4, recipe.seed)
    (sums,) = measure(shapes([one]), 4, EXACT)
    parts = setup(small(micro_batch=4, prompts_per_iteration=1, **keys))
    made = sample(parts, 2)  # the second group
    R = scored(parts, [made]).R
    credit = credit_of(parts.recipe, R, made.groups.trained)
    A = getattr(advantages, parts.recipe.advantage)(credit, made.groups.trained)
    every_pair = made.groups.layout.noisy.sum(0)
    normalised = recipe.ratio == "normalised"
    accumulate(made.velocity, None, made.trajectory, A.flatten(0, 1), every_pair, parts.weights, 4, clip=1e-4,
               normalised_ratio=normalised)  # fmt: skip
    trained = torch.cat([p.grad.flatten() for _, p in parts.policy.named_parameters()])
    # training descends, with a mean over (member, step) pairs and over the dimensions of a latent
    pairs = int(made.groups.layout.noisy.sum()) / made.groups.size
    expected = -trained * pairs * torch.Size(parts.policy.latent_shape).numel()
    got = sums.totals[1][0]
    assert got.norm() > 0
    assert torch.allclose(got, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def test_schemes_share_rollouts_and_estimates_where_they_can():
    policy = Linear()
    gain = scheme("gain", policy=policy)
    same = scheme("joint", policy=policy, advantage="joint")
    other = scheme("tweedie", policy=policy, estimate="tweedie")
    uniform = scheme("uniform", policy=policy, credit="uniform", advantage="group", estimate="tweedie")
    kernel = scheme("dance", policy=policy, kernel="dance")
    found = shapes([gain, uniform, same, other, kernel])
    assert [[s.label for s in shape.schemes] for shape in found] == [["gain", "uniform", "joint", "tweedie"], ["dance"]]
    assert len(found[0].scored_by) == 2
    assert found[0].estimate_of == (0, 0, 0, 1)
    alone = shapes([uniform])[0]  # the reference's baseline comes free of model evaluations
    assert alone.scored_by[0].recipe.estimate == "tweedie"


def test_one_pass_gives_each_scheme_what_it_gets_alone():
    policy = Linear()
    pair = scheme("gain", policy=policy), scheme("uniform", policy=policy, credit="uniform", advantage="group")
    _, (both,) = kept(*pair, groups=4)
    for k, one in enumerate(pair):
        _, (alone,) = kept(one, groups=4)
        assert np.allclose(both.gradients(k), alone.gradients(0), rtol=1e-5, atol=1e-6)


def test_an_audit_that_is_stopped_gives_what_it_has():
    done = []
    found = shapes([scheme("gain")])
    (sums,) = measure(found, 50, EXACT, lambda k, of: done.append((k, of)), lambda: len(done) == 5)
    assert sums.groups == 5
    assert done[-1] == (5, 50)
    assert summarise(found, [sums])["groups"] == 5
    (none,) = measure(found, 50, EXACT, stopped=lambda: True)
    assert "Too few groups (0)" in summarise(found, [none])["advice"]


def test_the_order_of_groups_changes_no_result():
    found, (sums,) = kept(scheme("gain"), groups=20)
    order = np.random.default_rng(0).permutation(20)
    mixed = replace(sums, totals=[sums.totals[k] for k in order])
    one, other = (summarise(found, [s])["schemes"][0] for s in (sums, mixed))
    for key in ("signal_to_noise", "alignment", "progress", "ratio"):
        assert list(one[key].values()) == pytest.approx(list(other[key].values()), rel=1e-6, nan_ok=True), key


def test_the_reference_advantage_by_hand():
    R = torch.tensor([[[0.0, 1.0, 3.0], [0.0, 2.0, 1.0], [0.0, float("nan"), 5.0]]])
    trained = torch.ones(1, 3, 2, dtype=torch.bool)
    # to the end: 3, 1, 5 at step 0; 2, -1 at step 1, where the third has failed
    expected = torch.tensor([[[0.0, 3.0], [-3.0, -3.0], [3.0, 0.0]]])
    assert torch.allclose(reference_advantage(R, trained), expected)
    assert float(reference_advantage(R, torch.zeros_like(trained)).abs().sum()) == 0


def test_the_sketch_keeps_products_in_expectation():
    a, b = torch.randn(2, 400, generator=torch.Generator().manual_seed(0))
    b = b + 0.5 * a
    sketches = [Sketch(400, n) for n in range(40, 240)]
    found = torch.tensor([float(s(a) @ s(b)) for s in sketches])
    assert abs(float(found.mean() - a @ b)) < 4 * float(found.std()) / len(found) ** 0.5
    assert float(found.std()) < 2 * float(a.norm() * b.norm()) / 40**0.5
    assert torch.equal(Sketch(400, 100)(a), Sketch(400, 100)(a))
    assert torch.equal(Sketch(400, 400)(a), a)


def test_a_window_is_proposed_where_the_last_steps_are_noise():
    assert _window(np.array([0.5, 0.5, 0.0]), np.array([0.1, 0.1, 0.8])) == [0, 2]
    assert _window(np.array([0.4, 0.3, 0.3]), np.array([0.4, 0.3, 0.3])) is None
    assert _window(np.array([0.0, 1.0]), np.array([0.0, 1.0])) is None


def interval(mean: float, half: float) -> dict[str, float]:
    return {"mean": mean, "low": mean - half, "high": mean + half}


def row(
    label: str, ratio: float, *, half: float = 0.2, cosine: float = 1.0, noise=(0.3, 0.3, 0.4), window=None
) -> dict:
    return {
        "label": label, "credit": "gain", "advantage": "centred", "kernel": "cps", "level": 0.8, "window": None,
        "sampler_steps": 3, "estimate": "2 substeps", "progress_at_equal_cost": interval(0.1 * ratio, 0.1 * half),
        "ratio": interval(ratio, half), "difference": interval(0.1 * (ratio - 1), 0.1 * half),
        "behind_best": interval(0.1 * (1.5 - ratio), 0.1 * half), "alignment": interval(cosine, 0.05),
        "steps": {"proposed_window": window, "share_of_noise": list(noise)},
    }  # fmt: skip


def test_the_advice_says_what_the_intervals_allow():
    base = row("one", 1.0, half=0.0)
    clear = advice({"groups": 64, "schemes": [base, row("two", 1.5)]})
    assert clear.startswith("Take two: credit gain, advantage centred, kernel cps 0.8, window [0, 3), 2 substeps; ")
    assert clear.endswith("at equal cost an update gains 1.50 [1.30, 1.70] times what one gains.")
    close = advice({"groups": 64, "schemes": [base, row("two", 1.1)]})
    assert "1.10 [0.90, 1.30] times what one gains, which 64 groups do not tell from the same" in close
    first = advice({"groups": 64, "schemes": [base, row("two", 0.5), row("three", 0.9)]})
    assert first.startswith("Take one")
    assert "none of the others gains more at equal cost, and 1 of 2 gain clearly less" in first
    biased = advice({"groups": 64, "schemes": [base, row("two", 1.5, cosine=0.6, window=[0, 2])]})
    assert "biased, with a cosine of 0.60 [0.55, 0.65]" in biased
    assert "audit it again with --window 0 2" in biased
    unknown = {"mean": float("nan"), "low": float("nan"), "high": float("nan")}
    open_first = [{**base, "progress_at_equal_cost": interval(0.1, 0.2)}, {**row("two", 1.5), "ratio": unknown}]
    assert "gains 0.05 [0.03, 0.07] more than one" in advice({"groups": 64, "schemes": open_first})
    tied = advice({"groups": 64, "schemes": [base, row("two", 1.5), row("three", 1.4), row("four", 1.0)]})
    assert tied.endswith("; not told from it: three.")
    hidden = advice({"groups": 64, "schemes": [row("one", 0.1, half=0.5, noise=(0.1, 0.1, 0.8))]})
    assert hidden.startswith("No scheme's signal stands out of the noise of 64 groups")
    assert "step 2 alone brings 80% of the noise" in hidden


def test_recipes_on_another_policy_are_refused(small):
    with pytest.raises(UserError, match=r"reward is 'jpeg_size' in 'a' and None in 'b'"):
        prepare({"a": small(), "b": small(reward=None)}, 4, 0)
