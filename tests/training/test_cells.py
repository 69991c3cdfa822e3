"""The fixed cut of a batch: whole micro-batches, equal shares, nothing twice; and sums of gradients."""

import pytest
import torch

from stepcredit import rollout
from stepcredit.errors import UserError
from stepcredit.training import cells
from stepcredit.training.gradients import summed


@pytest.mark.parametrize(
    ("prompts", "members", "micro_batch", "expected"),
    [
        (32, 16, 128, 4),  # compose-stepwise: 8 prompts are the fewest that fill a micro-batch
        (48, 24, 8, 8),  # more would fit, but 8 are enough
        (6, 4, 8, 3),  # of 1, 2, 3 and 6 cells, 2 and 6 would leave a micro-batch half full
        (2, 4, 8, 1),
        (3, 4, 5, 1),  # nothing fits: one cell
    ],
)
def test_the_number_of_cells_does_not_depend_on_the_processes_that_share_them(prompts, members, micro_batch, expected):
    for processes in [n for n in range(1, expected + 1) if expected % n == 0]:
        assert cells.per_update(prompts, members, micro_batch, processes) == expected
        shares = [list(cells.owned(expected, rank, processes)) for rank in range(processes)]
        assert [cell for share in shares for cell in share] == list(range(expected))
        assert len({len(share) for share in shares}) == 1


def test_more_processes_than_whole_micro_batches_get_a_cell_each():
    assert cells.per_update(32, 16, 128, 8) == 8
    assert cells.per_update(6, 4, 8, 2) == 2


def test_processes_that_cannot_share_the_prompts_are_refused_with_a_number_that_can():
    with pytest.raises(UserError, match=r"4 processes cannot share the 6 prompts .*--nproc_per_node 3\)"):
        cells.per_update(6, 4, 4, 4)


@pytest.mark.parametrize("options", [{}, {"shared_noise": True}, {"shared_noise": True, "branch": True}])
def test_groups_of_some_prompts_are_those_of_the_whole(options):
    trainable = torch.tensor([False, True, True, True, True])
    windows = [(0, 3), (1, 4), (2, 5), (0, 3)] if not options.get("branch") else [(1, 3)] * 4
    whole = rollout.groups(windows, 3, trainable, **{"shared_noise": False, **options})
    part = whole.of_prompts(1, 3)
    direct = rollout.groups(windows[1:3], 3, trainable, **{"shared_noise": False, **options})
    assert (part.count, part.size) == (direct.count, direct.size)
    assert torch.equal(part.prompt, direct.prompt + 1)
    assert torch.equal(part.member, direct.member)
    assert torch.equal(part.root, direct.root)
    assert torch.equal(part.layout.noisy, direct.layout.noisy)
    for i in range(6):
        assert torch.equal(part.layout.index[i], direct.layout.index[i])
        assert torch.equal(part.layout.first[i], direct.layout.first[i])


def test_gradients_of_many_passes_are_summed_beyond_the_precision_of_one():
    """2^24 + 1 - 2^24: 0 in float32, in any order but one."""
    weight, untouched = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.ones(3))
    with summed([weight, untouched]):
        for slope in (2.0**24, 1.0, -(2.0**24)):
            (weight * torch.tensor([slope, 1.0])).sum().backward()
            assert weight.grad is None
    assert weight.grad.tolist() == [1.0, 3.0]
    assert weight.grad.dtype == torch.float32
    assert untouched.grad is None
    (weight * 2.0).sum().backward()  # the sum has let go of the parameters
    assert weight.grad.tolist() == [3.0, 5.0]
