"""GenEval: post-processing on logits made by hand, colours, names of weights, and the whole on tiny random models."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from stepcredit.rewards import RewardError, detector, geneval, get, mask2former_names, score
from stepcredit.rewards.base import judge
from stepcredit.rewards.detector import Instance, instances, network_input, resized
from stepcredit.rewards.inputs import to_pil

transformers = pytest.importorskip("transformers")

CLASSES = ("cat", "dog", "cup", "car", "stop sign")


def test_sizes_keep_the_ratio_within_800_and_1333() -> None:
    assert resized(512, 512) == (800, 800)
    assert resized(480, 640) == (800, 1067)
    assert resized(300, 1000) == (400, 1333)
    assert resized(1024, 768) == (1067, 800)


def test_network_input_is_the_detectors_own() -> None:
    images = functional.interpolate(torch.rand(1, 3, 9, 12), (96, 128), mode="bicubic").clamp(0, 1)
    found = network_input(images)
    assert found.shape == (1, 3, 800, 1088)
    assert torch.equal(found[..., 1067:], torch.zeros(1, 3, 800, 21))
    images = images[..., :96]
    found = network_input(images)
    processor = transformers.Mask2FormerImageProcessor(
        size={"shortest_edge": 800, "longest_edge": 1333}, size_divisor=32
    )
    expected = processor(to_pil(images), return_tensors="pt")["pixel_values"]
    assert found.shape == expected.shape == (1, 3, 800, 800)
    difference = (found - expected).abs()
    assert difference.max() < 1.01 / 57  # one 8-bit step, from rounding in the resampling
    assert difference.mean() < 0.005
    swapped = network_input(images, "flow_grpo")
    assert torch.allclose(swapped, network_input(images.flip(1)))
    assert not torch.allclose(swapped, found, atol=0.1)


def _logits(size: tuple[int, int], box: tuple[int, int, int, int], inside: float, outside: float = -8.0) -> Tensor:
    """Mask logits over the padded input at a quarter of its resolution; box (x1, y1, x2, y2) in picture pixels."""
    height, width = resized(*size)
    h, w = (height + -height % 32) // 4, (width + -width % 32) // 4
    mask = torch.full((h, w), outside)
    sx, sy = width / 4 / size[1], height / 4 / size[0]
    mask[round(box[1] * sy) : round(box[3] * sy), round(box[0] * sx) : round(box[2] * sx)] = inside
    return mask


def test_postprocessing_by_hand() -> None:
    size = (100, 100)  # scaled by 8 to 800, masks at 200: two mask pixels per picture pixel
    class_logits = torch.full((3, 4), -20.0)
    class_logits[0, 1] = class_logits[0, 2] = 0.0  # two classes of .5 each from one query
    class_logits[1, 0] = 5.0  # sure of class 0, with an empty mask
    class_logits[2, 3] = 5.0  # nothing
    masks = torch.stack(
        [_logits(size, (20, 30, 60, 50), 4.0), torch.full((200, 200), -3.0), _logits(size, (0, 0, 9, 9), 4.0)]
    )
    found = instances(class_logits, masks, size)
    assert [(one.label, one.box) for one in found[:2]] == [(1, (20, 30, 60, 50)), (2, (20, 30, 60, 50))]
    assert all(one.score < 1e-6 for one in found[2:])
    # .5 times the mean probability inside, which the soft edge lowers a little from sigmoid(4) = .982.
    assert 0.45 < found[0].score < 0.5 * 0.9820138
    assert found[0].score == pytest.approx(found[1].score, abs=1e-6)
    assert found[0].mask[30:50, 20:60].all()
    assert int(found[0].mask.sum()) == 40 * 20
    assert len(instances(class_logits, masks, size, least=0.3)) == 2
    assert instances(class_logits, masks, size, least=0.5) == []


def test_uniform_masks_give_the_exact_score() -> None:
    size = (64, 96)
    h, w = resized(*size)
    masks = torch.full((1, (h + -h % 32) // 4, (w + -w % 32) // 4), 1.5)
    (one,) = instances(torch.tensor([[2.0, 0.0]]), masks, size)
    sigmoid = 1 / (1 + math.exp(-1.5))
    assert one.score == pytest.approx(math.exp(2) / (math.exp(2) + 1) * sigmoid, rel=1e-5)
    assert one.box == (0, 0, 96, 64)


def test_only_the_surest_hundred_pairs_count() -> None:
    logits = torch.zeros(30, 6)
    masks = torch.full((30, 200, 200), 3.0)
    assert len(instances(logits, masks, (32, 32))) == 100
    assert len(instances(logits, masks, (32, 32), top=7)) == 7


def test_objects_overlap_freely_and_keep_their_whole_mask() -> None:
    size = (100, 100)
    masks = torch.stack([_logits(size, (10, 10, 80, 80), 6.0), _logits(size, (20, 20, 60, 60), 6.0)])
    found = instances(torch.tensor([[6.0, -6.0, -6.0], [-6.0, 5.0, -6.0]]), masks, size, least=0.3)
    assert [one.box for one in found] == [(10, 10, 80, 80), (20, 20, 60, 60)]
    assert int(found[0].mask.sum()) == 70 * 70


def _square(box: tuple[int, int, int, int], label: int = 0, sure: float = 0.95) -> Instance:
    mask = torch.zeros(40, 56, dtype=torch.bool)
    mask[box[1] : box[3], box[0] : box[2]] = True
    return Instance(label, sure, box, mask)


def test_the_object_alone_is_shown_on_grey() -> None:
    picture = np.zeros((40, 56, 3), np.uint8)
    picture[:, :28] = (255, 0, 0)
    instance = _square((20, 10, 36, 30))
    instance.mask[10:20, 20:24] = False
    shown = np.array(geneval.cut_out(picture, instance))
    assert shown.shape == (20, 16, 3)
    assert (shown[:10, :4] == 0x99).all()
    assert (shown[15, 2] == (255, 0, 0)).all()
    assert (shown[15, 12] == 0).all()


@pytest.fixture(scope="module")
def mask2former(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Mask2Former of the real class with five classes."""
    folder = tmp_path_factory.mktemp("mask2former")
    torch.manual_seed(0)
    model = transformers.Mask2FormerForUniversalSegmentation(transformers.Mask2FormerConfig(**_config()))
    model.save_pretrained(folder)
    return folder


