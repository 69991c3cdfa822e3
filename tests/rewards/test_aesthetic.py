"""The aesthetic reward on a tiny random CLIP, with a head of its width."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from stepcredit.rewards import RewardError, get, score
from stepcredit.rewards.clip_models import crop_preprocess

transformers = pytest.importorskip("transformers")


@pytest.fixture
def head(tmp_path: Path) -> Path:
    folder = tmp_path / "head"
    folder.mkdir()
    weight = torch.randn(12, generator=torch.Generator().manual_seed(5)).double()
    save_file({"weight": weight, "bias": torch.tensor([5.0]).double()}, folder / "model.safetensors")
    return folder


def test_score_is_the_head_on_the_normalised_embedding(clip_folder: Path, head: Path, pictures: Tensor) -> None:
    reward = get("aesthetic", weights=clip_folder, head=head, device="cpu")
    found = score(reward, pictures, [""] * 6, [{}] * 6)
    model = transformers.CLIPModel.from_pretrained(clip_folder).eval()
    with torch.no_grad():
        e = model.visual_projection(model.vision_model(crop_preprocess(pictures, 28)).pooler_output)
    weight = torch.randn(12, generator=torch.Generator().manual_seed(5))
    expected = (e / e.norm(dim=1, keepdim=True)) @ weight + 5
    assert torch.allclose(found, expected, atol=1e-5)
    low, high = reward.info.range
    assert (low, high) == pytest.approx((5 - float(weight.norm()), 5 + float(weight.norm())))
    alone = torch.cat([reward(pictures[k : k + 1], [""], [{}]) for k in range(6)])
    assert torch.allclose(found, alone, atol=1e-5)
    broken = pictures.clone()
    broken[1] = float("inf")
    assert reward(broken, [""] * 6, [{}] * 6).isnan().tolist() == [False, True, False, False, False, False]


@pytest.mark.usefixtures("offline")
def test_absent_or_wrong_heads_are_explained(clip_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"stepcredit rewards convert aesthetic"):
        get("aesthetic", weights=clip_folder)
    save_file({"weight": torch.zeros(768), "bias": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(RewardError, match=r"must be weight \[12\] and bias \[1\]; got .*768"):
        get("aesthetic", weights=clip_folder, head=tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a file of tensors")
    with pytest.raises(RewardError, match="cannot read"):
        get("aesthetic", weights=clip_folder, head=tmp_path)
