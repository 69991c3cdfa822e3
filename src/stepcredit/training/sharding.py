"""A transformer shared out among processes (FSDP2): each keeps a part of every weight, and gathers a block to use it.

With LoRA the frozen base is shared out and the adapters stay whole on every process, so nothing else of a run changes.
Under full tuning the trained weights are shared out, and with them gradients, moments and average: tensors of which a
process has a part are DTensors, and the functions here lead from parts to wholes and back. Whole tensors pass through.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stepcredit.policies.base import Policy
from stepcredit.policies.diffusers_policy import DiffusersPolicy
from stepcredit.training import distributed


def shard(policy: Policy) -> None:
    """Share a pipeline's transformer, and its frozen copy if there is one, among the processes; nothing for one alone.

    To be called by every process, before an optimiser or an average takes hold of the parameters. Raises TypeError for
    a policy that is no pipeline's.
    """
    if not distributed.joined():
        return
    if not isinstance(policy, DiffusersPolicy):
        raise TypeError(f"{policy.name} cannot be sharded: only the transformers of pipelines are")
    transformer = policy.pipe.transformer
    _share(transformer, set() if policy.trains_base else set(policy.trained.values()))
    if policy.trains_base:
        policy.trained = dict(transformer.named_parameters())
    if policy.reference is not None:
        _share(policy.reference, set())


def _share(transformer: nn.Module, whole: set[nn.Parameter]) -> None:
    """Shard every block of a transformer, and what lies outside the blocks, but for the parameters kept ``whole``."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(next(transformer.parameters()).device.type, (distributed.world(),))
    lists = [module for module in transformer.children() if isinstance(module, nn.ModuleList)]
    for module in [*(block for blocks in lists for block in blocks), transformer]:
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=True,  # else the root would keep what it gathered, and miss weights that are set
            mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32),
            ignored_params=whole,
        )
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)  # losses are shares of one mean already
        module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale


def shared(tensor: Tensor) -> bool:
    """Whether each process has only a part of the tensor."""
    return hasattr(tensor, "placements")


def local(tensor: Any) -> Tensor:
    """This process's part of a tensor, sharing its memory; a whole tensor itself."""
    part: Tensor = tensor.to_local() if shared(tensor) else tensor
    return part


def whole(tensor: Any) -> Tensor:
    """All of a tensor, gathered from all processes, which must all ask. Raises PeerLostError."""
    with distributed.peers():
        every: Tensor = tensor.full_tensor() if shared(tensor) else tensor
    return every


def gathered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All of every tensor, for the process that writes, on the CPU if they were shared; the others get none of those.

    Raises PeerLostError.
    """
    every: dict[str, Tensor] = {}
    for name, tensor in tensors.items():  # one at a time: all may be more than a GPU holds
        if not shared(tensor):
            every[name] = tensor
            continue
        value = whole(tensor)
        if distributed.leads():
            every[name] = value.cpu()
    return every


def part(value: Tensor, like: Any) -> Tensor:
    """Of a whole ``value``, which every process has, the part that this one holds of ``like``, on its device."""
    value = value.to(like.device)
    if not shared(like):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def as_part(value: Tensor, like: Any) -> Tensor:
    """A flat ``value``, of this process's part if ``like`` is shared out, with the shape, layout and dtype of it."""
    own = value.view_as(local(like)).to(like.dtype)
    if not shared(like):
        return own
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(own, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())


def norm(tensors: Sequence[Tensor]) -> float:
    """Norm of all tensors together, in float64, every process having the same. Raises PeerLostError."""
    squares = torch.stack([local(tensor.detach()).double().square().sum().cpu() for tensor in tensors])
    if any(shared(tensor) for tensor in tensors):
        distributed.add(squares)
    return math.sqrt(sum(squares.tolist()))
