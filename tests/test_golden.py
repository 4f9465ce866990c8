"""Numbers printed by reference implementations (tests/golden) and worked by hand in fp64.  Loosened by nobody."""

import json
import math
from pathlib import Path

import pytest
import torch

from flowrl.advantages import many_rewards, outcome, steps, tree
from flowrl.objectives import clipped, penalties
from flowrl.part import part
from samplers import density, kernels, schedules, solvers

GOLDEN = json.loads((Path(__file__).parent / "golden" / "reference_numbers.json").read_text(encoding="utf-8"))
SIGMAS = torch.tensor(GOLDEN["sigmas"])
CLOSE = {"atol": 3e-6, "rtol": 0}
KERNELS = {"flow_sde": kernels.flow_sde, "dance_sde": kernels.dance_sde, "cps": kernels.cps, "ode": kernels.ode}


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("row", GOLDEN["transitions"], ids=lambda t: f"{t['rule']}-{t['step']}-{t['eta']}")
def test_a_transition_has_the_mean_std_and_log_prob_of_the_reference(row):
    latents, velocity, next_latents, mean = (
        torch.tensor(row[name]).reshape(2, -1) for name in ("latents", "velocity", "next_latents", "mean")
    )
    kernel = kernels.bind(part(KERNELS[row["rule"]], eta=row["eta"]).bound, sigmas=SIGMAS)
    sigma, sigma_next = torch.tensor(row["sigma"]), torch.tensor(row["sigma_next"])
    assert (sigma, sigma_next) == (SIGMAS[row["step"]], SIGMAS[row["step"] + 1])
    ours, std = kernel(latents, velocity, sigma, sigma_next)
    torch.testing.assert_close(ours, mean, **CLOSE)
    torch.testing.assert_close(std, torch.tensor(row["std"]), **CLOSE)
    if row["rule"] == "cps":
        log_prob = density.squared_error(next_latents, ours)
    else:
        log_prob = density.gaussian(next_latents, ours, std)
    torch.testing.assert_close(log_prob, torch.tensor(row["log_prob"]), **CLOSE)


@pytest.mark.parametrize("row", GOLDEN["ddim"], ids=lambda t: f"alpha-{t['alpha']:.4f}")
def test_a_ddim_step_is_that_of_the_reference_through_a_change_of_variables(row):
    """Latents divided by sqrt(a) + sqrt(1 - a); a density of n dims then divides by it, too."""
    a, b = (torch.tensor(row[name]) for name in ("alpha", "alpha_next"))
    scale, scale_next = (x.sqrt() + (1 - x).sqrt() for x in (a, b))
    sigma, sigma_next = (1 - a).sqrt() / scale, (1 - b).sqrt() / scale_next
    latents, noise, next_latents = (
        torch.tensor(row[name]).reshape(2, -1) for name in ("latents", "noise", "next_latents")
    )
    x0 = (latents - (1 - a).sqrt() * noise) / a.sqrt()
    ours, std = kernels.ddim(latents / scale, noise - x0, sigma, sigma_next, eta=row["eta"])
    # Recovering x0 divides by sqrt(alpha), at least .118: fp32 rounding of the latents grows up to 8.4 times.
    torch.testing.assert_close(ours * scale_next, torch.tensor(row["mean"]).reshape(2, -1), rtol=2e-6, atol=3e-6)
    torch.testing.assert_close(std * scale_next, torch.tensor(row["std"]), **CLOSE)
    log_prob = density.gaussian(next_latents / scale_next, ours, std) - scale_next.log()
    torch.testing.assert_close(log_prob, torch.tensor(row["log_prob"]), **CLOSE)


def test_a_ddim_step_gives_the_hand_worked_numbers():
    """a = .5 -> .6, x = .3, predicted noise .2, eta 1."""
    scale, scale_next = (math.sqrt(a) + math.sqrt(1 - a) for a in (0.5, 0.6))
    x0 = (0.3 - math.sqrt(0.5) * 0.2) / math.sqrt(0.5)
    assert x0 == pytest.approx(0.22426407, abs=6e-9)
    at = (numbers(math.sqrt(0.5) / scale)[0], numbers(math.sqrt(0.4) / scale_next)[0])
    mean, std = kernels.ddim(numbers(0.3)[None] / scale, numbers(0.2 - x0)[None], *at)
    assert (mean * scale_next).item() == pytest.approx(0.27699376, abs=6e-9)
    assert (std * scale_next).item() == pytest.approx(0.36514837, abs=6e-9)
    log_prob = density.gaussian(numbers(0.42)[None] / scale_next, mean, std) - math.log(scale_next)
    assert log_prob.item() == pytest.approx(0.01182253, abs=6e-9)


