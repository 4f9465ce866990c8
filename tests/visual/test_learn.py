"""flowrl/visual/trainer.py and train_step.py: forward-process methods and several updates of one rollout."""

from dataclasses import replace

import pytest
import torch

from flowrl.objectives import forward, ratios
from flowrl.part import part
from flowrl.recipes.visual.forward import awm, dgpo, diffusion_dpo, diffusion_nft, v_grpo
from flowrl.recipes.visual.steps import flow_grpo, flow_grpo_fast
from flowrl.run.learner import Learner
from flowrl.train_step import train_step
from flowrl.updates import minibatches, once, reposition
from flowrl.visual import trainer
from flowrl.visual.evaluate import evaluate
from flowrl.visual.points import on_noise


def drawn_points(policy, recipe, loop, advantage=None):
    """A rollout of two prompts and its points, with made-up advantages."""
    tree, _ = trainer.roll_out(policy, recipe, loop.examples[:2], seed=0, iteration=0)
    drawn = trainer.draw_levels(recipe, tree, seed=0, iteration=0)
    gain = torch.linspace(-1, 1, len(tree.edge)) if advantage is None else advantage(len(tree.edge))
    weight = torch.full(tree.edge.shape, 1 / tree.edge.numel())
    table = gain[:, None].expand(tree.edge.shape)
    return tree, drawn, recipe.points(tree=tree, advantage=table, weight=weight, drawn=drawn)


def gradient_of(loss, policy):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, [p for _, p in policy.trainable()])])


def test_pictures_of_a_group_share_levels_and_noises_where_the_recipe_says_so(toy, loop):
    """Another group has others; without sharing every picture has its own."""
    for recipe, distinct in ((v_grpo(), 2 * 4), (awm(), 2 * 24 * 6)):
        tree, drawn, _ = drawn_points(toy(recipe), recipe, loop)
        assert len(drawn.noises) == distinct == len(drawn.noises.unique(dim=0))
        own = drawn.noise[tree.group == 0]
        assert bool((own == own[0]).all()) == recipe.noising.shared


def test_a_row_is_the_mixture_of_its_picture_and_its_noise(toy, loop):
    recipe = awm()
    tree, drawn, points = drawn_points(toy(recipe), recipe, loop)
    (rows,) = points.split(10**6)
    leaf, draw = rows["call"][:, 0] // 6, rows["call"][:, 0] % 6
    x0, noise, level = tree.leaves()[leaf], drawn.noises[drawn.noise[leaf, draw]], drawn.sigma[leaf, draw]
    torch.testing.assert_close(rows["latents"][:, 0], (1 - level[:, None]) * x0 + level[:, None] * noise)
    torch.testing.assert_close(rows["sigma"][:, 0], level)
    assert rows["weight"].sum().item() == pytest.approx(1) and len(points) == 48 * 6


@pytest.mark.parametrize("together", [False, True])
def test_the_weight_of_a_picture_is_shared_by_its_levels(toy, loop, together):
    recipe = v_grpo().but(points=part(on_noise, together=together))
    _, _, points = drawn_points(toy(recipe), recipe, loop)
    assert points.columns["sigma"].shape == ((48, 4) if together else (192, 1))
    torch.testing.assert_close(points.columns["weight"], torch.full_like(points.columns["weight"], 1 / 192))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_v_grpo_at_the_old_policy_has_the_gradient_of_minus_advantage_times_elbo(toy, loop, sign):
    """And the other sign turns it."""
    recipe = v_grpo().check()
    policy = toy(recipe, torch.float64)
    tree, _, points = drawn_points(policy, recipe, loop, lambda n: sign * torch.linspace(-1, 1, n).sin())
    (rows,) = points.split(10**6)
    q = evaluate(policy, rows, recipe.needs, recipe, tree.sigmas)
    q["ratio"] = recipe.ratio(**q)
    assert torch.equal(q["ratio"], torch.ones_like(q["ratio"]))
    ours = gradient_of((q["weight"] * recipe.objective(**q)).sum(), policy)
    q = evaluate(policy, rows, {"elbo"}, recipe, tree.sigmas)
    plain = gradient_of((q["weight"] * -rows["advantage"] * q["elbo"]).sum(), policy)
    assert (ours - plain).norm() <= 1e-7 * plain.norm() and plain.norm() > 0


@pytest.mark.parametrize("make", [dgpo, diffusion_dpo])
def test_two_passes_have_the_gradient_of_one(toy, loop, make):
    """D17: in micro-batches of 7 rows, groups cut anywhere, against autograd over the whole table at once."""
    recipe = make().but(penalties=())
    policy = toy(recipe, torch.float64)
    for _, parameter in policy.trainable():
        parameter.data.mul_(1.01)  # away from the reference
    tree, _, points = drawn_points(policy, recipe, loop, lambda n: torch.arange(n) % 5 - 2.0)
    (rows,) = points.split(10**6)
    q = evaluate(policy, rows, recipe.needs, recipe, tree.sigmas)
    loss = (q["weight"] * recipe.objective(**q)).sum()
    whole, found = gradient_of(loss, policy), []

    def look(rows, names, gradient=True):
        return evaluate(policy, rows, names, recipe, tree.sigmas, gradient=gradient)

    learner = loop.learner(policy, 7, reduce=lambda gradients: found.extend(g.flatten().clone() for g in gradients))
    log = train_step(recipe, points, look, learner)
    assert (torch.cat(found) - whole).norm() <= 1e-10 * whole.norm() and whole.norm() > 0
    assert log[f"objective/{recipe.objective.name}"] == pytest.approx(loss.item(), rel=1e-10)


