"""Files, names and texts made to do harm: refused in one line before they do, or shown as the text that they are.

Attacks on the reward server and its client are in tests/rewards/test_served.py, on adapters in
tests/diffusers/test_lora_files.py, on checkpoints in tests/training/test_checkpoint_damage.py, on pages in
tests/reports and tests/inspection.
"""

import http.client
import json
import os
import pickle
import struct
import threading

import pytest
import torch

from stepcredit.cli import main
from stepcredit.policies.desk import DeskPolicy
from stepcredit.rewards import FunctionReward, RewardError, RewardInfo, SelfTest, get, wire
from stepcredit.rewards.server import RewardServer
from stepcredit.training import recipe as recipes
from stepcredit.untrusted import clean, load_yaml, loads, quoted

TINY = ["--iterations", "1", "--prompts-per-iteration", "2", "--group-size", "2", "--micro-batch", "4",
        "--eval-prompts", "4", "--eval-prompts-during", "2"]  # fmt: skip


class Bomb:
    """An object whose pickle runs a command when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def refused(capsys, *argv):
    """The one line that a refused command prints."""
    assert main([str(word) for word in argv]) == 2
    told = capsys.readouterr()
    lines = told.err.strip().splitlines()
    assert len(lines) == 1, told.err
    assert lines[0].startswith("error: ")
    assert lines[0].isprintable()
    return lines[0]


@pytest.mark.parametrize("framed", [False, True])
def test_a_pickle_named_safetensors_is_not_loaded(capsys, tmp_path, framed):
    payload = pickle.dumps(Bomb(tmp_path / "harm"))
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(payload)) + payload if framed else payload)
    told = refused(capsys, "train", "compose-stepwise", "--model", path, "--out", tmp_path, "--name", "run", *TINY)
    assert "safetensors" in told
    assert not (tmp_path / "harm").exists()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("!!python/object/apply:os.system ['true']", "tags are not allowed"),
        ("iterations: !!python/name:os.system", "tags are not allowed"),
        ("iterations: !!int 3", "tags are not allowed"),
        ("a: &a [1]\nb: *a", "anchors are not allowed"),
        ("a: &a [x,x]\n" + "".join(f"{c}: &{c} [*{p},*{p}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True)),
         "anchors are not allowed"),  # doubled eight times; thirty times would fill a machine
        ("[" * 5000, "nested too deeply"),
        ("a: " + "{b: " * 200 + "1" + "}" * 200, "nested too deeply"),
    ],
)  # fmt: skip
def test_yaml_that_is_more_than_plain_values(capsys, tmp_path, text, word):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert word in refused(capsys, "train", path, "--out", tmp_path)


def test_a_recipe_of_many_megabytes_is_not_read(capsys, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"#" * (recipes.LARGEST + 1))
    assert "too many for a list of keys" in refused(capsys, "train", path)


@pytest.mark.parametrize("name", ["..", "../x", "/tmp/x", "a/b", "a\x00b", "a\nb", "-x", ".hidden", "con\x1b[2J", ""])
def test_run_names_cannot_leave_the_runs_folder(capsys, tmp_path, name):
    out = tmp_path / "runs"
    refused(capsys, "train", "compose-stepwise", "--out", out, f"--name={name}", *TINY)
    assert [path for path in tmp_path.rglob("*") if path != out] == []


def test_a_run_name_that_is_a_link_elsewhere_is_not_followed(capsys, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(tmp_path / "elsewhere")
    refused(capsys, "train", "compose-stepwise", "--out", tmp_path / "runs", "--name", "mine", *TINY)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_texts_of_others_cannot_rewrite_a_terminal(capsys, tmp_path):
    """In a file's name, a recipe's key, a prompt and the name of a flag's value."""
    evil = "x\x1b[2J\x1b]0;owned\x07\u202e"
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps({evil: 1}), encoding="utf-8")
    assert "unknown keys" in refused(capsys, "train", path)
    assert "no recipe" in refused(capsys, "train", evil)
    assert "holds a control character" in refused(capsys, "train", "compose-stepwise", "--reward", evil)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": f"a red {evil}", "tag": "colors", "include": []}) + "\n")
    refused(capsys, "train", "compose-stepwise", "--train-prompts", prompts, "--out", tmp_path, *TINY)