def _config() -> dict[str, Any]:
    swin = {
        "model_type": "swin",
        "embed_dim": 8,
        "depths": [1, 2, 1, 1],
        "num_heads": [1, 2, 2, 4],
        "window_size": 7,
        "out_features": ["stage1", "stage2", "stage3", "stage4"],
    }
    return {
        "backbone_config": swin,
        "feature_size": 32,
        "mask_feature_size": 32,
        "hidden_dim": 32,
        "encoder_feedforward_dim": 48,
        "dim_feedforward": 64,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "num_attention_heads": 4,
        "num_queries": 7,
        "id2label": dict(enumerate(CLASSES)),
    }


@pytest.fixture(scope="module")
def reward(mask2former: Path, clip_folder: Path) -> geneval.GenEval:
    found = get("geneval", weights=mask2former, clip=clip_folder, device="cpu")
    assert isinstance(found, geneval.GenEval)
    return found


def _asks(tag: str, *include: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"tag": tag, "include": list(include), **more}


def test_the_whole_chain_on_random_models(
    reward: geneval.GenEval, pictures: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detector, "SHORT", 128)  # for speed
    metadata = [_asks("single_object", {"class": "cat", "count": 1})] * 2
    found = score(reward, pictures[:2], ["", ""], metadata)
    assert found.shape == (2,)
    assert set(found.tolist()) <= {0.0, 1.0}
    assert "not GenEval's scores" in reward.info.description
    together = detector.detect(reward._detector, pictures[:2])
    for k in range(2):
        (alone,) = detector.detect(reward._detector, pictures[k : k + 1])
        assert [one.label for one in together[k]] == [one.label for one in alone]
        assert np.allclose([o.score for o in together[k]], [o.score for o in alone], atol=1e-5)
        assert all(one.mask.shape == (40, 56) for one in alone)
    broken = pictures[:2].clone()
    broken[0] = float("nan")
    assert reward(broken, ["", ""], metadata).isnan().tolist() == [True, False]


