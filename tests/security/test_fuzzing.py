"""More than 5,000 files and messages that nobody meant: each works, or is refused by an error of ours in one line.

Any other exception fails a test, since a user would see its traceback.
"""

import json
import struct

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepcredit.errors import UserError
from stepcredit.policies.desk import DeskPolicy
from stepcredit.policies.lora_files import LoraError
from stepcredit.policies.lora_files import read as read_lora
from stepcredit.rewards import FunctionReward, RewardError, RewardInfo, SelfTest, wire
from stepcredit.rewards.server import Refusal, RewardServer
from stepcredit.tasks import files
from stepcredit.training import checkpoint
from stepcredit.training import recipe as recipes
from stepcredit.training.checkpoint import CheckpointError
from stepcredit.untrusted import load_yaml, loads


def fuzz(examples):
    """So many inputs, the same in every run, in a folder that all of them share."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


NASTY = st.sampled_from(
    [
        *(
            "\x00",
            "\x1b[2J",
            "\u202e",
            "\u2028",
            "\ud800",
            "\N{BYTE ORDER MARK}",
            "../../x",
            "=1+1",
            "<script>",
            "~",
            "%s",
        ),
        *(
            "1e999",
            "NaN",
            "-.inf",
            "0x" + "f" * 400,
            "9" * 5000,
            "1:2:3",
            "2026-99-99",
            "!!python/name:os.system",
            "&a",
        ),
        *("*a", "<<: 1", "---", "{" * 60, "[" * 200, "? x", "|\n x", "yes", "null", "''", '"\\ud800"'),
    ]
)
TEXT = st.text(max_size=20) | NASTY
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXT
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4), max_leaves=12
)
KEYS = st.sampled_from(sorted(recipes.Recipe.model_fields)) | TEXT


@st.composite
def damaged(draw, whole):
    """Bytes with some replaced, cut off, or put in twice."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        kind = draw(st.sampled_from(["set", "cut", "put"]))
        if kind == "set" and data:
            data[at] = draw(st.integers(0, 255))
        elif kind == "cut":
            del data[at : at + draw(st.integers(1, 40))]
        else:
            data[at:at] = draw(st.binary(max_size=12))
    return bytes(data)


def refused(error):
    """An explanation is one line of printable text, of a length that can be read."""
    text = str(error)
    assert 0 < len(text) < 4000
    assert "\n" not in text.rstrip("\n")


@fuzz(700)
@given(st.dictionaries(KEYS, VALUES, max_size=5))
def test_recipes_of_any_keys(keys):
    try:
        text = yaml.safe_dump(keys, allow_unicode=True)
    except (UnicodeError, ValueError):
        return  # not even YAML can hold it
    try:
        recipe = recipes.parse(text, "fuzz.yaml")
    except UserError as error:
        refused(error)
        return
    assert recipes.parse(recipes.dump(recipe), "again") == recipe


@fuzz(600)
@given(st.data())
def test_recipes_damaged(data):
    text = data.draw(damaged(recipes.text("compose-turning-point").encode())).decode("utf-8", errors="replace")
    try:
        recipes.parse(text, "fuzz.yaml")
    except UserError as error:
        refused(error)


@fuzz(600)
@given(st.lists(st.tuples(KEYS, TEXT), max_size=6))
def test_recipes_of_any_lines(lines):
    try:
        recipes.parse("\n".join(f"{key}: {value}" for key, value in lines), "fuzz.yaml")
    except UserError as error:
        refused(error)


@fuzz(600)
@given(st.binary(max_size=80) | st.lists(VALUES.map(lambda v: json.dumps(v).encode()), max_size=4).map(b"\n".join),
       st.sampled_from([".txt", ".jsonl", ".csv", ""]))  # fmt: skip
def test_prompt_files(tmp_path, data, suffix):
    path = tmp_path / f"prompts{suffix}"
    path.write_bytes(data)
    try:
        prompts = files.read(path)
    except UserError as error:
        refused(error)
        return
    assert prompts
    assert all(prompt.text.strip() for prompt in prompts)


ENTRY = {"prompt": "a red circle", "tag": "colors", "include": [{"class": "circle", "count": 1, "color": "red"}]}


