"""Statistics of images that know nothing of any reward: they drift when a reward is being hacked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

LUMA = (0.299, 0.587, 0.114)


STATISTICS = ("brightness", "contrast", "saturation", "edge_energy", "colour_entropy", "diversity")


def image_statistics(images: Tensor, before: Tensor) -> Tensor:
    """Statistics of images ``[B, 3, H, W]`` in [0, 1], one row each: float32 ``[B, 6]`` in the order of STATISTICS.

    ``brightness`` and ``contrast`` (mean and deviation of luma), ``saturation`` (largest minus smallest channel),
    ``edge_energy`` (mean absolute luma difference of neighbours), ``colour_entropy`` (bits, of colours quantised to 4
    levels a channel), ``diversity`` (root mean squared pixel difference to the image before; ``before`` ``[3, H, W]``
    is the one before the first).
    """
    images = images.float().clamp(0, 1)
    luma = (images * torch.tensor(LUMA, device=images.device).view(1, 3, 1, 1)).sum(1)
    levels = (images * 3.999).long()
    code = (levels[:, 0] * 16 + levels[:, 1] * 4 + levels[:, 2]).flatten(1)
    counts = torch.zeros(len(images), 64, device=images.device).scatter_add_(1, code, torch.ones_like(code).float())
    share = counts / code.shape[1]
    edges = luma.diff(dim=1).abs().flatten(1).mean(1) + luma.diff(dim=2).abs().flatten(1).mean(1)
    others = torch.cat([before.float().clamp(0, 1)[None], images[:-1]])
    return torch.stack(
        [
            luma.flatten(1).mean(1),
            luma.flatten(1).std(1),
            (images.amax(1) - images.amin(1)).flatten(1).mean(1),
            edges / 2,
            -(share * share.clamp(min=1e-12).log2()).sum(1),
            (images - others).square().flatten(1).mean(1).sqrt(),
        ],
        dim=1,
    )


class Streamed:
    """The rows of ``image_statistics`` of images that come in batches, of which none but the first and last are kept.

    They are the bits of one call on all images.
    """

    def __init__(self) -> None:
        self._rows: list[Tensor] = []
        self._first: Tensor | None = None
        self._last: Tensor | None = None

    def add(self, images: Tensor) -> None:
        """The next images, ``[B, 3, H, W]`` in [0, 1]; B may be 0."""
        if len(images) == 0:
            return
        if self._last is None:
            self._first = self._last = images[0].clone()
        with _one_thread():
            self._rows.append(image_statistics(images, self._last))
        self._last = images[-1].clone()

    @property
    def last(self) -> Tensor | None:
        """The image added last, ``[3, H, W]``; None before the first one."""
        return self._last

    def rows(self, before: Tensor) -> Tensor:
        """One row for each image, float32 ``[N, 6]``; ``before`` ``[3, H, W]`` is the image before the first."""
        if self._first is None:
            return torch.empty(0, len(STATISTICS))
        with _one_thread():
            first = image_statistics(self._first[None], before)
        return torch.cat([first, torch.cat(self._rows)[1:]])


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums over one large image would be cut among threads, sums over many are not: the rounding must not tell them
    apart."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def pairwise_diversity(images: Tensor) -> float:
    """Root mean squared pixel difference of two images of one prompt, mean over pairs and prompts.

    images ``[P, M, 3, H, W]`` in [0, 1], M >= 2 images of each of P prompts. It falls when a policy comes to draw every
    prompt in one way, which the diversity between prompts does not show.
    """
    flat = images.float().clamp(0, 1).flatten(2)
    members = flat.shape[1]
    pairs = [(flat[:, a] - flat[:, b]).square().mean(-1).sqrt() for a in range(members) for b in range(a)]
    return float(torch.stack(pairs).mean())