def test_colours_are_clips_nearest_of_ten(reward: geneval.GenEval, clip_folder: Path) -> None:
    picture = (torch.rand(40, 56, 3, generator=torch.Generator().manual_seed(2)) * 255).byte().numpy()
    objects = [_square((2, 2, 20, 30)), _square((25, 5, 50, 20))]
    found = reward._colour(picture, objects, "cup")
    model = transformers.CLIPModel.from_pretrained(clip_folder).eval()
    tokenizer = transformers.CLIPTokenizer.from_pretrained(clip_folder)
    from stepcredit.rewards.clip_models import crop_pictures

    for instance, colour in zip(objects, found, strict=True):
        pixels = crop_pictures([geneval.cut_out(picture, instance)], 28)
        means = []
        with torch.no_grad():
            image = model.visual_projection(model.vision_model(pixels).pooler_output)
            for name in geneval.COLOURS:
                texts = [f"a photo of a {name} cup", f"a photo of a {name}-colored cup", f"a photo of a {name} object"]
                vectors = [
                    model.text_projection(model.text_model(**tokenizer([text], return_tensors="pt")).pooler_output)
                    for text in texts
                ]
                means.append(torch.stack([functional.normalize(v[0], dim=0) for v in vectors]).mean(0))
        cosines = [float(functional.cosine_similarity(image[0], mean, dim=0)) for mean in means]
        assert colour == geneval.COLOURS[int(np.argmax(cosines))]
    assert reward._colour(picture, [], "cup") == []


def test_rules_see_the_detections(reward: geneval.GenEval, monkeypatch: pytest.MonkeyPatch) -> None:
    left, right, faint = _square((2, 2, 12, 12), 0), _square((30, 2, 44, 12), 1), _square((5, 20, 9, 30), 0, 0.6)
    monkeypatch.setattr(geneval, "detect", lambda *_, **__: [[left, right, faint]])
    monkeypatch.setattr(reward, "_colour", lambda picture, objects, name: ["red"] * len(objects))
    images = torch.zeros(1, 3, 40, 56)

    def judged(metadata: dict[str, Any]) -> dict[str, float]:
        return {name: float(value) for name, value in reward.components(images, [""], [metadata]).items()}

    two = judged(_asks("two_object", {"class": "cat", "count": 1}, {"class": "dog", "count": 1}))
    assert (two["score"], two["official"], two["strict"]) == (1, 1, 0)  # two cats above .3
    counting = {"class": "cat", "count": 1}
    exclude = [{"class": "cat", "count": 2}]
    assert judged(_asks("counting", counting, exclude=exclude))["strict"] == 1  # only one above .9
    beside = {"class": "dog", "count": 1, "position": ["right of", 0]}
    assert judged(_asks("position", counting, beside))["score"] == 1
    wrong = {"class": "dog", "count": 1, "position": ["left of", 0]}
    assert judged(_asks("position", counting, wrong))["score"] == 0
    assert judged(_asks("colors", {"class": "dog", "count": 1, "color": "red"}))["score"] == 1
    assert judged(_asks("colors", {"class": "dog", "count": 1, "color": "blue"}))["score"] == 0
    with pytest.raises(RewardError, match=r"metadata 0 asks for class 'catt'.*did you mean 'cat'"):
        judged(_asks("single_object", {"class": "catt", "count": 1}))
    with pytest.raises(RewardError, match="metadata 0 has no 'tag'"):
        judged({"include": [counting]})


