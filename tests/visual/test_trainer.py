"""flowrl/visual/trainer.py: the loop body."""

import gc
import threading

import pytest
import torch

from flowrl import randomness
from flowrl.changes import changed
from flowrl.part import part
from flowrl.recipe import copied
from flowrl.recipes.visual.forward import awm, dgpo, v_grpo
from flowrl.recipes.visual.steps import dance_grpo, flow_cps, flow_grpo, flow_grpo_fast, sage_grpo
from flowrl.recipes.visual.trees import branch_grpo, e_grpo
from flowrl.updates import minibatches
from flowrl.visual.policy import Example
from flowrl.visual.ranks import Ranks
from flowrl.visual.trainer import noisy_steps, roll_out
from rewards.table import RewardTable
from samplers import schedules


def test_flow_grpo_costs_1792_forwards_and_576_backwards(toy, loop):
    """Four prompts of 16: 64 x 10 for the rollout, 64 x 9 twice for training, the reference and the policy."""
    recipe = flow_grpo()
    policy = toy(recipe)
    loop.update(policy, recipe, loop.learner(policy))
    assert (policy.forwards, policy.backwards) == (1792, 576)


def test_branch_grpo_costs_203_calls_of_rollout_and_187_of_training(toy, loop):
    """One prompt, T = 20, forks at 0, 3, 6 and 9: siblings share the call of the state that they leave."""
    recipe = branch_grpo()
    policy = toy(recipe)
    log = loop.update(policy, recipe, loop.learner(policy), examples=loop.examples[:1])
    assert (policy.forwards, policy.backwards) == (203 + 187, 187)
    assert (log["rollout_calls"], log["train_calls"]) == (203, 187)


def test_the_guidance_is_set_before_the_prompts_are_encoded(toy, loop):
    """Without guidance no negative prompt is encoded; with it, all are, whatever an evaluation has left behind."""
    recipe, seen = flow_grpo().but(rollout={"guidance": 4.0}), []
    policy = toy(recipe)
    encode = policy.encode
    policy.encode = lambda examples: seen.append(policy.guidance) or encode(examples)
    policy.guidance = 1.0
    roll_out(policy, recipe, loop.examples, seed=0, iteration=0)
    assert seen == [4.0]


def test_a_recipe_without_a_penalty_makes_no_reference_pass(toy, loop):
    """C54: 64 x 10 and 64 x 9, and no penalty in the log."""
    recipe = flow_grpo().but(penalties=(), snapshots={})
    policy = toy(recipe)
    log = loop.update(policy, recipe, loop.learner(policy))
    assert policy.forwards == 640 + 576 and not any("penalty" in name for name in log)


def test_only_the_window_is_trained(toy, loop):
    """C27: three noisy steps of ten, the others deterministic and without a log-prob."""
    recipe = flow_grpo_fast()
    policy = toy(recipe)
    log = loop.update(policy, recipe, loop.learner(policy))
    assert (policy.forwards, policy.backwards) == (64 * 13, 64 * 3)
    assert all(value == value for value in log.values() if isinstance(value, float))


def test_shared_initial_noise_starts_each_group_from_one_state(toy, loop):
    """C42: dance_grpo forks at step 0: one state per prompt, twelve distinct pictures."""
    tree, _ = roll_out(toy(), dance_grpo(), loop.examples, seed=0, iteration=0)
    assert len(tree.source[tree.edge[:, 0]].unique()) == 4
    assert len(tree.leaves().unique(dim=0)) == len(tree.leaves()) == 48


def test_a_group_is_an_example_also_where_two_have_the_same_text(toy):
    """Statistics by group id: equal prompts are not merged, and start from their own noise."""
    tree, _ = roll_out(toy(), flow_grpo(), [Example("1"), Example("1")], seed=0, iteration=0)
    assert tree.group.tolist() == [0] * 16 + [1] * 16 and set(tree.prompt.tolist()) == {1}
    assert len(tree.leaves().unique(dim=0)) == 32


def test_steps_that_stand_apart_are_a_group_each_and_share_their_path(toy, loop):
    """E-GRPO: two prompts, eight steps with twelve jumps each: one call of the path serves a step's group."""
    recipe, policy = e_grpo(), toy()
    tree, noisy = roll_out(policy, recipe, loop.examples[:2], seed=0, iteration=0)
    assert len(noisy) == 8 and tree.group.bincount().tolist() == [12] * 16
    assert tree.root.tolist() == [0] * 96 + [1] * 96
    left = tree.source[tree.noisy]
    assert len(left) == 192 and len(left.unique()) == 16
    told = []

    def score(images, examples, group):
        told.append([e.prompt for e in examples])
        return loop.score(images, examples, group)

    log = loop.update(policy, recipe, loop.learner(policy), examples=loop.examples[:2], score=score)
    assert told == [["0"] * 96 + ["1"] * 96] and log["train_calls"] == 16


