"""Tiny random pipelines of the real families, built offline in a fraction of a second: for tests and rehearsals.

Every part is of the very class that the released checkpoint has; only the sizes are small. Tokenizers are built by
hand from a fixed list of words, because the trainers of the ``tokenizers`` library give other vocabularies in every
process. A pipeline is a function of its arguments alone and leaves torch's global generators as they were.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_VOCABULARY = """
a an and the of on in to with above below left right photo sign word words text written reading that says small
large one two three four red orange yellow green blue purple pink brown black white grey circle square triangle
cross star ring dog cat bird horse apple banana bowl cup bus car boat chair clock vase tree house sun moon sea
"""
WORDS = tuple(_VOCABULARY.split())
"""Words with a token of their own; every other word is spelled in smaller pieces."""

TEXT_WIDTH = 64
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
            joint_attention_dim=TEXT_WIDTH,
            pooled_projection_dim=32,  # the two CLIP projections side by side
            pos_embed_max_size=16,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        )
        clip, clip_2, t5 = clip_tokenizer(), clip_tokenizer(), t5_tokenizer(256)
        pipe = diffusers.StableDiffusion3Pipeline(
            transformer=transformer.eval(),
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=_vae(),
            text_encoder=_clip_model(clip, projection=True),
            tokenizer=clip,
            text_encoder_2=_clip_model(clip_2, projection=True),
            tokenizer_2=clip_2,
            text_encoder_3=_t5_model(t5),
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
            joint_attention_dim=TEXT_WIDTH,
            pooled_projection_dim=16,
            axes_dims_rope=(4, 6, 6),
            guidance_embeds=guidance_embeds,
        )
        clip, t5 = clip_tokenizer(), t5_tokenizer(512)
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
            text_encoder=_clip_model(clip, projection=False),
            tokenizer=clip,
            text_encoder_2=_t5_model(t5),
            tokenizer_2=t5,
        )
    return _finish(pipe, f"tiny-flux-{'dev' if guidance_embeds else 'schnell'}-{seed}")


BUILDERS: dict[str, Callable[[int], Any]] = {"sd3": sd3, "flux": flux}


def clip_tokenizer(max_length: int = 77) -> Any:
    """CLIP's byte-level BPE over single bytes, with the merges that spell out ``WORDS``."""
    tokenizers: Any = importlib.import_module("tokenizers")
    transformers: Any = importlib.import_module("transformers")

    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|startoftext|>", "<|endoftext|>", *letters, *(letter + "</w>" for letter in letters)]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges: dict[tuple[str, str], None] = {}  # a dict keeps the order in which merges apply
    for word in WORDS:
        *pieces, last = [*word[:-1], word[-1] + "</w>"]
        if not pieces:
            continue
        left = pieces[0]
        for piece in [*pieces[1:], last]:
            merges.setdefault((left, piece))
            left += piece
            vocab.setdefault(left, len(vocab))
    return transformers.CLIPTokenizer(vocab=vocab, merges=list(merges), model_max_length=max_length)


def t5_tokenizer(max_length: int) -> Any:
    """T5's unigram vocabulary: printable ASCII characters, and ``WORDS`` at a higher probability."""
    transformers: Any = importlib.import_module("transformers")

    space = "\u2581"
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), (space, -8.0)]
    pieces += [(chr(code), -10.0) for code in range(33, 127)]
    pieces += [(space + word, -math.log(len(WORDS))) for word in WORDS]
    return transformers.T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=max_length)


def _clip_model(tokenizer: Any, projection: bool) -> Any:
    transformers: Any = importlib.import_module("transformers")

    config = transformers.CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=tokenizer.model_max_length,
        projection_dim=16,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,  # CLIP pools at this token: it must be the tokenizer's own
        pad_token_id=tokenizer.pad_token_id,
    )
    model = transformers.CLIPTextModelWithProjection if projection else transformers.CLIPTextModel
    return model(config).eval()


def _t5_model(tokenizer: Any) -> Any:
    transformers: Any = importlib.import_module("transformers")

    config = transformers.T5Config(
        vocab_size=len(tokenizer),
        d_model=TEXT_WIDTH,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return transformers.T5EncoderModel(config).eval()


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
