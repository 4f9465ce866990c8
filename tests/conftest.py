"""What several tests share: every visual recipe, a toy policy that is fitted once, and the loop around it."""

import copy
import functools
import importlib
import inspect
import pkgutil
from types import SimpleNamespace

import jaxtyping
import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("house", deadline=None, max_examples=30, derandomize=True, database=None)
settings.load_profile("house")


def public_functions(module):
    """The functions that a module defines for others."""
    here = [f for f in vars(module).values() if inspect.isfunction(f) and f.__module__ == module.__name__]
    return [f for f in here if not f.__name__.startswith("_")]


def modules_of(package):
    """The package `package` (a dotted name) and everything below it."""
    top = importlib.import_module(package)
    below = pkgutil.walk_packages(getattr(top, "__path__", ()), package + ".")
    return [top, *(importlib.import_module(found.name) for found in below)]


@functools.cache
def recipe_functions():
    found = [f for module in modules_of("flowrl.recipes.visual") for f in public_functions(module)]
    return [f for f in found if not inspect.signature(f).parameters]


NOT_COMPARING = {"reward_itself", "best_of_group", "against_history", "against_expected", "gain", "siblings"}
REPRESENTATIVE = {  # recipes whose way through the loop no other one takes; the others differ by a pure function
    *("flow_grpo", "dance_grpo", "branch_grpo", "flow_dppo", "chunk_grpo", "e_grpo", "mix_grpo_flash", "drm_stepwise"),
    *("stepwise_flow_grpo", "dynamic_tree_rpo", "sage_grpo", "adagrpo", "diffusion_nft", "v_grpo", "dgpo"),
}
FAMILIES = {  # parameter of a test: which recipes it runs through
    # that compare pictures: not those that take a reward as it is, or compare it with earlier ones, or compare steps
    "comparing": lambda recipe: not {recipe.advantage.name, recipe.credit.name} & NOT_COMPARING,
    "drawing": lambda recipe: recipe.rollout.noisy is not None,  # steps that draw noise
}


def pytest_generate_tests(metafunc):
    """`recipe_function` runs through every visual recipe, the names of FAMILIES through some of them.

    `public` runs through the functions of @pytest.mark.menu(...).
    """
    if "recipe_function" in metafunc.fixturenames:
        some = metafunc.definition.get_closest_marker("representative")
        marks = {f: [pytest.mark.slow] * (f.__name__ not in REPRESENTATIVE) if some else [] for f in recipe_functions()}
        found = [pytest.param(f, id=f.__name__, marks=marks[f]) for f in recipe_functions()]
        metafunc.parametrize("recipe_function", found)
    for name in FAMILIES.keys() & set(metafunc.fixturenames):
        found = [pytest.param(f(), id=f.__name__) for f in recipe_functions() if FAMILIES[name](f())]
        metafunc.parametrize(name, found)
    if "public" in metafunc.fixturenames:
        packages = metafunc.definition.get_closest_marker("menu").args
        found = [f for package in packages for module in modules_of(package) for f in public_functions(module)]
        metafunc.parametrize("public", found, ids=lambda f: f"{f.__module__}.{f.__name__}")


def pytest_configure(config):
    config.addinivalue_line("markers", "representative: the recipes that are not in REPRESENTATIVE are slow here")
    config.addinivalue_line(
        "markers", "long: whole runs, in half the time without checks of shapes; shorter tests check those"
    )
    config.addinivalue_line(
        "markers", "menu(package, ...): `public` runs through the public functions of these packages"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Shapes are checked in every test but the long ones."""
    jaxtyping.config.update("jaxtyping_disable", bool(item.get_closest_marker("long")))
    try:
        return (yield)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def recipe(recipe_function):
    return recipe_function().check()


@functools.cache
def _fitted(dtype):
    from flowrl.visual.toy import ToyPolicy

    return ToyPolicy(dtype=dtype)


@pytest.fixture
def toy():
    """Make fresh toy policies; with a recipe, its snapshots are taken."""

    def make(recipe=None, dtype=torch.float32):
        policy = copy.deepcopy(_fitted(dtype))
        for name, rule in recipe.snapshots.items() if recipe else ():
            policy.snapshot(name, rule, 0)
        return policy

    return make


@pytest.fixture
def loop():
    """The loop on the toy: four prompts; the even ones want a red pixel, the odd ones anything but."""
    from flowrl.run.learner import Learner
    from flowrl.visual import trainer
    from flowrl.visual.policy import Example
    from rewards.table import RewardTable

    examples = [Example(str(i)) for i in range(4)]

    def score(images, examples, group):
        sign = torch.tensor([1.0 if int(e.prompt) % 2 == 0 else -1.0 for e in examples], dtype=images.dtype)
        value = (sign * images[:, 0].mean((1, 2)) + (1 - sign) / 2)[:, None]  # in [0, 1]
        weight, valid = torch.ones(1, dtype=images.dtype), torch.ones(len(value), dtype=torch.bool)
        return RewardTable(value, weight, group, valid, ("red",))

    def learner(policy, micro_batch=64, rate=2e-3, **changes):
        return Learner(policy.trainable(), lambda update: rate, micro_batch=micro_batch, **changes)

    def update(policy, recipe, learner, iteration=0, batch_size=64, examples=examples, score=score, seed=0, **changes):
        changes |= {"seed": seed, "iteration": iteration, "batch_size": batch_size}
        return trainer.update(policy, recipe, examples, score, learner, **changes)[0]

    def gradient(policy, recipe, micro_batch, **changes):
        """(gradient of one update, its log), before any clipping or step."""
        kept = learner(policy, micro_batch, reduce=lambda gradients: seen.extend(g.clone() for g in gradients))
        seen = []
        log = update(policy, recipe, kept, **changes)
        flat = seen or [torch.zeros_like(p) for _, p in policy.trainable()]  # where nothing weighs there is no step
        return torch.cat([g.flatten() for g in flat]), log

    return SimpleNamespace(examples=examples, score=score, learner=learner, update=update, gradient=gradient)
