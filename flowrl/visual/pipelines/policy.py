"""A diffusers pipeline as a Policy, whatever its family: trained weights, snapshots, texts, guidance, pictures."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from diffusers.utils import load_image
from torch import Tensor, nn

from flowrl.recipe import Snapshot
from flowrl.visual.pipelines import execution, parts
from flowrl.visual.pipelines.family import Family, Text
from flowrl.visual.pipelines.folders import read_index
from flowrl.visual.pipelines.lora import add_lora, load_lora, lora_weights, merge_lora, save_lora, without_lora
from flowrl.visual.pipelines.texts import Texts
from flowrl.visual.policy import Example, ShareOut, Snapshots


class PipelinePolicy:
    """Policy over a pipeline: LoRA (rank > 0) or full weights, fp32 where they are trained.

    family:     the pipeline and how it draws; its networks are trained in place
    dtype:      of the networks' arithmetic, and of their weights where they are frozen
    targets:    of LoRA; by default the family's
    grid:       see Family.sigmas, or a shift of even steps; by default the first of the family's
    batch_size: rows per autoencoder call
    attention, compile: see flowrl.visual.pipelines.execution
    quantized:  the networks were loaded so; they stay as they are
    offload:    keep the text encoders and the autoencoder off the device while nobody asks for them
    cache:      folder of encoded texts
    device:     of the run; by default where the networks are
    vae_dtype:  of the autoencoder when the pipeline is left to its owner; by default its own. It works in fp32
    """

    def __init__(
        self,
        family: Family,
        *,
        dtype: torch.dtype,
        rank: int,
        alpha: float,
        targets: Sequence[str] | None = None,
        grid: str | float | None = None,
        gradient_checkpointing: bool = False,
        batch_size: int = 64,
        seed: int = 0,
        attention: str = "native",
        compile: str | None = None,
        quantized: bool = False,
        offload: bool = False,
        cache: Path | None = None,
        vae_tiling: bool = False,
        vae_slicing: bool = False,
        device: torch.device | None = None,
        vae_dtype: torch.dtype | None = None,
    ):
        if attention == "flash" and family.MASKED:
            raise ValueError(
                f"model.attention = flash takes no mask, and {family.PIPELINE} masks texts of different lengths. "
                "Accepted here: native, xformers."
            )
        family.walk(2, grid)  # a scheduler without noise levels is refused before anything else, and a grid
        self.grid = grid
        pipe = self.pipe = family.pipe
        self.family, self.batch_size, self.dtype = family, batch_size, dtype
        self._vae = [pipe.vae] if hasattr(pipe, "vae") else []  # a model of pixels has none
        self._vae_dtypes = [vae_dtype or vae.dtype for vae in self._vae]
        self.device = device or next(iter(parts.networks(pipe, family.NETWORKS).values())).device  # diffusers walks all
        self.guidance, self.forwards, self.backwards = 1.0, 0, 0
        self.shape, self._embedded = family.shape(), family.embeds_guidance()
        self.networks = parts.networks(pipe, family.NETWORKS)
        self._training = {name: network.training for name, network in self.networks.items()}
        for module in parts.modules(pipe):
            module.eval().requires_grad_(False)  # dropout off in rollout, training and evaluation alike
        for vae in self._vae:
            parts.cast(vae, torch.float32)  # half-precision decoders overflow
            if vae_tiling:
                vae.enable_tiling()
            if vae_slicing:
                vae.enable_slicing()
        for network in self.networks.values():
            if rank:
                if not quantized:
                    parts.cast(network, dtype)
                chosen, unread = targets or family.TARGETS, family.unread(network)
                add_lora(network, rank=rank, alpha=alpha, targets=chosen, seed=seed, unread=unread)
            else:
                parts.thaw(network.float(), family.unread(network))
            if gradient_checkpointing:
                network.enable_gradient_checkpointing()  # diffusers' own, non-reentrant
            if dtype != torch.float32:
                parts.compute_under_autocast(network, self.device)
            execution.set_attention(network, attention, self.device)
            if compile is not None:
                execution.compile_in_place(network, compile)
        self.rank, self.sharded, self._offload = rank, False, offload
        self.snapshots = self._snapshots()
        self._ids: dict[tuple, int] = {}
        self._texts, self._active = Texts(self._encode, cache, self._encoders_near), {}

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """Under the names that the network gives them; where there are several networks, after the network's."""
        pairs = [(n, pair) for n, network in self.networks.items() for pair in network.named_parameters()]
        return [(self._named(n, name), p) for n, (name, p) in pairs if p.requires_grad]

    def _named(self, network, name):
        return name if len(self.networks) == 1 else f"{network}.{name}"

    def _of_network(self, weights):
        """{network: its part of `weights`}, under its own names."""
        starts = {network: self._named(network, "") for network in self.networks}
        return {
            network: {name.removeprefix(start): x for name, x in weights.items() if name.startswith(start)}
            for network, start in starts.items()
        }

    def _snapshots(self):
        base = (lambda: without_lora(self.networks.values())) if self.rank else None
        return Snapshots([p for _, p in self.trainable()], base, pinned=self.sharded)

    def distribute(self, share_out: ShareOut) -> None:
        """Share out the networks' weights; what is frozen beside them stays whole on every process."""
        for network in self.networks.values():
            share_out(network, self.family.BLOCKS)
        self.sharded = self.family.sharded = True
        self.snapshots = self._snapshots()

    @property
    def frames(self) -> int:
        """Of a sample; 1: it is a picture."""
        return self.family.frames

    # Texts

    @property
    def pairs(self) -> bool:
        """Whether guidance above 1 is a pair of rows, not an input of the network."""
        return not self._embedded

    @property
    def rows_per_state(self) -> int:
        """2 where classifier-free guidance asks for a pair."""
        return 2 if self.guidance > 1 and self.pairs else 1

    def encode(self, examples: Sequence[Example]) -> Tensor:
        """Prompt ids [P]; texts are encoded once and kept on the CPU, those of this call are moved to the device.

        `velocity` accepts the ids of the latest call only. Negative prompts are not encoded without guidance.
        """
        if self.guidance > 1 and not self.family.GUIDED:
            raise ValueError(
                f"guidance = {self.guidance:g}: this {self.family.PIPELINE} draws without guidance; accepted is 1."
            )
        pictures = [self._pictures(e) for e in examples]
        seen = zip(examples, pictures, strict=True)
        other = type(self.family).encode_negative is not Family.encode_negative  # else a text is a text
        pairs = [((e.prompt, files, False), (e.negative_prompt, files, other)) for e, files in seen]
        ids = [self._ids.setdefault(pair, len(self._ids)) for pair in pairs]
        keys = list(dict.fromkeys(key for pair in pairs for key in pair[: self.rows_per_state]))
        moved = {key: self._moved(text) for key, text in zip(keys, self._texts.get(keys), strict=True)}
        self._active = {
            i: [moved[key] for key in pair[: self.rows_per_state]] for i, pair in zip(ids, pairs, strict=True)
        }
        buckets = {self.family.bucket(positive) for positive, *_ in self._active.values()}
        if self.sharded and len(buckets) > 1:
            raise ValueError(
                f"the pictures that condition these prompts have {len(buckets)} sizes, and sharded weights are "
                "gathered for one at a time. Give them one size, or do without shards."
            )
        return torch.tensor(ids)

    def _pictures(self, example):
        if bool(example.pictures) != self.family.CONDITIONED:
            raise ValueError(
                f"{self.family.PIPELINE} {'edits pictures' if self.family.CONDITIONED else 'takes no picture'}: the "
                f"prompt {example.prompt[:60]!a} comes with {len(example.pictures) or 'none'} in its column `image`."
            )
        return example.pictures

    @torch.no_grad()
    def _encode(self, key):
        text, files, negative = key
        encode = self.family.encode_negative if negative else self.family.encode
        return encode(text, [load_image(file) for file in files], self.device)

    def _encoders_near(self):
        """All but the autoencoder, where that encodes no pictures."""
        return self._near(*(m for m in parts.modules(self.pipe) if self.family.CONDITIONED or m not in self._vae))

    def _moved(self, text: Text) -> Text:
        return {name: x.to(self.device, non_blocking=True) for name, x in text.items()}

    @contextmanager
    def _near(self, *modules):
        """These modules on the device, and off it again if they are offloaded; the networks are there anyway."""
        with ExitStack() as after:
            for module in modules if self._offload else ():
                if not any(module is network for network in self.networks.values()):
                    module.to(self.device)
                    after.callback(module.to, "cpu")
            yield

    def warnings(self, examples: Sequence[Example]) -> list[str]:
        """What the tokenizers cannot read of these prompts, counted: one line per kind of trouble.

        ValueError where a prompt lacks the picture that it edits, or brings one that nobody asks for.
        """
        for example in examples:
            self._pictures(example)
        troubles: dict[str, list[str]] = {}
        for tokenizer, limit in self.family.readers():
            known = tokenizer.unk_token_id in (None, tokenizer.eos_token_id)  # CLIP's own has no unknown word
            for prompt, ids in [(e.prompt, tokenizer(e.prompt).input_ids) for e in examples]:
                if len(ids) > limit:
                    troubles.setdefault(f"exceed the tokenizer's {limit} tokens; cut there", []).append(prompt)
                if not known and tokenizer.unk_token_id in ids[1:-1]:
                    troubles.setdefault("have words that the tokenizer does not know", []).append(prompt)
        return [
            f"{len(found)} of {len(examples)} prompts {trouble}. First: {found[0][:60]!a}"
            for trouble, found in troubles.items()
        ]

    # The flow

    def noise(self, n: int, generator: torch.Generator) -> Tensor:
        return torch.randn(n, *self.shape, generator=generator).to(self.device, non_blocking=True)

    def sigmas(self, steps: int) -> Tensor:
        """The pipeline's own schedule, made by its scheduler, or even steps shifted: fp32 [steps + 1] on the CPU."""
        return self.family.walk(steps, self.grid)

    def velocity(self, latents: Tensor, sigma: Tensor, prompt: Tensor) -> Tensor:
        """One call, or one for each size of the pictures that condition the rows; `prompt` is on the CPU."""
        rows = [self._active[i] for i in prompt.tolist()]
        places: dict[object, list[int]] = {}
        for i, (positive, *_) in enumerate(rows):
            places.setdefault(self.family.bucket(positive), []).append(i)
        if len(places) == 1:
            return self._velocity(latents, sigma, rows)
        found = [self._velocity(latents[at], sigma[at], [rows[i] for i in at]) for at in places.values()]
        back = torch.tensor([i for at in places.values() for i in at]).argsort()
        return torch.cat(found)[back.to(latents.device)]

    def _velocity(self, latents, sigma, rows):
        guided = self.rows_per_state == 2
        texts = [positive for positive, *_ in rows]
        scale = self.family.scale(self.guidance, sigma)
        if guided:
            texts = [negative for _, negative in rows] + texts
            latents, sigma = torch.cat([latents, latents]), torch.cat([sigma, sigma])
        self.forwards += len(latents)
        self.backwards += len(latents) * torch.is_grad_enabled()
        guidance = torch.full_like(sigma, self.guidance) if self._embedded else None
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            out = self.family.velocity(latents.to(self.dtype), sigma, texts, guidance).float()
        return self.family.guide(*out.chunk(2), scale) if guided else out

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Pictures [N, 3, H, W], videos [N, F, 3, H, W], in [0, 1]; rounded to 8 bits once, so that every reward sees
        what a file would hold.
        """
        pictures = []
        with self._near(*self._vae):
            for chunk in latents.split(1 if self.frames > 1 else self.batch_size):
                raw = self.family.decode(chunk).float()
                pictures.append(((raw / 2 + 0.5).clamp(0, 1) * 255).round().byte())
        out = torch.cat(pictures)
        if out.ndim == 5:
            out = out.transpose(1, 2) if self.frames > 1 else out[:, :, 0]
        return out.float() / 255

    # Weights

    def snapshot(self, name: str, rule: Snapshot, update: int) -> None:
        self.snapshots.refresh(name, rule, update)

    def at(self, name: str):
        return self.snapshots.at(name)

    def finish(self, name: str) -> None:
        """Leave the pipeline to its owner: the weights of snapshot `name` for good, its own mode, in one dtype.

        Full weights stay in fp32, as they were evaluated and saved, and the rest follows them. Shards stay shards: the
        whole weights are in the folder that was saved.
        """
        self.snapshots.adopt(name)
        if self.rank or self.sharded:
            for vae, dtype in zip(self._vae, self._vae_dtypes, strict=True):
                parts.cast(vae, dtype)
        else:
            for module in parts.modules(self.pipe):
                parts.cast(module, torch.float32)
        for name, network in self.networks.items():
            parts.compute_as_before(network)
            network.train(self._training[name])

    @property
    def folder(self) -> str:
        """Name of what `save` writes: "adapter" or "model"."""
        return "adapter" if self.rank else "model"

    def weights(self) -> dict[str, Tensor]:
        """What `save` writes, of the weights in force; where they are sharded, the parts of this process."""
        found = {n: lora_weights(x) if self.rank else x.state_dict() for n, x in self.networks.items()}
        return {self._named(n, name): x for n, weights in found.items() for name, x in weights.items()}

    def save(self, directory: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Write weights so that plain diffusers loads them: a LoRA file, or a whole pipeline.

        weights: those that `weights` returned, put together; by default those in force
        """
        of_network = self._of_network(self.weights() if weights is None else weights)
        if self.rank:
            for network, part in of_network.items():
                save_lora(self.pipe, network, directory, part)
        else:
            whole = {name: _rebuilt(self.networks[name], part) for name, part in of_network.items()}
            type(self.pipe)(**{**self.pipe.components, **parts.numbers(self.pipe), **whole}).save_pretrained(directory)

    def merge(self) -> None:
        """Make the adapter part of the base's weights; `save` writes a whole pipeline from here on."""
        merge_lora(self.networks.values())
        self.rank = 0

    def load(self, directory: Path) -> None:
        """Take the weights of a folder that `save` wrote."""
        if self.rank:
            for network in self.networks:
                load_lora(self.pipe, network, directory)
            return
        read_index(directory, self.family.PIPELINE, "weights")
        for name, network in self.networks.items():
            trained = type(network).from_pretrained(directory / name, local_files_only=True)
            network.load_state_dict(trained.state_dict())


def _rebuilt(network, weights):
    """A network of the same configuration that holds `weights`, without a copy of them."""
    with torch.device("meta"):
        rebuilt = type(network).from_config(network.config)
    rebuilt.load_state_dict(weights, assign=True)
    return rebuilt
