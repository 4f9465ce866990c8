"""flowrl/visual/pipelines/opening.py: which pipelines are taken, and in what dtype."""

import json
import shutil

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from diffusers import FlowMatchHeunDiscreteScheduler, StableDiffusion3Img2ImgPipeline
from safetensors.torch import load_file

from flowrl.visual.pipelines import opening, parts

CPU = torch.device("cpu")


def adopted(pipe, dtype=None, rank=0):
    return opening.adopt(pipe, dtype=dtype, device=CPU, rank=rank, alpha=1.0, grid="linear", max_sequence_length=0)


def dtypes_of(pipe):
    return {p.dtype for module in parts.modules(pipe) for p in module.parameters()}


def test_full_weights_are_those_of_the_file_bit_by_bit_before_and_after(folders):
    """In whatever dtype the network computes: a GPU and a CPU start from the same weights, and nothing is rounded."""
    policy = opening.load(folders["sd3.5"], dtype=torch.bfloat16, device=CPU, rank=0, alpha=1.0, max_sequence_length=0)
    saved = load_file(folders["sd3.5"] / "transformer" / "diffusion_pytorch_model.safetensors")
    assert policy.dtype == policy.pipe.text_encoder.dtype == torch.bfloat16
    for _ in range(2):
        weights = policy.pipe.transformer.state_dict()
        assert weights.keys() == saved.keys() and all(torch.equal(weights[name], saved[name]) for name in saved)
        policy.finish("current")
    assert any(not torch.equal(x.bfloat16().float(), x) for x in saved.values())


def test_a_pipeline_of_full_weights_can_be_called_afterwards(folders):
    """Of one dtype throughout, or latents of one meet weights of another."""
    policy = opening.load(folders["base"], dtype=torch.bfloat16, device=CPU, rank=0, alpha=1.0, max_sequence_length=0)
    policy.finish("current")
    assert dtypes_of(policy.pipe) == {torch.float32}
    pictures = policy.pipe("a red circle", num_inference_steps=1, max_sequence_length=0, output_type="pt").images
    assert pictures.shape == (1, 3, 32, 32) and bool(pictures.isfinite().all())


@pytest.mark.parametrize("rank", [0, 2])
def test_a_loaded_pipeline_takes_the_dtype_that_is_asked_for(plain, rank):
    policy = adopted(plain(), torch.bfloat16, rank)
    frozen = [policy.pipe.text_encoder, policy.pipe.text_encoder_2, *([policy.pipe.transformer] if rank else [])]
    assert policy.dtype == torch.bfloat16 and {module.dtype for module in frozen} == {torch.bfloat16}
    assert {p.dtype for _, p in policy.trainable()} == {policy.pipe.vae.dtype} == {torch.float32}
    policy.finish("current")
    assert policy.pipe.vae.dtype == policy.pipe.text_encoder.dtype == policy.pipe.transformer.dtype
    assert policy.pipe.vae.dtype == (torch.bfloat16 if rank else torch.float32)


def test_a_loaded_pipeline_keeps_its_own_dtype_where_none_is_asked_for(plain):
    assert adopted(plain()).dtype == torch.float32
    assert adopted(plain().to(torch.bfloat16), torch.float32).dtype == torch.float32


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (torch.float16, "the pipeline is in float16: accepted are float32 and bfloat16, whose gradients need no loss"),
        (torch.float64, "the pipeline is in float64: accepted are float32 and bfloat16"),
        (torch.bfloat16, "about 100 times slower than float32 on a CPU: load it in float32, or set model.dtype"),
    ],
)
def test_a_loaded_pipeline_in_a_dtype_that_cannot_be_trained_is_refused(plain, own, said):
    with pytest.raises(ValueError) as caught:
        adopted(plain().to(own))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_is_not_loaded_in_float16(folders):
    with pytest.raises(ValueError, match="the pipeline is in float16: accepted are float32 and bfloat16"):
        opening.load(folders["base"], dtype=torch.float16, device=CPU, rank=2, alpha=1.0)


def test_another_scheduler_is_refused(plain):
    pipe = plain()
    pipe.scheduler = FlowMatchHeunDiscreteScheduler()
    with pytest.raises(
        ValueError, match=r"FlowMatchHeunDiscreteScheduler: .*Accepted are FlowMatchEulerDiscreteScheduler"
    ):
        adopted(pipe)


def test_a_pipeline_of_another_class_is_refused(plain):
    with pytest.raises(
        ValueError,
        match=r"StableDiffusion3Img2ImgPipeline.*no adapter.*Accepted: .*StableDiffusion3Pipeline.*docs/new_model.md",
    ):
        adopted(StableDiffusion3Img2ImgPipeline(**plain().components))


@pytest.mark.parametrize(
    ("index", "said"),
    [
        (None, "no model_index.json"),
        ({"_class_name": "AuraFlowPipeline"}, "is of class AuraFlowPipeline, for which there is no adapter"),
        ({}, "names no class"),
        ("{", "model_index.json"),
        ({"_class_name": "StableDiffusion3Pipeline", "vae": ["diffusers", "AutoencoderTiny"]}, "cannot be loaded"),
    ],
)
def test_a_folder_that_is_no_such_pipeline_is_named(tmp_path, index, said):
    if index is not None:
        (tmp_path / "model_index.json").write_text(index if isinstance(index, str) else json.dumps(index))
    with pytest.raises(ValueError) as caught:
        opening.load(tmp_path, dtype=torch.float32, device=CPU, rank=0, alpha=1.0)
    assert said in str(caught.value) and str(tmp_path) in str(caught.value)


def test_a_truncated_file_of_weights_is_named(folders, tmp_path):
    shutil.copytree(folders["dynamic"], tmp_path / "copy")
    weights = tmp_path / "copy" / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"copy' cannot be loaded: ") as caught:
        opening.load(tmp_path / "copy", dtype=torch.float32, device=CPU, rank=0, alpha=1.0)
    assert "\n" not in str(caught.value)


def test_a_pipeline_that_moves_its_parts_by_itself_is_refused(plain):
    """enable_model_cpu_offload, which hooks itself into every part."""
    pipe = plain()
    add_hook_to_module(pipe.vae, ModelHook())
    with pytest.raises(ValueError, match=r"by itself \(vae\): load it without enable_model_cpu_offload"):
        opening.accept(pipe)