def test_partial_credit_and_the_published_slip(
    mask2former: Path, clip_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cats = [_square((2, 2 + 12 * k, 12, 12 + 12 * k), 0) for k in range(3)]
    monkeypatch.setattr(geneval, "detect", lambda *_, **__: [cats])
    options = {"mode": "flow_grpo", "weights": mask2former, "clip": clip_folder, "device": "cpu"}
    metadata = [_asks("single_object", {"class": "cat", "count": 1})]
    assert float(get("geneval", **options)(torch.zeros(1, 3, 40, 56), [""], metadata)) == 0.0
    short = get("geneval_partial", weights=mask2former, clip=clip_folder, device="cpu")
    assert float(short(torch.zeros(1, 3, 40, 56), [""], metadata)) == 0.0
    verdict = judge(short, torch.zeros(1, 3, 40, 56), [""], metadata)
    assert verdict.exact.tolist() == [1.0]  # officially three cats are a cat
    assert {name: float(value) for name, value in verdict.components.items()} == {
        "official": 1.0, "strict": 0.0, "flow_grpo": 0.0,
    }  # fmt: skip
    slip = get("geneval", reproduce_bug=True, **options)
    assert float(slip(torch.zeros(1, 3, 40, 56), [""], metadata)) == -1.0
    assert slip.info.range == (-math.inf, 1.0)


@pytest.mark.parametrize("options", [{"mode": "soft"}, {"channel_order": "bgr"}, {"reproduce_bug": True}])
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="geneval: "):
        get("geneval", **options)


@pytest.mark.usefixtures("offline")
def test_absent_weights_are_explained() -> None:
    with pytest.raises(RewardError, match=r"stepcredit rewards convert geneval"):
        get("geneval")


def test_every_class_of_the_benchmark_is_known(data: Path) -> None:
    names, metadata = data / "geneval" / "object_names.txt", data / "geneval" / "evaluation_metadata.jsonl"
    if not names.is_file() or not metadata.is_file():
        pytest.skip("needs object_names.txt and evaluation_metadata.jsonl of GenEval in $STEPCREDIT_DATA/geneval")
    assert names.read_text().splitlines() == list(mask2former_names.COCO)
    known = geneval.class_names({k: str(k) for k in range(80)})
    for line in metadata.read_text().splitlines():
        entry = json.loads(line)
        assert {c["class"] for c in (*entry["include"], *entry.get("exclude", ()))} <= set(known)
        assert {c["color"] for c in entry["include"] if "color" in c} <= set(geneval.COLOURS)


def _mmdetection_names() -> dict[str, tuple[int, ...]]:
    """Names and shapes of mmdetection's Mask2Former for the tiny configuration, written out."""
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, out: int, inside: int, *kernel: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (out, inside, *kernel), (out,)

    def norm(name: str, width: int) -> None:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (width,)

    linear("backbone.patch_embed.projection", 8, 3, 4, 4)
    norm("backbone.patch_embed.norm", 8)
    for stage, (depth, heads) in enumerate(zip([1, 2, 1, 1], [1, 2, 2, 4], strict=True)):
        width = 8 * 2**stage
        for block in range(depth):
            name = f"backbone.stages.{stage}.blocks.{block}"
            norm(f"{name}.norm1", width)
            norm(f"{name}.norm2", width)
            shapes[f"{name}.attn.w_msa.relative_position_bias_table"] = (169, heads)
            shapes[f"{name}.attn.w_msa.relative_position_index"] = (49, 49)
            linear(f"{name}.attn.w_msa.qkv", 3 * width, width)
            linear(f"{name}.attn.w_msa.proj", width, width)
            linear(f"{name}.ffn.layers.0.0", 4 * width, width)
            linear(f"{name}.ffn.layers.1", width, 4 * width)
        if stage < 3:
            norm(f"backbone.stages.{stage}.downsample.norm", 4 * width)
            shapes[f"backbone.stages.{stage}.downsample.reduction.weight"] = (2 * width, 4 * width)
        norm(f"backbone.norm{stage}", width)
    pixel = "panoptic_head.pixel_decoder"
    for level, width in enumerate([64, 32, 16]):
        linear(f"{pixel}.input_convs.{level}.conv", 32, width, 1, 1)
        norm(f"{pixel}.input_convs.{level}.gn", 32)
    for layer in range(2):
        name = f"{pixel}.encoder.layers.{layer}"
        linear(f"{name}.attentions.0.sampling_offsets", 4 * 3 * 4 * 2, 32)
        linear(f"{name}.attentions.0.attention_weights", 4 * 3 * 4, 32)
        linear(f"{name}.attentions.0.value_proj", 32, 32)
        linear(f"{name}.attentions.0.output_proj", 32, 32)
        linear(f"{name}.ffns.0.layers.0.0", 48, 32)
        linear(f"{name}.ffns.0.layers.1", 32, 48)
        norm(f"{name}.norms.0", 32)
        norm(f"{name}.norms.1", 32)
    shapes[f"{pixel}.level_encoding.weight"] = (3, 32)
    shapes[f"{pixel}.lateral_convs.0.conv.weight"] = (32, 8, 1, 1)
    shapes[f"{pixel}.output_convs.0.conv.weight"] = (32, 32, 3, 3)
    norm(f"{pixel}.lateral_convs.0.gn", 32)
    norm(f"{pixel}.output_convs.0.gn", 32)
    linear(f"{pixel}.mask_feature", 32, 32, 1, 1)
    for layer in range(2):
        name = f"panoptic_head.transformer_decoder.layers.{layer}"
        for attention in range(2):
            shapes[f"{name}.attentions.{attention}.attn.in_proj_weight"] = (96, 32)
            shapes[f"{name}.attentions.{attention}.attn.in_proj_bias"] = (96,)
            linear(f"{name}.attentions.{attention}.attn.out_proj", 32, 32)
        linear(f"{name}.ffns.0.layers.0.0", 64, 32)
        linear(f"{name}.ffns.0.layers.1", 32, 64)
        for k in range(3):
            norm(f"{name}.norms.{k}", 32)
    norm("panoptic_head.transformer_decoder.post_norm", 32)
    shapes["panoptic_head.query_embed.weight"] = shapes["panoptic_head.query_feat.weight"] = (7, 32)
    shapes["panoptic_head.level_embed.weight"] = (3, 32)
    linear("panoptic_head.cls_embed", 6, 32)
    for k in (0, 2, 4):
        linear(f"panoptic_head.mask_embed.{k}", 32, 32)
    shapes["panoptic_head.loss_cls.class_weight"] = (6,)
    return shapes