def golden_edges(parents):
    """The table [leaves, depths] of a tree given as parents[depth][node], with an id of its own for every edge."""
    node, columns, first = torch.arange(len(parents[-1])), [], 0
    for level in reversed(parents):
        columns.append(first + node)
        node, first = torch.tensor(level)[node], first + len(level)
    return torch.stack(columns[::-1], dim=1)


def test_the_mean_fusion_tree_has_the_rewards_and_advantages_of_the_reference():
    golden = GOLDEN["tree"]
    edge, leaves = golden_edges(golden["parents"]), torch.tensor(golden["leaf_reward"])
    value = tree.tree_value(leaves, edge)
    advantage = tree.tree_depthwise(leaves, edge, torch.zeros(len(leaves), dtype=torch.long))
    for depth in range(edge.shape[1]):
        node, first = edge[:, depth] - edge[:, depth].min(), golden["node_reward"][depth + 1]
        torch.testing.assert_close(value[:, depth], torch.tensor(first)[node], **CLOSE)
        torch.testing.assert_close(
            advantage[:, depth], torch.tensor(golden["node_advantage"][depth + 1])[node], **CLOSE
        )
    torch.testing.assert_close(leaves.mean(), torch.tensor(golden["node_reward"][0][0]), **CLOSE)


def test_the_weighted_tree_has_the_rewards_and_advantages_of_the_reference():
    """Children weighed by the softmax of their edges' log-probs, level by level."""
    golden = GOLDEN["weighted_tree"]
    edge, leaves = golden_edges(golden["parents"]), torch.tensor(golden["leaf_reward"])
    levels = list(zip(edge.T, golden["edge_log_prob"], strict=True))
    log_prob = torch.stack([torch.tensor(each)[ids - ids.min()] for ids, each in levels], dim=1)
    above = torch.cat([edge.new_full((len(edge), 1), int(edge.max()) + 1), edge], dim=1)  # an edge to the root
    nothing = log_prob.new_zeros(len(edge), 1)
    value = tree.edge_softmax(leaves, above, torch.cat([nothing, log_prob], dim=1))
    advantage = tree.tree_depthwise_by_edge(leaves, edge, torch.zeros(len(leaves), dtype=torch.long), log_prob)
    torch.testing.assert_close(value[:, 0], torch.tensor(golden["node_reward"][0]).expand(len(leaves)), **CLOSE)
    for depth, (ids, _) in enumerate(levels):
        node = ids - ids.min()
        torch.testing.assert_close(value[:, depth + 1], torch.tensor(golden["node_reward"][depth + 1])[node], **CLOSE)
        expected = torch.tensor(golden["node_advantage"][depth + 1])[node]
        torch.testing.assert_close(advantage[:, depth], expected, **CLOSE)


@pytest.mark.parametrize("row", GOLDEN["group_advantages"], ids=lambda g: f"global_std={g['global_std']}")
def test_group_advantages_are_those_of_the_reference(row):
    group = torch.tensor([sorted(set(row["prompts"])).index(p) for p in row["prompts"]])
    scope = "batch" if row["global_std"] else "group"
    ours = outcome.grpo(
        torch.tensor(row["rewards"])[:, None], torch.ones(1), group, scope=scope, ddof=0, eps=row["eps"]
    )
    torch.testing.assert_close(ours, torch.tensor(row["advantages"]), **CLOSE)


def test_the_published_schedule_is_the_linear_one_shifted_by_3():
    """The single shift, T = 10.  The golden schedule is the pipeline's own, shifted twice: not the same grid."""
    single = [1, 0.964286, 0.923077, 0.875, 0.818182, 0.75, 0.666667, 0.5625, 0.428571, 0.25, 0]
    torch.testing.assert_close(schedules.shifted(schedules.linear(10), shift=3.0), torch.tensor(single), **CLOSE)
    assert SIGMAS[9] < 0.01


