"""flowrl/objectives/weights.py: how much each decision counts."""

import pytest
import torch

from flowrl.objectives import weights
from samplers import tree_layout


def test_every_decision_counts_the_same_under_token_mean():
    mask = torch.tensor([[1.0, 1, 0], [1, 0, 0]])
    assert torch.equal(weights.token_mean(mask), mask / 3)


def test_every_distinct_transition_counts_the_same_under_edge_mean():
    """branch_grpo: 218 edges, of which the last step's 16 are not trained."""
    edge = tree_layout(1, 20, range(19), {0: 2, 3: 2, 6: 2, 9: 2}).edge
    mask = torch.ones(edge.shape)
    mask[:, -1] = 0
    weight = weights.edge_mean(mask, edge)
    per_edge = torch.zeros(218).index_add_(0, edge.flatten(), weight.flatten())
    torch.testing.assert_close(per_edge[:202], torch.full((202,), 1 / 202))
    assert not per_edge[202:].any()


def test_an_edge_counts_once_however_few_of_its_leaves_train_it():
    """Two leaves share edge 0, one of them leaves it out: it still counts like edge 1."""
    weight = weights.edge_mean(torch.tensor([[1.0], [0], [1]]), torch.tensor([[0], [0], [1]]))
    assert weight.flatten().tolist() == [0.5, 0, 0.5]


def test_edge_mean_is_token_mean_where_nothing_is_shared():
    mask, edge = torch.tensor([[1.0, 1, 0], [1, 0, 1]]), torch.arange(6).reshape(2, 3)
    torch.testing.assert_close(weights.edge_mean(mask, edge), weights.token_mean(mask))


def test_nothing_trained_weighs_nothing():
    mask, edge = torch.zeros(2, 3), torch.arange(6).reshape(2, 3)
    assert not weights.token_mean(mask).any() and not weights.edge_mean(mask, edge).any()


def test_every_chunk_counts_the_same_however_long_it_is():
    """Chunks 2, 3, 4, 7, of which a rollout trains two."""
    chunk = torch.tensor([0] * 2 + [1] * 3 + [2] * 4 + [3] * 7 + [-1])
    mask = torch.stack([((chunk == 0) | (chunk == 3)).float(), ((chunk == 1) | (chunk == 2)).float()])
    weight = weights.chunk_mean(mask, chunk)
    for row, numbers in ((0, (0, 3)), (1, (1, 2))):
        for number in numbers:
            assert weight[row, chunk == number].sum().item() == pytest.approx(1 / 4)
            assert len(weight[row, chunk == number].unique()) == 1


def test_chunks_of_one_step_are_token_mean():
    mask = torch.tensor([[1.0, 1, 0], [1, 0, 1]])
    torch.testing.assert_close(weights.chunk_mean(mask, torch.arange(3)), weights.token_mean(mask))


def test_a_trained_decision_of_no_chunk_is_refused():
    with pytest.raises(ValueError, match="belongs to no chunk is trained"):
        weights.chunk_mean(torch.ones(2, 3), torch.tensor([0, 0, -1]))
