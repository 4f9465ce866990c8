"""What a run file may hold, by section.  Defaults are the field's."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from flowrl.changes import changed
from flowrl.recipe import Recipe
from flowrl.recipes import find

Positive = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value, info):
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation is not bool:
            raise ValueError("is a truth value (as yes and on are in YAML), expected something else")
        return value


class Lora(Section):
    """Low-rank adapters; published runs on SD3 use rank 32, alpha 64 on the attention layers."""

    rank: Positive = 32
    alpha: Rate = 64.0
    targets: tuple[str, ...] | None = None  # module names by their end; default: the attention layers


class Model(Section):
    path: str  # folder of a saved diffusers pipeline
    adapter: str | None = None  # my_package.my_file:MyFamily, for a class of pipelines that flowrl does not know
    train: Literal["lora", "full"] = "lora"
    lora: Lora | None = None  # only with train: lora
    init_adapter: str | None = None  # folder of an adapter to start from: a warm start, not a resumed run
    # of arithmetic and frozen weights; auto: float32 on a CPU, else bfloat16, and of a loaded pipeline its own
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    size: Positive | tuple[Positive, Positive] | None = None  # pixels: of a side, or (height, width)
    frames: Positive | None = None  # of a video
    guidance_2: Rate | None = None  # of the second expert of a model that has two; default: the first's
    # the schedule of pipe(num_inference_steps) or of pipe(sigmas=linspace(1, 1/steps, steps))
    # or a shift: that of even steps from 1 to 0. Default of this and the above: the pipeline's own
    grid: Literal["pipeline", "linear"] | Annotated[float, Field(gt=0)] | None = None
    max_sequence_length: Annotated[int, Field(ge=0)] | None = None  # text tokens, as in pipe(...)
    attention: Literal["native", "xformers", "flash"] = "native"  # diffusers' backends; the others need a GPU
    compile: Literal["inductor", "aot_eager"] | None = None  # torch.compile
    # frozen weights; only with train: lora
    quantize: Literal["bitsandbytes_4bit", "bitsandbytes_8bit", "torchao_8bit"] | None = None
    offload: bool = False  # text encoders and autoencoder on the device only while they work
    cache: str | None = None  # folder of encoded texts, for all runs of this model
    vae_tiling: bool = False  # decode a large picture in tiles
    vae_slicing: bool = False  # decode one picture of a batch at a time
    gradient_checkpointing: bool = False  # compute activations twice instead of keeping them


class Data(Section):
    train: str  # .txt with a prompt per line, or .jsonl with "prompt" and metadata
    test: str | None = None  # held-out prompts of the same form; default: train
    tags: tuple[str, ...] | None = None  # train on the prompts whose metadata "tag" is one of these
    balance: bool = False  # take the tags in turn, in training and evaluation; a rare one is gone through more often


class RewardSetting(Section):
    weight: float | dict[str, float] = 1.0  # 0: evaluated, never trained; a dict names the components of the answer
    on_error: Literal["raise", "mask"] = "raise"
    deadline: Rate = 600.0  # seconds for one call; a reward that hangs ends the run
    function: str | None = None  # my_package.my_file:my_function; default: the built-in reward of this name
    numbers: dict[str, object] = {}  # what the reward's load() takes


class Budget(Section):
    updates: Positive = 100
    prompts_per_update: Positive = 8
    batch_size: Positive = 64  # rows per network call of a rollout
    micro_batch: Positive = 64  # network calls per backward pass


class Optimizer(Section):
    name: Literal["adamw", "adamw_8bit"] = "adamw"  # 8 bit: moments in a quarter of the memory, by bitsandbytes
    learning_rate: Rate = 3e-4
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: Annotated[int, Field(ge=0)] = 0  # updates
    max_grad_norm: Rate = 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: Annotated[float, Field(ge=0)] = 1e-4
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None  # decay of the averaged weights that are evaluated and saved
    ema_every: Positive = 1  # updates


class Evaluation(Section):
    every: Positive | None = None  # updates; default: before the first and after the last
    prompts: Positive = 256  # of the held-out file, spread over it
    others: Annotated[int, Field(ge=0)] = 0  # held-out prompts of tags that are not trained, printed beside
    samples: Positive = 1  # pictures per prompt; diversity needs 2
    steps: Positive | None = None  # default: those of the rollout
    guidance: Annotated[float, Field(ge=1)] | None = None  # default: that of the rollout
    pictures: Positive = 24  # in the grid
    seed: int = 0  # of the fixed noise
    patience: Positive | None = None  # evaluations without a new best after which the run ends


class Checkpoint(Section):
    every: Positive = 10  # updates; the start, every new best and the last update are written as well
    keep: Positive = 2  # the last ones, beside the best
    best: str | None = None  # eval/NAME, higher is better; default: the weighted total of the evaluation's rewards


class Log(Section):
    """Where the log goes besides metrics.jsonl and samples/; needs the extra `track`."""

    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()  # wandb stays offline unless WANDB_MODE says otherwise

    @field_validator("trackers")
    @classmethod
    def _each_once(cls, trackers):
        if len(set(trackers)) < len(trackers):
            raise ValueError("names a tracker twice")
        return trackers


class Together(Section):
    """Of several processes; how many there are, the launcher says."""

    timeout: Positive = 1800  # seconds in which every process must reach a sum or a table; then the run ends


class Run(Section):
    """A run, resolved.  `recipe` holds "name" and changes by dotted name."""

    model: Model
    data: Data
    rewards: dict[str, RewardSetting]
    recipe: dict[str, object]
    budget: Budget = Budget()
    optimizer: Optimizer = Optimizer()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    processes: Together = Together()
    log: Log = Log()
    output: str
    seed: int = 0
    profile: bool = False  # log the share of time per part

    def build_recipe(self) -> Recipe:
        changes = {key: value for key, value in self.recipe.items() if key != "name"}
        return changed(find(str(self.recipe["name"]))(), changes).check()
