"""Tiny random pipelines of the real families, built offline in a fraction of a second: for tests and rehearsals.

Every part is of the very class that the released checkpoint has; only the sizes are small. A pipeline is a function of
its arguments alone, in every process, and leaves torch's global generators as they were.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from stepcredit.policies import tiny_text

HEADS, HEAD_WIDTH = 4, 16


def build(family: str, seed: int = 0) -> Any:
    """Tiny random pipeline of a family, by its name: a key of ``BUILDERS``. Raises ValueError for an unknown one."""
    if family not in BUILDERS:
        raise ValueError(f"no tiny pipeline of family {family!r}; there are {', '.join(BUILDERS)}")
    return BUILDERS[family](seed)


def sd3(seed: int = 0) -> Any:
    """StableDiffusion3Pipeline of about 0.4 M parameters: as SD3.5-M, with rms-normed queries and dual attention.

    Images of multiples of 8 pixels up to 128; latents ``[B, 4, H/4, W/4]``; shifted grid with shift 3.
    """
    diffusers: Any = importlib.import_module("diffusers")

    with _seeded(seed):
        transformer = diffusers.SD3Transformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=HEAD_WIDTH,
            num_attention_heads=HEADS,
            caption_projection_dim=HEADS * HEAD_WIDTH,
            joint_attention_dim=tiny_text.T5_WIDTH,
            pooled_projection_dim=32,  # the two CLIP projections side by side
            pos_embed_max_size=16,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        )
        clip, clip_2, t5 = tiny_text.clip_tokenizer(), tiny_text.clip_tokenizer(), tiny_text.t5_tokenizer(256)
        pipe = diffusers.StableDiffusion3Pipeline(
            transformer=transformer.eval(),
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=_vae(),
            text_encoder=tiny_text.clip_model(clip, projection=True),
            tokenizer=clip,
            text_encoder_2=tiny_text.clip_model(clip_2, projection=True),
            tokenizer_2=clip_2,
            text_encoder_3=tiny_text.t5_model(t5),
            tokenizer_3=t5,
        )
    return _finish(pipe, f"tiny-sd3-{seed}")


def flux(seed: int = 0, *, guidance_embeds: bool = True) -> Any:
    """FluxPipeline of about 0.4 M parameters: as FLUX.1-dev, or as FLUX.1-schnell without ``guidance_embeds``.

    Images of multiples of 8 pixels; packed latents ``[B, H/8 * W/8, 16]``; resolution-dependent grid.
    """
    diffusers: Any = importlib.import_module("diffusers")

    with _seeded(seed):
        transformer = diffusers.FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,  # 2x2 patches of the autoencoder's 4 channels
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=HEAD_WIDTH,
            num_attention_heads=HEADS,
            joint_attention_dim=tiny_text.T5_WIDTH,
            pooled_projection_dim=16,
            axes_dims_rope=(4, 6, 6),
            guidance_embeds=guidance_embeds,
        )
        clip, t5 = tiny_text.clip_tokenizer(), tiny_text.t5_tokenizer(512)
        pipe = diffusers.FluxPipeline(
            transformer=transformer.eval(),
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
                shift=3.0,
                use_dynamic_shifting=True,
                base_shift=0.5,
                max_shift=1.15,
                base_image_seq_len=256,
                max_image_seq_len=4096,
            ),
            vae=_vae(),
            text_encoder=tiny_text.clip_model(clip, projection=False),
            tokenizer=clip,
            text_encoder_2=tiny_text.t5_model(t5),
            tokenizer_2=t5,
        )
    return _finish(pipe, f"tiny-flux-{'dev' if guidance_embeds else 'schnell'}-{seed}")


def qwen_image(seed: int = 0) -> Any:
    """QwenImagePipeline of about 0.5 M parameters; images of multiples of 8 pixels, packed latents ``[B, N, 16]``."""
    diffusers: Any = importlib.import_module("diffusers")

    with _seeded(seed):
        transformer = diffusers.QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=HEAD_WIDTH,
            num_attention_heads=HEADS,
            joint_attention_dim=tiny_text.QWEN_WIDTH,
            axes_dims_rope=(4, 6, 6),
        )
        vae = diffusers.AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=4,
            dim_mult=[1, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[False, True],
            latents_mean=[-0.75, 0.1, 0.9, 0.2],
            latents_std=[2.8, 1.45, 2.3, 1.1],
        )
        tokenizer = tiny_text.qwen_tokenizer()
        pipe = diffusers.QwenImagePipeline(
            transformer=transformer.eval(),
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
                use_dynamic_shifting=True,
                base_shift=0.5,
                max_shift=0.9,
                base_image_seq_len=256,
                max_image_seq_len=8192,
                shift_terminal=0.02,
            ),
            vae=vae.eval(),
            text_encoder=tiny_text.qwen_vl_model(tokenizer),
            tokenizer=tokenizer,
        )
    return _finish(pipe, f"tiny-qwen-image-{seed}")


def z_image(seed: int = 0) -> Any:
    """ZImagePipeline of about 0.5 M parameters; images of multiples of 8 pixels, latents ``[B, 4, H/4, W/4]``."""
    diffusers: Any = importlib.import_module("diffusers")

    with _seeded(seed):
        transformer = diffusers.ZImageTransformer2DModel(
            in_channels=4,
            dim=HEADS * HEAD_WIDTH,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=HEADS,
            n_kv_heads=HEADS,
            cap_feat_dim=tiny_text.QWEN_WIDTH,
            axes_dims=[4, 6, 6],
            axes_lens=[1024, 64, 64],
        )
        torch.nn.init.normal_(transformer.x_pad_token)  # zeros until trained
        torch.nn.init.normal_(transformer.cap_pad_token)
        tokenizer = tiny_text.qwen_tokenizer()
        pipe = diffusers.ZImagePipeline(
            transformer=transformer.eval(),
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=_vae(),
            text_encoder=tiny_text.qwen_model(tokenizer),
            tokenizer=tokenizer,
        )
    return _finish(pipe, f"tiny-z-image-{seed}")


BUILDERS: dict[str, Callable[[int], Any]] = {"sd3": sd3, "flux": flux, "qwen-image": qwen_image, "z-image": z_image}


def _vae() -> Any:
    diffusers: Any = importlib.import_module("diffusers")

    return diffusers.AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 16, 16),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=32,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.5305,
        shift_factor=0.0609,
    ).eval()


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would touch the generators of accelerators too
        yield


def _finish(pipe: Any, name: str) -> Any:
    pipe.set_progress_bar_config(disable=True)
    pipe.register_to_config(_name_or_path=name)
    return pipe