def test_a_second_epoch_sees_the_updated_policy(toy, loop):
    """C19: the ratio is exactly 1 in the first of two updates and not in the second; two optimizer steps."""
    seen = []

    def watched(log_prob, log_prob_old):
        """Keeps what it returns."""
        seen.append(ratios.per_decision(log_prob, log_prob_old).detach())
        return ratios.per_decision(log_prob, log_prob_old)

    recipe = flow_grpo_fast().but(ratio=part(watched), update=part(minibatches, count=1, epochs=2))
    policy = toy(recipe)
    log = loop.update(policy, recipe, loop.learner(policy, 10_000, rate=1e-2))
    assert len(seen) == 2 and torch.equal(seen[0], torch.ones_like(seen[0]))
    assert (seen[1] - 1).abs().max() > 1e-3
    assert log["optimizer_steps"] == 2 and log["on_policy"] is False and log["ratio/clipped"] > 0.2


def test_minibatches_train_every_decision_once(toy, loop):
    """Each sums to weight 1 of its own; the calls add up to those of one update."""
    recipe = flow_grpo().but(update=part(minibatches, count=3))
    policy = toy(recipe)
    log = loop.update(policy, recipe, loop.learner(policy))
    assert log["optimizer_steps"] == 3 and log["train_calls"] == 64 * 9 and policy.backwards == 64 * 9


def test_the_old_elbo_is_recorded_only_where_several_updates_need_it(toy, loop):
    """awm: 24 x 6 rows per prompt; with two updates the policy that drew is asked once more, before the first."""
    forwards = []
    for update in (part(once), part(minibatches, count=2)):
        recipe = awm().but(update=update, penalties=(), snapshots={})
        policy = toy(recipe)
        loop.update(policy, recipe, loop.learner(policy), examples=loop.examples[:1])
        forwards.append(policy.forwards)
    assert forwards == [24 * 14 + 144, 24 * 14 + 144 + 144]


def test_the_golden_numbers_of_reposition(toy, loop):
    """SFPO on .5 (theta - 1)^2, plain gradient steps of .1: .2710 after three, back to .2168, .2951 after the last."""
    theta = torch.nn.Parameter(torch.zeros(()))
    learner = Learner([("theta", theta)], lambda iteration: 0.1, micro_batch=1, max_grad_norm=1e9)
    learner.optimizer = torch.optim.SGD([theta], lr=0.1)
    learner.begin(0, restorable=True)
    at = []
    for planned in reposition(torch.zeros(1, dtype=torch.long), passes=3, kept=0.8):
        if planned.kept < 1:
            learner.go_back(planned.kept)
            at.append(theta.item())
        learner.backward(0.5 * (theta - 1) ** 2)
        learner.step()
        at.append(theta.item())
    assert at[2:] == pytest.approx([0.2710, 0.2168, 0.29512], abs=1e-5)


def test_nft_is_drawn_by_its_old_policy(toy, loop):
    """Whatever the current weights are, the pictures are those of the snapshot."""
    recipe = diffusion_nft()
    reference = toy(recipe)
    moved = toy(recipe)
    for _, parameter in moved.trainable():
        parameter.data.mul_(1.1)
    seen = []
    for policy in (reference, moved):

        def score(images, examples, group):
            seen.append(images)
            return loop.score(images, examples, group)

        loop.update(policy, recipe, loop.learner(policy), score=score)
    assert torch.equal(*seen)


def test_dgpo_is_drawn_by_its_reference_only_after_200_updates():
    plan = dgpo().rollout
    assert [plan.drawn_by(i) for i in (0, 199, 200)] == ["current", "current", "ref"]


def test_a_guided_reference_sees_its_own_guidance(toy, loop):
    """D15: the current policy keeps the rollout's."""
    recipe, seen = diffusion_nft(), []
    recipe = recipe.but(snapshots=recipe.snapshots | {"ref": replace(recipe.snapshots["ref"], guidance=4.5)}).check()
    policy = toy(recipe)
    velocity = policy.velocity
    policy.velocity = lambda *rows: seen.append(policy.guidance) or velocity(*rows)
    loop.update(policy, recipe, loop.learner(policy, 10_000))
    assert seen[-3:] == [1.0, 4.5, 1.0] and policy.guidance == 1.0  # old, ref, current


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"noising": None}, "noising is missing: points = on_noise"),
        ({"update": part(minibatches, count=2)}, "set update.whole_groups = true"),
        ({"objective": part(forward.nft)}, r"noising\.elbo = weighted has no effect: no part asks for elbo"),
        ({"rollout": {"by": "olf"}}, "rollout.by = 'olf': no such snapshot"),
        ({"rollout": {"noisy": flow_grpo().rollout.noisy}}, "rollout.kernel is missing"),
        ({"rollout": {"kernel": flow_grpo().rollout.kernel}}, "rollout.kernel has no effect: no step draws noise"),
        ({"noising": replace(dgpo().noising, shared=False)}, "set noising.shared = true"),
        ({"noising": replace(dgpo().noising, elbo=None)}, "asks for 'elbo': set noising.elbo"),
    ],
)
def test_a_forward_recipe_that_does_not_fit_together_is_one_line(changes, said):
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        dgpo().but(**changes).check()
