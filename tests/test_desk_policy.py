"""The desk policy: shapes, exact reproducibility, a reference that stays, and files that are refused, not misread."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from stepcredit.policies.base import Policy, take
from stepcredit.policies.desk import DeskPolicy, read_metadata, vocabulary
from stepcredit.policies.desk_model import DeskConfig, DeskTransformer, _cells, _picture

SMALL = {"height": 16, "width": 16, "hidden": 16, "depth": 2, "heads": 2}
PROMPTS = ["a red circle on white", "two rings on black", "a square left of a cross on grey", "a diamond on grey"]


@pytest.fixture
def policy():
    """A small policy of which no weight is zero, so that every part of the network has its say."""
    policy = DeskPolicy.initial("compose", seed=3, **SMALL)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in policy.named_parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    policy.reset_reference()
    return policy


def batch(policy, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(PROMPTS), *policy.latent_shape, generator=generator)
    return x, torch.tensor([1.0, 0.7, 0.2, 0.0]), policy.encode(PROMPTS)


def weights(policy):
    return {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}


def test_satisfies_the_protocol(policy):
    assert isinstance(policy, Policy)
    assert (policy.name, policy.forwards_per_velocity, policy.latent_shape) == ("desk-compose", 1, (3, 16, 16))
    assert policy.device == torch.device("cpu")


def test_parameters_of_the_default_architecture():
    per_block = (
        (96 * 576 + 576) + (96 * 9 + 96) + (96 * 288 + 288) + (96 * 96 + 96) + (96 * 384 + 384) + (384 * 96 + 96)
    )
    inputs = (48 * 96 + 96) + 64 * 96 + 34 * 96 + 10 * 96
    conditioning = (64 * 96 + 96) + 2 * (96 * 96 + 96)
    outputs = (96 * 192 + 192) + (96 * 48 + 48)
    model = DeskTransformer(DeskConfig(words=34))
    assert sum(p.numel() for p in model.parameters()) == inputs + conditioning + 3 * per_block + outputs == 568_080


def test_velocity_has_the_shape_of_x_and_takes_double_inputs(policy):
    x, t, cond = batch(policy)
    v = policy.velocity(x, t, cond)
    assert v.shape == x.shape
    assert v.dtype == torch.float32
    assert torch.equal(policy.velocity(x.double(), t.double(), cond), v)


def test_rectangular_images():
    policy = DeskPolicy.initial("compose", height=8, width=24, hidden=8, depth=1, heads=1)
    x = torch.randn(2, 3, 8, 24, generator=torch.Generator().manual_seed(0))
    assert policy.velocity(x, torch.tensor([0.1, 0.9]), policy.encode(PROMPTS[:2])).shape == (2, 3, 8, 24)


def test_cells_are_patches_row_by_row_and_back():
    x = torch.arange(2 * 3 * 4 * 6).float().view(2, 3, 4, 6)
    cells = _cells(x, 2)
    assert cells.shape == (2, 6, 12)
    # second row, third column of patches: rows 2-3, columns 4-5 of each channel of 24 pixels
    assert cells[0, 5].tolist() == [16, 17, 22, 23, 40, 41, 46, 47, 64, 65, 70, 71]
    assert torch.equal(_picture(cells, x, 2), x)


def test_an_initial_policy_has_zero_velocity():
    policy = DeskPolicy.initial("compose", **SMALL)
    assert torch.count_nonzero(policy.velocity(*batch(policy))) == 0


def test_initial_weights_follow_the_seed_and_leave_the_global_generator_alone():
    state = torch.get_rng_state()
    first, again, other = (weights(DeskPolicy.initial("compose", seed=s, **SMALL)) for s in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["patches.weight"], other["patches.weight"])


def test_velocity_is_deterministic(policy):
    assert torch.equal(policy.velocity(*batch(policy)), policy.velocity(*batch(policy)))


def test_a_row_does_not_depend_on_the_others(policy):
    x, t, cond = batch(policy)
    together = policy.velocity(x, t, cond)
    for k in range(len(x)):
        one = torch.tensor([k])
        torch.testing.assert_close(policy.velocity(x[one], t[one], take(cond, one)), together[one], atol=1e-5, rtol=0)
    order = torch.tensor([2, 0, 3, 1])
    shuffled = policy.velocity(x[order], t[order], take(cond, order))
    torch.testing.assert_close(shuffled, together[order], atol=1e-5, rtol=0)


def test_velocity_depends_on_words_their_order_time_and_every_pixel(policy):
    x, t, _ = batch(policy)
    x, t = x[:1].requires_grad_(), t[1:2]
    left = policy.velocity(x, t, policy.encode(["a square left of a cross on grey"]))
    swapped = policy.velocity(x, t, policy.encode(["a cross left of a square on grey"]))
    later = policy.velocity(x, t - 0.1, policy.encode(["a square left of a cross on grey"]))
    assert (left - swapped).abs().max() > 1e-4
    assert (left - later).abs().max() > 1e-4
    left.square().sum().backward()
    assert bool((x.grad != 0).all())


def test_every_weight_that_a_prompt_uses_gets_a_gradient(policy):
    policy.velocity(*batch(policy)).square().mean().backward()
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
        assert parameter.grad.abs().max() > 0, name


def test_encode_numbers_words_and_refuses_unknown_ones(policy):
    words = vocabulary("compose")
    tokens = policy.encode(["a red ring on black"])["tokens"]
    assert tokens.tolist() == [[words.index(w) for w in ["a", "red", "ring", "on", "black"]] + [0] * 5]
    with pytest.raises(ValueError, match="pentagon"):
        policy.encode(["a pentagon on black"])


def test_decode_maps_and_clamps(policy):
    values = torch.tensor([-2.0, -1.0, 0.0, 1.0, 3.0], dtype=torch.float64)
    assert policy.decode(values.view(1, 1, 1, 5)).flatten().tolist() == [0, 0, 0.5, 1, 1]
    assert policy.decode(values).dtype == torch.float32


def test_grid_is_the_shifted_one(policy):
    published = [1, 0.9601, 0.9133, 0.8577, 0.7904, 0.7073, 0.6022, 0.4649, 0.2780, 0.0089, 0]
    assert policy.grid(10).dtype == torch.float64
    torch.testing.assert_close(policy.grid(10), torch.tensor(published, dtype=torch.float64), atol=5e-5, rtol=0)


def test_reference_stays_while_the_policy_is_trained(policy):
    x, t, cond = batch(policy)
    before = policy.velocity(x, t, cond).detach()
    assert torch.equal(policy.reference_velocity(x, t, cond), before)
    optimiser = torch.optim.SGD([parameter for _, parameter in policy.named_parameters()], lr=0.1)
    policy.velocity(x, t, cond).square().mean().backward()
    optimiser.step()
    reference = policy.reference_velocity(x, t, cond)
    assert torch.equal(reference, before)
    assert not reference.requires_grad
    assert not torch.equal(policy.velocity(x, t, cond), before)
    policy.reset_reference()
    assert torch.equal(policy.reference_velocity(x, t, cond), policy.velocity(x, t, cond))


def test_save_and_load_are_bitwise(policy, tmp_path):
    path = tmp_path / "model.safetensors"
    policy.save(path, {"steps": "7"})
    loaded = DeskPolicy.load(path)
    mine, theirs = weights(policy), weights(loaded)
    assert list(mine) == list(theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert all(parameter.requires_grad for _, parameter in loaded.named_parameters())
    assert torch.equal(loaded.velocity(*batch(policy)), policy.velocity(*batch(policy)))
    assert torch.equal(loaded.reference_velocity(*batch(policy)), policy.velocity(*batch(policy)))
    header = read_metadata(path)
    assert header["steps"] == "7"
    assert json.loads(header["config"])["hidden"] == 16
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_load_weights_keeps_the_reference(policy, tmp_path):
    path = tmp_path / "model.safetensors"
    before = policy.velocity(*batch(policy)).detach()
    DeskPolicy.initial("compose", seed=9, **SMALL).save(path)
    policy.load_weights(path)
    assert torch.count_nonzero(policy.velocity(*batch(policy))) == 0
    assert torch.equal(policy.reference_velocity(*batch(policy)), before)
    DeskPolicy.initial("compose", **{**SMALL, "depth": 1}).save(path)
    with pytest.raises(ValueError, match="depth=1"):
        policy.load_weights(path)


def test_weights_that_are_not_finite_are_not_saved(policy, tmp_path):
    policy.model.out.bias.data[0] = torch.inf
    with pytest.raises(ValueError, match=r"'out\.bias' of the model is not finite"):
        policy.save(tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="'task' belongs to the format"):
        policy.save(tmp_path / "model.safetensors", {"task": "spell"})


class TestRefusal:
    """Whatever is wrong with a file, loading says so in a sentence and makes no policy."""

    @pytest.fixture
    def parts(self, policy, tmp_path):
        policy.save(tmp_path / "good.safetensors")
        return load_file(tmp_path / "good.safetensors"), read_metadata(tmp_path / "good.safetensors")

    def refuses(self, tmp_path, tensors, header, match):
        path = tmp_path / "bad.safetensors"
        save_file(tensors, path, metadata={"stepcredit": json.dumps(header)})
        with pytest.raises(ValueError, match=match):
            DeskPolicy.load(path)

    def test_missing_file(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="there is no file"):
            DeskPolicy.load(tmp_path / "none.safetensors")

    @pytest.mark.parametrize("keep", [0, 7, 100, -1])
    def test_truncated(self, parts, tmp_path, keep):
        content = (tmp_path / "good.safetensors").read_bytes()
        (tmp_path / "bad.safetensors").write_bytes(content[:keep])
        with pytest.raises(ValueError, match="not a whole safetensors file"):
            DeskPolicy.load(tmp_path / "bad.safetensors")

    def test_of_another_kind(self, parts, tmp_path):
        self.refuses(tmp_path, parts[0], None, "not a desk model")
        self.refuses(tmp_path, parts[0], {**parts[1], "format": "lora"}, "its format is 'lora'")

    def test_lacking_a_weight(self, parts, tmp_path):
        del parts[0]["blocks.1.qkv.weight"]
        self.refuses(tmp_path, *parts, r"lacks the weight 'blocks\.1\.qkv\.weight'")

    def test_unknown_weight(self, parts, tmp_path):
        parts[0]["more"] = torch.zeros(1)
        self.refuses(tmp_path, *parts, "unknown weight 'more'")

    def test_shape(self, parts, tmp_path):
        parts[0]["places"] = parts[0]["places"][:9].clone()
        self.refuses(tmp_path, *parts, r"'places' is torch\.float32 \(9, 16\), not float32 \(10, 16\)")

    def test_dtype(self, parts, tmp_path):
        parts[0]["places"] = parts[0]["places"].half()
        self.refuses(tmp_path, *parts, r"'places' is torch\.float16")

    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    def test_not_finite(self, parts, tmp_path, value):
        parts[0]["out.weight"][3, 1] = value
        self.refuses(tmp_path, *parts, r"'out\.weight' of .* is not finite")

    def test_other_vocabulary(self, parts, tmp_path):
        words = json.loads(parts[1]["vocabulary"])
        words[1], words[2] = words[2], words[1]
        self.refuses(tmp_path, parts[0], {**parts[1], "vocabulary": json.dumps(words)}, "another vocabulary")

    def test_unknown_task(self, parts, tmp_path):
        self.refuses(tmp_path, parts[0], {**parts[1], "task": "composer"}, "did you mean 'compose'")

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ({"hidden": 10**9}, "hidden must be a whole number"),
            ({"depth": True}, "depth must be a whole number"),
            ({"depth": 0}, "depth must be a whole number"),
            ({"heads": 3}, "multiple of 4 and of heads 3"),
            ({"patch": 5}, "patch 5 must divide"),
            ({"extra": 1}, "does not describe a desk model"),
        ],
    )
    def test_header_that_cannot_be_built(self, parts, tmp_path, change, match):
        config = json.dumps({**json.loads(parts[1]["config"]), **change})
        self.refuses(tmp_path, parts[0], {**parts[1], "config": config}, match)

    @pytest.mark.parametrize("config", ["[]", "{", "null"])
    def test_header_that_is_no_description(self, parts, tmp_path, config):
        self.refuses(tmp_path, parts[0], {**parts[1], "config": config}, "does not describe a desk model")


def test_pretrained_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'compose'"):
        DeskPolicy.pretrained("compos")
