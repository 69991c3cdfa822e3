"""GenEval (Ghosh et al. 2023): objects by Mask2Former, colours by CLIP, verdict by the shared rules."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor
from torch.nn import functional

from stepcredit.errors import nearest
from stepcredit.rewards import geneval_rules as rules
from stepcredit.rewards import weights as weights_module
from stepcredit.rewards.base import Metadata, RewardError, RewardInfo, SelfTest, to_uint8
from stepcredit.rewards.clip_models import CLIP_L, clip_tokenizer, crop_pictures
from stepcredit.rewards.detector import ChannelOrder, Instance, detect
from stepcredit.rewards.inputs import check_batch, scatter
from stepcredit.rewards.mask2former_names import COCO, SHA256, UNUSED
from stepcredit.rewards.weights import cache_folder, pick_device, resolve

Mode = Literal["official", "strict", "flow_grpo"]
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
TEMPLATES = ("a photo of a {colour} {name}", "a photo of a {colour}-colored {name}", "a photo of a {colour} object")
BACKGROUND = 0x99
FOREIGN = "an independently trained detector, not GenEval's scores"


@dataclass(frozen=True)
class Object:
    """A detection in the terms of the rules."""

    cls: str
    instance: Instance
    color: str | None = None

    @property
    def score(self) -> float:
        """Confidence in [0, 1]."""
        return self.instance.score

    @property
    def box(self) -> rules.Box:
        """x1, y1, x2, y2 in pixels."""
        return self.instance.box


class ColourJudge:
    """Names the colour of an object by CLIP: zero-shot over ten colours and three templates.

    ``model`` is a ``transformers.CLIPModel``. The object alone is shown, on grey, cropped to its box.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self._tokenizer = model, tokenizer
        self._heads: dict[str, Tensor] = {}

    @torch.no_grad()
    def __call__(self, picture: NDArray[np.uint8], objects: Sequence[Instance], name: str) -> list[str]:
        """The colour of each object of class ``name`` in a picture uint8 ``[H, W, 3]``."""
        if not objects:
            return []
        pixels = crop_pictures([cut_out(picture, one) for one in objects], self.model.config.vision_config.image_size)
        features = self.model.vision_model(pixels.to(self.model.device, self.model.dtype)).pooler_output
        embedded = functional.normalize(self.model.visual_projection(features).float(), dim=-1)
        best = (embedded @ self._head(name).T).argmax(dim=1)
        return [COLOURS[int(index)] for index in best]

    def _head(self, name: str) -> Tensor:
        """One direction per colour ``[10, D]``: templates normalised, averaged and normalised again."""
        if name not in self._heads:
            texts = [template.format(colour=colour, name=name) for colour in COLOURS for template in TEMPLATES]
            tokens = self._tokenizer(texts, padding=True, return_tensors="pt").to(self.model.device)
            pooled = self.model.text_model(
                input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]
            ).pooler_output
            embedded = functional.normalize(self.model.text_projection(pooled).float(), dim=-1)
            mean = embedded.unflatten(0, (len(COLOURS), len(TEMPLATES))).mean(dim=1)
            self._heads[name] = functional.normalize(mean, dim=-1)
        return self._heads[name]


def cut_out(picture: NDArray[np.uint8], instance: Instance) -> Image.Image:
    """The object's pixels on grey #999999, cropped to its box."""
    alone = np.where(instance.mask.numpy()[:, :, None], picture, np.uint8(BACKGROUND))
    return Image.fromarray(alone).crop(instance.box)


