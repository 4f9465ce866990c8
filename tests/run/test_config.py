"""The run file: one strict loader, one line for every fault."""

import pytest
import yaml

from flowrl.run.config import ROOT, dump, from_dict, load, resolve


@pytest.fixture
def fault(given):
    """The message for the small run with overrides or changed sections."""

    def of(*overrides, **sections):
        with pytest.raises(ValueError) as caught:
            from_dict({**given, **sections}, overrides)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return of


def test_command_line_wins_over_the_file_and_the_file_over_the_recipe(given):
    given["recipe"] = {"name": "flow_grpo", "rollout.steps": 6, "objective.clip_low": 2e-4}
    run = from_dict(given, ["recipe.rollout.steps=7", "seed=11", "budget.updates=3", "output=runs/x"])
    recipe = run.build_recipe()
    assert (recipe.rollout.steps, recipe.rollout.roots) == (7, 16)
    assert recipe.objective.numbers["clip_low"] == 2e-4 and recipe.objective.numbers["clip_high"] == 1e-4
    assert (run.seed, run.budget.updates, run.output) == (11, 3, "runs/x")


def test_nested_sections_and_dotted_names_mean_the_same(given):
    dotted = {"name": "flow_grpo", "rollout.steps": 5, "penalties.kl_mean_over_s2": 0.1}
    nested = {"name": "flow_grpo", "rollout": {"steps": 5}, "penalties": {"kl_mean_over_s2": 0.1}}
    assert from_dict({**given, "recipe": dotted}).recipe == from_dict({**given, "recipe": nested}).recipe
    assert from_dict({**given, "recipe": nested}, ["recipe.rollout.steps=9"]).build_recipe().rollout.steps == 9


def test_an_override_may_name_a_recipe_that_the_file_gives_as_a_word(given):
    run = from_dict({**given, "recipe": "flow_grpo"}, ["recipe.rollout.steps=5", "recipe.name=flow_cps"])
    assert run.recipe == {"name": "flow_cps", "rollout.steps": 5}


def test_forks_come_as_a_mapping_from_both_sides(given):
    given["recipe"] = {"name": "branch_grpo", "rollout": {"steps": 9, "forks": {0: 2, 4: 3}}}
    assert from_dict(given).build_recipe().rollout.forks == {0: 2, 4: 3}
    assert from_dict(given, ["recipe.rollout.forks={1: 4}"]).build_recipe().rollout.forks == {1: 4}


@pytest.mark.parametrize("text", ["1e-5", "'1e-5'", "0.00001", "1.0e-5"])
def test_1e_5_is_a_number_whatever_yaml_thinks(given, text):
    run = from_dict(given, [f"optimizer.learning_rate={text}", f"recipe.objective.clip_low={text}"])
    assert run.optimizer.learning_rate == 1e-5 == run.build_recipe().objective.numbers["clip_low"]


def test_a_reward_may_be_just_its_weight_and_null_takes_it_out(given):
    given["rewards"] = {"jpeg_size": 2, "shapes": {"weight": {"strict": 1.0, "soft": 0.0}}}
    run = from_dict(given, ["rewards.shapes=null", "rewards.jpeg_size.on_error=mask"])
    assert list(run.rewards) == ["jpeg_size"]
    assert run.rewards["jpeg_size"].weight == 2 and run.rewards["jpeg_size"].on_error == "mask"


def test_what_is_dumped_loads_again_unchanged(given, tmp_path):
    given["recipe"] = {"name": "branch_grpo", "rollout.steps": 9, "rollout.forks": {0: 2, 4: 3}}
    given["optimizer"] = {"betas": [0.8, 0.99], "ema": 0.9}
    run = from_dict(given)
    (tmp_path / "again.yaml").write_text(dump(run), encoding="utf-8")
    again = load(tmp_path / "again.yaml")
    assert again.build_recipe() == run.build_recipe()
    assert again.model_dump(exclude={"recipe"}) == run.model_dump(exclude={"recipe"})


def test_shipped_run_files_load_and_build():
    files = sorted((ROOT / "scripts" / "configs").glob("*.yaml"))
    assert "quickstart" in {file.stem for file in files}
    for file in files:
        run = load(file)
        assert run.build_recipe().rollout.steps > 0 and load(file.stem) == run and run.output.startswith("runs/")