@pytest.mark.parametrize("silenced", ["initial noise", "step noise"])
def test_either_noise_alone_tells_all_members_of_all_groups_apart(toy, monkeypatch, silenced):
    """C42: each is named by group and member; here the other one is the same for everybody."""
    named = randomness.generator

    def generator(seed, iteration, purpose, *member):
        return named(seed, iteration, purpose, *(() if purpose == silenced else member))

    monkeypatch.setattr(randomness, "generator", generator)
    tree, _ = roll_out(toy(), flow_grpo(), [Example("1"), Example("1")], seed=0, iteration=0)
    assert len(tree.leaves().unique(dim=0)) == 32


def test_every_reward_is_told_the_example_of_its_own_leaf(toy, loop):
    """C50: prompts that are not their own index, in branching groups."""
    examples = [Example("3"), Example("0"), Example("2")]
    told = []

    def score(images, examples, group):
        told.append(([e.prompt for e in examples], group.tolist()))
        return loop.score(images, examples, group)

    recipe = branch_grpo()
    policy = toy(recipe)
    loop.update(policy, recipe, loop.learner(policy), examples=examples, score=score)
    assert told == [(["3"] * 16 + ["0"] * 16 + ["2"] * 16, [0] * 16 + [1] * 16 + [2] * 16)]


def test_equal_rewards_leave_no_gradient_but_that_of_the_penalty(toy, loop, comparing):
    """C01: reward = prompt index. Where nothing pulls nothing is run; a penalty is flat at the reference."""

    def score(images, examples, group):
        value = torch.tensor([[float(e.prompt) / 3] for e in examples])
        return RewardTable(value, torch.ones(1), group, torch.ones(len(value), dtype=torch.bool), ("index",))

    flat = [(scale, p) for scale, p in comparing.penalties if p.name != "log_prob_drop_adaptive"]  # falls everywhere
    comparing = comparing.but(penalties=tuple(flat))
    policy = toy(comparing)
    gradient, log = loop.gradient(policy, comparing, 64, score=score)
    assert not gradient.any() and log["group/zero_spread"] == 1.0 and log["grad_norm"] == 0.0
    assert comparing.penalties or policy.backwards == 0


