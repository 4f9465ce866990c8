"""Pipelines without weights: built from configurations, and measured by their shapes."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from tiny_pipelines import one_of_each, tiny
from torch import nn

from flowrl.visual.pipelines import blueprint, footprint, parts
from flowrl.visual.policy import Example

PARAMETERS = {  # of the networks that are trained, as their publishers and diffusers count them
    "FLUX.1-Kontext-dev": 11_901_408_320,
    "FLUX.1-dev": 11_901_408_320,
    "FLUX.1-schnell": 11_891_178_560,
    "FLUX.2-klein-4B": 3_875_544_576,
    "FLUX.2-klein-base-4B": 3_875_544_576,
    "PixArt-Sigma-XL-2-1024-MS": 610_856_096,
    "Qwen-Image": 20_430_401_088,
    "Qwen-Image-Edit-2509": 20_430_401_088,
    "Qwen-Image-Edit-2511": 20_430_401_088,
    "Sana_1600M_1024px_diffusers": 1_604_462_752,
    "Wan2.1-T2V-1.3B-Diffusers": 1_418_996_800,
    "Wan2.1-T2V-14B-Diffusers": 14_288_491_584,
    "Wan2.2-T2V-A14B-Diffusers": 2 * 14_288_491_584,
    "Wan2.2-TI2V-5B-Diffusers": 4_999_787_712,
    "Z-Image": 6_154_908_736,
    "Z-Image-Turbo": 6_154_908_736,
    "stable-diffusion-2-1": 865_910_724,
    "stable-diffusion-3.5-large": 8_056_627_520,
    "stable-diffusion-3.5-medium": 2_243_171_520,
    "stable-diffusion-v1-5": 859_520_964,
    "stable-diffusion-xl-base-1.0": 2_567_463_684,
}
CLIP_L, CLIP_L_PROJECTED, CLIP_G, OPENCLIP_H = 123_060_480, 123_650_304, 694_659_840, 340_387_840
T5, UMT5, GEMMA, QWEN3, QWEN_VL = 4_762_310_656, 5_680_910_336, 2_614_341_888, 4_022_468_096, 8_292_166_656
KL_4, KL_16, KL_FLUX2, DC, WAN_21, WAN_22 = 83_653_863, 83_819_683, 84_046_115, 312_250_275, 126_892_531, 704_688_668
BESIDE = {  # parameters of autoencoders and text encoders
    "FLUX.1-Kontext-dev": [KL_16, CLIP_L, T5],
    "FLUX.1-dev": [KL_16, CLIP_L, T5],
    "FLUX.1-schnell": [KL_16, CLIP_L, T5],
    "FLUX.2-klein-4B": [KL_FLUX2, QWEN3],
    "FLUX.2-klein-base-4B": [KL_FLUX2, QWEN3],
    "PixArt-Sigma-XL-2-1024-MS": [KL_4, T5],
    "Qwen-Image": [WAN_21, QWEN_VL],
    "Qwen-Image-Edit-2509": [WAN_21, QWEN_VL],
    "Qwen-Image-Edit-2511": [WAN_21, QWEN_VL],
    "Sana_1600M_1024px_diffusers": [DC, GEMMA],
    "Wan2.1-T2V-1.3B-Diffusers": [WAN_21, UMT5],
    "Wan2.1-T2V-14B-Diffusers": [WAN_21, UMT5],
    "Wan2.2-T2V-A14B-Diffusers": [WAN_21, UMT5],
    "Wan2.2-TI2V-5B-Diffusers": [WAN_22, UMT5],
    "Z-Image": [KL_16, QWEN3],
    "Z-Image-Turbo": [KL_16, QWEN3],
    "stable-diffusion-2-1": [KL_4, OPENCLIP_H],
    "stable-diffusion-3.5-large": [KL_16, CLIP_L_PROJECTED, CLIP_G, T5],
    "stable-diffusion-3.5-medium": [KL_16, CLIP_L_PROJECTED, CLIP_G, T5],
    "stable-diffusion-v1-5": [KL_4, CLIP_L],
    "stable-diffusion-xl-base-1.0": [KL_4, CLIP_L, CLIP_G],
}


@pytest.mark.parametrize("name", blueprint.known())
def test_a_published_model_has_its_parameters(name):
    plan = blueprint.read(Path("models") / name)
    networks = parts.networks(plan.pipe, plan.family.NETWORKS)
    modules = {part: m for part, m in plan.pipe.components.items() if isinstance(m, nn.Module)}
    counts = {part: sum(p.numel() for p in m.parameters()) for part, m in modules.items()}
    assert sum(counts[part] for part in networks) == PARAMETERS[name]
    assert sorted(counts[part] for part in counts if part not in networks) == sorted(BESIDE[name])
    assert all(p.is_meta for m in modules.values() for p in m.parameters())


def test_a_folder_is_read_without_its_weights(base, tmp_path):
    for folder in ("transformer", "vae", "text_encoder", "text_encoder_2", "scheduler"):
        (tmp_path / folder).mkdir()
        for file in (base / folder).glob("*.json"):
            (tmp_path / folder / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model_index.json").write_bytes((base / "model_index.json").read_bytes())
    plan = blueprint.read(tmp_path)
    assert sum(p.numel() for p in plan.pipe.transformer.parameters()) == 3_484_688
    assert plan.pipe.scheduler.config.num_train_timesteps == 1000


def test_another_name_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"no such folder\. Did you mean 'FLUX\.1-dev'\?.*Known without their weights"):
        blueprint.read(Path("models/FLUX.1-deb"))


def test_shapes_alone_tell_what_the_real_network_keeps(opened):
    """The same bytes as autograd keeps of a real state, and of several states as many times as much."""
    policy = opened("sd3.5")
    plan = blueprint.read(Path(policy.pipe.config._name_or_path))
    family = plan.family(plan.pipe, max_sequence_length=policy.family.max_sequence_length)
    expected = footprint.activations(family, torch.float32)
    for rows in (1, 3):
        ids = policy.encode([Example("a red circle")]).repeat(rows)
        latents = policy.noise(rows, torch.Generator().manual_seed(0))
        ledger = footprint.Ledger([*policy.pipe.transformer.parameters(), *policy.pipe.transformer.buffers()])
        with torch.autograd.graph.saved_tensors_hooks(ledger.saved, lambda x: x):
            policy.velocity(latents, torch.full((rows,), 0.5), ids)
        assert ledger.total == pytest.approx(rows * expected.kept, rel=0.05)


@pytest.mark.parametrize("name", one_of_each())
def test_shapes_tell_what_a_network_of_any_family_keeps(saved, policy_of, monkeypatch, name):
    """All weights trained; attention is counted as fused, and the rest of the shapes is a text's own."""
    plan, policy = blueprint.read(saved(name)), policy_of(name, train="full")
    for network in parts.networks(plan.pipe, plan.family.NETWORKS).values():
        parts.thaw(network, plan.family.unread(network))
    family = plan.family(plan.pipe, **tiny()[name].settings, size=tiny()[name].sizes[0])
    picture = Image.new("RGB", (160, 128))
    text = policy.family.encode("a red circle", [picture] if tiny()[name].conditioned else [], policy.device)
    assert set(family.blank()) == set(text) and all(x.is_meta for x in family.blank().values())
    monkeypatch.setattr(family, "blank", lambda: {key: torch.empty_like(x, device="meta") for key, x in text.items()})
    expected = footprint.activations(family, torch.float32)
    networks = policy.networks.values()
    ledger = footprint.Ledger([x for n in networks for x in (*n.parameters(), *n.buffers())])
    latents = policy.noise(1, torch.Generator().manual_seed(0))
    guidance = torch.full((1,), 3.5) if policy.family.embeds_guidance() else None
    with torch.autograd.graph.saved_tensors_hooks(ledger.saved, lambda x: x):
        policy.family.velocity(latents, torch.full((1,), 0.95), [text], guidance)
    assert ledger.total == pytest.approx(expected.kept, rel=0.06)


def test_checkpointing_keeps_what_goes_into_blocks_and_the_inside_of_one(opened):
    policy = opened("sd3.5")
    plan = blueprint.read(Path(policy.pipe.config._name_or_path))
    seen = footprint.activations(plan.family(plan.pipe, max_sequence_length=4), torch.float32)
    assert 0 < seen.block < seen.checkpointed < seen.kept
    width, tokens, texts, size = 32, 16, 10 + 4, 4
    inputs = 2 * size * (width * (tokens + texts) + width)  # two blocks: pictures, texts, the time
    assert seen.checkpointed - seen.block >= inputs
