"""Recipes: everything that determines a run, as flat keys of a YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from stepcredit.errors import UserError, nearest
from stepcredit.training import recipe_rules
from stepcredit.untrusted import clean_lines, load_yaml, quoted

LARGEST = 1 << 20
"""Bytes of the largest recipe that is read."""
LARGEST_INTEGER = 2**53


class Recipe(BaseModel):
    """A training run. Unknown keys are refused; every key is also a flag of ``stepcredit train``."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    # What is trained on what
    task: str = "compose"
    """Prompts, reward and base model: `compose`, `spell` on the desk; `geneval`, `ocr`, `pickscore` for pipelines."""
    model: str | None = None
    """Base model in place of the task's own: a desk model's safetensors, or the folder or hub id of a pipeline."""
    reward: str | None = None
    """Reward in place of the task's own, by its registered name."""
    reward_options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Options of the reward, as docs/rewards.md lists them; for `composite` a weight for every reward by its name."""
    watch: str | None = None
    """A second reward, by its registered name, that judges the images of every evaluation and trains nothing."""
    watch_options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Options of the watched reward."""
    reward_cache: int = Field(0, ge=0)
    """Scores to remember by picture, prompt and metadata; 0 remembers none."""
    train_prompts: Path | None = None
    """File of training prompts in place of the task's own: .txt (one a line) or .jsonl (metadata with a `prompt`)."""
    heldout_prompts: Path | None = None
    """File of evaluation prompts in place of the task's own."""
    seed: int = Field(0, ge=0)
    """Seed of prompts, noise and windows; the same seed gives the same run."""
    iterations: int = Field(30, ge=1)
    """Rollouts to make; each is followed by `updates_per_rollout` optimiser steps."""

    # Diffusers pipelines alone; a desk model refuses these
    revision: str | None = None
    """Commit, tag or branch of the hub repository."""
    resolution: int | None = Field(None, ge=16)
    """Height and width of the images in pixels; 512 by default."""
    guidance_scale: float | None = Field(None, ge=0)
    """Guidance as the pipeline's own argument; the family's usual one by default."""
    max_sequence_length: int | None = Field(None, ge=1)
    """Tokens for the long text encoder; the pipeline's default by default."""
    tuning: Literal["lora", "full"] = "lora"
    """Train LoRA adapters, or the whole transformer (a KL penalty then keeps a second copy of it)."""
    lora_rank: int = Field(32, ge=1, le=1024)
    """Rank of the adapters."""
    lora_alpha: float = Field(64.0, gt=0)
    """Scale of the adapters, which are multiplied by alpha / rank."""
    lora_targets: tuple[str, ...] | None = Field(None, min_length=1)
    """Name endings of the linear layers to adapt; the published ones of the model's family by default."""
    precision: Literal["fp32", "bf16", "fp16"] | None = None
    """Precision of the transformer; the family's published one by default. Steps and adapters are always float32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: much less memory, about a third more time."""
    shard: bool = False
    """Share the transformer out among the processes of a run, which gather a block when they need it (FSDP2)."""
    decode_batch: int = Field(8, ge=1)
    """Images that the autoencoder decodes at a time."""
    embedding_cache: str | None = Field(None, min_length=1)
    """Folder of text embeddings, `auto` for the user's cache; prompts are encoded once, then the encoders are freed."""

    offload: Literal["none", "idle"] = "none"
    """`idle`: autoencoder, text encoders and reward networks wait in the CPU's memory until the GPU needs them."""

    # The batch: three numbers, everything else follows
    prompts_per_iteration: int = Field(8, ge=1, le=100_000)
    """Prompts (groups) of one rollout."""
    group_size: int = Field(16, ge=2, le=100_000)
    """Members of a group: images of one prompt that are compared with each other."""
    micro_batch: int = Field(32, ge=1)
    """Samples that go through the model at once; must divide prompts x group size. Changes memory, not results."""

    # Rollout
    steps: int = Field(10, ge=2, le=10_000)
    """Steps of the sampler in training."""
    kernel: Literal["ddim", "cps", "precise", "flow_sde", "dance"] = "flow_sde"
    """Transition kernel of the noisy steps."""
    level: float | None = Field(None, ge=0)
    """Noise level of the kernel; its usual one by default."""
    latent_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """What sampled states are stored in; steps are computed in float32 and scored as stored."""
    shared_noise: bool = True
    """All members of a group start from the same noise."""
    window: tuple[int, int] | None = None
    """Steps [start, stop) that may take noise and are trained; all others follow the ODE. All steps by default."""
    window_size: int | None = Field(None, ge=1)
    """Length of a window drawn anew for each prompt and iteration from within `window`."""
    branch: bool = False
    """TempFlow-GRPO: a group for every step of the window, noisy at that step alone."""

    # Scoring and credit
    estimate: Literal["tweedie", "substeps", "full"] = "substeps"
    """Clean estimate of intermediate states: free, a few Euler steps, or all remaining steps."""
    substeps: int = Field(2, ge=1, le=10_000)
    """Euler steps of the estimate `substeps`."""
    spacing: Literal["grid", "linear"] = "grid"
    """Substeps on points of the grid, never more than remain, or always that many, equally spaced in time."""
    credit: Literal["uniform", "gain", "turning_point", "turning_point_smooth", "gae", "tempflow"] = "gain"
    """How the reward is divided among the steps."""
    lam: float = Field(0.5, ge=0, le=1)
    """Decay of credit `gae`: 0 is `gain`, 1 the long-term reward."""
    strict: bool = True
    """Turning points must agree with all that follows."""
    balance: bool = False
    """As many positive as negative turning points in each group."""
    temperature: float = Field(1.0, gt=0)
    """Softness of `turning_point_smooth`."""
    advantage: Literal["group", "joint", "per_step", "centred"] = "centred"
    """How credit is centred and scaled within a group."""
    global_std: bool = False
    """Scale by the deviation over all groups of the iteration instead of each group's own."""
    on_reward_failure: Literal["fail", "drop"] = "fail"
    """A sample that the reward could not score ends the run, or leaves its group."""

    # Objective
    clip: float = Field(1e-4, gt=0)
    """Clip range of the ratio."""
    ratio: Literal["plain", "normalised"] = "plain"
    """`normalised` is GRPO-Guard's ratio (flow_sde only)."""
    log_prob: Literal["mean", "sum"] = "mean"
    """Reduction of log-probs over the dimensions of a latent."""
    kl_beta: float = Field(0.0, ge=0)
    """Weight of the KL penalty to the base model."""
    kl: Literal["gaussian", "flow_grpo", "velocity"] = "gaussian"
    """Form of the KL penalty."""
    trust_kl: float | None = Field(None, gt=0)
    """Largest KL between the policy before and after an update, per dimension, mean over the trained steps; a longer
    update is shortened to it. Measured on one member of each group, twice, and again when it is shortened. `None`: no
    limit, not measured."""
    step_weight: Literal["none", "std", "balanced", "table"] = "none"
    """Loss weight of the steps: equal, proportional to the kernel's std, pulling equally hard, or `step_table`."""
    step_table: tuple[float, ...] | None = None
    """Loss weight of each step for `step_weight: table`."""
    updates_per_rollout: int = Field(1, ge=1)
    """Optimiser steps per rollout, each on its share of the prompts. All but the first are off-policy."""
    replay: Literal["recompute", "retain"] = "recompute"
    """Evaluate the trained steps again for the update, or `retain` the rollout's graphs: the same bits in less time and
    more memory, with one update per rollout."""

    # Optimiser
    lr: float = Field(3e-4, gt=0)
    """Learning rate: of AdamW, or the length of a step in weight space for `optimiser: sgd`."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the learning rate to 0 over the run."""
    warmup: int = Field(0, ge=0)
    """Optimiser steps over which the learning rate rises to its value."""
    weight_decay: float = Field(1e-4, ge=0)
    """Decoupled weight decay."""
    optimiser: Literal["adamw", "sgd"] = "adamw"
    """`sgd` follows the gradient itself, scaled to unit length, with momentum 0.9; AdamW scales every weight alone."""
    adam_betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's moments."""
    grad_clip: float = Field(1.0, gt=0)
    """Largest norm of the gradient."""
    ema: float = Field(0.9, ge=0, lt=1)
    """Highest decay of the moving average of the weights, which is what is evaluated; 0 turns it off."""

    # Guards: what skips an update, and what stops a run
    spike_factor: float | None = Field(10.0, gt=1)
    """An update is skipped if its gradient norm is this many times the median of the past ones; `None`: never."""
    max_skips: int = Field(3, ge=1)
    """Updates skipped in a row, for a spike or a gradient that is not finite, that stop the run."""
    max_kl: float | None = Field(None, gt=0)
    """KL to the base model, in the form of `kl`, mean over the trained steps, that stops the run; needs a `kl_beta`."""
    max_ratio_deviation: float | None = Field(None, gt=0)
    """Largest |ratio - 1| of any update that does not stop the run; on-policy it is 0."""
    max_reward_drop: float | None = Field(0.5, gt=0)
    """Fall of the held-out reward below the best so far, in standard deviations of the base model's rewards, that
    stops the run if it lasts for `patience` evaluations."""
    max_watch_drop: float | None = Field(0.25, gt=0)
    """The same of the watched reward, if there is one: its fall while the trained reward rises is reward hacking."""
    patience: int = Field(2, ge=1)
    """Evaluations running with such a fall that stop the run."""
    max_image_drift: float | None = Field(None, gt=0)
    """Relative change of a statistic of the held-out images (contrast, diversity, ...) that stops the run."""

    # Evaluation and checkpoints
    eval_every: int = Field(10, ge=0)
    """Iterations between evaluations; 0 evaluates before and after only."""
    eval_prompts: int = Field(1000, ge=2)
    """Held-out prompts (with fixed noise) of the evaluation before and after."""
    eval_prompts_during: int = Field(240, ge=2)
    """Held-out prompts of evaluations during the run, a subset of the former."""
    eval_steps: int | None = Field(None, ge=1, le=10_000)
    """ODE steps of an evaluation; as in training by default."""
    checkpoint_every: int = Field(10, ge=0)
    """Iterations between checkpoints; 0 saves at the end only."""
    keep_checkpoints: int = Field(2, ge=1)
    """Checkpoints kept beside the best one."""
    tracker: Literal["none", "tensorboard", "trackio"] = "none"
    """Where metrics and pictures go beside metrics.jsonl: TensorBoard's event files in the run's folder, or trackio."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`."""
    check_memory: bool = True
    """Refuse to load a pipeline that by `plan`'s estimate needs more memory than the device has free."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        for key in type(self).model_fields:
            if not _plain(value := getattr(self, key)):
                raise ValueError(
                    f"{key} = {quoted(value)} holds a control character, or a number of {LARGEST_INTEGER:g} or more"
                )
        recipe_rules.check(self)
        return self


MAY_CHANGE = frozenset(
    {"shard", "iterations", "eval_every", "eval_prompts_during", "checkpoint_every", "keep_checkpoints", "tracker"}
    | {"replay", "max_skips", "max_kl", "max_ratio_deviation", "max_reward_drop", "max_watch_drop", "patience"}
    | {"max_image_drift", "offload"}
)
"""Keys that a resumed run may change, since they do not alter the iterations already made."""


def names() -> list[str]:
    """Names of the bundled recipes."""
    return sorted(entry.name.removesuffix(".yaml") for entry in _folder().iterdir() if entry.name.endswith(".yaml"))


def text(name: str) -> str:
    """The YAML of a bundled recipe, comments and all; UserError names the nearest if there is none."""
    if name not in names():
        raise UserError(
            f"no recipe {name!r}{nearest(name, names()) or '.'} `stepcredit recipes` lists the bundled ones; "
            "a recipe of your own is given as the path of its .yaml file"
        )
    return str(_folder().joinpath(f"{name}.yaml").read_text(encoding="utf-8"))


def load(name: str, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """A recipe by bundled name or path of a YAML file, with some keys overridden. Raises UserError."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        try:
            if path.stat().st_size > LARGEST:
                raise UserError(f"recipe {name!r} has more than {LARGEST} bytes, too many for a list of keys")
            source = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # not UTF-8, or a path that no file can have
            raise UserError(f"cannot read the recipe {name!r}: {error}") from error
    else:
        source = text(name)
    return parse(source, f"recipe {name!r}", overrides)


