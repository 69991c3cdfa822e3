"""Drawing prompts and reading prompt files."""

from collections import Counter

import pytest

from stepcredit.errors import UserError
from stepcredit.tasks import Prompt, draw, files

PROMPTS = [Prompt(f"{tag} {k}", {"tag": tag}) for tag, n in (("a", 3), ("b", 10), ("c", 1)) for k in range(n)]


def test_tags_come_in_equal_shares_in_every_prefix():
    drawn = draw(PROMPTS, 31, 0, 5)
    for n in range(1, 32):
        counts = Counter(p.tag for p in drawn[:n])
        assert max(counts.values()) - min(counts.get(t, 0) for t in "abc") <= 1


def test_no_prompt_repeats_within_a_tag_until_all_are_used():
    of_b = [p.text for p in draw(PROMPTS, 60, 1) if p.tag == "b"]
    assert len(set(of_b[:10])) == 10
    assert len(set(of_b[10:20])) == 10


def test_a_draw_is_a_function_of_its_key():
    assert draw(PROMPTS, 12, 0, 1) == draw(PROMPTS, 12, 0, 1)
    assert draw(PROMPTS, 12, 0, 1) != draw(PROMPTS, 12, 0, 2)
    assert draw(PROMPTS, 12, 0, 1)[:6] == draw(PROMPTS, 6, 0, 1)


def test_prompt_files(tmp_path):
    text = tmp_path / "p.txt"
    text.write_text("a red circle\n\n a blue ring \n", encoding="utf-8")
    assert [p.text for p in files.read(text)] == ["a red circle", "a blue ring"]
    lines = tmp_path / "p.jsonl"
    lines.write_text('{"prompt": "a circle", "tag": "single_object", "include": []}\n')
    (prompt,) = files.read(lines)
    assert prompt.tag == "single_object"
    assert prompt.metadata["include"] == []


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("p.txt", "\n \n", "holds no prompt"),
        ("p.jsonl", '{"prompt": "x"}\nnot json\n', "line 2"),
        ("p.jsonl", '["x"]\n', "line 1"),
        ("p.jsonl", '{"prompt": ""}\n', "non-empty"),
        ("p.csv", "a\n", r"\.txt"),
    ],
)
def test_bad_prompt_files_are_one_sentence(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(UserError, match=words):
        files.read(path)


def test_a_missing_prompt_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"gone\.txt"):
        files.read(tmp_path / "gone.txt")
