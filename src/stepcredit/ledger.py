"""The ledger: what a batch of trajectories costs, counted in model evaluations, decodes and reward calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass

from stepcredit.rollout import Layout, chunks
from stepcredit.scoring import ScoringPlan


@dataclass(frozen=True)
class Ledger:
    """Costs of one batch, each counted per sample: a batched call on n rows counts n."""

    trajectories: int
    rollout_evaluations: int
    scoring_evaluations: int
    decodes: int
    reward_calls: int
    trained_evaluations: int
    """Forward-backward passes of one update; backward passes alone where the rollout's graphs are retained."""

    @property
    def model_evaluations(self) -> int:
        """Evaluations without gradient: those of the rollout and those that complete intermediate states."""
        return self.rollout_evaluations + self.scoring_evaluations

    def per_trajectory(self) -> dict[str, float]:
        """The counts divided by the number of trajectories."""
        counts = asdict(self) | {"model_evaluations": self.model_evaluations}
        del counts["trajectories"]
        return {f"{name}_per_trajectory": count / self.trajectories for name, count in counts.items()}


def total(ledgers: Sequence[Ledger]) -> Ledger:
    """The cost of several batches together."""
    return Ledger(*(sum(counts) for counts in zip(*(astuple(each) for each in ledgers), strict=True)))


def ledger(tree: Layout, plan: ScoringPlan, micro_batch: int = 1) -> Ledger:
    """The exact cost of sampling, scoring and training a layout once, known before anything runs.

    Chunks of ``micro_batch`` rows without a trained member are not replayed; 1 gives the least count.
    """
    trained = sum(
        chunk.rows.stop - chunk.rows.start
        for i in range(tree.steps)
        for chunk in chunks(tree, i, micro_batch)
        if len(chunk.members)
    )
    return Ledger(
        trajectories=tree.members,
        rollout_evaluations=sum(tree.rows(i) for i in range(tree.steps)),
        scoring_evaluations=plan.evaluations,
        decodes=plan.count,
        reward_calls=plan.count,
        trained_evaluations=trained,
    )
