"""What becomes of every command in the pages: how it is made small, or why it cannot run here.

A command that stands in no table fails the test, and so does a row that no page has any more.
"""

from __future__ import annotations

TINY = (
    "--iterations 1 --prompts-per-iteration 2 --group-size 4 --micro-batch 8 --eval-prompts 8 --eval-prompts-during 4"
)
"""A desk recipe in less than a second: the bundled model, one iteration of eight pictures."""
TINY_REHEARSAL = "--group-size 2 --micro-batch 4 --eval-prompts 4 --eval-prompts-during 2 --eval-steps 2"
"""A rehearsal in a few seconds."""
TINY_PIPELINE = (
    f"{TINY} --group-size 2 --micro-batch 4 --model tiny:sd3 --resolution 32 --precision fp32 --max-sequence-length 16 "
    "--steps 4 --substeps 2 --eval-steps 4 --eval-prompts 4 --eval-prompts-during 2"
)
"""A recipe for SD3.5 on a tiny random pipeline of the same class."""
TINY_AUDIT = "--groups 4 --prompts-per-iteration 1 --group-size 4 --micro-batch 4"

RUN: dict[str, str] = {
    # the desk
    "stepcredit train compose-stepwise": TINY,
    "stepcredit train spell-uniform --tracker tensorboard": TINY,
    "stepcredit train compose-turning-point --seed 1": TINY,
    "stepcredit train compose-turning-point --name mine": TINY,
    "stepcredit train --resume mine": "",
    "stepcredit train --resume mine --max-reward-drop 1": "",
    "stepcredit train compose-uniform --lr-schedule constant --iterations 10 --name longer": TINY,
    "stepcredit train --resume longer --iterations 20": "--iterations 2",
    "stepcredit train compose-stepwise --model mine.safetensors": f"{TINY} --reward jpeg_size",
    "stepcredit train compose-stepwise --tracker tensorboard": TINY,
    "stepcredit plan compose-turning-point": "",
    "stepcredit check compose-stepwise": TINY,
    "stepcredit check compose-turning-point": TINY,
    "stepcredit eval compose-stepwise": "--prompts 8",
    "stepcredit eval compose-turning-point": "--prompts 8",
    "stepcredit eval RUN": "--prompts 8",
    "stepcredit eval RUN --prompt-file mine.txt --images 4": "--images 2 --rewards jpeg_size",
    "stepcredit sample runs/compose-stepwise": "--count 2",
    'stepcredit sample runs/compose-turning-point --prompt "two circles on black" --to circles.png': "--count 2",
    "stepcredit inspect compose-stepwise": "--members 4",
    "stepcredit inspect runs/compose-stepwise": "--members 4",
    'stepcredit inspect runs/compose-stepwise --prompt "two circles on black" --members 8 --to circles.html': "",
    "stepcredit compare compose-stepwise compose-uniform --seeds 3": f"--seeds 1 {TINY}",
    "stepcredit compare compose-stepwise my-recipe.yaml --seeds 3 --iterations 40 --eval-every 5 --jobs 2 "
    "--name mine": (f"--seeds 1 --jobs 1 {TINY}"),
    "stepcredit audit compose-stepwise --all-schemes": TINY_AUDIT,
    "stepcredit audit compose-stepwise compose-uniform --groups 256": TINY_AUDIT,
    "stepcredit audit my-recipe.yaml my-other-kernel.yaml --json --to audit.json": TINY_AUDIT,
    "stepcredit recipes": "",
    "stepcredit recipes copy compose-stepwise mine.yaml": "",
    "stepcredit export runs/compose-stepwise --to mine": "",
    "stepcredit pretrain compose --to mine.safetensors": "--steps 2",
    "stepcredit train prefer-stepwise": TINY,
    "stepcredit train prefer-uniform": TINY,
    "stepcredit train prefer-turning-point": TINY,
    "stepcredit train prefer-uniform --lr 1.2e-3 --lr-schedule constant --iterations 40 --max-image-drift None": TINY,
    "torchrun --nproc_per_node 2 -m stepcredit train compose-stepwise": TINY,
    # a reward of one's own
    "python redness.py check compose-stepwise --reward redness": TINY,
    "python redness.py train compose-stepwise --reward redness --name red": TINY,
    "python redness.py eval red": "--prompts 8",
    "python redness.py inspect runs/red": "--members 4",
    # pipelines
    "stepcredit plan sd35-ocr-stepwise-24gb": "",
    "stepcredit plan sd35-ocr-stepwise-24gb --iterations 60 --prompts-per-iteration 16 --group-size 12 "
    "--substeps 2": "",
    "stepcredit plan flux-geneval-uniform --micro-batch 4 --json": "",
    "stepcredit check sd35-ocr-stepwise --model /models/mine --reward jpeg_size": TINY_PIPELINE,
    "stepcredit train sd35-ocr-stepwise --model /models/mine --reward jpeg_size --iterations 15 --name sanity": (
        TINY_PIPELINE
    ),
    "stepcredit inspect runs/sanity": "--members 2",
    "stepcredit train --resume my-run": "",
    "stepcredit train --resume sd35": "",
    "stepcredit export my-run --to my-lora": "",
    "stepcredit export sd35 --to sd35-lora": "",
}
"""Command as the pages have it -> flags added when it is executed; of a flag given twice the last counts."""