def test_a_coupled_row_of_advantage_0_counts_among_its_peers(toy, loop):
    """C01: all 4 x 4 pictures are run at 4 levels, as where the advantage is 1e-30; the others' gradients are equal."""

    def two_of_four(reward, group, *, nothing):
        return torch.tensor([2.0, -1.0, nothing, nothing], dtype=reward.dtype).repeat(len(reward) // 4)

    found, plain = [], dgpo().but(rollout={"roots": 4}, penalties=())
    for nothing in (0.0, 1e-30):
        recipe = plain.but(advantage=part(two_of_four, nothing=nothing)).check()
        policy = toy(recipe)
        for _, parameter in policy.trainable():
            parameter.data.mul_(1.02)  # away from the reference, or every share is 1/2
        found.append(loop.gradient(policy, recipe, 64)[0])
        assert policy.backwards == 4 * 4 * 4
    assert (found[0] - found[1]).norm() <= 1e-6 * found[1].norm() and found[1].norm() > 1


def test_one_rank_or_two_draw_the_same_pictures(toy, loop, recipe):
    """Noise is named by group and member, not by process."""
    whole, _ = roll_out(toy(), recipe, loop.examples, seed=3, iteration=5)
    parts = []
    for index in range(2):
        first, mine = Ranks(index, 2).share(loop.examples)
        parts.append(roll_out(toy(), recipe, mine, seed=3, iteration=5, first_group=first)[0])
    assert torch.equal(torch.cat([part.group for part in parts]), whole.group)
    torch.testing.assert_close(torch.cat([part.leaves() for part in parts]), whole.leaves(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("count, shares", [(4, [1, 1, 1, 1]), (3, [1, 1, 2]), (2, [2, 2]), (1, [4])])
def test_the_slices_of_all_ranks_make_up_the_whole(count, shares):
    slices = [Ranks(index, count).share("abcd") for index in range(count)]
    assert [len(mine) for _, mine in slices] == shares and "".join(mine for _, mine in slices) == "abcd"
    assert [first for first, _ in slices] == [sum(shares[:i]) for i in range(count)]


class Thread:
    """Ranks as threads that meet to exchange rows, in place of processes."""

    def __init__(self, count):
        self.meet, self.rows = threading.Barrier(count), [None] * count

    def exchange(self, index, mine):
        self.rows[index] = mine
        self.meet.wait(30)
        everybody = list(self.rows)
        self.meet.wait(30)
        return everybody

    def sum_into(self, index, gradients):
        everybody = self.exchange(index, [g.clone() for g in gradients])
        for gradient, *shares in zip(gradients, *everybody, strict=True):
            gradient.copy_(sum(shares))


@pytest.mark.representative
@pytest.mark.parametrize(("count", "examples"), [(2, 4), (2, 3), (3, 4)])
def test_several_ranks_give_the_gradient_of_one(toy, loop, recipe, count, examples):
    """C14, C18: ragged shares too: the table is global, only latents stay local."""
    chosen = loop.examples[:examples]
    recipe = changed(recipe, {"pilot.candidates": 1}) if recipe.pilot else recipe  # a prompt for every rank
    whole, log = loop.gradient(toy(recipe, torch.float64), recipe, 10_000, examples=chosen)
    thread, found = Thread(count), [None] * count

    def run(index):
        policy, seen = toy(recipe, torch.float64), []
        ranks = Ranks(index, count, lambda rows: torch.cat(thread.exchange(index, rows)))

        def reduce(gradients):
            thread.sum_into(index, gradients)
            seen.extend(g.clone() for g in gradients)

        learner = loop.learner(policy, 7, reduce=reduce)
        their_log = loop.update(policy, recipe, learner, examples=chosen, ranks=ranks)
        found[index] = torch.cat([g.flatten() for g in seen]), their_log

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    for gradient, their_log in found:
        assert (gradient - whole).norm() <= 1e-10 * whole.norm() and whole.norm() > 0
        assert their_log["reward/red"] == pytest.approx(log["reward/red"], rel=1e-12)


def test_a_group_is_cut_into_micro_batches_of_any_size(toy, loop):
    """C14: two groups of twelve, one row at a time or twelve: 24 pictures, 24 x 9 decisions, the same gradient."""
    recipe, found = flow_grpo().but(rollout={"roots": 12}), []
    for size in (1, 12):
        policy, seen = toy(recipe), []

        def score(images, examples, group, seen=seen):
            seen.append(len(images))
            return loop.score(images, examples, group)

        found.append(loop.gradient(policy, recipe, size, examples=loop.examples[:2], score=score)[0])
        assert seen == [24] and policy.backwards == 24 * 9
    assert (found[0] - found[1]).norm() <= 1e-6 * found[1].norm() and found[1].norm() > 1e-3


@pytest.mark.parametrize("count", [1, 3])
def test_a_remainder_of_micro_batches_is_no_update_of_its_own(toy, loop, count):
    """C17: ten pictures in fours: as many optimizer steps as were asked for, all pictures of equal weight."""
    recipe = flow_grpo().but(rollout={"roots": 5}, update=part(minibatches, count=count)).check()
    policy, weights, steps = toy(recipe), [], []
    learner = loop.learner(policy, micro_batch=4)
    split, step = learner.micro_batches, learner.step
    learner.micro_batches = lambda points: weights.append(points.columns["weight"]) or split(points)
    learner.step = lambda: steps.append(learner.updates) or step()
    log = loop.update(policy, recipe, learner, examples=loop.examples[:2])
    assert len(steps) == count == log["optimizer_steps"] and log["on_policy"] is (count == 1)
    assert sorted(len(rows) for rows in weights) == ([90] if count == 1 else [27, 27, 36])
    for rows in weights:
        torch.testing.assert_close(rows, torch.full_like(rows, 1 / len(rows)))


@pytest.mark.parametrize(("poisoned", "logged"), [({0}, [1, 1]), ({1}, [1, 1]), ({0, 1}, [2, 2]), ({1, 3}, [1, 2])])
def test_the_count_of_skipped_steps_is_one_at_the_end_of_an_update(toy, loop, poisoned, logged):
    """C107: two optimizer steps in each of two updates; no mean over those of an update."""
    recipe = flow_grpo().but(rollout={"roots": 4}, update=part(minibatches, count=2)).check()
    policy, made, found = toy(recipe), [], []
    learner = loop.learner(policy, reduce=lambda gradients: poison(gradients, len(made)))

    def poison(gradients, step):
        made.append(step)
        if step in poisoned:
            gradients[0].fill_(torch.nan)

    for iteration in range(2):
        log = loop.update(policy, recipe, learner, iteration, examples=loop.examples[:2])
        assert type(log.get("skipped_nonfinite", 0)) is int
        found.append(learner.skipped)
        assert log.get("skipped_nonfinite", found[-1]) == found[-1]
    assert found == logged and made == [0, 1, 2, 3]


def test_a_failed_score_costs_its_rollout_and_nothing_else(toy, loop, recipe):
    """C04 with `mask`: finite, counted, and the mean is over what was scored."""

    def score(images, examples, group):
        table = loop.score(images, examples, group)
        scored.append(len(images))
        if len(scored) == 1 + bool(recipe.pilot):  # the finished pictures, no candidates, no estimates on the way
            table.valid[::3], table.value[::3] = False, 0.0
        return table

    policy, scored = toy(recipe), []
    gradient, log = loop.gradient(policy, recipe, 64, score=score)
    assert bool(gradient.isfinite().all()) and bool(gradient.any())
    assert log["reward/invalid"] == -(-scored[bool(recipe.pilot)] // 3)


def test_the_window_is_a_function_of_seed_and_iteration():
    """C41: the same on every rank, another one in another update, and not that of the noise."""
    recipe = flow_grpo_fast()

    def windows(seed):
        return [tuple(noisy_steps(recipe, schedules.linear(recipe.rollout.steps), seed, i)) for i in range(20)]

    assert windows(0) == windows(0) and len(set(windows(0))) == 3 and windows(0) != windows(1)


def test_an_update_is_a_function_of_weights_seed_and_iteration(toy, loop, recipe):
    """And of nothing global: torch's generator is neither read nor moved."""
    torch.manual_seed(1)
    one, _ = loop.gradient(toy(recipe), recipe, 64, iteration=2)
    before = torch.manual_seed(2).get_state()
    same, _ = loop.gradient(toy(recipe), recipe, 64, iteration=2)
    assert torch.equal(one, same) and torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(one, loop.gradient(toy(recipe), recipe, 64, iteration=3)[0])
    assert not torch.equal(one, loop.gradient(toy(recipe), recipe, 64, iteration=2, seed=1)[0])


def test_what_is_logged_says_whether_it_learns(toy, loop, recipe):
    """C24: the deviation of the ratio is a number, not a rounded 1.000, and the weights moved."""
    policy = toy(recipe)
    log = loop.update(policy, recipe, loop.learner(policy, micro_batch=7))
    assert type(log["ratio/deviation"]) is float and 0 <= log["ratio/deviation"] < 1e-5
    assert log["param_delta_norm"] > 0 and log["grad_norm"] > 0 and -1 < log["reward/red"] < 1
    assert all(isinstance(value, float | int) for value in log.values())


def test_a_policy_that_differs_from_the_one_that_drew_is_noticed(toy, loop):
    """C21: training under other weights than the rollout's shows in the deviation."""
    recipe = flow_cps()
    policy = toy(recipe)
    rolled = policy.decode

    def decode(latents):
        for _, parameter in policy.trainable():
            parameter.data.mul_(1.02)
        return rolled(latents)

    policy.decode = decode
    assert loop.update(policy, recipe, loop.learner(policy))["ratio/deviation"] > 1e-3


def test_how_far_every_snapshot_is_from_the_policy_is_logged(toy, loop):
    """C64: 0 in the first update, where all are copies; a reference refreshed every two updates is 0 in the third."""
    refreshed = dgpo().but(rollout={"roots": 4}, snapshots={"ref": copied(every=2)})
    for recipe, names in ((refreshed, {"ref"}), (awm(), {"ref", "anchor"}), (flow_grpo(), {"ref"}), (v_grpo(), set())):
        policy = toy(recipe)
        learner = loop.learner(policy)
        logs = [loop.update(policy, recipe, learner, i, examples=loop.examples[:2]) for i in range(3)]
        for log in logs:
            assert {name for name in log if name.startswith("snapshot/")} == {f"snapshot/{n}_distance" for n in names}
        for name in (f"snapshot/{n}_distance" for n in names):
            assert logs[0][name] == 0 < logs[1][name] and (logs[2][name] == 0) == (recipe is refreshed)


def test_an_anchor_holds_nothing_right_after_it_was_copied(toy, loop):
    """sage_grpo, copied every two updates.  Its stepwise term is 0 in all: the policy that drew is the current one."""
    recipe = sage_grpo().but(snapshots={"anchor": copied(every=2)})
    policy, logs = toy(recipe), []
    learner = loop.learner(policy)
    for iteration in range(5):
        logs.append(loop.update(policy, recipe, learner, iteration=iteration))
    for name in ("divergence", "penalty/kl_anchor_adaptive"):
        assert [log[name] > 0 for log in logs] == [False, True, False, True, False], name
        assert [log[name] for log in logs[::2]] == [0] * 3
    assert [log["penalty/log_prob_drop_adaptive"] for log in logs] == [0] * 5


def test_memory_does_not_grow_from_update_to_update(toy, loop):
    """C92: thirty updates, the number of live tensors constant after the third."""
    recipe = branch_grpo()
    policy = toy(recipe)
    learner, counts, logs = loop.learner(policy), [], []
    for iteration in range(30):
        logs.append(loop.update(policy, recipe, learner, iteration, examples=loop.examples[:1]))
        if iteration in (3, 16, 29):
            gc.collect()
            counts.append(sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects()))
    assert counts[0] == counts[1] == counts[2]
