"""Cells: the fixed cut of a batch into equal runs of prompts, which any number of processes may share.

Sampling, scoring and replay go cell by cell, so the batches that the model sees are the same on one process or on
eight, and with them every bit of what it computes.
"""

from __future__ import annotations

from stepcredit.errors import UserError

HIGHEST = 8
"""Cells of an update, at most: more would leave more chunks part empty."""


def per_update(prompts: int, members: int, micro_batch: int, processes: int) -> int:
    """Number of cells that the prompts of one update are cut into; it divides them, and is divided by the processes.

    As many as ``HIGHEST`` allows whose ``members`` per prompt fill whole micro-batches, whatever the number of
    processes; only where that number does not divide these, one cell for each process, and results then agree up to
    rounding. Raises UserError if the processes cannot share the prompts equally.
    """
    if prompts % processes:
        fits = max(n for n in range(1, processes) if prompts % n == 0)
        raise UserError(
            f"{processes} processes cannot share the {prompts} prompts of an update (prompts_per_iteration / "
            f"updates_per_rollout) equally; start {fits} of them (--nproc_per_node {fits}), or give each update a "
            f"multiple of {processes} prompts"
        )
    fitting = [n for n in range(1, HIGHEST + 1) if prompts % n == 0 and (prompts // n * members) % micro_batch == 0]
    cells = max(fitting, default=1)
    return cells if cells % processes == 0 else processes


def owned(cells: int, process: int, processes: int) -> range:
    """Which of the ``cells`` of an update a process samples and trains: consecutive ones, equally many for each."""
    share = cells // processes
    return range(process * share, (process + 1) * share)