def test_a_path_here_wins_over_one_that_came_with_flowrl(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve("assets/shapes") == ROOT / "assets" / "shapes"
    (tmp_path / "assets" / "shapes").mkdir(parents=True)
    assert resolve("assets/shapes").resolve() == (tmp_path / "assets" / "shapes").resolve()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("learning_rate=1e-4", ["learning_rate: no such setting.", "There is 'optimizer.learning_rate'."]),
        ("num-epochs=3", ["num-epochs: no such setting.", "Settings here: model, data,"]),
        ("model.loar.rank=8", ["model.loar: no such setting.", "Did you mean 'lora'?"]),
        ("model.lora.rnak=8", ["model.lora.rnak", "Did you mean 'rank'?", "Settings here: rank, alpha, targets."]),
        ("budget.micro_batches=8", ["budget.micro_batches", "Did you mean 'micro_batch'?"]),
        ("budget.seed=8", ["budget.seed: no such setting."]),
        ("rewards.redness.wieght=1", ["rewards.redness.wieght", "Did you mean 'weight'?", "on_error"]),
        ("model.dtype=bf16", ["model.dtype = 'bf16'", "Did you mean 'bfloat16'?", "Accepted: auto, float32,"]),
        ("model.train=lroa", ["model.train = 'lroa'", "Did you mean 'lora'?", "Accepted: lora, full."]),
        ("rewards.redness.on_error=ignore", ["rewards.redness.on_error = 'ignore'", "raise, mask"]),
        ("optimizer.schedule=cosin", ["optimizer.schedule", "Did you mean 'cosine'?"]),
        ("budget.updates=many", ["budget.updates = 'many'", "integer"]),
        ("budget.updates=2.5", ["budget.updates = 2.5", "integer"]),
        ("budget.updates=0", ["budget.updates = 0", "greater than or equal to 1"]),
        ("optimizer.learning_rate=fast", ["optimizer.learning_rate = 'fast'", "number"]),
        ("optimizer.learning_rate=.nan", ["optimizer.learning_rate = nan", "finite"]),
        ("optimizer.learning_rate=-1", ["optimizer.learning_rate = -1", "greater than 0"]),
        ("optimizer.ema=1", ["optimizer.ema = 1", "less than 1"]),
        ("optimizer.betas=[0.9]", ["optimizer.betas"]),
        ("evaluation.guidance=0.5", ["evaluation.guidance = 0.5", "greater than or equal to 1"]),
        ("data.tags=count", ["data.tags = 'count': expected a list"]),
        ("model=elsewhere", ["model = 'elsewhere': expected a section"]),
        ("output=null", ["output = None"]),
        ("recipe=null", ["recipe = None", "name of a recipe"]),
        ("recipe.name=null", ["expected the name of a recipe"]),
        ("rewards=jpeg_size", ["rewards = 'jpeg_size'"]),
        ("rewards=[jpeg_size]", ["rewards = ['jpeg_size']"]),
        ("rewards.redness=much", ["rewards.redness = 'much': expected a section"]),
        ("rewards.redness.weight=much", ["rewards.redness.weight = 'much'", "number"]),
        ("rewards.redness.weight=[1, 2]", ["rewards.redness.weight = [1, 2]"]),
        ("seed", ["'seed': expected key=value"]),
        ("=3", ["'=3': expected key=value"]),
        ("budget.updates=[1", ["budget.updates=[1", "not YAML"]),
    ],
)
def test_a_wrong_override_is_named_with_what_is_accepted(fault, override, said):
    """C94: nothing unknown, misplaced or of another type is ignored."""
    message = fault(override)
    assert all(words in message for words in said), message


@pytest.mark.parametrize(
    "override", ["seed=yes", "budget.updates=true", "optimizer.learning_rate=on", "rewards.redness.weight=true"]
)
def test_yes_is_not_the_number_one(fault, override):
    """C94: YAML turns yes, on and true into a truth value, which Python would count as 1."""
    assert override.partition("=")[0] in (message := fault(override)) and "True" in message


@pytest.mark.parametrize("missing", ["model", "data", "rewards", "recipe", "output"])
def test_a_missing_section_is_named(given, missing):
    del given[missing]
    with pytest.raises(ValueError, match=f"^{missing}"):
        from_dict(given)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.train=full"], "model.lora has no effect with model.train = full"),
        (["evaluation.others=4"], "evaluation.others has no effect without data.tags"),
        (["optimizer.ema_every=2"], "optimizer.ema_every has no effect without optimizer.ema"),
        (["rewards={}"], "at least one reward is needed"),
    ],
)
def test_settings_that_are_wrong_together_are_refused(fault, overrides, said):
    assert said in fault(*overrides)


def test_a_tab_in_the_file_is_named_by_line_and_column(tmp_path):
    """C94."""
    (tmp_path / "tab.yaml").write_text("model:\n\tpath: x\n")
    with pytest.raises(ValueError, match=r"tab\.yaml, line 2, column 1: not YAML: .*'\\t'"):
        load(tmp_path / "tab.yaml")


@pytest.mark.parametrize(("text", "said"), [(b"", "NoneType"), (b"- a\n", "list"), (b"output: caf\xe9\n", "UTF-8")])
def test_a_file_that_is_no_mapping_of_text_is_named(tmp_path, text, said):
    (tmp_path / "odd.yaml").write_bytes(text)
    with pytest.raises(ValueError, match=said) as caught:
        load(tmp_path / "odd.yaml")
    assert "odd.yaml" in str(caught.value)


def test_a_key_given_twice_is_refused(tmp_path, given):
    text = yaml.safe_dump(given) + "seed: 1\nseed: 2\n"
    (tmp_path / "twice.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"twice\.yaml.*'seed'.*twice"):
        load(tmp_path / "twice.yaml")


def test_an_unknown_run_file_is_told_from_those_that_came_with_flowrl():
    with pytest.raises(ValueError, match=r"'quickstrat': no such file\. Did you mean 'quickstart'\?"):
        load("quickstrat")
