"""Stable Diffusion 3 and 3.5 as a Policy.

The transformer takes timestep = 1000 * sigma and predicts the velocity; latents are [B, C, H/8, W/8].
arXiv:2403.03206
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import Tensor, nn

from flowrl.recipe import Snapshot
from flowrl.visual.pipelines.folders import quiet, read_index
from flowrl.visual.pipelines.lora import add_lora, load_lora, lora_weights, merge_lora, save_lora, without_lora
from flowrl.visual.policy import Example, ShareOut, Snapshots

ATTENTION = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")
TARGETS = (*ATTENTION, "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out")  # Flow-GRPO's
BLOCKS = ("JointTransformerBlock", "SD3SingleTransformerBlock")  # gathered one at a time where weights are sharded
GRIDS = ("pipeline", "linear")
CACHE_BYTES = 2**32  # of encoded texts in host memory; about 2,500 prompts of SD3 with 128 T5 tokens


@dataclass(frozen=True)
class Encoded:
    """One text as the transformer reads it: tokens [L, D] and pooled [D], kept on the CPU."""

    tokens: Tensor
    pooled: Tensor


class SD3Policy:
    """Policy over a StableDiffusion3Pipeline: LoRA (rank > 0) or full weights, fp32 where it is trained.

    pipe:                loaded pipeline; its transformer is trained in place
    size:                pixels of a side, by default the pipeline's own
    grid:                "pipeline" is the schedule of `pipe(num_inference_steps=T)` (SD3 shifts it twice), "linear"
                         that of `pipe(sigmas=linspace(1, 1/T, T))`
    max_sequence_length: T5 tokens, as in `pipe(max_sequence_length=...)`; without T5 they are zeros
    batch_size:          rows per autoencoder call
    """

    def __init__(
        self,
        pipe: StableDiffusion3Pipeline,
        *,
        rank: int,
        alpha: float,
        targets: Sequence[str] = TARGETS,
        size: int | None = None,
        grid: str = "pipeline",
        max_sequence_length: int = 256,
        gradient_checkpointing: bool = False,
        batch_size: int = 64,
        seed: int = 0,
    ):
        _check(pipe, grid)
        self.pipe, self.grid, self.batch_size = pipe, grid, batch_size
        self.max_sequence_length = max_sequence_length
        self.device = pipe.vae.device  # asking diffusers walks all modules
        self.dtype, self._vae_dtype = pipe.transformer.dtype, pipe.vae.dtype
        self.guidance = 1.0
        self.forwards = self.backwards = 0
        side = _side(pipe, size)
        self.shape = (pipe.transformer.config.in_channels, *[side // pipe.vae_scale_factor] * 2)
        self._training = pipe.transformer.training
        for module in (pipe.transformer, pipe.vae, pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3):
            if module is not None:
                module.eval().requires_grad_(False)  # dropout off in rollout, training and evaluation alike
        _cast(pipe.vae, torch.float32)  # half-precision decoders overflow
        if rank:
            add_lora(pipe.transformer, rank=rank, alpha=alpha, targets=targets, seed=seed)
        else:
            pipe.transformer.float().requires_grad_(True)
        if gradient_checkpointing:
            pipe.transformer.enable_gradient_checkpointing()  # diffusers' own, non-reentrant
        self.rank, self.sharded = rank, False
        self.snapshots = self._snapshots()
        self._ids: dict[tuple[str, str], int] = {}
        self._texts: dict[str, Encoded] = {}

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.pipe.transformer.named_parameters() if p.requires_grad]

    def _snapshots(self):
        base = (lambda: without_lora(self.pipe.transformer)) if self.rank else None
        return Snapshots([p for _, p in self.trainable()], base, pinned=self.sharded)

    def distribute(self, share_out: ShareOut) -> None:
        """Share out the transformer's weights; what is frozen beside it stays whole on every process."""
        share_out(self.pipe.transformer, BLOCKS)
        self.sharded = True
        self.snapshots = self._snapshots()

    def encode(self, examples: Sequence[Example]) -> Tensor:
        """Prompt ids [P]; texts are encoded once and kept on the CPU, those of this call are moved to the device.

        `velocity` accepts the ids of the latest call only. Negative prompts are not encoded without guidance.
        """
        guided = self.guidance > 1
        pairs = [(e.prompt, e.negative_prompt) for e in examples]
        wanted = [text for pair in pairs for text in pair[: 2 if guided else 1]]
        self._forget_texts(set(wanted))
        self._encode_texts([text for text in dict.fromkeys(wanted) if text not in self._texts])
        ids = [self._ids.setdefault(pair, len(self._ids)) for pair in pairs]
        active = dict(zip(ids, pairs, strict=True))
        self._row = torch.full((len(self._ids),), torch.iinfo(torch.long).max, device=self.device)
        self._row[torch.tensor(list(active), device=self.device)] = torch.arange(len(active), device=self.device)
        self._prompts = self._stack([prompt for prompt, _ in active.values()])
        self._negatives = self._stack([negative for _, negative in active.values()]) if guided else None
        return torch.tensor(ids)

    def _forget_texts(self, wanted):
        """Keep the cache within CACHE_BYTES: beyond that, only what is wanted now stays."""
        size = sum(e.tokens.nbytes + e.pooled.nbytes for e in self._texts.values())
        if size > CACHE_BYTES:
            self._texts = {text: e for text, e in self._texts.items() if text in wanted}

    @torch.no_grad()
    def _encode_texts(self, texts):
        """One by one: in a batch, the last bits of an embedding depend on its neighbours, and so on the run's past."""
        settings = {"device": self.device, "max_sequence_length": self.max_sequence_length}
        settings |= {"prompt_2": None, "prompt_3": None, "do_classifier_free_guidance": False}
        for text in texts:
            tokens, _, pooled, _ = self.pipe.encode_prompt(prompt=[text], **settings)
            self._texts[text] = Encoded(tokens[0].cpu(), pooled[0].cpu())

    def _stack(self, texts):
        encoded = [self._texts[text] for text in texts]
        columns = (torch.stack([getattr(e, name) for e in encoded]) for name in ("tokens", "pooled"))
        return tuple(x.to(self.device, non_blocking=True) for x in columns)

    def warnings(self, examples: Sequence[Example]) -> list[str]:
        """What the tokenizers cannot read of these prompts, counted: one line per kind of trouble."""
        tokenizer, limit = self.pipe.tokenizer, self.pipe.tokenizer.model_max_length
        tokens = [(e.prompt, tokenizer(e.prompt).input_ids) for e in examples]
        known = tokenizer.unk_token_id == tokenizer.eos_token_id  # CLIP's own has no unknown word
        troubles = {
            f"exceed the tokenizer's {limit} tokens; cut there": [p for p, ids in tokens if len(ids) > limit],
            "have words that the tokenizer does not know": [
                p for p, ids in tokens if not known and tokenizer.unk_token_id in ids[1:-1]
            ],
        }
        return [
            f"{len(found)} of {len(examples)} prompts {trouble}. First: {found[0][:60]!a}"
            for trouble, found in troubles.items()
            if found
        ]

    def noise(self, n: int, generator: torch.Generator) -> Tensor:
        return torch.randn(n, *self.shape, generator=generator).to(self.device, non_blocking=True)

    def sigmas(self, steps: int) -> Tensor:
        """The pipeline's own schedule, made by its scheduler: fp32 [steps + 1] on the CPU."""
        scheduler, extra = copy.deepcopy(self.pipe.scheduler), {}
        if scheduler.config.get("use_dynamic_shifting"):
            extra["mu"] = self._mu(scheduler.config)
        if self.grid == "linear":
            scheduler.set_timesteps(sigmas=torch.linspace(1, 1 / steps, steps).tolist(), **extra)
        else:
            scheduler.set_timesteps(steps, **extra)
        return scheduler.sigmas.cpu().float()

    def _mu(self, config):
        """Resolution-dependent shift: linear in the number of image tokens."""
        patch = self.pipe.transformer.config.patch_size
        tokens = (self.shape[1] // patch) * (self.shape[2] // patch)
        low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
        least, most = config.get("base_shift", 0.5), config.get("max_shift", 1.16)
        return least + (most - least) * (tokens - low) / (high - low)

    def velocity(self, latents: Tensor, sigma: Tensor, prompt: Tensor) -> Tensor:
        row = self._row[prompt.to(self.device, non_blocking=True)]
        tokens, pooled = (x[row] for x in self._prompts)
        if guided := self.guidance > 1:
            unconditional = (x[row] for x in self._negatives)
            tokens, pooled = (torch.cat(pair) for pair in zip(unconditional, (tokens, pooled), strict=True))
            latents, sigma = torch.cat([latents, latents]), torch.cat([sigma, sigma])
        self.forwards += len(latents)
        self.backwards += len(latents) * torch.is_grad_enabled()
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            out = self.pipe.transformer(
                hidden_states=latents.to(self.dtype),
                timestep=1000 * sigma,
                encoder_hidden_states=tokens,
                pooled_projections=pooled,
                return_dict=False,
            )[0].float()
        if not guided:
            return out
        negative, positive = out.chunk(2)
        return negative + self.guidance * (positive - negative)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Pictures [N, 3, H, W] in [0, 1], rounded to 8 bits once so that every reward sees what a file would hold."""
        config, pictures = self.pipe.vae.config, []
        for chunk in latents.split(self.batch_size):
            raw = self.pipe.vae.decode(chunk / config.scaling_factor + config.shift_factor, return_dict=False)[0]
            pictures.append(((raw.float() / 2 + 0.5).clamp(0, 1) * 255).round() / 255)
        return torch.cat(pictures)

    def snapshot(self, name: str, rule: Snapshot, update: int) -> None:
        self.snapshots.refresh(name, rule, update)

    def at(self, name: str):
        return self.snapshots.at(name)

    def finish(self, name: str) -> None:
        """Leave the pipeline to its owner: the weights of snapshot `name` for good, its own dtypes and mode.

        Shards stay shards, in fp32: the whole weights are in the folder that was saved.
        """
        self.snapshots.adopt(name)
        _cast(self.pipe.vae, self._vae_dtype)
        if not (self.rank or self.sharded):
            _cast(self.pipe.transformer, self.dtype)
        self.pipe.transformer.train(self._training)

    @property
    def folder(self) -> str:
        """Name of what `save` writes: "adapter" or "model"."""
        return "adapter" if self.rank else "model"

    def weights(self) -> dict[str, Tensor]:
        """What `save` writes, of the weights in force; where they are sharded, the parts of this process."""
        return lora_weights(self.pipe) if self.rank else self.pipe.transformer.state_dict()

    def save(self, directory: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Write weights so that plain diffusers loads them: a LoRA file, or a whole pipeline.

        weights: those that `weights` returned, put together; by default those in force
        """
        weights = self.weights() if weights is None else weights
        if self.rank:
            save_lora(self.pipe, directory, weights)
        else:
            with torch.device("meta"):
                transformer = SD3Transformer2DModel.from_config(self.pipe.transformer.config)
            transformer.load_state_dict(weights, assign=True)
            type(self.pipe)(**{**self.pipe.components, "transformer": transformer}).save_pretrained(directory)

    def merge(self) -> None:
        """Make the adapter part of the base's weights; `save` writes a whole pipeline from here on."""
        merge_lora(self.pipe)
        self.rank = 0

    def load(self, directory: Path) -> None:
        """Take the weights of a folder that `save` wrote."""
        if self.rank:
            load_lora(self.pipe, directory)
        else:
            read_index(directory, "weights")
            trained = SD3Transformer2DModel.from_pretrained(directory / "transformer", local_files_only=True)
            self.pipe.transformer.load_state_dict(trained.state_dict())


def accept(pipe: object) -> None:
    """ValueError unless this is a pipeline that training can take over."""
    if not isinstance(pipe, StableDiffusion3Pipeline):
        raise ValueError(
            f"model is a {type(pipe).__name__}: accepted is StableDiffusion3Pipeline, or the folder of one."
        )
    if pipe.get_list_adapters():
        raise ValueError(
            f"the pipeline carries adapters already ({pipe.get_list_adapters()}): fuse them with pipe.fuse_lora() "
            "and pipe.unload_lora_weights(), or load the base alone."
        )


def _check(pipe, grid):
    """Refuse a pipeline or a schedule that training could not follow."""
    if not isinstance(pipe.scheduler, FlowMatchEulerDiscreteScheduler):
        raise ValueError(
            f"scheduler {type(pipe.scheduler).__name__}: accepted is FlowMatchEulerDiscreteScheduler, whose sigmas "
            "are the flow's."
        )
    if grid not in GRIDS:
        raise ValueError(f"model.grid = {grid!r}: accepted are {', '.join(GRIDS)}.")


def _side(pipe, size):
    """Pixels of a side that the transformer can draw."""
    side = size or pipe.default_sample_size * pipe.vae_scale_factor
    patch = pipe.vae_scale_factor * pipe.transformer.config.patch_size
    largest = patch * pipe.transformer.config.pos_embed_max_size
    if side % patch or side > largest:
        raise ValueError(f"model.size = {side}: accepted are multiples of {patch} up to {largest}.")
    return side


def _cast(module, dtype):
    """Change the dtype where it is another; diffusers warns of a cast even when it changes nothing."""
    if module.dtype != dtype:
        module.to(dtype)


def load(path: str | Path, *, dtype: torch.dtype, device: torch.device, sharded: bool = False, **settings) -> SD3Policy:
    """Policy over the pipeline saved in the folder `path`; encoders that it was saved without stay away.

    sharded: leave the transformer on the CPU, for `distribute` to share out
    """
    index = read_index(Path(path))
    quiet()
    absent = {name: None for name, entry in index.items() if isinstance(entry, list) and entry[0] is None}
    try:
        pipe = StableDiffusion3Pipeline.from_pretrained(path, dtype=dtype, local_files_only=True, **absent)
    except Exception as error:  # whatever a missing, truncated or foreign file raises
        said = " ".join(str(error).split())
        raise ValueError(f"model.path = {str(path)!r} cannot be loaded: {type(error).__name__}: {said}") from error
    pipe.set_progress_bar_config(disable=True)
    return SD3Policy(_placed(pipe, device, sharded), **settings)


def adopt(pipe: object, device: torch.device, sharded: bool = False, **settings) -> SD3Policy:
    """Policy over a pipeline that is loaded already."""
    accept(pipe)
    return SD3Policy(_placed(pipe, device, sharded), **settings)


def _placed(pipe, device, sharded):
    """The pipeline on the device; the transformer stays where it is if it is to be sharded."""
    for name, module in pipe.components.items():
        if isinstance(module, nn.Module) and not (sharded and name == "transformer"):
            module.to(device)
    return pipe


def count_trainable(path: Path, *, rank: int, targets: Sequence[str]) -> int:
    """Trainable parameters of a pipeline folder, from its configuration alone: no weight is read."""
    read_index(path)
    with torch.device("meta"):
        transformer = SD3Transformer2DModel.from_config(SD3Transformer2DModel.load_config(path / "transformer"))
    if rank:
        add_lora(transformer, rank=rank, alpha=1.0, targets=targets, seed=0)
    return sum(p.numel() for p in transformer.parameters() if p.requires_grad)
