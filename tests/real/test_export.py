"""Exports: what diffusers opens is what was trained."""

import json

import pytest
import torch
from PIL import Image

from stepcredit.cli import main
from stepcredit.errors import UserError
from stepcredit.policies import from_pipeline, lora, lora_files, tiny
from stepcredit.policies.desk import DeskPolicy
from stepcredit.sampling import sample
from stepcredit.training import checkpoint
from stepcredit.training import recipe as recipes
from stepcredit.training.export import export_run
from stepcredit.training.telemetry import make_display
from stepcredit.training.trainer import train

pytest.importorskip("diffusers")

KEYS = {
    "task": "pickscore",
    "reward": "jpeg_size",
    "model": "tiny:sd3",
    "resolution": 32,
    "max_sequence_length": 16,
    "precision": "fp32",
    "lora_rank": 2,
    "lora_alpha": 6,
    "lr": 0.02,
    "prompts_per_iteration": 2,
    "group_size": 2,
    "micro_batch": 4,
    "steps": 3,
    "iterations": 1,
    "eval_prompts": 4,
    "eval_prompts_during": 2,
}


def run(tmp_path, **keys):
    folder = tmp_path / "run"
    train(recipes.build({**KEYS, **keys}), folder, make_display(quiet=True))
    return folder


@pytest.mark.parametrize("family", ["sd3", "flux"])
def test_a_fresh_pipeline_with_the_exported_lora_draws_the_trained_images(family, tmp_path):
    folder = run(tmp_path, model=f"tiny:{family}")
    made = export_run(folder, tmp_path / "out")
    assert made.difference == 0
    assert made.dtype == torch.float32
    adapter = lora_files.read(tmp_path / "out")
    assert (adapter.rank, adapter.alpha) == (2, 6)

    pipe = tiny.build(family)
    pipe.load_lora_weights(str(tmp_path / "out"))
    opened = from_pipeline(pipe, height=32, width=32, max_sequence_length=16)
    base = from_pipeline(tiny.build(family), height=32, width=32, max_sequence_length=16)
    prompts = json.loads((folder / "samples" / "samples.json").read_text())["prompts"]
    images = sample(opened, prompts, steps=3, seed=0, micro_batch=4)
    assert not torch.equal(images, sample(base, prompts, steps=3, seed=0, micro_batch=4))
    grid = Image.open(tmp_path / "out" / "before-after.png")
    assert grid.size == (4 * 32, 2 * 32)
    after = torch.tensor(list(grid.crop((0, 32, 128, 64)).get_flattened_data()), dtype=torch.uint8).view(32, 128, 3)
    expected = torch.cat(list((images * 255).round().to(torch.uint8).permute(0, 2, 3, 1)), dim=1)
    assert torch.equal(after, expected)


def test_the_card_says_what_was_measured(tmp_path):
    folder = run(tmp_path)
    export_run(folder, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    summary = json.loads((folder / "summary.json").read_text())
    header = json.loads(card.split("---")[1])
    assert header["library_name"] == "diffusers"
    assert "lora" in header["tags"]
    for key in ("reward_before", "reward_after"):
        assert f"{summary[key]['mean']:.4g} | {summary[key]['low']:.4g} to {summary[key]['high']:.4g}" in card
    assert "This is a rehearsal" in card
    assert "load_lora_weights" in card
    assert "credit: gain" in card
    assert "0.0e+00 (float32)" in card


def test_last_weights_differ_from_the_average(tmp_path):
    folder = run(tmp_path)
    export_run(folder, tmp_path / "ema")
    export_run(folder, tmp_path / "last", weights="last")
    saved = checkpoint.load(folder / "checkpoints").tensors
    for name in ("ema", "last"):
        group = saved["ema" if name == "ema" else "weights"]
        for module, (a, _) in lora_files.read(tmp_path / name).modules.items():
            assert torch.equal(a, group[f"{module}.lora_A.default.weight"])


def test_full_fine_tuning_exports_the_transformer(tmp_path):
    folder = run(tmp_path, tuning="full", lr=1e-3)
    made = export_run(folder, tmp_path / "out")
    assert made.difference == 0
    pipe = tiny.build("sd3")
    again = type(pipe.transformer).from_pretrained(tmp_path / "out" / "transformer")
    saved = checkpoint.load(folder / "checkpoints").tensors["ema"]
    assert all(torch.equal(p, saved[name]) for name, p in again.named_parameters())


def test_a_desk_run_exports_its_safetensors(tmp_path):
    DeskPolicy.initial("compose", seed=1, hidden=16, depth=1, heads=2).save(tmp_path / "base.safetensors")
    keys = {key: value for key, value in KEYS.items() if key in recipes.Recipe.model_fields}
    for key in ("resolution", "max_sequence_length", "precision", "lora_rank", "lora_alpha"):
        del keys[key]
    folder = tmp_path / "run"
    recipe = recipes.build({**keys, "task": "compose", "model": str(tmp_path / "base.safetensors")})
    train(recipe, folder, make_display(quiet=True))
    assert main(["export", str(folder), "--to", str(tmp_path / "out")]) == 0
    saved = checkpoint.load(folder / "checkpoints").tensors["ema"]
    opened = dict(DeskPolicy.load(tmp_path / "out" / "compose.safetensors").named_parameters())
    assert all(torch.equal(opened[name], tensor) for name, tensor in saved.items())


def test_nothing_is_overwritten(tmp_path, capsys):
    folder = run(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    with pytest.raises(UserError, match="not empty"):
        export_run(folder, tmp_path / "out")
    assert main(["export", str(folder)]) == 2
    assert "--to" in capsys.readouterr().err
    assert main(["export", "--to", str(tmp_path / "new")]) == 2
    assert "--from-peft" in capsys.readouterr().err


def test_peft_folders_are_converted(tmp_path, capsys):
    from peft import LoraConfig, get_peft_model

    transformer = tiny.build("sd3").transformer
    targets = ["attn.to_q", "attn.to_v"]
    model = get_peft_model(transformer, LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False))
    model.save_pretrained(tmp_path / "theirs" / "lora")
    assert main(["export", "--from-peft", str(tmp_path / "theirs"), "--to", str(tmp_path / "ours")]) == 0
    assert "rank 4, alpha 8, 4 layers" in capsys.readouterr().out
    pipe = tiny.build("sd3")
    pipe.load_lora_weights(str(tmp_path / "ours"))
    assert pipe.transformer.peft_config
    assert main(["export", "--from-peft", str(tmp_path / "nowhere"), "--to", str(tmp_path / "x")]) == 2
    assert "adapter_config.json" in capsys.readouterr().err


def test_a_lora_of_another_model_is_refused(tmp_path):
    folder = run(tmp_path, model="tiny:flux")
    export_run(folder, tmp_path / "out")
    with pytest.raises(lora.LoraError, match="another model"):
        lora_files.read(tmp_path / "out", tiny.build("sd3").transformer)
