"""Build assets/shapes, the embedded text-to-image pipeline, from nothing.

    python scripts/pretrain_shapes.py --out assets/shapes --work /tmp/shapes

Two processes of one thread each render pictures, train an autoencoder and then the flow model, evaluate it and write
the model card.  Kill it at any time; the same command continues from --work and ends with the same weights.
The same seed gives the same weights on the same machine.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import diffusers
import numpy as np
import shapes_data
import torch
import torch.distributed as dist
import transformers
from diffusers import AutoencoderTiny
from safetensors.torch import load_file
from shapes_evaluation import CARD, evaluate, table_of
from shapes_models import (
    TextToVelocity,
    build_autoencoder,
    build_pipeline,
    build_tokenizer,
    load_pipeline,
    save_pipeline,
    token_ids,
)
from shapes_training import Stage, seconds_spent, train, write_safetensors
from torch import Tensor
from torch.nn.functional import l1_loss, mse_loss

PROCESSES = 2
ENCODING_BATCH = 250

LATENT_NOISE = 0.08  # of the latents' own spread, so that the decoder forgives small errors
LATENT_DECAY = 1e-3
CAPTION_DROPOUT = 0.1
ZERO_TOKEN_SHARE = 0.25  # of the rows; the others see no zero token
MAX_ZERO_TOKENS = 256  # diffusers' default max_sequence_length


@dataclass(frozen=True)
class Plan:
    """All that decides the result."""

    seed: int = 0
    pictures: int = 72_000
    autoencoder: Stage = field(
        default_factory=lambda: Stage(
            "autoencoder",
            steps=2500,
            batch=32,
            rate=3e-3,
            warmup=50,
            decay=1250,
            betas=(0.9, 0.99),
            average=0.995,
            save_every=250,
        )
    )
    flow: Stage = field(
        default_factory=lambda: Stage(
            "flow",
            steps=4000,
            batch=64,
            rate=1.2e-3,
            warmup=100,
            decay=1500,
            betas=(0.9, 0.98),
            average=0.9985,
            save_every=250,
        )
    )
    per_kind: int = 120  # pictures of each kind in one row of the evaluation


def tiny(plan: Plan) -> Plan:
    """The same path in seconds; learns nothing."""
    return replace(
        plan,
        pictures=64,
        per_kind=2,
        autoencoder=replace(plan.autoencoder, steps=4, batch=4, warmup=2, decay=2, save_every=2),
        flow=replace(plan.flow, steps=6, batch=4, warmup=2, decay=2, save_every=2),
    )


def autoencoder_loss(autoencoder: AutoencoderTiny, pictures: Tensor):
    """Reconstruction through slightly noisy latents, kept small."""

    def loss(rng: torch.Generator, rows: int) -> Tensor:
        picture = to_signed(pictures[torch.randint(len(pictures), (rows,), generator=rng)])
        latents = autoencoder.encoder(picture)
        noise = torch.randn(latents.shape, generator=rng) * LATENT_NOISE * latents.detach().std()
        decoded = autoencoder.decoder(latents + noise)
        error = l1_loss(decoded, picture) + 2 * mse_loss(decoded, picture)
        return error + LATENT_DECAY * latents.square().mean()

    return loss


def flow_loss(network: TextToVelocity, latents: Tensor, ids: Tensor, no_caption: Tensor):
    """Rectified flow with logit-normal sigma: the network predicts noise - data."""

    def loss(rng: torch.Generator, rows: int) -> Tensor:
        choice = torch.randint(len(latents), (rows,), generator=rng)
        dropped = torch.rand(rows, 1, generator=rng) < CAPTION_DROPOUT
        caption = torch.where(dropped, no_caption, ids[choice].long())
        data, noise = latents[choice], torch.randn(rows, *latents.shape[1:], generator=rng)
        sigma = torch.randn(rows, generator=rng).sigmoid()
        noisy = torch.lerp(data, noise, sigma.view(-1, 1, 1, 1))
        return mse_loss(network(noisy, sigma, caption, draw_zero_tokens(rng, rows)), noise - data)

    return loss


def draw_zero_tokens(rng: torch.Generator, rows: int) -> Tensor:
    """Mostly 0, else log-uniform in 1 .. MAX_ZERO_TOKENS, whole numbers; float [rows]."""
    some = torch.rand(rows, generator=rng) < ZERO_TOKEN_SHARE
    return some * (MAX_ZERO_TOKENS ** torch.rand(rows, generator=rng)).round()


def to_signed(pictures: Tensor) -> Tensor:
    """uint8 0 .. 255 to float -1 .. 1."""
    return pictures.float() / 127.5 - 1


def make_pictures(plan: Plan, work: Path) -> dict[str, Tensor]:
    """Each rank renders its share; all read all: {"pictures": uint8 [N, 3, 32, 32], "ids": uint8 [N, L]}."""
    rank, share = dist.get_rank(), plan.pictures // dist.get_world_size()
    path = work / f"pictures_{rank}.safetensors"
    if not path.exists():
        began, rng = time.monotonic(), np.random.default_rng([plan.seed, rank])
        pictures, prompts = shapes_data.draw_pictures(share, rng)
        ids = token_ids(build_tokenizer(), prompts).to(torch.uint8)
        write_safetensors(path, {"pictures": pictures, "ids": ids}, {"seconds": str(time.monotonic() - began)})
    return read_shares(work, "pictures")


def make_latents(autoencoder: AutoencoderTiny, pictures: Tensor, work: Path) -> Tensor:
    """Latents of mean 0 and spread 1, [N, 4, 8, 8]; tells the autoencoder's config the mean and the spread."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    path = work / f"latents_{rank}.safetensors"
    if not path.exists():
        began, mine = time.monotonic(), pictures.chunk(ranks)[rank]
        with torch.no_grad():
            parts = [autoencoder.encoder(to_signed(part)) for part in mine.split(ENCODING_BATCH)]
        write_safetensors(path, {"latents": torch.cat(parts)}, {"seconds": str(time.monotonic() - began)})
    latents = read_shares(work, "latents")["latents"]
    mean, spread = latents.mean().item(), latents.std().item()
    autoencoder.register_to_config(scaling_factor=1 / spread, shift_factor=mean)
    return (latents - mean) / spread


