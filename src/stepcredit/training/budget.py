"""What a diffusers pipeline needs before it is loaded: parameters, peak memory, operations and a range of hours.

Operations of a forward and of a decode are counted on the meta device. The factors of the backward pass and the
activations are reference figures, measured at 512 px and batch 1: SD3.5-M 1.9 GiB of activations an image without and
0.09 GiB with activation checkpointing, FLUX.1-dev 8.1 and 0.51 GiB; backward over forward 1.19 and 1.12 with LoRA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from stepcredit import tasks
from stepcredit.errors import UserError
from stepcredit.ledger import Ledger
from stepcredit.policies.diffusers_policy import DiffusersPolicy
from stepcredit.rollout import Layout
from stepcredit.scoring import ScoringPlan
from stepcredit.training import distributed, room
from stepcredit.training.gradients import LARGEST_IN_FLOAT64
from stepcredit.training.holding import peak_bytes
from stepcredit.training.recipe import Recipe

GIB = 2**30
EFFICIENCY = (0.2, 0.45)
"""Lowest and highest share of a GPU's peak that such runs reach."""
PEAK_TFLOPS = {"A100": 312.0, "H100": 989.0, "RTX 4090": 165.0}
"""Dense bf16 or fp16 operations a second, from the makers' data sheets."""
REWARD_GIB = {
    "geneval": 2.0,
    "geneval_partial": 2.0,
    "pickscore": 3.8,
    "imagereward": 1.9,
    "hpsv2.1": 3.8,
    "clip_l14_cos": 1.7,
    "aesthetic": 1.7,
}
"""Float32 weights of rewards that compute on the GPU; the others do not, or are served elsewhere."""
_BACKWARD = {"sd3": 2.67 / 2.25, "flux": 24.2 / 21.7}
_ACTIVATIONS = {"sd3": (1.9, 0.09), "flux": (8.1, 0.51)}
_REFERENCE_TOKENS = 1024
_CONTEXT_GIB = 0.8
"""Of the CUDA runtime and its libraries."""
_SLACK = 1.1
"""For fragments and workspaces."""


@dataclass(frozen=True)
class Budget:
    """Sizes of a run; memory in GiB, operations in TFLOP per sample."""

    transformer_parameters: int
    trained_parameters: int
    text_encoder_parameters: float
    weights_gib: float
    training_state_gib: float
    trajectories_gib: float
    activations_gib: float
    decoding_gib: float
    reward_gib: float
    visitors_gib: float
    """Of networks that come to the GPU for their use alone, those that decode and judge; 0 without ``offload``."""
    peak_gib: float
    forward_tflop: float
    """One velocity, with its unconditional half where there is one."""
    trained_tflop: float
    decode_tflop: float
    iteration_tflop: float
    run_tflop: float
    """Training and evaluations."""

    def hours(self, peak_tflops: float) -> tuple[float, float]:
        """Least and most hours of the run on one GPU of that peak, without rewards."""
        low, high = (self.run_tflop / (peak_tflops * share) / 3600 for share in reversed(EFFICIENCY))
        return low, high

    def as_dict(self) -> dict[str, Any]:
        """For ``plan --json``, with hours by GPU."""
        return {**asdict(self), "gpu_hours": {gpu: list(self.hours(peak)) for gpu, peak in PEAK_TFLOPS.items()}}


