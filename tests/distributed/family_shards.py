"""For every family of pipelines a velocity, that of the reference and a gradient, of whole and of shared weights."""

import itertools
import warnings

import torch

from stepcredit import noise
from stepcredit.policies import from_pipeline, tiny
from stepcredit.policies.lora import LoraSpec
from stepcredit.training import distributed, sharding

SIZES = {"height": 32, "width": 32, "max_sequence_length": 16, "gradient_checkpointing": True}


def results(policy):
    """Velocity, reference velocity and whole gradients by name, at two points."""
    x, t = noise.normal((2, *policy.latent_shape), "x"), torch.tensor([0.3, 0.8])
    cond = policy.encode(["a cat", "two red dogs"])
    velocity, reference = policy.velocity(x, t, cond), policy.reference_velocity(x, t, cond)
    velocity.square().sum().backward()
    gradients = {n: sharding.whole(p.grad).clone() for n, p in policy.named_parameters() if p.grad is not None}
    for _, parameter in policy.named_parameters():
        parameter.grad = None
    return velocity.detach(), reference, gradients


def policy_of(family, tuning, precision):
    full = tuning == "full"
    lora = "full" if full else LoraSpec(2, 4.0)
    policy = from_pipeline(tiny.build(family), lora=lora, precision=precision, reference_copy=full, **SIZES)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if ".lora_B." in name:  # zero at first, and with it the gradient of A
                parameter += noise.normal(tuple(parameter.shape), "b", name)
    return policy


def compare(family, tuning, precision):
    """Whether velocities are equal, the number of gradients, and their largest relative difference."""
    policy = policy_of(family, tuning, precision)
    velocity, reference, gradients = results(policy)
    sharding.shard(policy)
    velocity_again, reference_again, again = results(policy)
    equal = torch.equal(velocity, velocity_again) and torch.equal(reference, reference_again)
    equal = equal and gradients.keys() == again.keys()
    each = distributed.world() if tuning == "full" else 1  # FSDP has added the same gradient once for each process
    worst = max(float((g * each - again[n]).norm() / (g * each).norm()) for n, g in gradients.items())
    return int(equal), len(gradients), worst


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with distributed.processes():
        for case in (*itertools.product(tiny.BUILDERS, ("lora", "full"), ("fp32",)), ("sd3", "lora", "bf16")):
            told = ("COMPARED", *case, *compare(*case))
            if distributed.leads():
                print(*told)
