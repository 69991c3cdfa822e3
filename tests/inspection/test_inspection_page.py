"""The page as a file: what is embedded, escaped and said."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from hand_made import EVIL, inspection

from stepcredit.inspection import schemes
from stepcredit.reports import inspection as page
from stepcredit.reports import pictures


class Read(HTMLParser):
    """Elements with their attributes, and the text of scripts and of all else."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.scripts, self.text, self._script = [], [], "", False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._script = tag == "script"
        if self._script:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._script = False

    def handle_data(self, data):
        if self._script:
            self.scripts[-1] += data
        else:
            self.text += data

    def find(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def embedded(text):
    return json.loads(Read(text).scripts[0])


@pytest.fixture(scope="module")
def whole():
    return page.render(inspection())


def test_embedded_numbers_are_those_of_the_library_to_the_last_bit(whole):
    seen, data = inspection(), embedded(whole)
    for look, told in zip(seen.looks, data["looks"], strict=True):
        made = schemes.numbers(seen.recipe, look.R, seen.trained)
        assert np.array_equal(np.array(told["R"], np.float32), look.R.numpy())
        for key, value in made.credit.items():
            assert np.array_equal(np.array(told["credit"][key], np.float32), value.numpy())
            for name, advantage in made.advantage[key].items():
                assert np.array_equal(np.array(told["advantage"][key][name], np.float32), advantage.numpy())
        assert told["strict"] == made.strict.tolist()
    assert data["looks"][0]["credit"]["gae_0.5"][0] == [0.53125, 0.0625, 0.625, -0.25]
    assert data["start"] == {"scheme": "gae_0.3", "normalisation": "joint"}
    assert data["schemes"]["gae_0.5"]["keys"] == "credit: gae\nlam: 0.5"
    assert data["schemes"]["turning_point_loose"]["keys"] == "credit: turning_point\nstrict: false\nbalance: false"


def test_values_without_a_short_decimal_and_missing_ones():
    assert page.exact(torch.tensor([1 / 3, torch.nan])) == [0.33333334, None]
    assert np.float32(0.33333334) == np.float32(1 / 3)


def test_it_is_one_file_whose_only_script_is_named_by_its_hash(whole):
    read = Read(whole)
    assert [s.get("type") for s in read.find("script")] == ["application/json", None]
    digest = base64.b64encode(hashlib.sha256(read.scripts[1].encode()).digest()).decode()
    policy = next(m["content"] for m in read.find("meta") if m.get("http-equiv"))
    assert policy.startswith("default-src 'none'")
    assert f"script-src 'sha256-{digest}'" in policy
    assert not re.search(r"https?:|url\(|@import", re.sub(r"data:image[^\"]*", "", whole))
    assert all(image.get("src", "data:").startswith("data:image/png;base64,") for image in read.find("img")[:30])


def test_a_hostile_prompt_is_text():
    text = page.render(inspection(EVIL))
    read = Read(text)
    assert len(read.scripts) == 2
    assert EVIL in read.text
    assert "49" not in read.text.split("</title>")[0][:200]
    assert not any("onerror" in attributes for _, attributes in read.elements)
    assert len(read.find("img")) == len(Read(page.render(inspection())).find("img"))


def test_data_cannot_end_their_element():
    assert json.loads(page._embedded({"x": "</script><!--&"})) == {"x": "</script><!--&"}
    assert not re.search("[<>&]", page._embedded({"x": "</script><!--&"}))


def test_tables_and_pictures_have_names(whole):
    read = Read(whole)
    assert len(read.find("h1")) == 1
    assert all(cell["scope"] in ("row", "col") for cell in read.find("th"))
    assert all(table["aria-label"] for table in read.find("table"))
    assert all(drawing["aria-label"] for drawing in read.find("svg"))
    strips = [image for image in read.find("img") if "data-state" in image]
    assert len(strips) == 2 * 3 * 5
    assert strips[3]["alt"] == "State 3, reward 1.000"
    cells = [cell for cell in read.find("td") if cell["data-member"] == "0"]
    assert [cell["class"].split() for cell in cells[:4]] == [["strict"], ["minus"], ["loose"], ["minus", "off"]]


def test_it_says_what_is_shown_to_a_newcomer(whole):
    said = " ".join(Read(whole).text.split())
    for sentence in (
        "from noise to an image in 4 steps",
        "here 0–2, shaded",
        "the state carried to the end by 2 noise-free steps",
        "base and tuned weights get the same noise everywhere",
        "2 strict and 1 merely loose turning points in 12 steps",
    ):
        assert sentence in said
    alone = " ".join(Read(page.render(inspection(looks=1))).text.split())
    assert "tuned weights" not in alone


@pytest.mark.parametrize(("size", "limit"), [(24, 1_500_000), (192, 3_000_000)])
def test_a_large_group_stays_below_three_megabytes(size, limit):
    """Noise is the worst that a picture can be."""
    text = page.render(inspection(size=size, members=16, steps=10))
    assert len(text.encode()) < limit


def test_small_pictures_are_embedded_exactly():
    from io import BytesIO

    from PIL import Image

    seen = inspection(looks=1)
    uri = pictures.encode(seen.looks)[0][1][2]
    image = np.asarray(Image.open(BytesIO(base64.b64decode(uri.split(",")[1]))))
    assert np.array_equal(image, seen.looks[0].images[7].numpy())


@pytest.mark.parametrize(
    ("value", "largest", "text"),
    [(0.25, 1.0, "+0.25"), (-0.125, 1.0, "−0.13"), (0.125, 0.5, "+0.13"), (0.0, 1.0, "0"), (-0.001, 1.0, "0"),
     (0.0123, 0.02, "+0.012"), (12.34, 50.0, "+12.3"), (-250.0, 300.0, "−250"), (float("nan"), 1.0, "–")],
)  # fmt: skip
def test_cells_are_short_and_signed(value, largest, text):
    assert page.cell_text(value, largest) == text


def test_spans_of_steps():
    assert page.spans([0, 1, 2, 5]) == "0–2 and 5"
    assert page.spans([1, 3, 5]) == "1, 3 and 5"
    assert page.spans([4]) == "4"


def test_a_group_without_differences_says_so():
    seen = inspection(looks=1)
    seen.looks[0].R[:] = seen.looks[0].R[:1].clone()
    assert "teaches nothing" in page.render(seen)
    assert "teaches nothing" not in page.render(inspection())


def test_a_sample_without_a_reward_is_a_gap_not_a_number():
    seen = inspection(looks=1)
    seen.looks[0].R[1, 2] = torch.nan
    text = page.render(seen)
    told = embedded(text)["looks"][0]
    assert told["R"][1] == [0.0, 0.25, None, 0.5, 0.5]
    assert told["gain"][1] == [0.25, None, None, 0.0]
    assert told["credit"]["gain"][1] == [None] * 4  # it leaves its group
    assert told["advantage"]["gain"]["joint"][1] == [0.0] * 4
    assert "State 2, reward –" in text
