"""An evaluation lets its images go batch by batch, and says what it would say with all of them in hand."""

import gc
import weakref

import pytest
import torch

from stepcredit import sampling
from stepcredit.rewards.base import judge, to_uint8
from stepcredit.training import evaluation
from stepcredit.training.evaluation import evaluate
from stepcredit.training.image_stats import STATISTICS, Streamed, image_statistics
from stepcredit.training.setup import setup


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("batch", [1, 2, 3, 5])
@pytest.mark.parametrize("number", [1, 2])
def test_statistics_of_batches_are_the_bits_of_all_at_once(threads, number, batch):
    threads(number)
    images = torch.rand(5, 3, 192, 192, generator=torch.Generator().manual_seed(0))  # large enough to be cut in threads
    streamed = Streamed()
    for part in images.split(batch):
        streamed.add(part)
        streamed.add(part[:0])
    assert torch.equal(streamed.rows(images[-1]), image_statistics(images, images[-1]))
    assert torch.get_num_threads() == number
    assert torch.equal(streamed.last, images[-1])


def test_no_image_no_row():
    assert Streamed().last is None
    assert Streamed().rows(torch.zeros(3, 4, 4)).shape == (0, len(STATISTICS))


@pytest.mark.parametrize("keep", [0, 3, 5, 12])
def test_images_are_let_go_and_nothing_else_changes(small, monkeypatch, keep):
    parts = setup(small())
    on, size = parts.heldout, 4
    assert len(on) == 12
    made, alive = [], []

    def spy(*args, **options):
        gc.collect()
        alive.append(sum(images() is not None for images in made))
        images = sampling.sample(*args, **options)
        made.append(weakref.ref(images))
        return images

    monkeypatch.setattr(evaluation, "sample", spy)
    found = evaluate(parts.policy, parts.reward, on, 3, size, keep_images=keep)
    assert alive == [0, 0, 0]  # of the batches before
    gc.collect()
    assert all(images() is None for images in made)

    every = []
    for start in range(0, 12, size):
        some = on[start : start + size]
        noise = torch.stack([slot.noise(parts.policy.latent_shape) for slot in some])
        every.append(sampling.sample(parts.policy, [slot.prompt.text for slot in some], noise, steps=3))
    images = torch.cat(every)
    told = judge(parts.reward, images, [s.prompt.text for s in on], [s.prompt.metadata for s in on])
    assert torch.equal(found.rewards, told.score)
    assert torch.equal(found.images, to_uint8(images[:keep]))
    wanted = image_statistics(images, images[-1]).double().mean(0).tolist()
    assert found.statistics == dict(zip(STATISTICS, wanted, strict=True))
