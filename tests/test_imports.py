"""Imports run one way, and each foreign library has one door."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OURS = ("flowrl", "rewards", "samplers", "scripts")
PURE = tuple(f"flowrl.{name}" for name in ("advantages", "objectives", "distill", "allocation", "memory", "rollout"))
CORE = (
    "flowrl.vocabulary",
    "flowrl.groups",
    "flowrl.randomness",
    "flowrl.part",
    "flowrl.recipe",
    "flowrl.recipe_check",
    "flowrl.decays",
    "flowrl.updates",
    "flowrl.train_step",
    "flowrl.assign",
)
WING = ("samplers", "rewards", *PURE, *CORE)

MAY_IMPORT = {  # module or package -> what it may import of ours; the longest matching name decides
    "samplers": ("samplers",),
    "rewards": ("rewards",),
    "flowrl.vocabulary": (),
    "flowrl.randomness": (),
    "flowrl.groups": (),
    "flowrl.part": (),
    "flowrl.decays": (),
    "flowrl.updates": ("flowrl.groups",),
    "flowrl.recipe_check": ("flowrl.vocabulary", "flowrl.part"),
    "flowrl.recipe": ("flowrl.vocabulary", "flowrl.part", "flowrl.decays", "flowrl.recipe_check"),
    "flowrl.train_step": (),
    "flowrl.assign": ("flowrl.groups", "flowrl.recipe", "flowrl.vocabulary", *PURE),
    **{package: ("flowrl.groups", *PURE) for package in PURE},
    "flowrl.visual": ("flowrl.visual", *WING),
    "flowrl.text": ("flowrl.text", "rewards", *PURE, *CORE),
    "flowrl.recipes": ("flowrl.recipes", "flowrl.visual", "flowrl.text", *WING),
    "flowrl.explain": ("flowrl.recipes", "flowrl.visual", "flowrl.text", *WING),
    "flowrl.methods": ("flowrl.explain", "flowrl.plan", "flowrl.recipes", *WING),
    "flowrl.plan": ("flowrl.recipes", "flowrl.visual", "flowrl.text", *WING),
    "flowrl.run": ("flowrl", "rewards", "samplers"),
    "flowrl": ("flowrl",),
    "scripts": OURS,
}
LIGHT = {"torch", "jaxtyping"}
FOREIGN = {package: LIGHT for package in ("samplers", *PURE, *CORE, "flowrl.visual.points", "flowrl.visual.evaluate")}
LIGHTEST = ("vocabulary", "part", "recipe", "recipe_check", "decays", "recipes", "explain")
FOREIGN |= {f"flowrl.{name}": set() for name in LIGHTEST}

FILES = sorted(path for package in OURS for path in (ROOT / package).rglob("*.py"))


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path):
    """(dotted name, line) of everything a file imports, wherever in it; `from a import b` counts as a.b."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def inside(name, packages):
    return any(name == package or name.startswith(package + ".") for package in packages)


def rule_for(module, rules):
    """The rule of the longest package that holds the module, or None."""
    holding = [package for package in rules if inside(module, [package])]
    return rules[max(holding, key=len)] if holding else None


def direction_faults(module, imports):
    allowed = rule_for(module, MAY_IMPORT)
    return [name for name in imports if name.split(".")[0] in OURS and not inside(name, allowed)]


def door_faults(module, imports):
    """What the module imports of foreign libraries without being their door."""
    single_reward = module.startswith("rewards.") and module != "rewards.media"
    doors = {
        "diffusers": inside(module, ["flowrl.visual.pipelines"]),
        "transformers": inside(module, ["flowrl.visual.pipelines", "flowrl.text"]) or single_reward,
        "accelerate": inside(module, ["flowrl.run"]),
        "torch.distributed": inside(module, ["flowrl.run"]),
        "PIL": inside(module, ["rewards"]),
        "wandb": inside(module, ["flowrl.run.trackers"]),
        "tensorboard": inside(module, ["flowrl.run.trackers"]),
        "torch.utils.tensorboard": inside(module, ["flowrl.run.trackers"]),
    }
    faults = [name for name in imports for door, open_here in doors.items() if inside(name, [door]) and not open_here]
    light = rule_for(module, FOREIGN)
    if light is not None:
        known = light | set(sys.stdlib_module_names) | set(OURS)
        faults += [name for name in imports if name.split(".")[0] not in known]
    return faults


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_point_one_way_and_foreign_libraries_come_in_by_one_door(path):
    module, imports = module_of(path), [name for name, _ in imports_of(path)]
    assert not direction_faults(module, imports)
    assert inside(module, ["scripts"]) or not door_faults(module, imports)


def test_the_walk_sees_all_three_packages():
    seen = {module_of(path).split(".")[0] for path in FILES}
    assert {"flowrl", "rewards", "samplers"} <= seen and len(FILES) > 25


@pytest.mark.parametrize(
    "module, imported",
    [
        ("samplers.tree", "flowrl.recipe"),
        ("rewards.shapes", "flowrl.groups"),
        ("flowrl.advantages.tree", "flowrl.visual.points"),
        ("flowrl.advantages.tree", "samplers.tree"),
        ("flowrl.visual.trainer", "flowrl.recipes.visual"),
        ("flowrl.visual.trainer", "flowrl.text.policy"),
        ("flowrl.text.trainer", "flowrl.visual.toy"),
        ("flowrl.visual.trainer", "flowrl.run.learner"),
        ("flowrl.recipes.visual.steps", "flowrl.run.config"),
        ("flowrl.run.cli", "scripts.train"),
    ],
)
def test_a_wrong_direction_is_seen(module, imported):
    """The table itself is tested: it must be able to fail."""
    assert direction_faults(module, [imported]) == [imported]


@pytest.mark.parametrize(
    "module, imported",
    [
        ("flowrl.visual.policy", "diffusers"),
        ("flowrl.run.cli", "diffusers.StableDiffusion3Pipeline"),
        ("flowrl.visual.trainer", "transformers.AutoModel"),
        ("flowrl.visual.pipelines.sd3", "accelerate.Accelerator"),
        ("flowrl.visual.trainer", "torch.distributed"),
        ("flowrl.visual.toy", "PIL.Image"),
        ("samplers.kernels", "numpy"),
        ("flowrl.recipe", "torch"),
        ("flowrl.run.train", "wandb"),
        ("flowrl.run.metrics", "torch.utils.tensorboard.SummaryWriter"),
    ],
)
def test_a_foreign_library_at_the_wrong_door_is_seen(module, imported):
    assert imported in door_faults(module, [imported])


def test_importing_the_packages_loads_no_model_library():
    code = (
        "import sys, flowrl, samplers, rewards\n"
        "heavy = {'diffusers', 'transformers', 'accelerate', 'peft', 'open_clip'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