X, V, NEXT, GUARD = numbers(0.3)[None], numbers(-0.5)[None], numbers(0.42)[None], numbers(1, 0.96, 0)
TABLE = [  # kernel, sigma, sigma_next, eta, mean, std, log_prob (cps: minus the squared distance; none at std 0)
    ("flow_sde", 0.8, 0.7, 0.7, 0.32550000, 0.44271887, -0.12689947),
    ("flow_sde", 0.8, 0.7, 0.3, 0.34550000, 0.18973666, 0.66609283),
    ("flow_sde", 1.0, 0.96, 0.7, 0.24650000, 0.70000000, -0.59298017),
    ("flow_sde", 0.5, 0.25, 0.7, 0.41887500, 0.35000000, 0.13087843),
    ("flow_sde", 0.1, 0.0, 0.7, 0.35408333, 0.07378648, 1.28861000),
    ("dance_sde", 0.8, 0.7, 0.3, 0.34887500, 0.09486833, 1.15528428),
    ("dance_sde", 1.0, 0.96, 0.3, 0.31946000, 0.06000000, 0.49054279),
    ("cps", 0.8, 0.7, 0.8, 0.25326238, 0.66573956, -0.02780143),
    ("cps", 0.5, 0.25, 0.8, 0.41636271, 0.23776413, -0.00001323),
    ("cps", 0.1, 0.0, 0.8, 0.35000000, 0.0, -0.00490000),
    ("ode", 0.8, 0.7, None, 0.35, 0.0, None),
]


@pytest.mark.parametrize("name, sigma, sigma_next, eta, mean, std, log_prob", TABLE)
def test_a_kernel_gives_the_hand_worked_numbers(name, sigma, sigma_next, eta, mean, std, log_prob):
    sigma, sigma_next = torch.tensor(sigma, dtype=torch.float64), torch.tensor(sigma_next, dtype=torch.float64)
    filled = part(KERNELS[name], **({} if eta is None else {"eta": eta}))
    ours = kernels.bind(filled.bound, sigmas=GUARD)(X, V, sigma, sigma_next)
    close = {"atol": 6e-9, "rtol": 0}
    torch.testing.assert_close(torch.stack([ours[0].squeeze(), ours[1]]), numbers(mean, std), **close)
    if name == "cps":
        torch.testing.assert_close(density.squared_error(NEXT, ours[0]), numbers(log_prob), **close)
    elif log_prob is not None:
        torch.testing.assert_close(density.gaussian(NEXT, *ours), numbers(log_prob), **close)


def test_flow_sde_at_half_noise_is_dance_sde():
    """sigma / (1 - sigma) is 1 there: two implementations check each other."""
    at = (X, V, torch.tensor(0.5, dtype=torch.float64), torch.tensor(0.25, dtype=torch.float64))
    flow, dance = kernels.flow_sde(*at, GUARD, eta=0.3), kernels.dance_sde(*at, eta=0.3)
    torch.testing.assert_close(flow, dance, atol=1e-15, rtol=0)


def test_the_first_flow_sde_step_does_not_depend_on_the_grid():
    """mean = (1 - eta^2 / 2) x - (1 - sigmas[1]) v and std = eta."""
    for second in (0.96, 0.9, 0.5):
        one, second = torch.ones((), dtype=torch.float64), torch.tensor(second, dtype=torch.float64)
        mean, std = kernels.flow_sde(X, V, one, second, torch.stack([one, second, one * 0]), eta=0.7)
        torch.testing.assert_close(mean, (1 - 0.245) * X - (1 - second) * V)
        torch.testing.assert_close(std, one * 0.7)


def test_dpm_solver_gives_the_hand_worked_numbers():
    """x = .3, sigma .9, .8 -> .6, clean estimates .62 and .70."""
    x, before, now = numbers(0.3)[None], numbers(0.62)[None], numbers(0.70)[None]
    levels = numbers(0.9, 0.8, 0.6)
    assert solvers.first_order(x, now, levels[1], levels[2]).item() == pytest.approx(0.4, abs=1e-9)
    assert solvers.second_order(x, now, before, *levels).item() == pytest.approx(0.41209511, abs=5e-9)


TWO_GROUPS = numbers(0.2, 0.4, 0.6, 0.8, 0.9, 0.9, 1.0, 0.8)[:, None]
GROUP = torch.arange(2).repeat_interleave(4)
ONE = numbers(1)