def test_brackets_of_others_are_no_markup(capsys):
    assert "[bold]x[/bold]" in refused(capsys, "train", "compose-stepwise", "--reward", "[bold]x[/bold]")
    assert main(["sample", "compose-uniform", "--prompt", "[bold]a red circle[/bold]"]) == 2
    assert "[bold]" in capsys.readouterr().err


@pytest.mark.parametrize("change", [{"depth": 4096}, {"hidden": 4096}, {"height": 4096}])
def test_a_desk_model_that_asks_for_a_giant_is_refused_before_it_is_built(tmp_path, change):
    path = tmp_path / "model.safetensors"
    DeskPolicy.initial("compose", hidden=8, heads=1, depth=1).save(path)
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    told = json.loads(header["__metadata__"]["stepcredit"])
    told["config"] = json.dumps(json.loads(told["config"]) | change)
    header["__metadata__"]["stepcredit"] = json.dumps(told)
    changed = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(changed)) + changed + data[8 + length :])
    with pytest.raises(ValueError, match="of another architecture"):
        DeskPolicy.load(path)


def test_many_images_within_the_limit_of_one_are_counted_together():
    """Each of 64 images may be accepted alone; a megabyte of PNG would be a gigabyte of floats."""
    one = wire.encode_images(torch.zeros(1, 3, 64, 64))[0]
    limits = wire.Limits(pixels=64 * 64, all_pixels=10 * 64 * 64)
    assert wire.decode_images([one] * 10, limits).shape == (10, 3, 64, 64)
    with pytest.raises(ValueError, match=r"11 images of 45056 pixels; at most 40960"):
        wire.decode_images([one] * 11, limits)


def test_an_upload_of_ten_gigabytes_is_refused_by_its_first_line():
    """Nothing of it is read: the answer comes when only the headers were sent."""
    red = torch.zeros(3, 8, 8)
    info = RewardInfo("red", (0.0, 1.0), "none", "redness")
    reward = FunctionReward(info, lambda images, *_: images[:, 0].mean(dim=(1, 2)), SelfTest(red + 1, red, "", {}))
    with RewardServer(reward, port=0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        connection = http.client.HTTPConnection(*server.server_address, timeout=20)
        connection.putrequest("POST", "/v1/score")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(10 << 30))
        connection.endheaders()
        reply = connection.getresponse()
        assert (reply.status, b"at most" in reply.read()) == (413, True)
        connection.close()
        server.shutdown()


@pytest.mark.parametrize("token", ["secret-with\r\nInjected: yes", "sécret"])
def test_a_token_that_is_no_header_is_not_quoted(monkeypatch, token):
    monkeypatch.setenv("STEPCREDIT_REWARD_TOKEN", token)
    with pytest.raises(RewardError, match=r"must be printable ASCII in one line") as caught:
        get("remote", url="http://127.0.0.1:1")
    assert "cret" not in str(caught.value).replace("STEPCREDIT_REWARD_TOKEN", "")


@pytest.mark.parametrize(
    "text", ["1e999", "-1e999", "NaN", "Infinity", '"\\ud800"', '{"\\udfff": 1}', "[" * 101 + "]" * 101]
)
def test_json_beyond_json_is_refused(text):
    with pytest.raises(ValueError, match=r"finite|not JSON|surrogate|deeply"):
        loads(text)


def test_what_is_shown_of_a_value_is_short_and_quick():
    assert len(quoted("x" * 10**7)) < 200
    assert len(quoted([[["y" * 1000] * 1000] * 1000])) < 4000
    assert quoted(10**5000) == "a int of too many digits"
    assert clean("a\x1b]8;;http://x\x07b\x1b[31mc\x00d\n") == "abc d"
    assert load_yaml("a: [1, two]") == {"a": [1, "two"]}