CANNOT_RUN: dict[str, str] = {
    "stepcredit train sd35-ocr-stepwise --rehearse": "is the fixture pipeline_run, and every recipe's in tests/real",
    "stepcredit compare compose-stepwise compose-uniform --seeds 5": "as with three seeds, which is tried with one",
    "stepcredit compare compose-stepwise compose-uniform --seeds 3 --jobs 2 --eval-every 6 --eval-prompts-during 480": (
        "as without its flags"
    ),
    "stepcredit train compose-stepwise --tracker trackio": "tried in tests/training, in a process without our threads",
    "make quickstart": "installs, and trains for minutes",
    "make install": "installs",
    "make test": "runs this test",
    "make bench": "takes minutes",
    'pip install "stepcredit[diffusers,ocr]"': "installs",
    "pip install 'stepcredit[track]'": "installs",
    "torchrun --nproc_per_node 4 -m stepcredit train sd35-ocr-stepwise --shard": (
        "needs four GPUs; a tiny one is shared out in tests/distributed"
    ),
    "torchrun --nproc_per_node 8 -m stepcredit train sd35-ocr-stepwise --shard --tuning full --precision fp32": (
        "the same"
    ),
    "torchrun --nproc_per_node 4 -m stepcredit train compose-stepwise": "tried with two; four are in tests/distributed",
    "torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 -m stepcredit train "
    "flux-geneval-stepwise": "needs sixteen GPUs",
    "stepcredit eval RUN --suite geneval": "needs the published prompts and a detector",
    "stepcredit eval RUN --suite drawbench --rewards pickscore aesthetic": "needs the published prompts and weights",
    "stepcredit eval sd35 --suite ocr": "needs the published prompts",
    "stepcredit export --from-peft logs/checkpoint-60/lora --to my-lora": "tried with such a folder in tests/diffusers",
    "stepcredit train sd35-ocr-stepwise --model /models/sd35 --name my-run": "needs the weights",
    "stepcredit train sd35-ocr-stepwise-24gb --model /models/sd35 --name sd35": "needs the weights",
    "stepcredit check sd35-ocr-stepwise-24gb --model /models/sd35": "needs the weights",
    "stepcredit train sd35-ocr-stepwise-24gb --rehearse": "every recipe is rehearsed in tests/real",
    "stepcredit data get ocr": "needs a network",
    "stepcredit pretrain compose --to compose.safetensors": "as to mine.safetensors, which is tried with two steps",
    "stepcredit pretrain spell --to spell.safetensors": "reads words for many seconds even after two steps",
    "stepcredit pretrain prefer --to prefer.safetensors": "tried with one step in tests/rewards",
    "stepcredit audit compose-stepwise --all-schemes --groups 256": "as without --groups",
    "stepcredit audit spell-stepwise --all-schemes --groups 96 --to audit.json": "half an hour",
    "stepcredit rewards convert geneval": "needs a network",
    "stepcredit rewards convert hpsv2.1": "needs a network",
    "stepcredit rewards convert hpsv3": "needs a network",
    "stepcredit rewards convert aesthetic sac+logos+ava1-l14-linearMSE.pth": "needs the published file",
    "stepcredit rewards convert imagereward ImageReward.pt --sha256 DIGEST": "needs the published file",
    "stepcredit serve-reward pickscore --port 8765": "needs weights, and serves until it is stopped",
}
"""Command -> why it is not executed. Its flags, recipes and keys are taken through the real parser."""

FOREIGN = ("hf download", "vllm serve", "tensorboard --logdir", "trackio show")
"""Programs of others, which no test starts."""

BENCHMARKS = "python benchmarks/"
"""Commands that begin so take hours and are written into their page by themselves; their parser reads them."""

STAND_INS = {"/models/mine": "tiny:sd3"}
"""Words of a command -> what is there when it runs."""

GIVEN: dict[str, tuple[str, ...]] = {
    "inspect.md": ("runs/compose-stepwise",),
    "evaluation.md": ("RUN", "mine.txt"),
    "compare.md": ("my-recipe.yaml",),
    "audit.md": ("my-recipe.yaml", "my-other-kernel.yaml"),
    "real-models.md": ("runs/my-run",),
    "sd35-one-gpu.md": ("runs/sd35",),
}
"""Page -> what its reader has already: runs, files of recipes and prompts."""

NEEDS = {
    "README.md": "rapidocr",
    "trackers.md": "tensorboard",
    "real-models.md": "diffusers",
    "own-model.md": "diffusers",
    "sd35-one-gpu.md": "diffusers",
}
"""Page -> the module without which its commands are not tried."""

PLACEHOLDERS = {
    "RUN": "runs/compose-stepwise",
    "RECIPE": "compose-stepwise",
    "FOLDER": "folder",
    "FILE": "prompts.txt",
    "NAME": "ocr",
}
"""Words in capitals within sentences -> an example of them."""

PYTHON_RUNS: dict[tuple[str, int], str] = {
    ("README.md", 0): (
        "import torch; R = torch.rand(2, 4, 11); logp, logp_old, adv = torch.rand(3, 8).unbind()"  # what a loop has
    ),
    ("quickstart.md", 0): "import torch; R = torch.rand(2, 4, 11)",
    ("own-reward.md", 0): "",
    ("rewards.md", 0): (
        "import pytest, torch; pytest.importorskip('rapidocr')\n"
        "images, prompts, metadata = torch.ones(1, 3, 32, 32), ['the word \"SUN\"'], [{}]"
    ),
    ("rewards.md", 3): (
        "import torch; red_image, blue_image = torch.zeros(3, 8, 8), torch.zeros(3, 8, 8); red_image[0], "
        "blue_image[2] = 1, 1"
    ),
}
"""(page, number of its Python block) -> what has happened before it."""

PYTHON_CANNOT_RUN: dict[tuple[str, int], str] = {
    ("adapters.md", 0): "needs the weights and a GPU",
    ("adapters.md", 1): "every line of it is tried in tests/diffusers",
    ("rewards.md", 1): "serves until it is stopped",
    ("rewards.md", 2): "needs two servers",
}
"""The same -> why it is not executed. It is compiled, and its imports are made."""
