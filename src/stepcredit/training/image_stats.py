"""Statistics of images that know nothing of any reward: they drift when a reward is being hacked."""

from __future__ import annotations

import torch
from torch import Tensor

LUMA = (0.299, 0.587, 0.114)


def image_statistics(images: Tensor) -> dict[str, float]:
    """Means over a batch of images ``[B, 3, H, W]`` in [0, 1].

    ``brightness`` and ``contrast`` (mean and deviation of luma), ``saturation`` (largest minus smallest channel),
    ``edge_energy`` (mean absolute luma difference of neighbours), ``colour_entropy`` (bits, of colours quantised to 4
    levels a channel, within an image), ``diversity`` (root mean squared pixel difference between consecutive images).
    """
    images = images.float().clamp(0, 1)
    luma = (images * torch.tensor(LUMA, device=images.device).view(1, 3, 1, 1)).sum(1)
    levels = (images * 3.999).long()
    code = (levels[:, 0] * 16 + levels[:, 1] * 4 + levels[:, 2]).flatten(1)
    counts = torch.zeros(len(images), 64, device=images.device).scatter_add_(1, code, torch.ones_like(code).float())
    share = counts / code.shape[1]
    entropy = -(share * share.clamp(min=1e-12).log2()).sum(1)
    edges = luma.diff(dim=1).abs().mean() + luma.diff(dim=2).abs().mean()
    others = images.roll(1, 0)
    return {
        "brightness": float(luma.mean()),
        "contrast": float(luma.flatten(1).std(1).mean()),
        "saturation": float((images.amax(1) - images.amin(1)).mean()),
        "edge_energy": float(edges / 2),
        "colour_entropy": float(entropy.mean()),
        "diversity": float((images - others).square().flatten(1).mean(1).sqrt().mean()),
    }


def pairwise_diversity(images: Tensor) -> float:
    """Root mean squared pixel difference of two images of one prompt, mean over pairs and prompts.

    images ``[P, M, 3, H, W]`` in [0, 1], M >= 2 images of each of P prompts. It falls when a policy comes to draw every
    prompt in one way, which the diversity between prompts does not show.
    """
    flat = images.float().clamp(0, 1).flatten(2)
    members = flat.shape[1]
    pairs = [(flat[:, a] - flat[:, b]).square().mean(-1).sqrt() for a in range(members) for b in range(a)]
    return float(torch.stack(pairs).mean())
