"""Models and adapters that cannot be used, by the command line: one sentence and exit code 2, with nothing loaded."""

import json

import pytest
import torch

from stepcredit.cli import main
from stepcredit.policies import lora_files, tiny
from stepcredit.training import room

pytest.importorskip("diffusers")

GIB = 2**30


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch):
    """Neither weights of a pipeline nor those of a reward may be read."""
    import diffusers
    import transformers

    def load(*args, **options):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", load)
    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", load)


@pytest.fixture
def refused(capsys, tmp_path):
    """``refused(*words)``: the one line with which a command is refused; nothing was written."""

    def run(*words, out=True):
        flags = ["--out", str(tmp_path / "runs")] if out else []
        assert main([*words, *flags]) == 2
        lines = [line for line in capsys.readouterr().err.splitlines() if line]
        assert len(lines) == 1, lines
        assert lines[0].startswith("error: ")
        assert not (tmp_path / "runs").exists()
        return lines[0]

    return run


@pytest.fixture
def large(monkeypatch):
    """A machine with memory for every recipe."""
    monkeypatch.setattr(room, "available", lambda device: 2000 * GIB)


@pytest.mark.parametrize("command", ["train", "check"])
@pytest.mark.parametrize("recipe", ["sd35-ocr-stepwise", "flux-pickscore-uniform"])
def test_a_model_that_cannot_be_had(offline, refused, large, command, recipe):
    said = refused(command, recipe, out=command == "train")
    model = "stabilityai/stable-diffusion-3.5-medium" if recipe.startswith("sd35") else "black-forest-labs/FLUX.1-dev"
    assert f"model '{model}'" in said
    assert "no model_index.json in the hub's cache, and it cannot be fetched" in said
    assert "--local-dir FOLDER" in said
    assert "--model FOLDER" in said


@pytest.mark.parametrize("command", ["train", "plan"])
def test_an_id_that_nobody_knows(offline, refused, command):
    said = refused(
        command, "sd35-ocr-uniform", "--model", "someone/something", "--revision", "abc", out=command != "plan"
    )
    assert "'someone/something' at revision 'abc'" in said
    assert "--model FOLDER" in said


def test_a_pipeline_of_an_unknown_family(refused, tmp_path):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "LTXPipeline"}))
    for command in ("train", "plan"):
        said = refused(command, "sd35-ocr-uniform", "--model", str(tmp_path), out=command == "train")
        assert "LTXPipeline" in said
        assert "StableDiffusion3Pipeline, FluxPipeline, QwenImagePipeline, ZImagePipeline" in said


@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_lora_target_that_matches_no_module(refused, command):
    said = refused(command, "flux-geneval-uniform", "--lora-targets", "attn.to_q", "attn.to_x", out=command == "train")
    assert "LoRA target 'attn.to_x' matches no linear layer of FluxTransformer2DModel" in said
    assert "attn.to_q" in said


def test_too_little_memory_on_the_cpu(refused, monkeypatch, tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 32000000 kB\nMemAvailable: 12582912 kB\n")
    monkeypatch.setattr(room, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(room, "CGROUP", tmp_path / "none")
    said = refused("train", "sd35-ocr-uniform", "--device", "cpu")
    assert "this recipe needs about" in said
    assert "this machine's CPU has 12 free" in said
    assert "micro_batch" in said
    assert "--rehearse" in said
    assert "offload" not in said  # nothing is gained by it there


def test_too_little_memory_on_a_gpu(refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * GIB, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    said = refused("train", "sd35-ocr-stepwise-24gb", "--device", "cuda")
    assert "a card has 10 free" in said
    assert "offload" in said


def test_what_torch_keeps_of_a_gpu_for_later_is_free(monkeypatch):
    """An earlier run of the same process (compare, audit) leaves blocks behind that the next one takes."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * GIB, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 8 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3 * GIB)
    assert room.available(torch.device("cuda")) == 15 * GIB


def test_what_is_free_is_what_the_container_leaves(monkeypatch, tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable: 2048 kB\n")
    monkeypatch.setattr(room, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(room, "CGROUP", tmp_path)
    cpu = torch.device("cpu")
    assert room.available(cpu) == 2048 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert room.available(cpu) == 2048 * 1024
    (tmp_path / "memory.max").write_text("5000\n")
    assert room.available(cpu) == 4000
    (tmp_path / "memory.stat").write_text("anon 600\ninactive_file 300\nodd\n")
    assert room.available(cpu) == 4300
    (tmp_path / "meminfo").unlink()
    assert room.available(cpu) == 4300
    (tmp_path / "memory.max").unlink()
    assert room.available(cpu) is None
    assert room.available(torch.device("meta")) is None


@pytest.fixture
def adapter(tmp_path):
    """A PEFT folder with an adapter of a tiny FLUX."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, lora_alpha=4, target_modules=["attn.to_q"], init_lora_weights=False)
    get_peft_model(tiny.build("flux").transformer, config).save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def saved(family, folder):
    """Folder of a pipeline's configurations, without weights."""
    pipe = tiny.build(family)
    pipe.save_pretrained(folder, safe_serialization=True)
    for weights in folder.rglob("*.safetensors"):
        weights.unlink()
    return folder


def test_an_adapter_of_another_model(refused, adapter, tmp_path, capsys):
    ours = tmp_path / "ours"
    words = ["export", "--from-peft", str(adapter), "--to", str(ours)]
    folders = {family: str(saved(family, tmp_path / family)) for family in ("sd3", "flux")}
    capsys.readouterr()
    said = refused(*words, "--model", folders["sd3"], out=False)
    assert "SD3Transformer2DModel has no linear layer" in said
    assert "another model" in said
    said = refused(*words, "--model", "black-forest-labs/FLUX.1-dev", out=False)  # the same names, other widths
    assert "maps 64 to 64 features, but this model's maps 3072 to 3072" in said
    assert not ours.exists()
    assert main([*words, "--model", folders["flux"]]) == 0
    assert len(lora_files.read(ours).modules) == 2
    assert "rank 2, alpha 4, 2 layers" in capsys.readouterr().out


def test_models_that_take_no_adapter(refused, adapter, tmp_path, offline):
    words = ["export", "--from-peft", str(adapter), "--to", str(tmp_path / "ours"), "--model"]
    assert "'compose' is a desk model" in refused(*words, "compose", out=False)
    assert "no model_index.json" in refused(*words, "someone/something", out=False)
    assert "--model belongs to --from-peft" in refused("export", "a-run", "--to", "x", "--model", "y", out=False)
