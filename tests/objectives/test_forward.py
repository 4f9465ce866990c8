"""flowrl/objectives/forward.py: objectives on pictures that are noised again."""

import pytest
import torch

from flowrl.objectives import forward, penalties


def one_row(*values):
    return torch.tensor(values, dtype=torch.float64).view(1, 1, -1)


def nft(velocity, old, advantage, beta):
    """The loss of the golden row: x_t = [.5, -.2], t = .6, x0 = [.3, .1]."""
    x0, level = one_row(0.3, 0.1), torch.full((1, 1), 0.6).double()
    noise = (one_row(0.5, -0.2) - 0.4 * x0) / 0.6
    return forward.nft(velocity, old, x0, noise, level, torch.full((1, 1), advantage).double(), beta=beta)


@pytest.mark.parametrize(("beta", "policy", "total"), [(1.0, 0.5060150, 0.5060153), (0.1, 6.3894331, 6.3894334)])
def test_the_golden_loss_of_nft(beta, policy, total):
    """v = [.2, -.4], v_old = [.1, -.3], v_ref = [.15, -.35], advantage 2.5; the penalty weighs 1e-4."""
    velocity, old, ref = one_row(0.2, -0.4), one_row(0.1, -0.3), one_row(0.15, -0.35)
    loss = nft(velocity, old, 2.5, beta).item()
    assert loss == pytest.approx(policy, abs=5e-7)
    assert penalties.velocity_mse(velocity, ref).item() == pytest.approx(0.0025)
    assert loss + 1e-4 * 0.0025 == pytest.approx(total, abs=5e-7)


def test_nft_at_advantage_0_pulls_towards_the_old_policy():
    """Both mixtures count the same: no gradient at the old policy, downhill towards it from anywhere."""
    old = one_row(0.1, -0.3)
    for velocity in (old.clone(), one_row(0.6, 0.2), one_row(-0.4, -0.5)):
        velocity.requires_grad_()
        nft(velocity, old, 0.0, 1.0).sum().backward()
        towards = (velocity.grad * (old - velocity.detach())).sum().item()
        assert towards == pytest.approx(0, abs=1e-9) if torch.equal(velocity, old) else towards < 0


PEERS = torch.zeros(4, 1, dtype=torch.long)


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def test_the_golden_group_of_dgpo():
    """A = [1.5, .5, -.5, -1.5]: z = -.875, w = .29421497, loss -.00294215."""
    elbo, ref = -column(0.10, 0.12, 0.11, 0.13), -column(0.11, 0.12, 0.10, 0.12)
    elbo.requires_grad_()
    advantage = column(1.5, 0.5, -0.5, -1.5)
    loss = forward.dgpo(elbo, ref, advantage, PEERS, beta=100.0, clip=1.0)
    assert loss.mean().item() == pytest.approx(-0.00294215, abs=5e-9)
    loss.sum().backward()
    torch.testing.assert_close(elbo.grad, -0.29421497 * advantage, atol=1e-8, rtol=0)


def test_dgpo_lets_go_of_a_row_that_has_moved_far_enough():
    """exp(d_ref - d) beyond 1 + clip for a good row, below 1 - clip for a bad one; the other way nothing is clipped."""
    elbo = column(0.0, 0.0, 0.0, 0.0).requires_grad_()
    ref = column(-0.05, 0.05, 0.05, -0.05)  # good moved up, good moved down, bad moved down, bad moved up
    forward.dgpo(elbo, ref, column(1.0, 1.0, -1.0, -1.0), PEERS, beta=1.0, clip=0.01).sum().backward()
    assert (elbo.grad[:, 0] != 0).tolist() == [False, True, False, True]


def test_a_row_of_advantage_0_counts_among_the_peers_of_dgpo():
    """z = 100 * (2 * -.01 - 1 * .02) = -4 over four peers or two: sigmoid(-1) = .269, without the others .119."""
    elbo, ref = -column(0.10, 0.14, 0.11, 0.13), -column(0.11, 0.12, 0.10, 0.12)
    advantage = column(2.0, -1.0, 0.0, 0.0)
    loss = forward.dgpo(elbo, ref, advantage, PEERS, beta=100.0, clip=1.0)
    assert loss[:, 0].tolist() == pytest.approx([0.26894142 * 0.2, 0.26894142 * -0.14, 0, 0], abs=1e-8)
    two = forward.dgpo(elbo[:2], ref[:2], advantage[:2], PEERS[:2], beta=100.0, clip=1.0)
    assert two[:, 0].tolist() == pytest.approx([0.11920292 * 0.2, 0.11920292 * -0.14], abs=1e-8)


@pytest.mark.parametrize(("beta", "expected"), [(100.0, 0.12692801), (2000.0, 4.2483543e-18)])
def test_the_golden_pair_of_dpo(beta, expected):
    """Errors .10 and .20 against .12 and .18: margin 2 at beta 100, saturated at 2000; the others bear nothing."""
    elbo, ref = -column(0.10, 0.5, 0.20, 0.1), -column(0.12, 0.3, 0.18, 0.9)
    loss = forward.dpo(elbo, ref, column(1.0, 0.0, -1.0, 0.0), PEERS, beta=beta)[:, 0].tolist()
    assert loss == pytest.approx([expected, 0, expected, 0], rel=1e-6)


def test_crd_is_0_where_the_gain_is_the_centred_reward():
    """Whatever constant the gains share: it cancels within the group."""
    advantage = column(4.0, -1.0, 0.0, -3.0)
    gain = (advantage / 10 + 0.5) / 2.0 + 7.0
    old = column(0.3, 0.1, -0.2, 0.0)
    assert forward.crd(old + gain, old, advantage, PEERS, beta=2.0).abs().max() < 1e-12
    assert forward.crd(old + 2 * gain, old, advantage, PEERS, beta=2.0).sum() > 0.01


def test_crd_centres_over_a_group_or_over_the_batch():
    two, advantage = torch.tensor([[0], [0], [1], [1]]), column(1.0, -1.0, 1.0, -1.0)
    elbo, old = column(0.2, 0.0, 5.2, 5.0), column(0.0, 0.0, 0.0, 0.0)
    assert forward.crd(elbo, old, advantage, two, scope="group").abs().max() < 1e-12
    assert forward.crd(elbo, old, advantage, two, scope="batch").sum() > 1
    with pytest.raises(ValueError, match="accepted are batch, group"):
        forward.crd(elbo, old, advantage, two, scope="grup")


def test_matching_pulls_by_the_advantage():
    elbo = column(-0.4, -0.2).requires_grad_()
    forward.matching(elbo, column(1.0, 0.25)).sum().backward()
    assert elbo.grad[:, 0].tolist() == [-1.0, -0.25]


@pytest.mark.menu("flowrl.objectives.forward")
def test_an_objective_that_is_silent_says_so_and_leaves_no_gradient_at_advantage_0(public):
    """One that couples rows never is: a row that bears nothing itself may count among its peers."""
    declared = getattr(public, "silent", False)
    assert declared == ("Silent at advantage 0" in public.__doc__)
    if not declared:
        return
    assert not getattr(public, "couples", False)
    elbo = column(-0.1, -0.2, -0.3, -0.4).requires_grad_()
    public(elbo, column(1.0, 0.0, -1.0, 0.0)).sum().backward()
    assert not elbo.grad[[1, 3]].any()
