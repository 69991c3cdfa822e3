"""Tokenizers and text encoders of the tiny pipelines.

Vocabularies are built by hand from a fixed list of words: the trainers of the ``tokenizers`` library give others in
every process. Models take their random weights from torch's generator, which the caller seeds.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

_VOCABULARY = """
a an and the of on in to with above below left right photo sign word words text written reading that says small
large one two three four red orange yellow green blue purple pink brown black white grey circle square triangle
cross star ring dog cat bird horse apple banana bowl cup bus car boat chair clock vase tree house sun moon sea
"""
WORDS = tuple(_VOCABULARY.split())
"""Words with a token of their own; every other word is spelled in smaller pieces."""


T5_WIDTH = 64
QWEN_WIDTH = 32


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


def clip_model(tokenizer: Any, projection: bool) -> Any:
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


def t5_model(tokenizer: Any) -> Any:
    transformers: Any = importlib.import_module("transformers")

    config = transformers.T5Config(
        vocab_size=len(tokenizer),
        d_model=T5_WIDTH,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return transformers.T5EncoderModel(config).eval()


def qwen_tokenizer() -> Any:
    """Qwen's byte-level BPE without any merge, its two chat marks, and a chat template in Qwen's form."""
    tokenizers: Any = importlib.import_module("tokenizers")
    transformers: Any = importlib.import_module("transformers")

    marks = ["<|im_start|>", "<|im_end|>"]
    tokens = ["<|endoftext|>", *marks, *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    vocab = {token: index for index, token in enumerate(tokens)}
    turn = "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    return transformers.Qwen2Tokenizer(
        vocab=vocab,
        merges=[],
        additional_special_tokens=marks,
        model_max_length=1024,
        chat_template="{% for message in messages %}" + turn + "{% endfor %}<|im_start|>assistant\n",
    )


def qwen_vl_model(tokenizer: Any) -> Any:
    """Text encoder of Qwen-Image, with the smallest vision tower; the pipeline never runs that."""
    transformers: Any = importlib.import_module("transformers")

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**_qwen_sizes(tokenizer), "rope_parameters": rope},
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": QWEN_WIDTH,
            "fullatt_block_indexes": [0],
        },
        image_token_id=len(tokenizer) - 1,
        video_token_id=len(tokenizer) - 1,
        vision_start_token_id=len(tokenizer) - 1,
        vision_end_token_id=len(tokenizer) - 1,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config).eval()


def qwen_model(tokenizer: Any) -> Any:
    """Text encoder of Z-Image."""
    transformers: Any = importlib.import_module("transformers")

    return transformers.Qwen3Model(transformers.Qwen3Config(**_qwen_sizes(tokenizer), head_dim=16)).eval()


def _qwen_sizes(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": QWEN_WIDTH,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": tokenizer.model_max_length,
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.pad_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
