"""Statistics of images that know nothing of any reward: they drift when a reward is being hacked."""

from __future__ import annotations

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


def pairwise_diversity(images: Tensor) -> float:
    """Root mean squared pixel difference of two images of one prompt, mean over pairs and prompts.

    images ``[P, M, 3, H, W]`` in [0, 1], M >= 2 images of each of P prompts. It falls when a policy comes to draw every
    prompt in one way, which the diversity between prompts does not show.
    """
    flat = images.float().clamp(0, 1).flatten(2)
    members = flat.shape[1]
    pairs = [(flat[:, a] - flat[:, b]).square().mean(-1).sqrt() for a in range(members) for b in range(a)]
    return float(torch.stack(pairs).mean())