@fuzz(400)
@given(st.data())
def test_prompt_files_damaged(tmp_path, data):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(data.draw(damaged(b"\n".join([json.dumps(ENTRY).encode()] * 3))))
    try:
        assert files.read(path)
    except UserError as error:
        refused(error)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint, and the bytes of its files."""
    folder = tmp_path_factory.mktemp("saved")
    tensors = {"weights": {"w": torch.arange(6.0).view(2, 3)}, "ema": {"w": torch.zeros(2, 3)}}
    path = checkpoint.save(folder, 7, tensors, {"iteration": 7, "best": None})
    return path, {file.name: file.read_bytes() for file in path.iterdir()}


@fuzz(900)
@given(data=st.data(), name=st.sampled_from(["manifest.json", "state.json", "weights.safetensors"]))
def test_checkpoints_damaged(saved, data, name):
    path, whole = saved
    changed = data.draw(damaged(whole[name]))
    (path / name).write_bytes(changed)
    try:
        found = checkpoint.read(path)
    except CheckpointError as error:
        refused(error)
    else:  # only what says the same may pass: blanks in the manifest, or nothing changed at all
        assert changed == whole[name] or name == "manifest.json"
        assert found.iteration == 7
        assert torch.equal(found.tensors["weights"]["w"], torch.arange(6.0).view(2, 3))
    finally:
        (path / name).write_bytes(whole[name])


@fuzz(300)
@given(VALUES)
def test_manifests_of_any_json(saved, value):
    path, whole = saved
    (path / "manifest.json").write_text(json.dumps(value), encoding="utf-8", errors="surrogatepass")
    try:
        with pytest.raises(CheckpointError) as caught:
            checkpoint.read(path)
        refused(caught.value)
    finally:
        (path / "manifest.json").write_bytes(whole["manifest.json"])


def _red(images, prompts, metadata):
    return images[:, 0].mean(dim=(1, 2))


@pytest.fixture(scope="module")
def server():
    """A reward server that listens on a port of its own and is asked directly."""
    red = torch.zeros(3, 8, 8)
    red[0] = 1
    reward = FunctionReward(RewardInfo("red", (0.0, 1.0), "none", "redness"), _red, SelfTest(red, red.flip(0), "", {}))
    with RewardServer(reward, port=0) as listening:
        yield listening


REQUEST = {
    "version": 1,
    "images": wire.encode_images(torch.zeros(2, 3, 4, 4)),
    "prompts": ["a", "b"],
    "metadata": [{}, {}],
}


@fuzz(500)
@given(st.data())
def test_requests_damaged(server, data):
    _ask(server, data.draw(damaged(json.dumps(REQUEST).encode())))


@fuzz(500)
@given(
    st.fixed_dictionaries({}, optional=dict.fromkeys([*REQUEST, "more"], VALUES)),
    st.sets(st.sampled_from(sorted(REQUEST))),
)
def test_requests_of_any_json(server, values, kept):
    _ask(server, json.dumps(values | {key: REQUEST[key] for key in kept}).encode())


def _ask(server, body):
    try:
        reply = server.score(body)
    except (Refusal, RewardError) as error:
        refused(error)
        return
    assert reply.scores == [0.0, 0.0]


REPLIES = {
    wire.ScoreReply: {"version": 1, "reward": "red", "scores": [0.5, None]},
    wire.InfoReply: {"version": 1, "name": "red", "low": 0.0, "high": 1.0, "licence": "", "description": "",
                     "direction": "higher", "batch_size": 4, "per_image": True},
    wire.SelfTestReply: {"version": 1, "good": "", "bad": "", "prompt": "a", "metadata": {}, "margin": 0.0},
}  # fmt: skip


@fuzz(500)
@given(st.data(), st.sampled_from(sorted(REPLIES, key=lambda kind: kind.__name__)))
def test_replies(data, kind):
    whole = json.dumps(REPLIES[kind]).encode()
    body = data.draw(damaged(whole) | st.dictionaries(st.sampled_from(sorted(REPLIES[kind])), VALUES).map(
        lambda change: json.dumps(REPLIES[kind] | change).encode()))  # fmt: skip
    try:
        assert isinstance(wire.parse(kind, body), kind)
    except ValueError as error:
        refused(error)


def safetensors(header, data):
    """The bytes of a safetensors file, right or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


HALF = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
PAIR = {
    "transformer.a.lora_A.weight": HALF,
    "transformer.a.lora_B.weight": {"dtype": "F32", "shape": [3, 2], "data_offsets": [24, 48]},
}


@fuzz(400)
@given(st.data())
def test_adapter_files(tmp_path, data):
    meta = data.draw(
        st.dictionaries(st.sampled_from(["r", "lora_alpha", "use_dora", "bias"]) | TEXT, VALUES, max_size=3)
    )
    config = json.dumps({f"transformer.{key}": value for key, value in meta.items()})
    header = PAIR | {"__metadata__": {"format": "pt", "lora_adapter_metadata": config}}
    whole = safetensors(header, bytes(48))
    path = tmp_path / "pytorch_lora_weights.safetensors"
    path.write_bytes(data.draw(st.just(whole) | damaged(whole)))
    try:
        adapter = read_lora(path)
    except LoraError as error:
        refused(error)
        return
    assert adapter.rank == 2
    assert adapter.alpha > 0


@pytest.fixture(scope="module")
def desk_file(tmp_path_factory):
    """A small desk model's file."""
    path = tmp_path_factory.mktemp("desk") / "small.safetensors"
    DeskPolicy.initial("compose", hidden=8, heads=1, depth=1).save(path)
    return path.read_bytes()


@fuzz(300)
@given(data=st.data())
def test_desk_models(tmp_path, desk_file, data):
    end = 8 + struct.unpack("<Q", desk_file[:8])[0]  # damage to a weight is no damage to the format
    path = tmp_path / "model.safetensors"
    path.write_bytes(data.draw(damaged(desk_file[:end])) + desk_file[end:])
    try:
        DeskPolicy.load(path)
    except (ValueError, OSError) as error:
        refused(error)


@fuzz(300)
@given(VALUES)
def test_json_and_yaml_give_back_what_was_written_or_refuse(value):
    for text, read in ((json.dumps(value), loads), (yaml.safe_dump(value, sort_keys=False), load_yaml)):
        try:
            assert repr(read(text)) == repr(value)  # NaN is not itself
        except ValueError as error:
            refused(error)
