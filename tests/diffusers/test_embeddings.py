"""The cache of text embeddings: computed once, keyed by model, revision and prompt, safe to interrupt."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("diffusers", minversion="0.38")

import stepcredit as sc
from stepcredit.policies import from_pipeline, tiny
from stepcredit.policies.embeddings import EmbeddingCache, embed_cached

PROMPTS = ["a red circle above a blue square", "the word cat"]


def policy_of(pipe, folder, **options):
    return from_pipeline(pipe, height=32, width=32, embedding_cache=folder, **options)


@pytest.mark.parametrize("family", list(tiny.BUILDERS))
def test_cached_embeddings_are_the_computed_ones(family, tmp_path, pipes):
    plain = from_pipeline(pipes[family], height=32, width=32).encode(PROMPTS)
    first, second = (policy_of(pipes[family], tmp_path).encode(PROMPTS) for _ in range(2))
    for name, tensor in plain.items():
        torch.testing.assert_close(first[name], tensor, rtol=0, atol=1e-5)
        assert torch.equal(first[name], second[name])


@pytest.mark.parametrize("family", list(tiny.BUILDERS))
def test_encoders_may_leave_once_all_prompts_are_cached(family, tmp_path):
    policy = policy_of(tiny.build(family), tmp_path)
    before = sc.sample(policy, PROMPTS, steps=2)
    policy.release_encoders()
    assert policy.pipe.text_encoder is None
    assert torch.equal(sc.sample(policy, PROMPTS, steps=2), before)
    with pytest.raises(RuntimeError, match="released and prompt 'a dog' is not in the embedding cache"):
        policy.encode(["the word cat", "a dog"])


def test_encoders_stay_without_a_cache(pipes):
    with pytest.raises(ValueError, match="release_encoders needs embedding_cache"):
        from_pipeline(pipes["sd3"], height=32, width=32).release_encoders()


def test_the_key_holds_model_revision_and_length(tmp_path, pipes):
    def path(pipe, **options):
        return policy_of(pipe, tmp_path, **options).cache.path("the word cat")

    pipe = pipes["sd3"]
    others = [
        path(pipe),
        path(pipe, revision="abc"),
        path(pipe, max_sequence_length=16),
        path(tiny.sd3(seed=1)),
        path(pipes["flux"]),
        policy_of(pipe, tmp_path).cache.path("the word dog"),
    ]
    assert len(set(others)) == len(others)
    assert path(pipe) == path(pipe)


def test_other_weights_under_one_name_are_told_apart(tmp_path):
    one, other = tiny.sd3(), tiny.sd3()
    with torch.no_grad():
        other.text_encoder_3.shared.weight.add_(1)
    paths = {policy_of(pipe, tmp_path).cache.path("a") for pipe in (one, other)}
    assert len(paths) == 2


def counting(calls):
    def embed(prompts):
        calls.append(list(prompts))
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        text = torch.stack([torch.full((3, 2), float(n)) for n in lengths])
        return {"text": text, "length": lengths}

    return embed


def test_only_missing_prompts_are_embedded_and_order_is_kept(tmp_path):
    calls, cache = [], EmbeddingCache(tmp_path, ("model", "1"))
    embed_cached(cache, ["aa", "a", "aa"], counting(calls))
    out = embed_cached(cache, ["aaa", "a", "aa", "a"], counting(calls))
    assert calls == [["aa", "a"], ["aaa"]]
    assert out["length"].tolist() == [3, 1, 2, 1]
    assert out["text"][:, 0, 0].tolist() == [3, 1, 2, 1]


def test_rows_of_unequal_length_are_padded(tmp_path):
    cache = EmbeddingCache(tmp_path, ("model", "1"))
    cache.write("short", {"text": torch.ones(1, 2)})
    cache.write("long", {"text": torch.ones(3, 2)})
    out = embed_cached(cache, ["short", "long"], counting([]))
    assert out["text"][..., 0].tolist() == [[1, 0, 0], [1, 1, 1]]


def test_damaged_and_foreign_files_are_made_anew(tmp_path):
    calls, cache = [], EmbeddingCache(tmp_path, ("model", "1"))
    embed_cached(cache, ["a", "b"], counting(calls))
    cache.path("a").write_bytes(cache.path("a").read_bytes()[:-4])
    cache.path("b").write_bytes(b"")
    with pytest.warns(UserWarning, match="damaged or not of this prompt"):
        out = embed_cached(cache, ["a", "b"], counting(calls))
    assert calls[1] == ["a", "b"]
    assert out["length"].tolist() == [1, 1]
    cache.path("b").write_bytes(cache.path("a").read_bytes())
    with pytest.warns(UserWarning, match="not of this prompt"):
        assert cache.read("b") is None
    assert not list(tmp_path.rglob("*.part"))
