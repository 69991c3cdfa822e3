"""How far the reward ``prefer`` can be driven from what it stands for: ``python benchmarks/prefer_ascent.py``.

Pictures of the base model are changed by signed steps of one 8-bit unit up the scorer's own gradient, and judged by the
scorer, by the verifier of ``compose``, and by the image statistics. No policy is trained: this is what it rewards, and
where a policy trained on it is drawn to.
"""

from __future__ import annotations

import torch

from stepcredit import rewards, tasks
from stepcredit.policies.desk import DeskPolicy
from stepcredit.rewards.base import judge, score
from stepcredit.rewards.prefer import PreferReward
from stepcredit.sampling import sample
from stepcredit.training.evaluation import slots
from stepcredit.training.image_stats import STATISTICS, image_statistics

PROMPTS, STEPS, SHOWN = 240, 32, (0, 2, 4, 8, 16, 32)


def main() -> None:
    """Print a row for each number of steps in SHOWN."""
    torch.set_num_threads(1)
    on = slots(tasks.draw(tasks.get("prefer").heldout(), PROMPTS, "heldout"))
    texts, metadata = [slot.prompt.text for slot in on], [slot.prompt.metadata for slot in on]
    policy = DeskPolicy.pretrained("compose")
    noise = torch.stack([slot.noise(policy.latent_shape) for slot in on])
    images = torch.cat([sample(policy, texts[k : k + 60], noise=noise[k : k + 60]) for k in range(0, PROMPTS, 60)])
    reward, verifier = PreferReward(), rewards.get("compose")
    print("| 8-bit steps | prefer | compose | exactly right | " + " | ".join(STATISTICS) + " |")
    for step in range(STEPS + 1):
        if step in SHOWN:
            verdict = judge(verifier, images, texts, metadata)
            assert verdict.exact is not None
            told = [score(reward, images, texts, metadata), verdict.score, verdict.exact]
            looks = image_statistics(images, images[-1]).mean(0).tolist()
            row = [*(f"{float(values.mean()):.3f}" for values in told), *(f"{value:.3f}" for value in looks)]
            print(f"| {step} | " + " | ".join(row) + " |", flush=True)
        changed = images.clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(reward.scorer(changed, texts).sum(), changed)
        images = (images + slope.sign() / 255).clamp(0, 1)


if __name__ == "__main__":
    main()
