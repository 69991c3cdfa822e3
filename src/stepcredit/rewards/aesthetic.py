"""LAION aesthetic predictor v2: how pleasing a picture looks, whatever the prompt. The head is an affine map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepcredit.rewards import weights as weights_module
from stepcredit.rewards.base import Metadata, RewardError, RewardInfo, SelfTest
from stepcredit.rewards.clip_models import CLIP_L, crop_preprocess
from stepcredit.rewards.inputs import check_batch, scatter
from stepcredit.rewards.weights import cache_folder, pick_device, resolve


def compose_affine(layers: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """One affine map for a chain of linear layers without activations, in float64.

    layers: (weight ``[out, in]``, bias ``[out]``) from first to last -> (weight ``[out_last, in_first]``, bias
    ``[out_last]``). Dropout, the only thing between the layers of the two heads used here, is idle at inference.
    """
    weight, bias = (part.double() for part in layers[0])
    for next_weight, next_bias in layers[1:]:
        weight, bias = next_weight.double() @ weight, next_weight.double() @ bias + next_bias.double()
    return weight, bias


def linear_layers(state: Mapping[str, Tensor], prefix: str) -> list[tuple[Tensor, Tensor]]:
    """The linear layers ``<prefix><number>.weight`` and ``.bias`` of a state dict, in order of their numbers."""
    numbers = sorted(
        int(key[len(prefix) : -len(".weight")])
        for key in state
        if key.startswith(prefix) and key.endswith(".weight") and key[len(prefix) : -len(".weight")].isdigit()
    )
    return [(state[f"{prefix}{n}.weight"], state[f"{prefix}{n}.bias"]) for n in numbers]


def convert(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The 769 numbers of ``sac+logos+ava1-l14-linearMSE.pth``: weight ``[768]`` and bias ``[1]``, float64.

    Raises ValueError when the layers are not those of the linear variant of the predictor.
    """
    layers = linear_layers(state, "layers.")
    shapes = [tuple(weight.shape) for weight, _ in layers]
    if shapes != [(1024, 768), (128, 1024), (64, 128), (16, 64), (1, 16)]:
        raise ValueError(f"not the linear aesthetic head: its layers are {shapes}")
    weight, bias = compose_affine(layers)
    return {"weight": weight[0].contiguous(), "bias": bias}


def load_head(folder: Path, width: int) -> tuple[Tensor, Tensor]:
    """Weight ``[width]`` and bias ``[1]`` of a converted head; RewardError when absent, damaged or of another width."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    weights_module.need_converted("aesthetic", folder)
    try:
        head = load_file(folder / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise RewardError(f"reward 'aesthetic': cannot read {folder / 'model.safetensors'}: {error}") from error
    if set(head) != {"weight", "bias"} or head["weight"].shape != (width,) or head["bias"].shape != (1,):
        shapes = {name: tuple(tensor.shape) for name, tensor in head.items()}
        raise RewardError(
            f"reward 'aesthetic': the head in {folder} must be weight [{width}] and bias [1]; got {shapes}"
        )
    return head["weight"], head["bias"]


class Aesthetic:
    """w . e + b with e the normalised CLIP ViT-L/14 embedding of the image; about 1 to 10, usually 4 to 7.

    Text-blind, and soon over-optimised (the style collapses): use it beside a reward that reads the prompt.
    ``weights`` and ``revision``: the CLIP model; ``head``: folder of the converted head, by default where ``stepcredit
    rewards convert aesthetic FILE`` puts it. Raises RewardError when either is absent.
    """

    def __init__(
        self,
        weights: str | Path | None = None,
        revision: str | None = None,
        head: str | Path | None = None,
        device: str | None = None,
    ) -> None:
        folder = Path(head).expanduser() if head is not None else cache_folder("aesthetic")
        weights_module.need_converted("aesthetic", folder)
        source = resolve(weights, revision, CLIP_L)
        self._model = weights_module.model("aesthetic", "CLIPVisionModelWithProjection", source, pick_device(device))
        self._side: int = self._model.config.image_size
        weight, bias = load_head(folder, self._model.config.projection_dim)
        self._weight, self._bias = weight.to(self._model.device, torch.float32), float(bias)
        reach = float(weight.norm())
        self.info = RewardInfo(
            name="aesthetic",
            range=(self._bias - reach, self._bias + reach),
            licence="Apache-2.0 (head), MIT (CLIP)",
            description="LAION aesthetic predictor v2 (sac+logos+ava1, linear); ignores the prompt",
            needs=("stepcredit[diffusers]", CLIP_L.id, "sac+logos+ava1-l14-linearMSE.pth (converted)"),
        )

    @property
    def networks(self) -> tuple[Any, ...]:
        """What may wait elsewhere while it is idle."""
        return (self._model,)

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Tensor:
        """Scores, float32 ``[B]``; NaN for an image that is not finite."""
        valid = check_batch("aesthetic", images, prompts, metadata, need_prompt=False)
        if not bool(valid.any()):
            return scatter(torch.empty(0), valid)
        pixels = crop_preprocess(images[valid.to(images.device)], self._side)
        embedding = self._model(pixel_values=pixels.to(self._model.device)).image_embeds
        return scatter(torch.nn.functional.normalize(embedding, dim=-1) @ self._weight + self._bias, valid)

    def self_test(self) -> SelfTest:
        """A soft evening sky against coloured noise."""
        down = torch.linspace(0, 1, 256)
        top, bottom = torch.tensor([0.15, 0.2, 0.45]), torch.tensor([1.0, 0.6, 0.3])
        sky = (top[:, None] + (bottom - top)[:, None] * down)[:, :, None].expand(3, 256, 256).clone()
        noise = torch.rand(3, 256, 256, generator=torch.Generator().manual_seed(0))
        return SelfTest(good=sky, bad=noise, prompt="an evening sky", metadata={})