def budget(
    recipe: Recipe,
    policy: DiffusersPolicy,
    cost: Ledger,
    cells: Sequence[tuple[Layout, ScoringPlan]],
    encoder_parameters: float,
    images: int,
) -> Budget:
    """The budget of a recipe from a policy on the meta device, its cost per iteration, the ``cells`` of this process in
    an iteration, and its evaluation images."""
    transformer, family = policy.pipe.transformer, policy.family.name
    width = policy.dtype.itemsize
    latent = torch.Size(policy.latent_shape).numel()
    parameters = sum(p.numel() for name, p in transformer.named_parameters() if ".lora_" not in name)
    trained = sum(p.numel() for _, p in policy.named_parameters())
    copies = 2 if policy.reference is not None else 1
    shards = distributed.world() if recipe.shard else 1
    released = recipe.embedding_cache is not None
    encoders = 0.0 if released else encoder_parameters * width
    vae = sum(p.numel() for p in policy.pipe.vae.parameters()) * 4
    idle = recipe.offload == "idle"
    weights = (copies * parameters * width / shards + (0.0 if idle else encoders + vae)) / GIB
    full = recipe.tuning == "full"
    held = trained / (shards if full else 1)
    gradient = 8 if held <= LARGEST_IN_FLOAT64 else 4
    state = held * ((2 * width + 4 if full else 4 * 4) + gradient) / GIB  # adapters, two moments, average; gradient
    trajectories = peak_bytes(recipe, cells, latent) / GIB
    # Latents hold (8 x 2)^2 pixels per token in all families with 8-fold autoencoders and 2x2 patches.
    pixels = (recipe.resolution or 512) ** 2
    scale = pixels / 256 / _REFERENCE_TOKENS
    retain = recipe.replay == "retain"
    kept = cost.trained_evaluations / recipe.micro_batch if retain else 1  # graphs of micro-batches alive at once
    activations = _activations(recipe, policy, family, parameters, width) * scale * kept
    decoding = 256 * pixels * 4 * 4 * min(recipe.decode_batch, recipe.micro_batch) / GIB  # four maps of 256 channels
    judges = (recipe.reward or tasks.get(recipe.task).reward, recipe.watch)
    reward = sum(REWARD_GIB.get(name, 0.0) for name in judges if name)
    loading = (copies * parameters * width + encoder_parameters * width + (0.0 if idle else vae)) / GIB
    visitors = vae / GIB + reward if idle else 0.0
    resting = 0.0 if idle else reward
    scoring = max(decoding + visitors, encoders / GIB if idle else 0.0)  # prompts are encoded before, not meanwhile
    busy = activations + scoring if retain else max(activations, scoring)  # images are decoded with graphs alive
    peak = max(weights + state + resting + trajectories + busy, loading) * _SLACK + _CONTEXT_GIB

    forward, decode = operations(policy, recipe)
    backward = forward * (_BACKWARD.get(family, 1.2) if not full else 2.0)
    again = forward if recipe.gradient_checkpointing else 0.0
    reference = forward if recipe.kl_beta > 0 else 0.0
    one = (0.0 if retain else forward) + backward + again + reference
    iteration = cost.model_evaluations * forward + cost.trained_evaluations * one + cost.decodes * decode
    evaluation = images * ((recipe.eval_steps or recipe.steps) * forward + decode)
    return Budget(
        transformer_parameters=parameters,
        trained_parameters=trained,
        text_encoder_parameters=encoder_parameters,
        weights_gib=weights,
        training_state_gib=state,
        trajectories_gib=trajectories,
        activations_gib=activations,
        decoding_gib=decoding,
        reward_gib=resting,
        visitors_gib=visitors,
        peak_gib=peak,
        forward_tflop=forward,
        trained_tflop=one,
        decode_tflop=decode,
        iteration_tflop=iteration,
        run_tflop=iteration * recipe.iterations + evaluation,
    )


def operations(policy: DiffusersPolicy, recipe: Recipe) -> tuple[float, float]:
    """TFLOP of one velocity (both halves, under guidance) and of one decode, counted on the meta device."""
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.zeros(1, *policy.latent_shape, device=policy.device)
    cond = _conditioning(policy)
    if cond is None:  # two operations for every parameter and token
        tokens = (recipe.resolution or 512) ** 2 / 256 + policy.family.max_sequence_length
        weights = sum(p.numel() for p in policy.pipe.transformer.parameters())
        return 2 * weights * tokens * policy.forwards_per_velocity / 1e12, 2.5
    with torch.no_grad():
        with FlopCounterMode(display=False) as forward:
            policy.velocity(x, torch.full((1,), 0.5, device=policy.device), cond)
        with FlopCounterMode(display=False) as decode:
            policy.decode(x)
    return forward.get_total_flops() / 1e12, decode.get_total_flops() / 1e12


def check_memory(needed: Budget, device: torch.device) -> None:
    """Raises UserError if the device has less free memory than the run is estimated to need, where it can be known."""
    free = room.available(device)
    if free is None or needed.peak_gib <= free / GIB:
        return
    if device.type == "cuda":
        where, remedy = torch.cuda.get_device_name(device), "embedding_cache or offload"
    else:
        where, remedy = "this machine's CPU", "embedding_cache"
    raise UserError(
        f"this recipe needs about {needed.peak_gib:.0f} GiB and {where} has {free / GIB:.0f} free: lower micro_batch "
        f"or decode_batch, set gradient_checkpointing, {remedy}, leave replay at recompute, or set check_memory: false "
        "to try all the same; `train --rehearse` runs it on a tiny pipeline"
    )


def _activations(recipe: Recipe, policy: DiffusersPolicy, family: str, parameters: int, width: int) -> float:
    """GiB of activations that a micro-batch keeps for its backward pass at 512 px."""
    plain, kept = _ACTIVATIONS.get(family, (8.1 * parameters / 11.9e9, 0.51 * parameters / 11.9e9))
    blocks = sum(len(blocks) for blocks in _block_lists(policy))
    each = kept + plain / max(blocks, 1) if recipe.gradient_checkpointing else plain
    return each * recipe.micro_batch * policy.forwards_per_velocity * width / 2


def _block_lists(policy: DiffusersPolicy) -> list[Any]:
    return [m for m in policy.pipe.transformer.children() if isinstance(m, torch.nn.ModuleList)]


def _conditioning(policy: DiffusersPolicy) -> dict[str, Tensor] | None:
    """Empty embeddings of the shapes that the family's encoders give; None for families not listed here."""
    config, length = policy.pipe.transformer.config, policy.family.max_sequence_length
    if policy.family.name == "sd3":
        shapes = {"text": (77 + length, config.joint_attention_dim), "pooled": (config.pooled_projection_dim,)}
    elif policy.family.name == "flux":
        shapes = {"text": (length, config.joint_attention_dim), "pooled": (config.pooled_projection_dim,)}
    else:
        return None
    halves = ("", "negative_") if policy.family.uses_cfg else ("",)
    return {
        half + name: torch.zeros(1, *shape, device=policy.device, dtype=policy.dtype)
        for half in halves
        for name, shape in shapes.items()
    }
