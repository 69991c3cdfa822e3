"""A look at a group, against a sampler of the test's own, and the command that writes the page."""

import dataclasses

import pytest
import torch

from stepcredit import noise
from stepcredit.cli import main
from stepcredit.errors import UserError
from stepcredit.inspection import collect
from stepcredit.rewards.base import RewardInfo, SelfTest, to_uint8
from stepcredit.rewards.registry import FunctionReward
from stepcredit.training import checkpoint
from stepcredit.training import recipe as recipes
from stepcredit.training.setup import setup
from stepcredit.training.state import load_weights

SMALL = ["--reward", "jpeg_size", "--steps", "4", "--window", "0", "3"]


@pytest.fixture(scope="module")
def parts(model):
    """A group of three; the reward is the brightness of the red channel."""
    grey = torch.full((3, 24, 24), 0.5)
    info = RewardInfo("red", (0.0, 1.0), "none", "mean of the red channel")
    reward = FunctionReward(info, lambda images, *_: images[:, 0].mean((1, 2)).tolist(), SelfTest(grey, grey, "", {}))
    keys = {"model": model, "steps": 5, "window": (1, 4), "estimate": "tweedie", "seed": 3, "eval_prompts_during": 2}
    return dataclasses.replace(setup(collect.narrowed(recipes.build(keys), 3)), reward=reward)


def test_rewards_and_pictures_are_those_of_every_state(parts):
    """Sampled again, member by member and state by state, with nothing shared and nothing planned."""
    prompt = parts.heldout[0].prompt
    seen = collect.look(parts, prompt, "Base")
    policy, kernel, seed = parts.policy, parts.kernel, parts.recipe.seed
    cond = policy.encode([prompt.text])
    for member in range(3):
        x = noise.normal(policy.latent_shape, "initial", seed, 0, 0, 0)[None]
        for i in range(6):
            t = kernel.grid[i].float()
            if i < 5:
                with torch.no_grad():
                    v = policy.velocity(x, t[None], cond)
                estimate = x - t * v
            if i >= 4:  # no noise follows: the final image is the estimate
                estimate = x
                for k in range(i, 5):
                    with torch.no_grad():
                        step = (kernel.grid[k + 1] - kernel.grid[k]).float()
                        estimate = estimate + step * policy.velocity(estimate, kernel.grid[k].float()[None], cond)
            image = policy.decode(estimate)
            assert float(seen.R[member, i]) == pytest.approx(float(image[0, 0].mean()), abs=1e-5)
            picture = seen.images[seen.estimate[member, i]]
            assert (picture.int() - to_uint8(image)[0].int()).abs().max() <= 1
            if i < 5:
                drawn = noise.normal(policy.latent_shape, "step", seed, 0, 0, member, i)[None]
                x = kernel.step(x, v, i, drawn) if 1 <= i < 4 else x + (kernel.grid[i + 1] - kernel.grid[i]).float() * v
    assert collect.inspection(parts, prompt, [seen]).trained.tolist() == [[False, True, True, True, False]] * 3


def test_two_looks_at_the_same_weights_are_equal(parts):
    prompt = parts.heldout[0].prompt
    first, second = (collect.look(parts, prompt, name) for name in ("a", "b"))
    assert torch.equal(first.R, second.R)
    assert torch.equal(first.images, second.images)


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_can_be_narrowed_to_a_group(name):
    recipe = recipes.load(name)
    small = collect.narrowed(recipe, 6)
    assert (small.prompts_per_iteration, small.group_size, small.branch) == (1, 6, False)
    assert 6 % small.micro_batch == 0
    assert {"kernel", "level", "window", "estimate", "substeps", "steps", "seed"}.isdisjoint(
        recipes.changed(recipe, small)
    )
    assert collect.narrowed(recipe).group_size == min(recipe.group_size, 16)


def test_one_member_is_no_group():
    with pytest.raises(UserError, match="--members must be at least 2, not 1"):
        collect.narrowed(recipes.build({}), 1)


def test_prompts_are_found_whatever_their_case_and_others_stand_for_themselves(parts):
    known = collect.find_prompt(parts, "  A Square on  black ")
    assert (known.text, known.metadata["tag"]) == ("a square on black", "single_object")
    assert collect.find_prompt(parts, None) == parts.heldout[0].prompt
    assert collect.find_prompt(parts, "a red square").metadata == {}
    with pytest.raises(UserError, match="--prompt is empty"):
        collect.find_prompt(parts, " ")


