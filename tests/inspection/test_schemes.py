"""Every scheme's numbers: one case by hand, and all against the functions of the core."""

import math

import pytest
import torch
from hand_made import R_BASE

from stepcredit import advantage, credit
from stepcredit.inspection import schemes
from stepcredit.training import recipe as recipes

TRAINED = torch.tensor([[True, True, True, False]] * 2)


@pytest.fixture(scope="module")
def by_hand():
    """The first two members of the hand-made group; the last step is not trained."""
    return schemes.numbers(recipes.build({}), torch.tensor(R_BASE[:2]), TRAINED)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("uniform", [[0.75] * 4, [0.5] * 4]),
        ("gain", [[0.5, -0.25, 0.75, -0.25], [0.25, 0.25, 0, 0]]),
        ("gae_0.5", [[0.53125, 0.0625, 0.625, -0.25], [0.375, 0.25, 0, 0]]),
        ("gae_1", [[0.75, 0.25, 0.5, -0.25], [0.5, 0.25, 0, 0]]),
        # step 0 turns with all that follows; step 2 rises after a fall, but what follows it falls: loose alone
        ("turning_point_strict", [[0.75, -0.25, 0.75, -0.25], [0.5, 0.25, 0, 0]]),
        ("turning_point_loose", [[0.75, -0.25, 0.5, -0.25], [0.5, 0.25, 0, 0]]),
    ],
)
def test_credit_by_hand(by_hand, key, expected):
    torch.testing.assert_close(by_hand.credit[key], torch.tensor(expected))


def test_turning_points_by_hand(by_hand):
    assert by_hand.loose.tolist() == [[True, False, True, False], [True, False, False, False]]
    assert by_hand.strict.tolist() == [[True, False, False, False], [True, False, False, False]]


def test_advantage_by_hand(by_hand):
    of = by_hand.advantage
    # final rewards 3/4 and 1/2: mean 5/8, deviation 1/8
    size = 0.125 / (0.125 + 1e-4)
    expected = [[size, size, size, 0], [-size, -size, -size, 0]]
    torch.testing.assert_close(of["uniform"]["group"], torch.tensor(expected))
    # six trained gains 1/2 -1/4 3/4 1/4 1/4 0: mean 1/4, squares of the deviations sum to 5/8
    std = math.sqrt(0.625 / 6)
    expected = [[d / (std + 1e-4) for d in row] for row in ([0.25, -0.5, 0.5, 0], [0, 0, -0.25, 0])]
    torch.testing.assert_close(of["gain"]["joint"], torch.tensor(expected))
    # two members stand equally far from their mean at every step, whatever its size
    signs = torch.tensor([[1.0, -1, 1, 0], [-1, 1, -1, 0]])
    torch.testing.assert_close(of["gain"]["per_step"].sign(), signs)
    half = torch.tensor([0.125, 0.25, 0.375, 0])  # half the difference of the two at each step
    std = math.sqrt(sum(h * h for h in half.tolist()) / 3)
    torch.testing.assert_close(of["gain"]["centred"], signs * half / (std + 1e-4))


@pytest.mark.parametrize("seed", range(3))
def test_all_numbers_are_the_core_functions_own(seed):
    R = torch.rand(5, 9, generator=torch.Generator().manual_seed(seed))
    trained = torch.ones(5, 8, dtype=torch.bool)
    trained[:, [0, 7]] = False
    made = schemes.numbers(recipes.build({"lam": 0.3, "temperature": 0.7}), R, trained)
    expected = {
        "uniform": credit.uniform(R),
        "gain": credit.gain(R),
        "turning_point_strict": credit.turning_point(R, True, False, trained),
        "turning_point_loose": credit.turning_point(R, False, False, trained),
        "turning_point_strict_balanced": credit.turning_point(R, True, True, trained),
        "turning_point_loose_balanced": credit.turning_point(R, False, True, trained),
        "turning_point_smooth": credit.turning_point_smooth(R, 0.7),
        **{f"gae_{lam:g}": credit.gae(R, lam) for lam in (0.25, 0.3, 0.5, 0.75, 0.9, 1.0)},
    }
    assert set(made.credit) == set(made.advantage) == set(expected)
    for key, value in expected.items():
        assert torch.equal(made.credit[key], value), key
        legal = {"joint", "per_step", "centred"} | ({"group"} if key == "uniform" else set())
        assert set(made.advantage[key]) == legal
        for name in legal:
            whole = getattr(advantage, name)(value[None], trained[None])[0]
            assert torch.equal(made.advantage[key][name], whole), (key, name)


def test_a_failed_sample_leaves_its_group():
    R = torch.tensor(R_BASE)
    R[0, 2] = torch.nan
    made = schemes.numbers(recipes.build({}), R, torch.ones(3, 4, dtype=torch.bool))
    assert made.credit["gain"][0].isnan().all()
    assert (made.advantage["gain"]["joint"][0] == 0).all()
    alone = schemes.numbers(recipes.build({}), R[1:], torch.ones(2, 4, dtype=torch.bool))
    torch.testing.assert_close(made.advantage["gain"]["joint"][1:], alone.advantage["gain"]["joint"])


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_finds_its_own_scheme(name):
    recipe = recipes.load(name)
    scheme = schemes.own(recipe)
    assert recipe.advantage in scheme.normalisations
    for key, value in scheme.options.items():
        assert getattr(recipe, key) == value or (key, value) == ("credit", "uniform")


def test_gae_without_decay_is_gain():
    assert schemes.own(recipes.build({"credit": "gae", "lam": 0.0})).key == "gain"
    assert schemes.own(recipes.build({"credit": "gae", "lam": 0.3})).key == "gae_0.3"