def parse(source: str, where: str, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """A recipe from YAML text; ``where`` names it in messages. Raises UserError."""
    try:
        keys = load_yaml(source)
    except ValueError as error:
        raise UserError(f"{where} is not valid YAML: {error}") from error
    keys = {} if keys is None else keys
    if not isinstance(keys, dict) or not all(isinstance(key, str) for key in keys):
        raise UserError(f"{where} must be a list of `key: value` lines, not {type(keys).__name__}")
    return build({**keys, **(overrides or {})}, where)


def build(keys: Mapping[str, Any], where: str = "the recipe") -> Recipe:
    """A recipe from its keys; UserError explains every wrong one in a line."""
    unknown = [key for key in keys if key not in Recipe.model_fields]
    if unknown:
        hints = [f"{quoted(key)}{nearest(key[:100], Recipe.model_fields)}" for key in unknown[:10]]
        more = f" and {len(unknown) - 10} more" if len(unknown) > 10 else ""
        raise UserError(f"{where} has unknown keys: {', '.join(hints)}{more}")
    try:
        return Recipe.model_validate(dict(keys))
    except ValidationError as error:
        raise UserError(f"{where}: " + "; ".join(_explain(problem) for problem in error.errors()[:10])) from error


def dump(recipe: Recipe) -> str:
    """The resolved recipe as YAML, all keys in order; ``parse(dump(r)) == r``."""
    # ASCII only: raw control and line-break characters would not survive the way back
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)


def changed(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """Keys whose values differ, each with (old, new)."""
    return {
        key: (getattr(old, key), getattr(new, key))
        for key in Recipe.model_fields
        if getattr(old, key) != getattr(new, key)
    }


def _explain(problem: Mapping[str, Any]) -> str:
    message = str(problem["msg"]).removeprefix("Value error, ")
    key = ".".join(str(part) for part in problem["loc"])
    return f"{key[:160]} = {quoted(problem['input'])}: {message}" if key else message


def _plain(value: object) -> bool:
    """Whether a value of a recipe holds neither control characters nor a number that no run can mean."""
    if isinstance(value, str | Path):
        return clean_lines(str(value)) == str(value) and "\n" not in str(value)
    if isinstance(value, Mapping):
        return all(_plain(key) and _plain(entry) for key, entry in value.items())
    if isinstance(value, tuple):
        return all(map(_plain, value))
    return not isinstance(value, int) or abs(value) < LARGEST_INTEGER


def _folder() -> Any:
    return resources.files("stepcredit").joinpath("recipes")
