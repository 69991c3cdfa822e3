"""Sizes without weights, against published figures: parameters, operations, memory."""

from functools import cache

import pytest

from stepcredit.training import budget, models
from stepcredit.training import recipe as recipes
from stepcredit.training.setup import setup

pytest.importorskip("diffusers")


@cache
def _plan(keys):
    recipe = recipes.build({"task": "ocr", "prompts_per_iteration": 48, "group_size": 24, **dict(keys)})
    return setup(recipe, weights=False)


def plan(**keys):
    return _plan(tuple(sorted(keys.items())))


SD35 = {"model": "stabilityai/stable-diffusion-3.5-medium", "micro_batch": 8}
FLUX = {"task": "pickscore", "model": "black-forest-labs/FLUX.1-dev", "micro_batch": 4, "max_sequence_length": 512}


@pytest.mark.parametrize(
    ("keys", "lora", "whole", "forward"),
    [
        # published: 18.8 M of 2.24 B, 2.25 TFLOP a forward (two of them under guidance); 89.7 M of 11.9 B, 21.7 TFLOP
        (SD35, 18.8e6, 2.243e9, 2 * 2.25),
        (FLUX, 89.7e6, 11.90e9, 21.7),
    ],
)
def test_parameters_and_operations(keys, lora, whole, forward):
    needed = plan(**keys).budget
    assert needed.trained_parameters == pytest.approx(lora, rel=2e-3)
    assert needed.transformer_parameters == pytest.approx(whole, rel=1e-3)
    assert needed.forward_tflop == pytest.approx(forward, rel=0.1)
    assert needed.decode_tflop == pytest.approx(2.5, rel=0.02)


def test_guidance_of_one_halves_the_operations():
    assert plan(**SD35, guidance_scale=1.0).budget.forward_tflop == pytest.approx(
        plan(**SD35).budget.forward_tflop / 2, rel=1e-6
    )


def test_memory_in_parts():
    needed = plan(**SD35).budget
    # by hand: 2.243 B + 5.580 B encoders in fp16, 83.8 M of VAE in fp32; of 18.776 M
    # adapters four copies in float32 and the gradient in float64
    assert needed.weights_gib == pytest.approx((2 * (2.243 + 5.580) + 4 * 0.0838) * 1e9 / 2**30, rel=2e-3)
    assert needed.training_state_gib == pytest.approx((4 * 4 + 8) * 18.776e6 / 2**30, rel=1e-3)
    assert needed.activations_gib == pytest.approx(1.9 * 8 * 2)
    assert needed.peak_gib > needed.weights_gib + needed.activations_gib


def test_what_saves_memory_is_seen_to():
    whole = plan(**SD35).budget
    assert plan(**SD35, gradient_checkpointing=True).budget.activations_gib < whole.activations_gib / 5
    assert plan(**SD35, embedding_cache="auto").budget.weights_gib < whole.weights_gib / 2
    assert plan(**{**SD35, "micro_batch": 2}).budget.activations_gib == pytest.approx(whole.activations_gib / 4)
    assert plan(**SD35, tuning="full", kl_beta=0.1, precision="fp32").budget.peak_gib > 40


def test_a_shared_transformer_is_counted_by_its_share(monkeypatch):
    keys = {**SD35, "embedding_cache": "auto", "tuning": "full", "kl_beta": 0.1}
    alone, one, lora = plan(**keys), plan(**keys, shard=True), plan(**{**keys, "tuning": "lora"})
    _plan.cache_clear()
    monkeypatch.setattr(budget.distributed, "world", lambda: 4)
    four, four_lora = plan(**keys, shard=True), plan(**{**keys, "tuning": "lora"}, shard=True)
    _plan.cache_clear()
    assert one.budget == alone.budget
    # by hand: two copies of 2.243 B in fp16, 83.8 M of VAE in fp32
    assert one.budget.weights_gib == pytest.approx((2 * 2 * 2.243 + 4 * 0.0838) * 1e9 / 2**30, rel=2e-3)
    assert four.budget.weights_gib == pytest.approx((2 * 2 * 2.243 / 4 + 4 * 0.0838) * 1e9 / 2**30, rel=2e-3)
    # moments in fp16, average in float32, gradient in float32
    assert four.budget.training_state_gib == pytest.approx((2 * 2 + 4 + 4) * 2.243e9 / 4 / 2**30, rel=2e-3)
    assert four_lora.budget.training_state_gib == lora.budget.training_state_gib
    assert four_lora.budget.weights_gib < lora.budget.weights_gib / 3


def test_trajectories_are_what_is_left_of_them():
    """48 prompts of 24 in 8 cells, latents of 16 x 64 x 64; T = 10, noise at every step, shared starts."""
    latent = 16 * 64 * 64 * 4
    keys = {**SD35, "credit": "uniform", "advantage": "group"}
    # 48 starts and the 10 states after them; no velocity is asked for twice
    update = 48 + 10 * 48 * 24
    # while the last cell of 6 prompts was sampled: a state, its successor and a velocity in the making
    cell = 6 * 24
    assert plan(**keys).budget.trajectories_gib * 2**30 == (update + cell * 3) * latent
    window = plan(**keys, window=(0, 2)).budget.trajectories_gib * 2**30
    assert window == (48 + 2 * 48 * 24 + cell * (3 + 1)) * latent  # the last cell's final states beside
    half = plan(**keys, latent_dtype="float16").budget.trajectories_gib * 2**30
    assert half == (update / 2 + cell * (1 / 2 + 1 / 2 + 1)) * latent


def test_hours_are_a_range_of_the_same_operations():
    needed = plan(**SD35).budget
    low, high = needed.hours(312.0)
    assert high / low == pytest.approx(0.45 / 0.2)
    assert low == pytest.approx(needed.run_tflop / (312.0 * 0.45) / 3600)


def test_operations_of_an_iteration_follow_the_ledger():
    parts = plan(**SD35, credit="uniform", advantage="group")
    cost, needed = parts.cost, parts.budget
    assert cost.model_evaluations == 48 * 24 * 10 - 48 * 23  # members share the evaluation of x[0]
    once = needed.forward_tflop
    trained = once * (1 + 2.67 / 2.25)
    expected = cost.model_evaluations * once + cost.trained_evaluations * trained + cost.decodes * needed.decode_tflop
    assert needed.iteration_tflop == pytest.approx(expected)


def test_a_plan_needs_no_data_no_weights_and_no_network(offline, monkeypatch, tmp_path):
    monkeypatch.setenv("STEPCREDIT_DATA", str(tmp_path))
    assert plan(**SD35).reward.info.name == "ocr"
    for known in models.architectures.KNOWN:
        assert plan(model=known, micro_batch=4).budget.peak_gib > 10


def test_a_small_model_has_no_budget():
    assert setup(recipes.build({"task": "ocr", "model": "tiny:sd3", "resolution": 32}), weights=False).budget is None
    assert budget.EFFICIENCY[0] < budget.EFFICIENCY[1]


def test_retained_graphs_save_the_second_forward_and_cost_the_activations_of_every_trained_step():
    again, kept = plan(**SD35), plan(**SD35, replay="retain")
    rows = kept.cost.trained_evaluations
    assert rows == again.cost.trained_evaluations > 48 * 24 * 8
    saved = again.budget.iteration_tflop - kept.budget.iteration_tflop
    assert saved == pytest.approx(rows * again.budget.forward_tflop, rel=1e-6)
    assert kept.budget.activations_gib == pytest.approx(1.9 * rows * 2)
    assert kept.budget.peak_gib > kept.budget.activations_gib + kept.budget.decoding_gib
