"""Every bundled recipe, whole, on tiny parts: two iterations, evaluation, checkpoint, resume, export."""

import json

import pytest
import torch

from stepcredit import tasks
from stepcredit.cli import main
from stepcredit.policies import lora_files
from stepcredit.policies.desk import DeskPolicy
from stepcredit.training import checkpoint, models, rehearsal
from stepcredit.training import recipe as recipes

pytest.importorskip("diffusers")


@pytest.fixture
def desk_model(tmp_path):
    """A random desk model of a task, in place of the bundled one."""

    def make(task):
        policy = DeskPolicy.initial(task, seed=1, hidden=16, depth=1, heads=2)
        with torch.no_grad():
            for k, (_, parameter) in enumerate(policy.named_parameters()):
                parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(k))
        policy.save(tmp_path / "desk.safetensors")
        return str(tmp_path / "desk.safetensors")

    return make


@pytest.mark.parametrize("name", recipes.names())
@pytest.mark.filterwarnings("ignore::stepcredit.policies.diffusers_common.PolicyWarning")
def test_every_bundled_recipe_runs_from_end_to_end(name, tmp_path, capsys, desk_model):
    recipe = recipes.load(name)
    desk = models.is_desk(recipe)
    swap = ["--model", desk_model(models.model_of(recipe)), "--reward", "jpeg_size"] if desk else []
    swap += ["--watch", "None"] if desk and recipe.watch else []  # the random model's pictures are larger
    small = ["--group-size", "2", "--micro-batch", "4", "--eval-prompts", "4", "--eval-prompts-during", "2"]
    assert main(["train", name, "--rehearse", "--quiet", "--out", str(tmp_path / "runs"), *small, *swap]) == 0
    printed = capsys.readouterr().out
    assert printed.count("REHEARSAL") == 2

    run = tmp_path / "runs" / f"{name}-rehearsal"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [0, 1, 2]
    assert all(line["ratio_deviation"] == 0 for line in lines[1:])
    assert {path.name for path in (run / "checkpoints").glob("step-*")} >= {"step-000001", "step-000002"}
    assert json.loads((run / "origin.json").read_text())["rehearsal"] is True
    summary = json.loads((run / "summary.json").read_text())
    assert summary["reward_after"]["mean"] == summary["reward_after"]["mean"]
    assert (run / "export" / "README.md").is_file()

    stored = recipes.parse((run / "recipe.yaml").read_text(), "run")
    for key in ("kernel", "level", "credit", "advantage", "estimate", "substeps", "steps", "window", "clip", "kl_beta",
                "kl", "guidance_scale", "updates_per_rollout", "lora_targets", "shared_noise", "lr"):  # fmt: skip
        assert getattr(stored, key) == getattr(recipe, key)
    if not desk:
        trained = checkpoint.load(run / "checkpoints").tensors["weights"]
        assert all(".lora_" in key for key in trained)
        assert any(bool((tensor != 0).any()) for key, tensor in trained.items() if ".lora_B." in key)
        assert lora_files.read(run / "export").rank == 4


def test_the_24gb_variant_differs_in_memory_alone():
    whole, small = recipes.load("sd35-ocr-stepwise"), recipes.load("sd35-ocr-stepwise-24gb")
    assert set(recipes.changed(whole, small)) == {
        *("micro_batch", "gradient_checkpointing", "decode_batch", "embedding_cache"),
        *("eval_every", "checkpoint_every"),
    }
    assert small.micro_batch < whole.micro_batch


def test_recipes_follow_the_papers():
    """Numbers of the papers, written down once more."""
    for task, beta in (("geneval", 0.04), ("ocr", 0.04), ("pickscore", 0.01)):
        uniform = recipes.load(f"sd35-{task}-uniform")
        assert (uniform.kernel, uniform.level, uniform.shared_noise) == ("flow_sde", 0.7, False)
        assert (uniform.kl_beta, uniform.kl, uniform.clip, uniform.updates_per_rollout) == (beta, "flow_grpo", 1e-4, 2)
        turning = recipes.load(f"sd35-{task}-turning-point")
        assert (turning.kernel, turning.level, turning.window) == ("cps", 0.7, (0, 9))
        assert (turning.estimate, turning.strict, turning.balance) == ("full", True, True)
        assert (turning.clip, turning.kl_beta) == (1e-5, 1e-4 if task == "pickscore" else 4e-4)
        stepwise = recipes.load(f"sd35-{task}-stepwise")
        assert (stepwise.kernel, stepwise.substeps, stepwise.spacing) == ("ddim", 5, "linear")
        assert (stepwise.credit, stepwise.advantage) == ("gain", "joint")
        for recipe in (uniform, turning, stepwise):
            assert (recipe.prompts_per_iteration, recipe.group_size, recipe.steps, recipe.eval_steps) == (
                48,
                24,
                10,
                40,
            )
            assert (recipe.resolution, recipe.guidance_scale, recipe.lora_rank, recipe.lora_alpha) == (512, 4.5, 32, 64)
            assert (recipe.lr, recipe.weight_decay, recipe.grad_clip) == (3e-4, 1e-4, 1.0)
    for task in ("geneval", "pickscore"):
        flux = recipes.load(f"flux-{task}-uniform")
        assert (flux.steps, flux.eval_steps, flux.guidance_scale, flux.level) == (6, 28, 3.5, 0.9)
        assert flux.precision == "bf16"


@pytest.mark.parametrize("name", [name for name in recipes.names() if not name.startswith(tasks.NAMES)])
def test_headers_have_command_prose_paper_hardware_and_figures(name):
    if models.is_desk(recipes.load(name)):
        pytest.skip("a desk recipe")
    comments = [line for line in recipes.text(name).splitlines() if line.startswith("#")]
    assert comments[0] == f"# stepcredit train {name}"
    assert [comment.split(":")[0] for comment in comments[2:]] == ["# Paper", "# Hardware", "# Expected"]


def test_numbers_that_the_user_gives_are_kept():
    small = rehearsal.rehearsed(recipes.load("sd35-ocr-uniform"), {"iterations": 3, "lr": 1.0})
    assert small.iterations == 3
    assert small.lr == 3e-4


def test_resume_and_rehearse_exclude_each_other(capsys, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "recipe.yaml").write_text(recipes.text("compose-uniform"))
    assert main(["train", "--rehearse", "--resume", "mine", "--out", str(tmp_path)]) == 2
    assert "--resume" in capsys.readouterr().err