def test_every_mmdetection_weight_finds_its_place(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    state = {name: torch.randn(shape) for name, shape in _mmdetection_names().items()}
    save_file(mask2former_names.convert(state), tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mask2former", **_config()}))
    model, report = transformers.Mask2FormerForUniversalSegmentation.from_pretrained(tmp_path, output_loading_info=True)
    absent = [k for k in report["missing_keys"] if not any(part in k for part in mask2former_names.UNUSED)]
    assert (absent, report["unexpected_keys"], report["mismatched_keys"]) == ([], set(), set())
    layer = model.model.transformer_module.decoder.layers[1]
    head = "panoptic_head.transformer_decoder.layers.1."
    assert torch.equal(layer.cross_attn.in_proj_weight, state[head + "attentions.0.attn.in_proj_weight"])
    assert torch.equal(layer.self_attn.k_proj.weight, state[head + "attentions.1.attn.in_proj_weight"][32:64])
    assert torch.equal(layer.self_attn_layer_norm.weight, state[head + "norms.1.weight"])
    with pytest.raises(ValueError, match="not a key of mmdetection"):
        mask2former_names.rename("bbox_head.fc.weight")


def test_patch_merging_gives_the_same_numbers_as_unfold() -> None:
    config = transformers.SwinConfig(embed_dim=6, depths=[1, 1], num_heads=[1, 2])
    merging = transformers.SwinModel(config).encoder.layers[0].downsample
    generator = torch.Generator().manual_seed(0)
    weight, scale, shift = (torch.randn(shape, generator=generator) for shape in ((12, 24), (24,), (24,)))
    x = torch.randn(2, 4, 8, 6, generator=generator)  # [B, H, W, C]
    patches = functional.unfold(x.permute(0, 3, 1, 2), kernel_size=2, stride=2).transpose(1, 2)
    expected = functional.layer_norm(patches, (24,), scale, shift) @ weight.T
    order = mask2former_names.merge_order
    merging.load_state_dict({"reduction.weight": order(weight), "norm.weight": order(scale), "norm.bias": order(shift)})
    with torch.no_grad():
        found = merging(x.flatten(1, 2), (4, 8))
    assert torch.allclose(found.reshape(expected.shape), expected, atol=1e-5)
