"""Idle networks wait on one device and work on another: torch's `lazy` device stands in for a GPU, and refuses, as a
GPU would, to compute with tensors of another device."""

import types

import pytest
import torch
from torch import nn

from stepcredit import policies, rewards
from stepcredit.policies import PipelineError, Placement, tiny
from stepcredit.policies.placement import at_hand
from stepcredit.rewards.base import judge
from stepcredit.rewards.meter import metered
from stepcredit.rewards.parked import Parked, parked

pytest.importorskip("diffusers")
PROMPTS = ["a red circle", "two dogs"]
OPTIONS = {"height": 32, "width": 32, "max_sequence_length": 16, "precision": "fp32"}


@pytest.fixture(scope="module")
def other():
    """A device that is not the CPU."""
    backend = pytest.importorskip("torch._lazy.ts_backend")
    backend.init()
    with pytest.raises(RuntimeError):
        nn.Linear(2, 2).to("lazy")(torch.zeros(1, 2))
    return torch.device("lazy")


class Spied(nn.Module):
    """A network that remembers where it was sent."""

    def __init__(self, name, log, broken=False):
        super().__init__()
        self.name, self.log, self.broken = name, log, broken
        self.weight = nn.Parameter(torch.ones(1))

    def to(self, device):
        if self.broken and torch.device(device).type != "cpu":
            raise RuntimeError("out of memory")
        self.log.append((self.name, torch.device(device).type))
        return self


def where(network):
    return {weight.device.type for weight in network.parameters()}


# Qwen-Image's text encoder makes its rotary table on the CPU in a way that `lazy` alone cannot follow
@pytest.mark.parametrize("family", sorted(tiny.BUILDERS.keys() - {"qwen-image"}))
def test_parts_come_to_the_device_to_work_and_leave_it_after(family, other):
    here = policies.from_pipeline(tiny.build(family), **OPTIONS)
    there = policies.from_pipeline(tiny.build(family), **OPTIONS, placement=Placement(other))
    pipe = there.pipe
    idle = [pipe.vae, *(getattr(pipe, name) for name in there.family.encoders)]
    assert there.device.type == "lazy"
    assert where(pipe.transformer) == {"lazy"}
    assert all(where(part) == {"cpu"} for part in idle)
    seen = []
    for part in idle:
        part.register_forward_pre_hook(lambda module, args: seen.append(where(module)))
    wanted, got = here.encode(PROMPTS), there.encode(PROMPTS)
    for name, tensor in wanted.items():
        assert got[name].device.type == "lazy"
        torch.testing.assert_close(got[name].cpu(), tensor, rtol=1e-4, atol=1e-5)
    assert len(seen) >= len(there.family.encoders)
    x = torch.randn(3, *here.latent_shape, generator=torch.Generator().manual_seed(0))
    decode = pipe.vae.decode
    pipe.vae.decode = lambda *args, **options: (seen.append(where(pipe.vae)), decode(*args, **options))[1]
    images = there.decode(x.to(other))
    assert images.device.type == "lazy"
    torch.testing.assert_close(images.cpu(), here.decode(x), rtol=1e-4, atol=1e-4)
    assert all(devices == {"lazy"} for devices in seen)
    assert all(where(part) == {"cpu"} for part in idle)


def test_the_parts_of_qwen_image_are_sent_for_as_well(monkeypatch):
    pipe, log = tiny.build("qwen-image"), []
    names = {pipe.vae: "vae", pipe.text_encoder: "text"}
    to = nn.Module.to

    def spy(module, *args, **options):
        if module in names and args and isinstance(args[0], torch.device):
            log.append(names[module])
        return to(module, *args, **options)

    monkeypatch.setattr(nn.Module, "to", spy)
    for part, name in names.items():
        part.to = types.MethodType(spy, part)
        part.register_forward_pre_hook(lambda *_, name=name: log.append(f"{name} works"))
    policy = policies.from_pipeline(pipe, **OPTIONS, placement=Placement(torch.device("cpu")))
    assert log == ["vae", "text"]
    log.clear()
    policy.encode(PROMPTS)
    assert log[0] == log[-1] == "text"
    assert "text works" in log[1:-1]
    log.clear()
    policy.decode(torch.zeros(1, *policy.latent_shape))
    assert log == ["vae", "vae"]


