"""flowrl/objectives/chunks.py: consecutive steps trained as one."""

import pytest
import torch

from flowrl.objectives import chunks


def sizes_of(chunk):
    assert chunk[-1] == -1 and bool((chunk[:-1].diff() >= 0).all())
    return chunk[:-1].unique(return_counts=True)[1].tolist()


def test_the_published_chunks_are_two_three_four_and_seven():
    assert chunks.fixed(17).tolist() == [0] * 2 + [1] * 3 + [2] * 4 + [3] * 7 + [-1]
    assert chunks.fixed(3, sizes=[1, 1]).tolist() == [0, 1, -1]


@pytest.mark.parametrize(("steps", "sizes"), [(16, (2, 3, 4, 7)), (17, (2, 3, 4)), (4, (3, 0)), (3, ())])
def test_chunks_that_do_not_fill_the_noisy_steps_are_refused(steps, sizes):
    with pytest.raises(ValueError, match=f"{steps} steps have {steps - 1} that draw noise"):
        chunks.fixed(steps, sizes=sizes)


def test_a_curve_is_cut_where_it_turns():
    """Falls for four steps, rises for three, falls again; the last step is none of it."""
    curve = torch.tensor([9.0, 7, 5, 3, 5, 7, 9, 6, 3, 99])
    change = torch.stack([curve * 0.5, curve * 1.5])
    assert sizes_of(chunks.by_change(change)) == [3, 3, 3]


def test_a_long_piece_is_cut_again_where_its_slope_turns():
    """Sigmoid: its second differences change sign in the middle."""
    curve = torch.linspace(-4, 4, 12).sigmoid()
    change = torch.cat([curve, curve[-1:]])[None].double()
    assert sizes_of(chunks.by_change(change, longest=12)) == [12]
    first, second = sizes_of(chunks.by_change(change, longest=7))
    assert abs(first - second) <= 2


@pytest.mark.parametrize("longest", [1, 2, 4, 7])
def test_a_curve_that_never_turns_is_cut_in_the_middle_until_it_is_short_enough(longest):
    sizes = sizes_of(chunks.by_change(torch.arange(17.0)[None], longest=longest))
    assert sum(sizes) == 16 and max(sizes) <= longest and sizes == sorted(sizes) == [min(16, sizes[0])] * len(sizes)


def test_the_relative_change_is_that_of_the_l1_norms():
    latents, moved = torch.tensor([[[1.0, -1.0, 2.0]]]), torch.tensor([[[1.5, -1.0, 1.5]]])
    assert chunks.relative_change(latents, moved).item() == pytest.approx(1 / 4)
    assert chunks.relative_change(latents, latents).item() == 0
