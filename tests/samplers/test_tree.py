"""samplers/tree.py: branching rollouts as integer tables."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from flowrl.part import part
from flowrl.randomness import generator
from samplers import density, kernels, noise, rollout, schedules, solvers, tree_layout

BINARY = {0: 2, 3: 2, 6: 2, 9: 2}
DANCE = part(kernels.dance_sde, eta=0.3).bound


class Spy:
    """A velocity that depends on everything it is given, and keeps what it saw."""

    def __init__(self):
        self.calls = []

    def __call__(self, latents, sigma, prompt):
        self.calls.append((latents, sigma, prompt))
        return latents * 0.3 + sigma[:, None] + 0.1 * prompt[:, None]

    @property
    def rows(self):
        return sum(len(latents) for latents, _, _ in self.calls)


def roll(velocity=None, roots=2, steps=5, noisy=None, forks=None, kernel=DANCE, prompt=None, seed=0, dims=(3,), **more):
    latents = torch.cat([torch.randn(1, *dims, generator=generator(seed, "initial", r)) for r in range(roots)])
    prompt = torch.arange(roots) if prompt is None else prompt
    noisy = tuple(range(steps - 1)) if noisy is None else noisy
    named = [generator(seed, "step", r) for r in range(roots)]
    sigmas = schedules.linear(steps)
    return rollout(
        velocity or Spy(), latents, prompt, sigmas, kernel, noisy=noisy, forks=forks, generators=named, **more
    )


def test_branch_grpo_has_218_edges_219_states_and_203_calls():
    """T = 20, two children at steps 0, 3, 6 and 9: 16 leaves."""
    spy = Spy()
    tree = roll(spy, roots=1, steps=20, forks=BINARY)
    assert tree.edge.shape == (16, 20) and len(tree.source) == 218 and len(tree.states) == 219 and spy.rows == 203
    counts = [len(column.unique()) for column in tree.edge.T]
    assert counts == [2, 2, 2, 4, 4, 4, 8, 8, 8, *[16] * 11]


def test_a_tree_stores_a_shared_prefix_once():
    tree = roll(forks={0: 2, 2: 3})
    assert len(tree.leaves()) == 12 and len(tree.source) == 2 * (2 + 2 + 6 + 6 + 6)
    for leaf in tree.edge:
        for before, after in pairwise(leaf):
            assert tree.target[before] == tree.source[after] >= 0
    assert bool((tree.target[tree.edge[:, -1]] == tree.final).all())
    assert len(tree.states.unique(dim=0)) == len(tree.states)


def test_the_network_sees_each_state_once_whatever_forks_from_it():
    spy = Spy()
    tree = roll(spy, forks={0: 2, 2: 3})
    seen = torch.cat([latents for latents, _, _ in spy.calls])
    assert len(seen) == 2 * (1 + 2 + 2 + 6 + 6) and len(seen.unique(dim=0)) == len(seen)
    left = tree.states[tree.source.unique()]
    torch.testing.assert_close(left.sort(0).values, seen.sort(0).values)


def test_an_edge_leads_from_its_source_to_its_target_by_the_kernel():
    """The recorded log-prob is the density of the stored step under the stored levels; nan where nothing was drawn."""
    noisy = (0, 2)
    tree = roll(Spy(), roots=2, noisy=noisy, forks={0: 2, 2: 3})
    for e in range(len(tree.source)):
        step = int(tree.step[e])
        assert int(tree.step_next[e]) == step + 1
        if step not in noisy:
            assert bool(tree.log_prob[e].isnan())
            continue
        latents, sigma = tree.states[tree.source[e]][None], tree.sigmas[step][None]
        velocity = Spy()(latents, sigma, tree.edge_prompt[e][None])
        mean, std = DANCE(latents, velocity, sigma, tree.sigmas[step + 1][None])
        ours = density.gaussian(tree.states[tree.target[e]][None], mean, std)
        torch.testing.assert_close(ours[0], tree.log_prob[e], atol=2e-6, rtol=0)


def test_log_probs_exist_on_noisy_steps_alone():
    """C27: a window (2, 3) of 10."""
    tree = roll(steps=10, noisy=(2, 3))
    assert bool((tree.log_prob.isfinite() == ((tree.step == 2) | (tree.step == 3))).all())


def test_only_the_finals_and_the_ends_of_noisy_steps_are_kept():
    tree = roll(roots=3, steps=10, noisy=(2, 3))
    assert len(tree.states) == 3 * 4  # before 2, between 2 and 3, after 3, and the finals
    kept_source, kept_target = tree.source >= 0, tree.target >= 0
    steps = tree.step
    assert bool((kept_source == ((steps >= 2) & (steps <= 4))).all())
    assert bool((kept_target == (((steps >= 1) & (steps <= 3)) | (steps == 9))).all())


def test_leaves_keep_the_prompt_and_the_group_of_their_root():
    """C50: two prompts, two levels of two: each leaf answers for its own prompt."""
    prompt = torch.tensor([7, 3])
    spy = Spy()
    tree = roll(spy, prompt=prompt, forks={0: 2, 1: 2}, group=torch.tensor([0, 1]))
    assert tree.prompt.tolist() == [7] * 4 + [3] * 4 and tree.group.tolist() == [0] * 4 + [1] * 4
    for latents, _, seen in spy.calls:
        assert seen.tolist() == [7] * (len(latents) // 2) + [3] * (len(latents) // 2)
    assert bool((tree.edge_prompt[tree.edge] == tree.prompt[:, None]).all())


def test_two_roots_of_one_prompt_form_the_group_they_are_given():
    """Equal prompts are one group only if the caller says so; by default the prompt is the group."""
    prompt = torch.tensor([4, 4])
    assert roll(prompt=prompt).group.tolist() == [4, 4]
    assert roll(prompt=prompt, group=torch.tensor([0, 1])).group.tolist() == [0, 1]


def test_no_forks_is_the_straight_rollout():
    """The same walk as a plain loop over kernel and noise."""
    tree = roll(Spy(), roots=2, steps=5)
    for root in range(2):
        drawn = torch.randn(4, 3, generator=generator(0, "step", root))
        x = torch.randn(1, 3, generator=generator(0, "initial", root))
        for t in range(5):
            at = (tree.sigmas[t][None], tree.sigmas[t + 1][None])
            velocity = Spy()(x, at[0], torch.tensor([root]))
            mean, std = (DANCE if t < 4 else kernels.ode)(x, velocity, *at)
            x = mean + (std * drawn[t] if t < 4 else 0)
        torch.testing.assert_close(tree.leaves()[root], x[0], atol=1e-6, rtol=0)
    assert bool((tree.edge == torch.arange(5) * 2 + torch.arange(2)[:, None]).all())


def test_the_default_kernel_is_the_ode_without_any_generator():
    sigmas, latents = schedules.linear(4), torch.ones(2, 3)
    tree = rollout(lambda x, s, p: torch.ones_like(x), latents, torch.tensor([0, 1]), sigmas)
    torch.testing.assert_close(tree.leaves(), torch.zeros(2, 3), atol=1e-6, rtol=0)
    assert len(tree.states) == 2 and bool(tree.log_prob.isnan().all())


@pytest.mark.parametrize("batch_size", [1, 3, 5, 100])
def test_the_batch_size_changes_no_number(batch_size):
    whole, spy = roll(forks={0: 2, 2: 3}), Spy()
    parts = roll(spy, forks={0: 2, 2: 3}, batch_size=batch_size)
    assert torch.equal(parts.states, whole.states) and torch.equal(parts.log_prob[:-12], whole.log_prob[:-12])
    assert max(len(latents) for latents, _, _ in spy.calls) <= batch_size


def test_the_noise_of_a_root_does_not_depend_on_who_walks_with_it():
    """One rank or two: the second root alone makes the same leaves."""
    both = roll(roots=2, forks={0: 2, 2: 3})
    latents = torch.randn(1, 3, generator=generator(0, "initial", 1))
    alone = rollout(
        Spy(),
        latents,
        torch.tensor([1]),
        schedules.linear(5),
        DANCE,
        noisy=(0, 1, 2, 3),
        forks={0: 2, 2: 3},
        generators=[generator(0, "step", 1)],
    )
    assert torch.equal(alone.leaves(), both.leaves()[6:])


@pytest.mark.parametrize("how", [noise.independent, part(noise.correlated, strength=4.0).bound], ids=["own", "shared"])
def test_siblings_are_distinct(how):
    """C42: forks from one initial noise make eight different pictures."""
    tree = roll(roots=1, forks={0: 2, 1: 2, 2: 2}, noise=how)
    assert len(tree.leaves().unique(dim=0)) == 8


def test_branches_of_one_noisy_step_agree_up_to_the_state_that_they_leave():
    """TempFlow-GRPO: other noise at step 2 changes nothing before it; up to there all six are one row."""
    found = []
    for how in (noise.independent, part(noise.scaled, strength=2.0).bound):
        roll(spy := Spy(), roots=1, noisy=(2,), forks={2: 6}, noise=how)
        found.append([latents for latents, _, _ in spy.calls])
    assert [len(latents) for latents in found[0]] == [1, 1, 1, 6, 6]
    assert [torch.equal(one, other) for one, other in zip(*found, strict=True)] == [True] * 3 + [False] * 2


def test_a_jump_is_finished_in_steps_of_every_stride_by_the_ode():
    """Strides 1 and 2 after jumps that land at step 3: the first way is that of a rollout without strides."""
    apart = {"roots": 1, "steps": 8, "noisy": {1: 2, 2: 1}, "forks": {1: 3, 2: 3}, "apart": True}
    plain, spy = roll(**apart), Spy()
    tree = roll(spy, **apart, strides=(1, 2), group=torch.tensor([5]))
    assert tree.group.tolist() == [20] * 3 + [21] * 3 + [22] * 3 + [23] * 3
    ends = tree.leaves().view(4, 3, -1)
    assert torch.equal(ends[[0, 2]].flatten(0, 1), plain.leaves()) and not torch.allclose(ends[0], ends[1], atol=1e-3)
    for row, jump in ((3, tree.edge[3, 1]), (9, tree.edge[9, 2])):
        x = tree.states[tree.target[jump]][None]
        for t, onward in ((3, 5), (5, 7), (7, 8)):
            at = (tree.sigmas[t][None], tree.sigmas[onward][None])
            x, _ = kernels.ode(x, Spy()(x, at[0], torch.zeros(1)), *at)
        torch.testing.assert_close(tree.leaves()[row], x[0], atol=1e-6, rtol=0)
    assert spy.rows == 3 + 6 * (5 + 2), "the path up to step 2, and where the jumps land once for both ways"


def test_correlated_siblings_of_a_rollout_correlate_as_promised():
    """Strength 4: unit variance, correlation 1/17; other steps and other roots know nothing of each other."""
    noise_dims, std = 40_000, 0.3 * 0.5
    tree = rollout(
        lambda x, s, p: torch.zeros_like(x),
        torch.zeros(2, noise_dims),
        torch.arange(2),
        torch.tensor([1.0, 0.75, 0.0]),
        lambda x, v, s, n: (x, torch.full_like(s, std)),
        noisy=(0,),
        forks={0: 3},
        noise=part(noise.correlated, strength=4.0).bound,
        generators=[generator(0, r) for r in range(2)],
    )
    drawn = tree.states[tree.target[tree.edge[:, 0]]] / std
    torch.testing.assert_close(drawn.std(1), torch.ones(6), atol=0.015, rtol=0)
    expected = torch.eye(6)
    for root in (slice(0, 3), slice(3, 6)):
        expected[root, root] += (1 - torch.eye(3)) / 17
    torch.testing.assert_close(torch.corrcoef(drawn), expected, atol=0.02, rtol=0)


def test_a_step_that_does_not_fork_draws_plain_noise_under_any_rule():
    """Only siblings share: without forks correlated and independent noise give the same rollout."""
    shared = roll(noise=part(noise.correlated, strength=4.0).bound)
    assert torch.equal(shared.leaves(), roll().leaves())


def test_noise_at_the_last_step_is_refused():
    """C26: sigma_next = 0 leaves no transition noise."""
    with pytest.raises(ValueError, match="step 9 of 10 has zero transition noise"):
        roll(steps=10, noisy=(8, 9))


def test_a_fork_at_a_deterministic_step_is_refused():
    """C27: its children would be equal."""
    with pytest.raises(ValueError, match="a fork at step 1, which draws no noise, makes equal children"):
        roll(noisy=(0, 2), forks={1: 2})


def test_a_fork_without_children_and_a_missing_generator_are_refused():
    with pytest.raises(ValueError, match=r"forks\[1\] = 0: a state has at least one child"):
        roll(forks={1: 0})
    with pytest.raises(ValueError, match="0 generators for 2 roots: give one per root"):
        sigmas = schedules.linear(4)
        rollout(Spy(), torch.zeros(2, 3), torch.arange(2), sigmas, DANCE, noisy=(0,), generators=[])


def test_a_kernel_may_ask_for_its_step_and_the_number_of_steps():
    """Noise that grows with depth: std = (step + 1) / steps, read back from the log-prob of each edge."""

    def by_depth(latents, velocity, sigma, sigma_next, step, steps):
        return latents, torch.full_like(sigma, 1.0) * (step + 1) / steps

    tree = roll(kernel=by_depth, steps=4, noisy=(0, 1, 2), dims=(400,))
    for step, std in ((0, 0.25), (1, 0.5), (2, 0.75)):
        moved = tree.states[tree.target[tree.edge[:, step]]] - tree.states[tree.source[tree.edge[:, step]]]
        assert moved.std().item() == pytest.approx(std, rel=0.1)


@pytest.mark.parametrize("kernel", [kernels.flow_sde, kernels.dance_sde, kernels.cps])
def test_every_trained_log_prob_is_finite_on_ten_steps(kernel):
    """C26, C28: first and last noisy step included."""
    bound = kernels.bind(kernel, sigmas=schedules.linear(10))
    for rule in (density.gaussian, density.squared_error):
        tree = roll(steps=10, kernel=bound, density=rule)
        assert bool((tree.log_prob.isfinite() == (tree.step < 9)).all())


def test_steps_are_integers_so_that_no_level_is_looked_up_by_its_value():
    """C33: hundreds of steps, whose levels repeat in bf16, each find their own row."""
    tree = roll(roots=1, steps=500, noisy=(496, 497), dims=(2,))
    assert len(tree.sigmas.bfloat16().unique()) < 500
    noisy = tree.source[tree.edge[0, [496, 497]]]
    assert tree.step.dtype == torch.int64 and tree.step[tree.edge[0]].tolist() == list(range(500))
    assert len(set(noisy.tolist())) == 2


def test_the_layout_knows_all_sizes_before_any_network_call():
    layout = tree_layout(3, 4, (1,), {1: 2})
    assert layout.frontier == (3, 3, 6, 6, 6) and layout.edge.shape == (6, 4)
    assert layout.leaf_root.tolist() == [0, 0, 1, 1, 2, 2]
    assert bool((layout.root[layout.edge] == layout.leaf_root[:, None]).all())


def test_a_rollout_leaves_torchs_generator_alone():
    before = torch.get_rng_state()
    roll(forks={0: 2})
    assert torch.equal(torch.get_rng_state(), before)


def test_a_solver_takes_the_place_of_euler_steps_and_keeps_the_finals_alone():
    """In batches too: the network sees every state of every step once."""
    seen = []

    def velocity(latents, sigma, prompt):
        seen.append(len(latents))
        return latents * sigma[:, None]

    latents, prompt = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), torch.arange(5)
    sigmas = schedules.linear(6)
    tree = rollout(velocity, latents, prompt, sigmas, solver=solvers.dpm_solver, batch_size=2)
    assert torch.equal(tree.leaves(), solvers.dpm_solver(velocity, latents, prompt, sigmas)) and len(tree.states) == 5
    assert seen[:18] == [2, 2, 1] * 6 and bool((tree.source == -1).all()) and bool(tree.log_prob.isnan().all())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tree: {"states": tree.states[:-1]}, "latents, of which edges name"),
        (lambda tree: {"sigmas": tree.sigmas[1:]}, "5 sigmas for 5 steps; expected 6, both ends included"),
        (lambda tree: {"sigmas": tree.sigmas[[0, 2, 1, 3, 4, 5]]}, "do not fall from noise to picture"),
        (lambda tree: {"edge": torch.where(tree.edge == 9, 8, tree.edge)}, "paths name 9 edges of 10"),
    ],
)
def test_a_table_that_does_not_fit_the_others_is_refused_whoever_filled_it(change, said):
    """C37: a latent or a noise level less, two levels swapped, an edge less."""
    tree = roll()
    with pytest.raises(ValueError, match=said):
        replace(tree, **change(tree))