def test_a_visit_within_a_visit_moves_nothing(other):
    log = []
    a, b = Spied("a", log), Spied("b", log)
    placement = Placement(other)
    placement.park([a], scoring=True)
    placement.park([b])
    assert log == [("a", "cpu"), ("b", "cpu")]
    log.clear()
    with at_hand(types.SimpleNamespace(placement=placement)):
        for _ in range(2):
            with placement.visit([a, b]):
                pass
    assert log == [("a", "lazy"), ("b", "lazy"), ("b", "cpu"), ("b", "lazy"), ("b", "cpu"), ("a", "cpu")]
    log.clear()
    with at_hand(object()), at_hand(types.SimpleNamespace(placement=None)):
        assert log == []


def test_networks_go_back_when_their_work_fails_or_there_is_no_room(other):
    log = []
    a, broken, c = Spied("a", log), Spied("broken", log, broken=True), Spied("c", log)
    placement = Placement(other)
    with pytest.raises(ZeroDivisionError), placement.visit([a]):
        1 / 0  # noqa: B018
    assert log == [("a", "lazy"), ("a", "cpu")]
    log.clear()
    with pytest.raises(RuntimeError, match="out of memory"), placement.visit([a, broken, c]):
        raise AssertionError("nothing works without room")
    assert log == [("a", "lazy"), ("a", "cpu"), ("broken", "cpu")]
    log.clear()
    with placement.visit([a]):
        assert log == [("a", "lazy")]  # nothing was left behind in the books


def test_a_rewards_network_waits_too(other):
    images = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    texts, metadata = ["a red circle", "two dogs", "a cat"], [{}] * 3
    wanted = rewards.get("tiny_pickscore")(images, texts, metadata)
    moved = rewards.get("tiny_pickscore")
    moved.networks[0].to(other)
    placement = Placement(other)
    reward = metered(parked(moved, placement), 8)
    assert where(moved.networks[0]) == {"cpu"}
    torch.testing.assert_close(judge(reward, images, texts, metadata).score, wanted, rtol=1e-4, atol=1e-3)
    assert where(moved.networks[0]) == {"cpu"}
    with at_hand(types.SimpleNamespace(placement=placement)):
        assert where(moved.networks[0]) == {"lazy"}
    assert reward.info == moved.info
    test = reward.self_test()
    assert test.prompt == moved.self_test().prompt


def test_only_networks_on_the_device_are_parked(other):
    """A reward that was told to stay on the CPU, or that has no network, stays as it is; of a composite each part."""
    placement = Placement(other)
    for name in ("tiny_pickscore", "jpeg_size"):
        reward = rewards.get(name)
        assert parked(reward, placement) is reward
        assert parked(reward, None) is reward
    both = rewards.get("composite", tiny_pickscore=1.0, jpeg_size=1.0)
    both.parts["tiny_pickscore"].networks[0].to(other)
    parts = parked(both, placement).parts
    assert isinstance(parts["tiny_pickscore"], Parked)
    assert parts["jpeg_size"] is both.parts["jpeg_size"]


def test_what_a_reward_can_do_beside_scores_is_done_at_work(other):
    class Telling:
        info = rewards.get("jpeg_size").info

        def __init__(self):
            self.log = []
            self.networks = (Spied("net", self.log),)
            self.networks[0].weight = nn.Parameter(torch.ones(1).to(other))

        def components(self, images, prompts, metadata):
            self.log.append("judged")
            return {"score": torch.zeros(len(images)), "exact": torch.ones(len(images))}

    inside = Telling()
    judged = judge(parked(inside, Placement(other)), torch.zeros(2, 3, 4, 4), ["a", "b"], [{}, {}])
    assert judged.exact.tolist() == [1, 1]
    assert inside.log == [("net", "cpu"), ("net", "lazy"), "judged", ("net", "cpu")]


def test_a_pipeline_that_moves_its_parts_itself_is_refused():
    pipe = tiny.build("sd3")
    pipe.vae._hf_hook = types.SimpleNamespace(execution_device="cpu")
    with pytest.raises(PipelineError, match="moves its vae itself"):
        policies.from_pipeline(pipe, **OPTIONS, placement=Placement(torch.device("cpu")))