class GenEval:
    """Whether the image shows the objects, counts, colours and places that the metadata asks for.

    ``detector`` is a ``transformers.Mask2FormerForUniversalSegmentation``, shown pictures with a short side of
    ``short`` pixels, 800 by default; ``origin`` says whose it is. The rest is as in :func:`geneval`. Raises ValueError
    for settings that do not fit together.
    """

    def __init__(
        self,
        detector: Any,
        colour: ColourJudge,
        mode: Mode = "official",
        channel_order: ChannelOrder = "official",
        reproduce_bug: bool = False,
        origin: str = FOREIGN,
        short: int | None = None,
    ) -> None:
        _check_settings(mode, channel_order, reproduce_bug)
        self.mode, self.channel_order, self.reproduce_bug = mode, channel_order, reproduce_bug
        self._detector, self._colour, self._short = detector, colour, short
        self.classes = class_names(detector.config.id2label)
        order = ", red and blue exchanged" if channel_order == "flow_grpo" else ""
        self.info = RewardInfo(
            name="geneval",
            range=(-float("inf") if reproduce_bug else 0.0, 1.0),
            licence="MIT (rules), Apache-2.0 (mmdet weights), MIT (CLIP); other detectors under their own",
            description=f"GenEval, {mode} scoring, {origin}{order}",
            needs=("stepcredit[diffusers]", "tsbpp/geneval_mask2former (converted)", CLIP_L.id),
            batch_size=8,
        )

    @property
    def networks(self) -> tuple[Any, ...]:
        """What may wait elsewhere while it is idle."""
        return (self._detector, self._colour.model)

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Tensor:
        """Scores, float32 ``[B]``; NaN for an image that is not finite. Raises RewardError for unusable metadata."""
        return self.components(images, prompts, metadata)["score"]

    def components(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> dict[str, Tensor]:
        """The score, and what all three rules say of the same detections: score, official, strict, flow_grpo.

        ``exact`` is the official verdict once more, under the name that evaluations look for.
        """
        valid = check_batch("geneval", images, prompts, metadata, need_prompt=False)
        for index, entry in enumerate(metadata):
            self._check(index, entry)
        asked = [entry for entry, ok in zip(metadata, valid.tolist(), strict=True) if ok]
        seen = self.objects(images[valid.to(images.device)], asked) if asked else []
        results: dict[str, list[float]] = {"official": [], "strict": [], "flow_grpo": []}
        for found, entry in zip(seen, asked, strict=True):
            results["official"].append(float(rules.official(found, entry)))
            results["strict"].append(float(rules.strict(found, entry)))
            results["flow_grpo"].append(rules.flow_grpo(found, entry, reproduce_bug=self.reproduce_bug))
        parts = {name: scatter(torch.tensor(values), valid) for name, values in results.items()}
        return {"score": parts[self.mode], **parts, "exact": parts["official"]}

    def objects(self, images: Tensor, metadata: Sequence[Metadata]) -> list[list[Object]]:
        """The objects that count in each image, surest first; colours are named where the metadata asks for one."""
        found = detect(self._detector, images, self.channel_order, least=rules.CONFIDENCE, short=self._short)
        pictures = to_uint8(images).numpy()
        return [self._judged(*each) for each in zip(pictures, found, metadata, strict=True)]

    def _judged(self, picture: NDArray[np.uint8], found: Sequence[Instance], entry: Metadata) -> list[Object]:
        kept = rules.confident([Object(self.classes[one.label], one) for one in found], str(entry["tag"]))
        coloured = {clause["class"] for clause in entry["include"] if "color" in clause}
        colours: dict[int, str] = {}
        for name in coloured:
            rows = [row for row, one in enumerate(kept) if one.cls == name]
            judged = self._colour(picture, [kept[row].instance for row in rows], name)
            colours.update(zip(rows, judged, strict=True))
        return [replace(one, color=colours.get(row)) for row, one in enumerate(kept)]

    def _check(self, index: int, entry: Metadata) -> None:
        if not isinstance(entry.get("tag"), str) or not entry.get("include"):
            raise RewardError(
                f"geneval: metadata {index} has no 'tag' or no 'include' clauses; pass GenEval's metadata"
            )
        for clause in (*entry["include"], *entry.get("exclude", ())):
            name = clause.get("class")
            if name not in self.classes:
                raise RewardError(
                    f"geneval: metadata {index} asks for class {name!r}, which the detector does not know"
                    + nearest(str(name), self.classes)
                )

    def self_test(self) -> SelfTest:
        """A drawn stop sign against an empty grey field."""
        page = Image.new("RGB", (512, 512), (150, 190, 230))
        draw = ImageDraw.Draw(page)
        draw.rectangle((246, 300, 266, 512), fill=(120, 120, 120))
        draw.regular_polygon((256, 200, 150), 8, rotation=22, fill=(190, 20, 30), outline=(255, 255, 255), width=8)
        draw.text((256, 200), "STOP", fill="white", anchor="mm", font_size=90)
        sign = torch.from_numpy(np.array(page)).permute(2, 0, 1).float() / 255
        metadata = {"tag": "single_object", "include": [{"class": "stop sign", "count": 1}]}
        grey = torch.full((3, 512, 512), 0.5)
        return SelfTest(good=sign, bad=grey, prompt="a photo of a stop sign", metadata=metadata)


def geneval(
    mode: Mode = "official",
    channel_order: ChannelOrder = "official",
    reproduce_bug: bool = False,
    weights: str | Path | None = None,
    revision: str | None = None,
    clip: str | Path | None = None,
    tokenizer: str | Path | None = None,
    device: str | None = None,
) -> GenEval:
    """GenEval with its own detector, or another.

    ``mode``: ``official`` (0 or 1, at least the asked count; the published benchmark), ``strict`` (exactly the asked
    count) or ``flow_grpo`` (partial credit in [0, 1]; ``reproduce_bug`` gives the published code's slips as well).
    ``channel_order``: ``flow_grpo`` shows the detector red and blue exchanged, as the published servers do.
    ``weights``: a folder converted from GenEval's own detector (the default), or another Mask2Former such as
    facebook/mask2former-swin-small-coco-instance, which was trained independently: its scores are not GenEval's, and
    ``info`` says so. ``clip`` and ``tokenizer``: the colour model. RewardError when weights are absent.
    """
    _check_settings(mode, channel_order, reproduce_bug)
    source = resolve(weights, revision, cache_folder("geneval"))
    weights_module.need_converted("geneval", source)
    where = pick_device(device)
    detector = weights_module.model("geneval", "Mask2FormerForUniversalSegmentation", source, where, unused=UNUSED)
    colour_source = resolve(clip, None, CLIP_L)
    colour_model = weights_module.model("geneval", "CLIPModel", colour_source, where)
    colour = ColourJudge(colour_model, clip_tokenizer("geneval", tokenizer, colour_source, CLIP_L))
    exact = isinstance(source, Path) and _came_from_geneval(source)
    origin = "GenEval's own detector" if exact else FOREIGN
    return GenEval(detector, colour, mode, channel_order, reproduce_bug, origin)


def partial(weights: str | Path | None = None, clip: str | Path | None = None, device: str | None = None) -> GenEval:
    """GenEval with Flow-GRPO's partial credit in [0, 1], which training needs: most images earn something."""
    return geneval(mode="flow_grpo", weights=weights, clip=clip, device=device)


def _check_settings(mode: str, channel_order: str, reproduce_bug: bool) -> None:
    """Raises ValueError for settings that are unknown or do not fit together."""
    if mode not in ("official", "strict", "flow_grpo"):
        raise ValueError(f"geneval: mode must be 'official', 'strict' or 'flow_grpo'; got {mode!r}")
    if channel_order not in ("official", "flow_grpo"):
        raise ValueError(f"geneval: channel_order must be 'official' or 'flow_grpo'; got {channel_order!r}")
    if reproduce_bug and mode != "flow_grpo":
        raise ValueError(f"geneval: reproduce_bug belongs to mode 'flow_grpo'; got mode {mode!r}")


def class_names(id2label: Mapping[int, str]) -> tuple[str, ...]:
    """GenEval's names of the detector's classes: those of COCO for 80 classes, else the model's own."""
    if len(id2label) == len(COCO):  # configurations spell COCO's classes in several ways; their order is one
        return COCO
    return tuple(id2label[index] for index in sorted(id2label))


def _came_from_geneval(folder: Path) -> bool:
    """Whether a folder was written by converting the detector that GenEval uses."""
    try:
        return bool(json.loads((folder / "source.json").read_text())["sha256"] == SHA256)
    except (OSError, ValueError, KeyError, TypeError):
        return False