@pytest.mark.parametrize(
    "rule, expected",
    [
        ({"scope": "group", "ddof": 0}, (-1.341041, -0.447014, 0.447014, 1.341041, 0, 0, 1.412216, -1.412216)),
        ({"scope": "batch", "ddof": 0}, (-1.154256, -0.384752, 0.384752, 1.154256, 0, 0, 0.384752, -0.384752)),
        ({"ddof": 1, "eps": 1e-8}, (-1.161895, -0.387298, 0.387298, 1.161895, 0, 0, 1.224745, -1.224745)),
    ],
    ids=str,
)
def test_advantages_of_two_groups_by_hand_under_three_rules(rule, expected):
    ours = outcome.grpo(TWO_GROUPS, ONE, GROUP, **rule)
    torch.testing.assert_close(ours, numbers(*expected), atol=6e-7, rtol=0)


def test_advantages_divided_by_the_group_the_batch_or_nothing():
    """C09: rewards [[0, 1], [0, 10]]."""
    reward, group = numbers(0, 1, 0, 10)[:, None], torch.tensor([0, 0, 1, 1])
    batch = torch.tensor([0.0, 1.0, 0.0, 10.0]).std(unbiased=False).item()
    by_scope = {"group": (-1, 1, -1, 1), "none": (-0.5, 0.5, -5, 5)}
    by_scope["batch"] = tuple(x / batch for x in by_scope["none"])
    for scope, expected in by_scope.items():
        ours = outcome.grpo(reward, ONE, group, scope=scope, eps=0.0)
        torch.testing.assert_close(ours, numbers(*expected), atol=1e-6, rtol=0)


def test_two_rewards_are_scaled_summed_and_whitened_as_by_hand():
    """Weights 1 and .5; the sum first, whitening over the batch after it."""
    first = numbers(0.1, 0.3, 0.5, 0.7, 0.2, 0.2, 0.4, 0.4)
    reward, weight = torch.stack([first, numbers(10, 30, 20, 40, 5, 15, 15, 25)], dim=1), numbers(1, 0.5)
    total = numbers(-2.012461, -0.223607, 0.223607, 2.012461, -1.707107, -1, 1, 1.707107)
    whitened = numbers(-1.421762, -0.157974, 0.157974, 1.421762, -1.206036, -0.706479, 0.706479, 1.206036)
    summed = sum(w * outcome.grpo(r[:, None], ONE, GROUP, eps=1e-6) for w, r in zip(weight, reward.T, strict=True))
    torch.testing.assert_close(summed, total, atol=1.5e-5, rtol=0)
    torch.testing.assert_close(many_rewards.gdpo(reward, weight, GROUP, eps=1e-12), whitened, atol=1e-6, rtol=0)
    torch.testing.assert_close(many_rewards.gdpo(reward, weight, GROUP), whitened, atol=5e-6, rtol=0)


def test_the_clipped_surrogate_gives_the_hand_worked_losses():
    """Advantages 2, -1, 7 (clamped to 5), -.5; three of four are clipped."""
    advantage, shift = numbers(2, -1, 7, -0.5).clamp(-5, 5)[None], numbers(5e-5, -3e-4, 2e-4, 4e-4)[None]
    loss = clipped.ppo_clip(shift.exp(), advantage, clip_low=1e-4, clip_high=1e-4)
    expected = numbers(-2.000100, 0.999900, -5.000500, 0.500200)
    torch.testing.assert_close(loss[0], expected, atol=6e-7, rtol=0)
    assert loss.mean().item() == pytest.approx(-1.375125, abs=1e-6)


def test_the_group_rule_clamps_an_advantage_at_5():
    """Thirty-six rollouts of which one is good: (1 - 1/36) / std = 5.92."""
    reward = torch.zeros(36, 1, dtype=torch.float64)
    reward[0] = 1
    everyone = torch.zeros(36, dtype=torch.long)
    assert outcome.grpo(reward, ONE, everyone).max() == 5
    assert outcome.grpo(reward, ONE, everyone, eps=0.0, clamp=99.0).max().item() == pytest.approx(math.sqrt(35))


