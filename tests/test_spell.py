"""The desk task ``spell``: its words, its pictures, what reads them, and its base model."""

import pytest
import torch

from stepcredit import rewards, tasks
from stepcredit.policies.desk import DeskPolicy
from stepcredit.rewards import selftest
from stepcredit.tasks.spell import prompts, render


def test_no_word_is_both_trained_on_and_held_out():
    train = [prompt.metadata["text"] for prompt in tasks.get("spell").train()]
    heldout = [prompt.metadata["text"] for prompt in tasks.get("spell").heldout()]
    assert not set(train) & set(heldout)
    assert len(set(train)) == len(train) == prompts.COUNT
    assert len(set(heldout)) == len(heldout)
    assert {len(word) for word in train} == {len(word) for word in heldout} == {3, 4}
    assert sum(len(word) == 3 for word in train) == prompts.COUNT // 2


def test_prompts_carry_what_the_reward_and_the_tables_need():
    prompt = prompts.prompt_of("SUN")
    assert (prompt.text, prompt.tag, prompt.metadata["text"]) == ('the word "SUN"', "3 letters", "SUN")


def test_letters_have_the_numbers_of_the_alphabet():
    assert prompts.tokenize(['the word "ABZ"', "", 'a sign "MOON"']).tolist() == [
        [1, 2, 26, 0],
        [0] * 4,
        [13, 15, 15, 14],
    ]


@pytest.mark.parametrize("text", ["the word SUN", 'the word "sun"', 'the word "HOUSE"', '"A" and "B"', 'the word "Ä"'])
def test_a_prompt_without_one_short_word_in_capitals_is_refused(text):
    with pytest.raises(ValueError, match="must quote one word of at most 4 capital letters"):
        prompts.tokenize([text])


def test_pictures_are_a_function_of_the_prompts_and_the_seed():
    some = tasks.get("spell").heldout()[:6]
    first = render.render_batch(some, 1)
    assert first.shape == (6, 3, 16, 48)
    assert 0 <= float(first.min()) < float(first.max()) <= 1
    assert torch.equal(first, render.render_batch(some, 1))
    assert not torch.equal(first, render.render_batch(some, 2))


def test_every_font_and_ink_is_used():
    looks = {tuple(render.render({"text": "I"}, seed).flatten(1).amin(1).tolist()) for seed in range(60)}
    grounds = {tuple(render.render({"text": "I"}, seed)[:, 0, 0].tolist()) for seed in range(60)}
    assert len(looks) >= len(render.INKS)
    assert len(grounds) == len(render.PAPERS)
    assert len({render.coverage("SUN", font).tobytes() for font in range(len(render.FONTS))}) == len(render.FONTS)


def test_the_engine_reads_rendered_words():
    """The ceiling of the task: all held-out words in every font, by the reward as runs use it."""
    pytest.importorskip("rapidocr")
    some = tasks.get("spell").heldout()[::3]
    pictures = torch.stack(
        [
            torch.from_numpy(1 - render.coverage(prompt.metadata["text"], k % len(render.FONTS))).expand(3, -1, -1)
            for k, prompt in enumerate(some)
        ]
    )
    reward = rewards.get("spell", workers=1)
    parts = reward.components(pictures, [prompt.text for prompt in some], [prompt.metadata for prompt in some])
    assert float(parts["exact"].mean()) >= 0.98
    assert float(parts["score"].mean()) >= 0.98
    others = [some[(k + 1) % len(some)] for k in range(len(some))]
    wrong = reward(pictures, [prompt.text for prompt in others], [prompt.metadata for prompt in others])
    assert float(wrong.mean()) < 0.3


def test_the_reward_passes_its_own_test():
    pytest.importorskip("rapidocr")
    selftest.require(rewards.get("spell", workers=1))


def test_the_shipped_base_spells_some_held_out_words():
    pytest.importorskip("rapidocr")
    from stepcredit.training.evaluation import evaluate, slots

    heldout = slots(tasks.draw(tasks.get("spell").heldout(), 120, "heldout"))
    result = evaluate(DeskPolicy.pretrained("spell"), rewards.get("spell"), heldout, steps=10, micro_batch=60)
    assert 0.35 < result.exact_rate.mean < 0.70
