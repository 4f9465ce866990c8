"""Pipelines for the adapter: the embedded base, and random ones of the same classes with all that it lacks."""

from types import SimpleNamespace

import pytest
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from shapes_models import build_tokenizer
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

from flowrl.run.config import resolve
from flowrl.visual.pipelines import sd3

FIVE = ["a red circle", "two blue squares", "a green cross", "the number 12 in red", "three yellow triangles"]


def random_pipeline(*, t5=False, dual=False, **schedule):
    """StableDiffusion3Pipeline of two blocks and random weights: 8 x 8 latents of four channels, pictures of 16."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        text = CLIPTextConfig(
            vocab_size=len(build_tokenizer()), hidden_size=16, intermediate_size=32, projection_dim=16, bos_token_id=0,
            num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=10, eos_token_id=1, pad_token_id=1,
        )  # fmt: skip
        encoders = [CLIPTextModelWithProjection(text) for _ in range(2)]
        third = T5Config(vocab_size=64, d_model=48, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.3)
        transformer = SD3Transformer2DModel(
            sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=48, caption_projection_dim=32, pooled_projection_dim=32,
            pos_embed_max_size=8, qk_norm="rms_norm" if dual else None, dual_attention_layers=(0,) if dual else (),
        )  # fmt: skip
        torch.nn.init.normal_(transformer.proj_out.weight, std=0.2)
        vae = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=2,
            block_out_channels=(4, 8), latent_channels=4, scaling_factor=1.5, shift_factor=0.06, sample_size=16,
            use_quant_conv=False, use_post_quant_conv=False,
        )  # fmt: skip
        return StableDiffusion3Pipeline(
            transformer=transformer,
            vae=vae,
            scheduler=FlowMatchEulerDiscreteScheduler(**schedule),
            text_encoder=encoders[0],
            tokenizer=build_tokenizer(),
            text_encoder_2=encoders[1],
            tokenizer_2=build_tokenizer(),
            text_encoder_3=T5EncoderModel(third) if t5 else None,
            tokenizer_3=build_tokenizer() if t5 else None,
        )


@pytest.fixture(scope="session")
def base():
    """Folder of the embedded base."""
    return resolve("assets/shapes").resolve()


@pytest.fixture(scope="session")
def folders(base, tmp_path_factory):
    """Pipeline folders by what is special about them."""
    saved = {"base": base}
    kinds = {"sd3 with T5": {"t5": True}, "sd3.5": {"dual": True, "t5": True}}
    kinds["dynamic"] = {"use_dynamic_shifting": True}
    for name, kind in kinds.items():
        schedule = {} if name == "dynamic" else {"shift": 3.0}
        saved[name] = tmp_path_factory.mktemp("pipelines") / name.replace(" ", "-")
        random_pipeline(**kind, **schedule).save_pretrained(saved[name])
    return saved


@pytest.fixture(scope="session")
def opened(folders):
    """A fresh policy over one of `folders` in fp32; all weights, or adapters if a rank is given."""

    def make(kind="base", rank=0, alpha=1.0, **settings):
        settings = {"grid": "linear", "max_sequence_length": 0 if kind == "base" else 4} | settings
        policy = sd3.load(
            folders[kind], dtype=torch.float32, device=torch.device("cpu"), rank=rank, alpha=alpha, **settings
        )
        return policy

    return make


@pytest.fixture(scope="session")
def plain(folders):
    """The same folder as diffusers' own documentation loads it."""

    def make(kind="base", folder=None):
        absent = {} if "T5" in kind or "3.5" in kind else {"text_encoder_3": None, "tokenizer_3": None}
        pipe = StableDiffusion3Pipeline.from_pretrained(folder or folders[kind], dtype=torch.float32, **absent)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    return make


@pytest.fixture
def spied():
    """Record every call of a module: its arguments by name."""

    def watch(module):
        calls, forward = [], module.forward

        def recorded(*args, **kwargs):
            calls.append(SimpleNamespace(args=args, **kwargs))
            return forward(*args, **kwargs)

        module.forward = recorded
        return calls

    return watch
