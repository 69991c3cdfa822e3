"""Recipes: what is refused, and with which words."""

import contextlib

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from stepcredit.errors import UserError
from stepcredit.training import recipe as recipes
from stepcredit.training.recipe import Recipe


@pytest.mark.parametrize("name", recipes.names())
def test_bundled_recipes_load_and_survive_a_round_trip(name):
    recipe = recipes.load(name)
    assert recipes.parse(recipes.dump(recipe), "dump") == recipe
    assert recipes.text(name).startswith(f"# stepcredit train {name}\n")


def test_names_of_the_issue_are_bundled():
    assert set(recipes.names()) >= {
        "compose-uniform",
        "compose-stepwise",
        "compose-stepwise-paper",
        "compose-turning-point",
        "compose-turning-point-paper",
        "compose-tempflow",
        "compose-gae",
    }


def test_paper_recipes_follow_the_papers():
    stepwise = recipes.load("compose-stepwise-paper")
    assert (stepwise.kernel, stepwise.estimate, stepwise.substeps) == ("ddim", "substeps", 5)
    assert (stepwise.credit, stepwise.advantage, stepwise.shared_noise) == ("gain", "joint", True)
    turning = recipes.load("compose-turning-point-paper")
    assert (turning.kernel, turning.window, turning.estimate) == ("cps", (0, 9), "full")
    assert (turning.credit, turning.strict, turning.balance, turning.advantage) == (
        "turning_point",
        True,
        True,
        "per_step",
    )
    assert turning.clip == 1e-5
    uniform = recipes.load("compose-uniform")
    assert (uniform.kernel, uniform.credit, uniform.advantage) == ("flow_sde", "uniform", "group")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"kernle": "ddim"}, ["'kernle'", "did you mean 'kernel'"]),
        ({"group_size": 1}, ["group_size", "1", "2"]),
        ({"micro_batch": 48}, ["micro_batch 48", "128", "32"]),
        ({"kernel": "ddpm"}, ["kernel", "'ddpm'", "flow_sde"]),
        ({"lr": -1.0}, ["lr", "-1"]),
        ({"lr": float("nan")}, ["lr", "nan"]),
        ({"credit": "gain", "advantage": "group"}, ["group", "gain", "centred"]),
        ({"branch": True}, ["branch", "tempflow", "gain"]),
        ({"credit": "tempflow"}, ["branch: true"]),
        ({"updates_per_rollout": 3}, ["updates_per_rollout 3", "8"]),
        ({"ratio": "normalised", "kernel": "cps"}, ["normalised", "flow_sde", "cps"]),
        ({"step_weight": "table", "step_table": [1.0, 2.0]}, ["step_table", "10"]),
        ({"eval_prompts": 10, "eval_prompts_during": 20}, ["eval_prompts_during 20", "10"]),
    ],
)
def test_refusals_name_the_key_the_value_and_the_remedy(keys, words):
    with pytest.raises(UserError) as caught:
        recipes.build(keys)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'compose-stepwise'"):
        recipes.load("compose-stepwize")


@pytest.mark.parametrize(
    "text", ["- a\n- b\n", "just words", "a: [1", "!!python/object/apply:os.system ['true']", "1: 2"]
)
def test_malformed_yaml_is_one_sentence(tmp_path, text):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        recipes.load(str(path))
    assert "\n" not in str(caught.value)
    assert "bad.yaml" in str(caught.value)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.yaml"):
        recipes.load(str(tmp_path / "nowhere.yaml"))


def test_every_key_has_a_meaning():
    assert [key for key, field in Recipe.model_fields.items() if not field.description] == []


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(Recipe.model_fields)) | st.text(max_size=12), scalars, max_size=6))
def test_any_keys_give_a_recipe_or_a_sentence(keys):
    try:
        recipe = recipes.build(keys)
    except UserError:
        return  # any other exception fails the test
    assert recipes.parse(recipes.dump(recipe), "dump") == recipe


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60))
def test_any_text_gives_a_recipe_or_a_sentence(text):
    with contextlib.suppress(UserError):  # any other exception fails the test
        recipes.parse(text, "text")


def test_dump_is_plain_yaml():
    assert yaml.safe_load(recipes.dump(Recipe()))["kernel"] == "flow_sde"


def test_changed_lists_old_and_new():
    old, new = Recipe(), Recipe(lr=1e-4, iterations=5)
    assert recipes.changed(old, new) == {"iterations": (30, 5), "lr": (3e-4, 1e-4)}
