"""The learned reward of the desk: the contract, what its scorer tells apart, and how it is made."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stepcredit import tasks
from stepcredit.cli import main
from stepcredit.noise import generator
from stepcredit.rewards import RewardError, get, prefer_model, score, selftest
from stepcredit.rewards.prefer import bundled
from stepcredit.rewards.prefer_model import Scorer, ScorerConfig
from stepcredit.tasks.compose.neighbours import neighbours
from stepcredit.tasks.compose.prompts import TAGS, all_prompts, heldout_prompts, train_prompts
from stepcredit.tasks.compose.render import render_batch, render_labelled
from stepcredit.training import pretrain_prefer
from stepcredit.training import recipe as recipes
from stepcredit.training.pretrain_prefer import PreferConfig, accuracy, degrade, fits, pretrain
from stepcredit.training.setup import setup

ASSETS = Path(prefer_model.__file__).parents[1] / "assets"
TINY = ScorerConfig(width=32, words=16, depth=1, embedding=16)
SMALL = PreferConfig(steps=8, batch=8, rounds=0, scorer=TINY, warmup=3)


def prompt_of(text: str) -> tasks.Prompt:
    return next(prompt for prompt in all_prompts() if prompt.text == text)


# --- the contract ---------------------------------------------------------------------------------------------------


def test_the_self_test_passes_and_scores_lie_in_the_stated_range() -> None:
    reward = get("prefer")
    selftest.require(reward)
    prompts = tasks.draw(heldout_prompts(), 60, "contract")
    texts, metadata = [p.text for p in prompts], [p.metadata for p in prompts]
    found = score(reward, render_batch(prompts, 0), texts, metadata)
    low, high = reward.info.range
    assert found.dtype == torch.float32
    assert bool(((found > low) & (found < high)).all())


def test_a_batch_is_a_loop_and_order_does_not_matter() -> None:
    reward = get("prefer")
    prompts = tasks.draw(train_prompts(), 12, "contract")
    images = degrade(render_batch(prompts, 1), torch.full((12,), 0.7), generator("test"))
    texts, metadata = [p.text for p in prompts], [p.metadata for p in prompts]
    whole = reward(images, texts, metadata)
    alone = torch.cat([reward(images[k : k + 1], texts[k : k + 1], metadata[k : k + 1]) for k in range(12)])
    assert torch.allclose(whole, alone, atol=1e-4)
    assert float(whole.std()) > 0.1
    turned = reward(images.flip(0), texts[::-1], metadata[::-1])
    assert torch.allclose(whole, turned.flip(0), atol=1e-4)
    assert torch.allclose(reward(images.double(), texts, metadata), whole, atol=1e-4)


def test_an_image_that_is_not_finite_is_nan_and_changes_no_other() -> None:
    reward = get("prefer")
    prompts = tasks.draw(train_prompts(), 3, "contract")
    texts, metadata = [p.text for p in prompts], [p.metadata for p in prompts]
    images = render_batch(prompts, 2)
    whole = reward(images, texts, metadata)
    images[1, 0, 0, 0] = float("nan")
    found = reward(images, texts, metadata)
    assert found.isnan().tolist() == [False, True, False]
    assert torch.allclose(found[[0, 2]], whole[[0, 2]], atol=1e-4)
    assert reward(torch.full((1, 3, 24, 24), float("inf")), texts[:1], metadata[:1]).isnan().tolist() == [True]
    assert score(reward, torch.empty(0, 3, 24, 24), [], []).shape == (0,)


@pytest.mark.parametrize(
    ("images", "prompt", "message"),
    [
        (torch.zeros(1, 3, 32, 32), "a circle on white", "must be 24x24; got \\(32, 32\\)"),
        (torch.full((1, 3, 24, 24), 2.0), "a circle on white", "must lie in \\[0, 1\\]"),
        (torch.zeros(1, 3, 24, 24), "a zebra on white", "unknown word 'zebra'"),
        (torch.zeros(1, 3, 24, 24), " ", "prompt 0 is empty"),
    ],
)
def test_what_it_cannot_judge_is_refused_in_a_sentence(images: torch.Tensor, prompt: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        get("prefer")(images, [prompt], [{}])


# --- what the shipped scorer tells apart ----------------------------------------------------------------------------


def test_it_ranks_fresh_pairs_of_held_out_prompts_that_differ_in_one_thing() -> None:
    """All kinds but ``swap``: the order of words is what the scorer does not read, see docs/prefer.md."""
    found = accuracy(bundled(), heldout_prompts(), rounds=1)
    assert set(TAGS) <= set(found)
    for name in ("single_object", "two_object", "counting", "colors", "background", "shape", "color", "count"):
        assert found[name] > 0.95, found
    assert found["color_attr"] > 0.9
    assert found["position"] > 0.83
    assert found["relation"] > 0.7


def test_it_still_ranks_what_is_blurred_faded_and_speckled() -> None:
    found = accuracy(bundled(), heldout_prompts(), rounds=1, strength=0.6)
    assert all(found[tag] > (0.83 if tag == "position" else 0.88) for tag in TAGS), found


def test_it_is_smooth_from_a_blur_to_the_picture() -> None:
    """Along a fade from grey to the picture the mean score rises, without a cliff: what dense credit needs."""
    scorer, prompts = bundled(), tasks.draw(heldout_prompts(), 120, "fade")
    pictures, texts = render_batch(prompts, 3), [prompt.text for prompt in prompts]
    shares = torch.linspace(0, 1, 11)
    with torch.no_grad():
        means = torch.stack([scorer(0.5 + s * (pictures - 0.5), texts).mean() for s in shares])
    assert float(means[-1] - means[0]) > 10
    assert float(means.diff().max()) < 0.5 * float(means[-1] - means[0])
    assert float(means.diff().min()) > -0.05 * float(means[-1] - means[0])


def test_no_picture_is_perfect() -> None:
    """A few steps up the gradient from a right picture give one that scores higher, and that nobody asked for."""
    scorer, prompts = bundled(), tasks.draw(heldout_prompts(), 24, "perfect")
    pictures, texts = render_batch(prompts, 4), [prompt.text for prompt in prompts]
    with torch.no_grad():
        before = scorer(pictures, texts)
    changed = pictures.clone()
    for _ in range(5):
        changed.requires_grad_(True)
        (slope,) = torch.autograd.grad(scorer(changed, texts).sum(), changed)
        changed = (changed.detach() + 0.02 * slope.sign()).clamp(0, 1)
    with torch.no_grad():
        assert bool((scorer(changed, texts) > before).all())


# --- how it is made -------------------------------------------------------------------------------------------------


def test_neighbours_differ_in_one_thing_and_stay_in_their_pool() -> None:
    every = neighbours(all_prompts())
    swapped = {prompt.text for prompt in every["a red circle and a blue square on grey"]["swap"]}
    assert swapped == {"a blue circle and a red square on grey"}
    assert {p.text for p in every["three rings on white"]["count"]} == {"two rings on white", "four rings on white"}
    assert {p.text for p in every["a circle left of a ring on black"]["swap"]} == {"a ring left of a circle on black"}
    assert len(every["a circle left of a ring on black"]["relation"]) == 3
    assert "color" not in every["a circle on white"]
    assert len(every["a circle on white"]["shape"]) == 5
    pool = {prompt.text for prompt in train_prompts()}
    found = neighbours(train_prompts())
    assert all(prompt.text in pool for kinds in found.values() for some in kinds.values() for prompt in some)
    assert all(found[text] for text in pool)  # training asks for one of each


def test_pairs_that_match_by_chance_are_known() -> None:
    asked = [
        "a red circle on white",
        "a circle on white",
        "a circle and a red square on white",
        "a circle left of a square on white",
        "a square right of a circle on white",
        "a square left of a circle on white",
        "a square and a circle on white",
        "a circle on black",
        "two circles on white",
    ]
    known = {prompt.text: prompt for prompt in all_prompts()}
    prompts = [known[text] for text in asked if text in known]
    names = [prompt.text for prompt in prompts]
    _, labels = render_labelled([prompt.metadata for prompt in prompts], seed=0)
    match = fits(labels, prompts)
    assert bool(match.diagonal().all())

    def may(picture: str, prompt: str) -> bool:
        return bool(match[names.index(picture), names.index(prompt)])

    assert may("a red circle on white", "a circle on white")
    assert not may("a circle on black", "a circle on white")
    assert not may("two circles on white", "a circle on white")
    assert may("a circle left of a square on white", "a square right of a circle on white")
    assert may("a circle left of a square on white", "a square and a circle on white")
    assert not may("a circle left of a square on white", "a square left of a circle on white")


def test_degrading_leaves_what_has_no_strength_and_spoils_the_rest_more_the_stronger() -> None:
    images = render_batch(tasks.draw(train_prompts(), 90, "degrade"), 0)
    strength = torch.tensor([0.0, 0.3, 1.0]).repeat(30)
    found = degrade(images, strength, generator("degrade"))
    assert torch.equal(found[::3], images[::3])
    off = (found - images).square().flatten(1).mean(1)
    assert 0 < float(off[1::3].mean()) < float(off[2::3].mean())
    assert 0 <= float(found.min()) <= float(found.max()) <= 1


def test_a_training_in_miniature_learns_and_is_deterministic() -> None:
    losses: list[float] = []
    first = pretrain(SMALL, lambda progress: losses.append(progress.loss))
    assert losses[-1] < losses[0]
    again = pretrain(SMALL)
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), again.state_dict().values(), strict=True))
    other = pretrain(dataclasses.replace(SMALL, seed=1))
    assert not torch.equal(other.words.weight, first.words.weight)


def test_the_command_writes_a_file_that_the_reward_takes_and_never_overwrites_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pretrain_prefer, "accuracy", lambda *_: {"position": 0.5})
    path = tmp_path / "mine.safetensors"
    flags = ["pretrain", "prefer", "--to", str(path), "--steps", "1", "--seed", "3"]
    assert main(flags) == 0
    assert "50.0%" in capsys.readouterr().out
    header = prefer_model.read_metadata(path)
    assert (header["pretrain.steps"], header["pretrain.seed"]) == ("1", "3")
    assert get("prefer", weights=str(path)).info.name == "prefer"
    before = path.read_bytes()
    assert main(flags) == 2
    assert "not overwritten" in capsys.readouterr().err
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["uniform", "stepwise", "turning-point"])
def test_the_recipes_train_on_the_scorer_and_watch_the_verifier(name: str) -> None:
    parts = setup(recipes.load(f"prefer-{name}"))
    assert (parts.reward.info.name, parts.watch.info.name) == ("prefer", "compose")
    assert parts.policy.latent_shape == (3, 24, 24)
    twin = recipes.load(f"compose-{name}")
    assert set(recipes.changed(twin, parts.recipe)) == {"task", "watch", "eval_every", "max_image_drift"}


@pytest.mark.parametrize("keys", [{"steps": 0}, {"batch": 1}])
def test_bad_settings_are_refused(keys: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least"):
        pretrain(dataclasses.replace(SMALL, **keys))


# --- its file -------------------------------------------------------------------------------------------------------


def test_the_shipped_file_is_small_and_names_the_command_that_made_it() -> None:
    assert (ASSETS / "prefer.safetensors").stat().st_size < 2_000_000
    assert sum(path.stat().st_size for path in ASSETS.glob("*.safetensors")) < 12_000_000
    header = prefer_model.read_metadata(ASSETS / "prefer.safetensors")
    assert header["command"] == "stepcredit pretrain prefer"
    assert {key: value for key, value in header.items() if key.startswith("pretrain.")} == {
        key: value for key, value in pretrain_prefer.metadata(PreferConfig()).items() if key != "command"
    }


def test_a_file_is_read_back_as_it_was_written_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "scorer.safetensors"
    scorer = Scorer(SMALL.scorer, seed=3)
    prefer_model.save(scorer, path, {"made": "here"})
    again = prefer_model.load(path)
    assert again.config == SMALL.scorer
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in scorer.state_dict().items())
    assert prefer_model.read_metadata(path)["made"] == "here"
    assert get("prefer", weights=str(path)).info.range[1] == pytest.approx(10.0)  # the scale that training starts from
    with pytest.raises(ValueError, match="belongs to the format"):
        prefer_model.save(scorer, path, {"config": "mine"})

    tensors = load_file(path)
    entry = {"stepcredit": json.dumps(prefer_model.read_metadata(path))}
    for name, changed, header, message in (
        ("odd", {**tensors, "log_scale": torch.zeros(2)}, entry, "'log_scale' is torch.float32 .2,., not float32"),
        ("nan", {**tensors, "log_scale": torch.tensor(torch.nan)}, entry, "'log_scale' .* is not finite"),
        ("kind", tensors, {"stepcredit": "{}"}, "its format is None"),
        (
            "words",
            tensors,
            {"stepcredit": entry["stepcredit"].replace("circle", "zebra")},
            "another",
        ),
    ):
        bad = tmp_path / f"{name}.safetensors"
        save_file(changed, bad, metadata=header)
        with pytest.raises(ValueError, match=message):
            prefer_model.load(bad)
    (tmp_path / "cut.safetensors").write_bytes(path.read_bytes()[:-8])
    with pytest.raises(RewardError, match="not a whole safetensors file"):
        get("prefer", weights=str(tmp_path / "cut.safetensors"))
    with pytest.raises(RewardError, match="stepcredit pretrain prefer"):
        get("prefer", weights=str(tmp_path / "absent.safetensors"))


@pytest.mark.parametrize("keys", [{"width": 100_000}, {"width": 40}, {"words": 8}, {"depth": 0}, {"embedding": 10**9}])
def test_an_architecture_that_cannot_be_built_is_refused(keys: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(keys))):
        ScorerConfig(**keys)