def read_shares(work: Path, name: str) -> dict[str, Tensor]:
    """What all ranks have written, in rank order."""
    dist.barrier()
    shares = [load_file(work / f"{name}_{rank}.safetensors") for rank in range(dist.get_world_size())]
    return {key: torch.cat([share[key] for share in shares]) for key in shares[0]}


def pretrain(plan: Plan, work: Path, out: Path) -> None:
    """Every stage, on this rank of an initialised process group; done stages are read from `work`."""
    torch.manual_seed(plan.seed)  # diffusers and transformers initialise from the global generator
    data = make_pictures(plan, work)
    autoencoder = build_autoencoder()
    train(
        autoencoder,
        autoencoder_loss(autoencoder, data["pictures"]),
        plan.autoencoder,
        plan.seed,
        work / "autoencoder.safetensors",
    )
    latents = make_latents(autoencoder, data["pictures"], work)
    network, no_caption = TextToVelocity(), token_ids(build_tokenizer(), [""])
    train(
        network, flow_loss(network, latents, data["ids"], no_caption), plan.flow, plan.seed, work / "flow.safetensors"
    )

    if dist.get_rank() == 0:
        out.mkdir(parents=True, exist_ok=True)
        save_pipeline(build_pipeline(network, autoencoder), out)
        shapes_data.write_prompts(out)
    dist.barrier()
    began = time.monotonic()
    results = evaluate_sides(plan, work, out)
    if dist.get_rank() == 0:
        files = {"rendering": "pictures_0", "autoencoder": "autoencoder", "encoding": "latents_0", "flow": "flow"}
        spent = {name: seconds_spent(work / f"{file}.safetensors") for name, file in files.items()}
        spent["evaluation"] = time.monotonic() - began
        write_card(plan, out, results, spent)
        print(table_of(results), flush=True)


def evaluate_sides(plan: Plan, work: Path, out: Path) -> dict[str, dict]:
    """The saved pipeline, read back, on the prompts of both sides; each rank takes its share of the sides."""
    sides = ("test", "train")
    for side in sides[dist.get_rank() :: dist.get_world_size()]:
        marks = evaluate(out, load_pipeline(str(out)), side, plan.per_kind, plan.seed)
        (work / f"scores_{side}.json").write_text(json.dumps(marks))
    dist.barrier()
    return {side: json.loads((work / f"scores_{side}.json").read_text()) for side in sides}


def write_card(plan: Plan, out: Path, results: dict[str, dict], spent: dict[str, float]) -> None:
    """README.md of the pipeline folder: what it is, how well it does, how it was made."""
    pipeline, total = load_pipeline(str(out)), plan.per_kind * 5
    millions = {
        name: sum(p.numel() for p in part.parameters()) / 1e6
        for name, part in (
            ("transformer", pipeline.transformer),
            ("text_encoder", pipeline.text_encoder),
            ("autoencoder", pipeline.vae),
        )
    }
    prompts = {side: len((out / f"{side}.jsonl").read_text().splitlines()) for side in ("train", "test")}
    (out / "README.md").write_text(
        CARD.format(
            **millions,
            **prompts,
            table=table_of(results),
            per_kind=plan.per_kind,
            total=total,
            error=0.5 / total**0.5,
            kind_error=0.5 / plan.per_kind**0.5,
            seed=plan.seed,
            pictures=plan.pictures,
            steps=plan.flow.steps,
            batch=plan.flow.batch,
            autoencoder_steps=plan.autoencoder.steps,
            autoencoder_batch=plan.autoencoder.batch,
            seconds=", ".join(f"{name} {value:.0f}" for name, value in spent.items()),
        )
    )


def work_process(rank: int, processes: int, rendezvous: str, plan: Plan, work: Path, out: Path) -> None:
    """One rank, one thread; diffusers need not say that it expected a larger autoencoder."""
    torch.set_num_threads(1)
    diffusers.utils.logging.set_verbosity_error()
    for library in (diffusers, transformers):
        library.utils.logging.disable_progress_bar()
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=processes)
    pretrain(plan, work, out)
    dist.destroy_process_group()


def claim(work: Path, plan: Plan) -> None:
    """Bind a work folder to one plan; ValueError if it holds another."""
    work.mkdir(parents=True, exist_ok=True)
    path, text = work / "plan.json", json.dumps(asdict(plan), indent=1)
    if path.exists() and path.read_text() != text:
        raise ValueError(f"--work {work}: holds another plan (see {path.name}); give it an empty folder")
    path.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the pipeline")
    parser.add_argument("--work", type=Path, required=True, help="folder of pictures and checkpoints, to resume from")
    parser.add_argument("--seed", type=int, default=Plan.seed)
    parser.add_argument("--steps", type=int, help="optimiser steps of the flow model")
    parser.add_argument("--tiny", action="store_true", help="a run of seconds that learns nothing")
    given = parser.parse_args()
    plan = Plan(seed=given.seed)
    plan = tiny(plan) if given.tiny else plan
    plan = plan if given.steps is None else replace(plan, flow=replace(plan.flow, steps=given.steps))
    claim(given.work, plan)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            work_process, (PROCESSES, f"{folder}/rendezvous", plan, given.work, given.out), nprocs=PROCESSES
        )


if __name__ == "__main__":
    main()