def test_the_penalties_give_the_hand_worked_numbers():
    """s = 1.4 and dt = -.1, so std = 1.4 sqrt(.1)."""
    mean, other = numbers(0.1, 0.2, 0.3, 0.4)[None, None], numbers(0.1, 0.25, 0.2, 0.4)[None, None]
    std, sigma, sigma_next = numbers(1.4 * math.sqrt(0.1))[None], numbers(0.6)[None], numbers(0.5)[None]
    assert penalties.mean_mse(mean, other).item() == pytest.approx(0.003125)
    assert penalties.velocity_mse(mean, other).item() == pytest.approx(0.003125)
    over_s2 = penalties.kl_mean_over_s2(mean, other, std, sigma, sigma_next).item()
    assert over_s2 == pytest.approx(0.000797194, abs=6e-10)
    assert penalties.kl_gaussian(mean, other, std).item() == pytest.approx(0.00797194, abs=6e-9)


def test_a_tree_of_two_splits_gives_the_hand_worked_advantages():
    """Leaves .1, .3, .5, .9: the first depth is worth .2 and .7."""
    edge, leaves = torch.tensor([[0, 2], [0, 3], [1, 4], [1, 5]]), numbers(0.1, 0.3, 0.5, 0.9)
    torch.testing.assert_close(tree.tree_value(leaves, edge)[:, 0], numbers(0.2, 0.2, 0.7, 0.7))
    ours = tree.tree_depthwise(leaves, edge, torch.zeros(4, dtype=torch.long))
    first = math.sqrt(0.5)
    expected = torch.stack([numbers(-first, -first, first, first), numbers(-1.024695, -0.439155, 0.146385, 1.317465)])
    torch.testing.assert_close(ours, expected.T, atol=6e-7, rtol=0)


def test_a_tree_of_two_splits_weighed_by_log_probs_has_the_hand_worked_values():
    """Edge log-probs -1, -1.2 | -.9, -1.5; below the first depth there is one edge per leaf, so both fusions agree."""
    edge, leaves = torch.tensor([[0, 2], [0, 3], [1, 4], [1, 5]]), numbers(0.1, 0.3, 0.5, 0.9)
    log_prob = torch.stack([numbers(0, 0, 0, 0), numbers(-1, -1.2, -0.9, -1.5)], dim=1)
    for fusion in (tree.edge_softmax, tree.path_softmax):
        value = fusion(leaves, edge, log_prob)[:, 0]
        torch.testing.assert_close(value, numbers(0.190033, 0.190033, 0.641737, 0.641737), atol=6e-7, rtol=0)


GRID = schedules.shifted(torch.linspace(1, 0, 11, dtype=torch.float64), shift=3.0)


def on_the_grid(multiplier, **quantities):
    """The multipliers of ten steps, all of them trainable: one more is put behind them."""
    edge = torch.arange(11)[None]
    extra = {name: torch.cat([x, x[-1:]]) for name, x in quantities.items()}
    return part(multiplier)(advantage=numbers(1), edge=edge, **extra)[0, :10]


def test_the_noise_aware_weights_are_the_published_ones():
    """Shift 3, T = 10; the strength of the noise drops out."""
    expected = numbers(1.66, 1.75, 1.26, 1.05, 0.92, 0.83, 0.76, 0.69, 0.61, 0.48)
    for eta in (0.3, 0.7):
        stds, _ = kernels.scales(part(kernels.flow_sde, eta=eta).bound, GRID)
        weight = on_the_grid(steps.noise_aware, stds=stds)
        torch.testing.assert_close(weight, expected, atol=5.1e-3, rtol=0)
        assert weight.mean().item() == pytest.approx(1)


def test_the_equalising_weights_are_the_published_ones():
    """SAGE, eta .5: J and median(J) / J."""
    stds, slopes = kernels.scales(kernels.sage, GRID)
    size = numbers(0.046, 0.105, 0.159, 0.222, 0.300, 0.406, 0.560, 0.805, 1.271, 2.721)
    torch.testing.assert_close(slopes.abs() / stds, size, atol=5.1e-4, rtol=0)
    weight = numbers(7.73, 3.38, 2.22, 1.59, 1.18, 0.87, 0.63, 0.44, 0.28, 0.13)
    torch.testing.assert_close(on_the_grid(steps.equalised, stds=stds, slopes=slopes), weight, atol=5.1e-3, rtol=0)