def test_large_pictures_are_reduced_and_small_ones_are_kept():
    assert collect._reduced(torch.rand(2, 3, 24, 96)).shape == (2, 3, 24, 96)
    assert collect._reduced(torch.rand(2, 3, 512, 256)).shape == (2, 3, 192, 96)
    plain = torch.full((1, 3, 512, 512), 0.25)
    torch.testing.assert_close(collect._reduced(plain), torch.full((1, 3, 192, 192), 0.25))


def test_a_recipe_shows_its_base_model(model, tmp_path, capsys):
    page = tmp_path / "page.html"
    flags = ["--model", model, "--members", "3", "--to", str(page), *SMALL]
    assert main(["inspect", "compose-stepwise", "--prompt", "a square on black", *flags]) == 0
    printed = capsys.readouterr().out
    assert '"a square on black", 3 members, 4 steps' in printed
    assert f"wrote {page}" in printed
    text = page.read_text(encoding="utf-8")
    assert text.count('<section class="look"') == 1
    assert main(["inspect", "compose-stepwise", *flags]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["inspect", "compose-stepwise", *flags, "--force", "--estimate", "full"]) == 0
    assert "carried to the end by all remaining steps" in page.read_text(encoding="utf-8")


def test_a_run_shows_base_and_tuned_side_by_side(model, tmp_path, capsys):
    train = ["--prompts-per-iteration", "2", "--group-size", "4", "--micro-batch", "4", "--lr", "0.01",
             "--eval-prompts", "4", "--eval-prompts-during", "2", "--iterations", "2", "--model", model]  # fmt: skip
    assert main(["train", "compose-stepwise", "--name", "run", "--quiet", "--out", str(tmp_path), *train, *SMALL]) == 0
    folder = tmp_path / "run"
    capsys.readouterr()
    assert main(["inspect", str(folder)]) == 0
    text = (folder / "inspect.html").read_text(encoding="utf-8")
    assert text.count('<section class="look"') == 2
    assert "Tuned: averaged weights after iteration 2" in text

    parts = setup(collect.narrowed(recipes.parse((folder / "recipe.yaml").read_text(), "run")))
    base = collect.look(parts, parts.heldout[0].prompt, "Base")
    load_weights(parts.policy, checkpoint.load(folder / "checkpoints"), "ema")
    tuned = collect.look(parts, parts.heldout[0].prompt, "Tuned")
    printed = capsys.readouterr().out
    assert not torch.equal(base.R, tuned.R)
    for look in (base, tuned):
        assert f"{look.R[:, -1].mean():.3f} of the images" in printed


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--prompt", "a red thing"], "unknown word 'thing'"),
        (["--prompt", "a red red square on black"], "did you mean 'a red square on black'?"),
        (["--members", "1"], "--members must be at least 2"),
        (["--to", "nowhere/page.html"], "the folder 'nowhere' of --to does not exist"),
    ],
)
def test_what_cannot_be_shown_is_said_in_a_sentence(model, tmp_path, monkeypatch, capsys, flags, said):
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", "compose-stepwise", "--model", model, "--steps", "4", "--window", "0", "3", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error
    assert len(error.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore::stepcredit.policies.diffusers_common.PolicyWarning")
def test_a_pipeline_rehearsed(tmp_path):
    """A recipe of SD3.5 on a tiny pipeline of its family: guidance, adapters, a prompt of one's own."""
    pytest.importorskip("diffusers")
    from stepcredit.training import rehearsal

    recipe = rehearsal.rehearsed(recipes.load("sd35-ocr-stepwise-24gb"), {})
    (tmp_path / "small.yaml").write_text(recipes.dump(recipe))
    page = tmp_path / "page.html"
    flags = [
        "--members",
        "2",
        "--prompt",
        'a sign that says "no"',
        "--to",
        str(page),
        "--embedding-cache",
        str(tmp_path),
    ]
    assert main(["inspect", str(tmp_path / "small.yaml"), *flags]) == 0
    text = page.read_text(encoding="utf-8")
    assert "a sign that says &#34;no&#34;" in text
    assert text.count("data-state=") == 2 * (recipe.steps + 1)
