"""The policy of a diffusers pipeline: one class for all families, composed with a small object that knows the family.

A ``Family`` says how its pipeline embeds prompts, calls its transformer and decodes; everything else is here, once.
"""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from stepcredit.interpolant import full_precision
from stepcredit.policies import diffusers_common as common
from stepcredit.policies import lora as adapters
from stepcredit.policies.base import Conditioning
from stepcredit.policies.embeddings import EmbeddingCache, embed_cached
from stepcredit.policies.placement import Placement


class Family(Protocol):
    """What one family of pipelines must say about itself; see docs/adapters.md for how to add one."""

    name: ClassVar[str]
    default_guidance: ClassVar[float]
    negative_prompt: ClassVar[str]
    """What the unconditional half is asked for."""
    precision: ClassVar[common.Precision]
    """The transformer's precision in the published recipes of this family."""
    encoders: ClassVar[tuple[str, ...]]
    """Components of the pipeline that only ``embed`` needs."""
    lora_targets: ClassVar[tuple[str, ...]]

    @property
    def pipe(self) -> Any: ...

    @property
    def guidance_scale(self) -> float: ...

    @property
    def max_sequence_length(self) -> int: ...

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of one sample's latents, as the pipeline's own ``prepare_latents`` returns them."""
        ...

    @property
    def uses_cfg(self) -> bool:
        """Whether the velocity is guided by a second, unconditional prediction."""
        ...

    def grid(self, steps: int) -> Tensor:
        """The times that the pipeline samples on, float64 ``[steps + 1]``, from 1 to 0."""
        ...

    def embed(self, prompts: Sequence[str]) -> Conditioning:
        """Conditioning of prompts without the unconditional half."""
        ...

    def predict(self, transformer: Any, x: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        """One forward of a transformer (the trained one or a copy): x in its dtype, t float32 ``[B]`` in [0, 1]."""
        ...

    def combine(self, conditional: Tensor, unconditional: Tensor) -> Tensor:
        """The guided velocity of the two predictions, float32."""
        ...

    def decode(self, x_0: Tensor) -> Tensor:
        """Raw images ``[B, 3, H, W]``, about [-1, 1], of clean latents."""
        ...

    def remarks(self) -> list[str]:
        """What a person who is about to train this checkpoint should know, one sentence each."""
        ...


@dataclass(eq=False)
class DiffusersPolicy:
    """A pipeline as ``Policy``: see ``stepcredit.policies.from_pipeline``, which builds it."""

    family: Family
    name: str
    dtype: torch.dtype
    """Dtype that the transformer computes in; velocities come back in float32."""
    trained: dict[str, nn.Parameter]
    decode_batch: int
    reference: nn.Module | None = None
    """A frozen copy of the transformer, for full fine-tuning; adapters are switched off instead."""
    trains_base: bool = False
    cache: EmbeddingCache | None = None
    placement: Placement | None = None
    """Where the autoencoder and the text encoders wait while they are idle; None where they stay on the device."""
    _negative: Conditioning | None = field(default=None, repr=False)
    _released: bool = False

    @property
    def pipe(self) -> Any:
        """The pipeline behind the policy; its transformer is the trained network."""
        return self.family.pipe

    @property
    def device(self) -> torch.device:
        return common.device_of(self.pipe.transformer)

    @property
    def latent_shape(self) -> tuple[int, ...]:
        return self.family.latent_shape

    @property
    def forwards_per_velocity(self) -> int:
        return 2 if self.family.uses_cfg else 1

    def grid(self, steps: int) -> Tensor:
        """The scheduler's own sigmas for this image size, float64 ``[steps + 1]``, from 1 to 0."""
        return self.family.grid(steps)

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """Embeddings of the prompts, and of the negative prompt where guidance needs it; from the cache if set.

        Raises RuntimeError for a prompt that is not cached once the encoders were released.
        """
        if isinstance(prompts, str) or not prompts:
            raise ValueError(f"prompts must be a list of at least one string, not {prompts!r}")
        cond = self._embed(prompts)
        if self.family.uses_cfg:
            if self._negative is None:
                self._negative = self._embed([self.family.negative_prompt])
            cond = common.with_negative(cond, self._negative)
        return cond

    def velocity(self, x: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        """Guided velocity, at least float32, ``[B, *latent_shape]``; x of any dtype, t ``[B]``; carries gradients."""
        return self._velocity(self.pipe.transformer, x, t, cond)

    @torch.no_grad()
    def reference_velocity(self, x: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        """The same with adapters off, or of the frozen copy. Raises RuntimeError for full fine-tuning without one."""
        if self.reference is not None:
            return self._velocity(self.reference, x, t, cond)
        if self.trains_base:
            raise RuntimeError(
                "full fine-tuning has changed the base model, so there is no reference: build the policy with "
                "reference_copy=True (memory of one more transformer), or set the KL weight to 0"
            )
        with common.adapters_off(self.pipe.transformer):
            return self._velocity(self.pipe.transformer, x, t, cond)

    @torch.no_grad()
    def decode(self, x_0: Tensor) -> Tensor:
        """Images float32 ``[B, 3, H, W]`` in [0, 1], decoded ``decode_batch`` at a time."""
        with self._at_work(["vae"]):
            images = torch.cat([self.family.decode(part) for part in full_precision(x_0).split(self.decode_batch)])
        return (images.float() * 0.5 + 0.5).clamp(0, 1)

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """The adapters, or all of the transformer under full fine-tuning, in its order; none if only sampled."""
        return self.trained.items()

    def release_encoders(self) -> None:
        """Frees the text encoders; from then on only cached prompts can be encoded. PipelineError without a cache."""
        if self.cache is None:
            raise common.PipelineError(
                "release_encoders needs embedding_cache: without it no prompt could be encoded any more"
            )
        if self.family.uses_cfg and self._negative is None:
            self._negative = self._embed([self.family.negative_prompt])
        for name in self.family.encoders:
            setattr(self.pipe, name, None)
        self._released = True
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.no_grad()
    def _embed(self, prompts: Sequence[str]) -> Conditioning:
        cond = embed_cached(self.cache, prompts, self._run_encoders) if self.cache else self._run_encoders(prompts)
        return {
            name: tensor.to(self.device, self.dtype if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in cond.items()
        }

    def _run_encoders(self, prompts: Sequence[str]) -> Conditioning:
        if self._released:
            raise RuntimeError(
                f"the text encoders were released and prompt {prompts[0]!r} is not in the embedding cache; encode "
                "every prompt, those of evaluation too, before release_encoders"
            )
        with self._at_work(self.family.encoders):
            return self.family.embed(prompts)

    def _at_work(self, names: Iterable[str]) -> AbstractContextManager[None]:
        """Parts of the pipeline on the device within the block."""
        return self.placement.visit(_networks(self.pipe, names)) if self.placement else nullcontext()

    def _velocity(self, transformer: Any, x: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        def predict(x: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
            return full_precision(self.family.predict(transformer, x, t, cond))

        x, t = x.to(self.device, self.dtype), t.to(self.device, torch.float32)
        return common.guided(predict, self.family.combine, x, t, cond)


def build(
    family: Family,
    *,
    lora: adapters.LoraSpec | Literal["full"] | None,
    precision: common.Precision | None,
    gradient_checkpointing: bool,
    reference_copy: bool,
    embedding_cache: str | Path | None,
    revision: str | None,
    decode_batch: int,
    placement: Placement | None = None,
) -> DiffusersPolicy:
    """Prepares the pipeline of ``family`` in place and makes it a policy; arguments as in ``from_pipeline``."""
    pipe, transformer = family.pipe, family.pipe.transformer
    if decode_batch < 1:
        raise common.PipelineError(f"decode_batch must be at least 1, not {decode_batch}")
    if lora is not None and lora != "full" and not isinstance(lora, adapters.LoraSpec):
        raise common.PipelineError(
            f"lora is {lora!r}; pass a LoraSpec, 'full', or None for a policy that is only sampled"
        )
    common.check_scheduler(pipe.scheduler)
    common.set_precision(pipe, precision)
    if lora is not None:  # a policy that only samples may share the pipeline with one that is being trained
        common.freeze(pipe)
    if placement is not None:
        _park(pipe, placement, family.encoders)
    dtype, reference = transformer.dtype, None
    if lora == "full":
        reference = copy.deepcopy(transformer) if reference_copy else None
        transformer.requires_grad_(True)
        trained = dict(transformer.named_parameters())
    else:
        trained = adapters.attach(transformer, lora, family.lora_targets) if lora else {}
    if gradient_checkpointing:
        transformer.enable_gradient_checkpointing()
    policy = DiffusersPolicy(
        family=family,
        name=f"{family.name}:{pipe.config.get('_name_or_path') or type(pipe).__name__}",
        dtype=dtype,
        trained=trained,
        decode_batch=decode_batch,
        reference=reference,
        trains_base=lora == "full",
        cache=_cache(family, embedding_cache, revision) if embedding_cache is not None else None,
        placement=placement,
    )
    if trained:
        for remark in _remarks(policy):
            warnings.warn(remark, common.PolicyWarning, stacklevel=3)
    return policy


def _park(pipe: Any, placement: Placement, encoders: Iterable[str]) -> None:
    """Transformer to the device, autoencoder and text encoders to where they wait. PipelineError for a pipeline that
    moves its parts itself.
    """
    hooked = next((name for name, part in pipe.components.items() if getattr(part, "_hf_hook", None) is not None), None)
    if hooked is not None:
        raise common.PipelineError(
            f"the pipeline moves its {hooked} itself (enable_model_cpu_offload or a device map): load it without, or "
            "leave placement out"
        )
    pipe.transformer.to(placement.work)
    placement.park(_networks(pipe, ["vae"]), scoring=True)
    placement.park(_networks(pipe, encoders))


def _networks(pipe: Any, names: Iterable[str]) -> list[nn.Module]:
    """Those of the named parts of a pipeline that are there."""
    return [part for name in names if isinstance(part := getattr(pipe, name), nn.Module)]


def _cache(family: Family, folder: str | Path, revision: str | None) -> EmbeddingCache:
    present = _networks(family.pipe, family.encoders)
    model = str(family.pipe.config.get("_name_or_path") or type(family.pipe).__name__)
    # A model without a pinned revision may change under its name: then the encoders' own weights tell.
    version = revision or common.fingerprint(present)
    dtypes = "+".join(str(next(module.parameters()).dtype) for module in present)
    return EmbeddingCache(Path(folder), (family.name, model, version, str(family.max_sequence_length), dtypes))


def _remarks(policy: DiffusersPolicy) -> Iterable[str]:
    family = policy.family
    yield from family.remarks()
    if name := common.step_distilled(policy.pipe):
        yield (
            f"{name} looks step-distilled by its name: reinforcement learning tends to blur such models; prefer the "
            "checkpoint that it was distilled from"
        )
    if family.uses_cfg:
        yield (
            f"classifier-free guidance is trained (guidance_scale={family.guidance_scale}): every velocity costs two "
            "forwards, and images must later be sampled at the same scale"
        )
    if policy.trains_base and policy.dtype != torch.float32:
        yield f"full fine-tuning in {policy.dtype} loses small updates to rounding; pass precision='fp32'"
