"""The page in a real browser: it switches to the library's numbers, links its views, asks for nothing."""

import json

import numpy as np
import pytest
from hand_made import EVIL, inspection

from stepcredit.inspection import schemes
from stepcredit.reports import inspection as page

VALUES = "[...document.querySelectorAll('.look')].map(l => [...l.querySelectorAll('tbody tr')].map(r => "
SHOWN = VALUES + "[...r.querySelectorAll('td')].map(c => Number(c.dataset.value))))"
TEXTS = VALUES + "[...r.querySelectorAll('td')].map(c => c.textContent)))"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "inspect.html"
    path.write_text(page.render(inspection(EVIL)), encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def opened(browser, url):
    browser.open(url)
    yield browser
    assert browser.complaints() == []
    assert browser.requests() == []


@pytest.fixture(scope="module")
def library():
    seen = inspection()
    return [schemes.numbers(seen.recipe, look.R, seen.trained) for look in seen.looks]


def switch(browser, **to):
    """Follow a link to a fragment, as a shared address does, and return the values that the maps then show."""
    fragment = "&".join(f"{key}={value}" for key, value in to.items())
    ready = "new Promise(done => addEventListener('hashchange', done, {once: true}))"
    return browser.run(
        f"(() => {{ const seen = {ready}; location.hash = {json.dumps(fragment)}; return seen.then(() => {SHOWN}) }})()"
    )


def test_it_opens_on_the_numbers_that_the_file_has_without_a_script(opened, library):
    assert opened.run("window.hacked") is None
    largest = max(float(made.gain.abs().max()) for made in library)
    expected = [[[page.cell_text(g, largest) for g in row] for row in made.gain.tolist()] for made in library]
    assert opened.run(TEXTS) == expected
    for look, made in zip(opened.run(SHOWN), library, strict=True):
        assert np.array_equal(np.array(look, np.float32), made.gain.numpy())


def test_every_scheme_and_normalisation_shows_the_librarys_numbers(opened, library):
    for key in library[0].credit:
        shown = switch(opened, show="credit", scheme=key)
        for look, made in zip(shown, library, strict=True):
            assert np.array_equal(np.array(look, np.float32), made.credit[key].numpy()), key
        for name in library[0].advantage[key]:
            shown = switch(opened, show="advantage", scheme=key, normalisation=name)
            for look, made in zip(shown, library, strict=True):
                assert np.array_equal(np.array(look, np.float32), made.advantage[key][name].numpy()), (key, name)


def test_controls_switch_and_say_what_they_show(opened, library):
    opened.run("""(() => { const s = document.querySelector('select'); s.value = 'uniform';
        s.dispatchEvent(new Event('change', {bubbles: true})) })()""")
    assert opened.run("document.querySelector('.quantity').textContent") == "Credit"  # a switch is seen
    assert opened.run(SHOWN)[0][0] == [0.75] * 4
    opened.click("input[value=group]")
    for look, made in zip(opened.run(SHOWN), library, strict=True):
        assert np.array_equal(np.array(look, np.float32), made.advantage["uniform"]["group"].numpy())
    said = opened.run("document.querySelector('.said').textContent")
    assert "credit: uniform, advantage: group" in said
    assert opened.run("location.hash").startswith("#show=advantage&scheme=uniform&normalisation=group")
    # credit that differs between steps has no group normalisation: back to the recipe's own
    opened.run("""(() => { const s = document.querySelector('select'); s.value = 'gain';
        s.dispatchEvent(new Event('change', {bubbles: true})) })()""")
    assert opened.run("document.querySelector('input[value=group]').disabled") is True
    assert opened.run("document.querySelector('input[name=normalisation]:checked').value") == "joint"


def test_pointing_at_a_cell_a_picture_or_a_curve_links_all_three(opened):
    opened.move_to(".look[data-look='1'] td[data-member='1'][data-step='2']")
    here = "[...document.querySelectorAll('img.here')].map(i => [i.dataset.member, i.dataset.state].join())"
    assert opened.run(here) == ["1,2", "1,3"] * 2
    assert opened.run("document.querySelectorAll('td.here').length") == 2
    reading = ".reading[data-look='1'] "
    assert opened.run(f'document.querySelector("{reading}.reward").textContent') == "0.75 → 0.5"
    assert opened.run(f'document.querySelector("{reading}.gain").textContent') == "−0.25"
    before = opened.run(f'document.querySelector("{reading}.before").src')
    assert before == opened.run(
        "document.querySelector(\".look[data-look='1'] img[data-member='1'][data-state='2']\").src"
    )

    opened.move_to(".look[data-look='0'] img[data-member='2'][data-state='1']")
    assert opened.run(here) == ["2,0", "2,1"] * 2
    assert "Member 2, step 0" in opened.run("document.querySelector('.where').textContent")

    # the curve of member 0 stands alone at its peak, state 3
    opened.run("document.querySelector('.wide-only svg').scrollIntoView({block: 'center'})")
    find = "const chart = document.querySelector('.wide-only svg'), box = chart.getBoundingClientRect()"
    x = "box.x + Number(f.left) + 2.9 * f.pitch"
    y = "box.y + Number(f.top) + 0.1 * (f.bottom - f.top)"
    x, y = opened.run(f"(() => {{ {find}, f = chart.dataset; return [{x}, {y}] }})()")
    opened.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    assert "Member 0, step 2" in opened.run("document.querySelector('.where').textContent")


def test_the_map_is_walked_by_keyboard(opened):
    opened.run("document.querySelector('td[tabindex=\"0\"]').focus()")
    assert opened.run('document.querySelectorAll(\'.look[data-look="0"] td[tabindex="0"]\').length') == 1
    at = "[document.activeElement.dataset.member, document.activeElement.dataset.step].join()"
    for key, code, modifiers, expected in (
        ("Home", 36, 2, "0,0"), ("ArrowRight", 39, 0, "0,1"), ("ArrowDown", 40, 0, "1,1"), ("ArrowLeft", 37, 0, "1,0"),
        ("ArrowLeft", 37, 0, "1,0"), ("End", 35, 0, "1,3"), ("End", 35, 2, "2,3"), ("ArrowUp", 38, 0, "1,3"),
    ):  # fmt: skip
        opened.press(key, code, modifiers)
        assert opened.run(at) == expected
    assert opened.run("document.activeElement.getAttribute('aria-label')") == "member 1, step 3: gain 0, not trained"
    assert opened.run("document.activeElement.getAttribute('role')") == "gridcell"
    assert "Member 1, step 3" in opened.run("document.querySelector('.where').textContent")
    assert opened.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"


@pytest.mark.parametrize(("looks", "steps"), [(1, 10), (2, 10), (2, 28)])
def test_a_phone_does_not_scroll_sideways(browser, tmp_path, looks, steps):
    path = tmp_path / "page.html"
    path.write_text(
        page.render(inspection("word " * 30, size=24, looks=looks, members=4, steps=steps)), encoding="utf-8"
    )
    browser.open(path.as_uri(), width=375, height=812)
    assert browser.run("document.documentElement.scrollWidth") == 375
    if steps == 10:  # and all of a strip is seen at once
        assert browser.run("document.querySelector('.film').getBoundingClientRect().right") <= 375
    assert browser.complaints() == []


def test_light_and_dark_follow_the_reader_and_the_switch(opened, url):
    paper = "getComputedStyle(document.body).backgroundColor"
    light = opened.run(paper)
    opened.click("button.theme")
    dark = opened.run(paper)
    assert dark != light
    opened.open(url, dark=True)
    assert opened.run(paper) == dark
    assert opened.run("document.querySelector('.theme').getAttribute('aria-pressed')") == "true"
    opened.click("button.theme")
    assert opened.run(paper) == light


CONTRAST = """(() => {
  const canvas = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
  const light = colour => {
    canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    const linear = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map(c => c / 255)
      .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  return Math.min(...[...document.querySelectorAll('.map td')].map(cell => {
    const style = getComputedStyle(cell);
    const both = [light(style.color), light(style.backgroundColor)].sort((a, b) => a - b);
    return (both[1] + 0.05) / (both[0] + 0.05);
  }));
})()"""


@pytest.mark.parametrize("dark", [False, True])
def test_numbers_stand_out_from_their_cells(opened, url, dark):
    """WCAG's contrast of 4.5 for text, at the strongest colour too."""
    opened.open(url, dark=dark)
    assert 4.5 <= opened.run(CONTRAST) < 21
    switch(opened, show="advantage", scheme="uniform", normalisation="group")
    assert opened.run(CONTRAST) >= 4.5


@pytest.mark.parametrize(("size", "looks", "steps", "width"), [(24, 2, 28, 1280), (24, 1, 6, 1280), (100, 2, 10, 375)])
def test_curve_map_and_strip_share_a_ruler(browser, tmp_path, size, looks, steps, width):
    """A cell stands between the pictures of its two states, and under its part of the curve."""
    path = tmp_path / "page.html"
    path.write_text(page.render(inspection(size=size, looks=looks, members=2, steps=steps)), encoding="utf-8")
    browser.open(path.as_uri(), width=width)
    middle = "(e => { const b = e.getBoundingClientRect(); return b.x + b.width / 2 })"
    for step in (0, steps - 1):
        before, after = (
            browser.run(f"{middle}(document.querySelector('.strip img[data-state=\"{i}\"]'))") for i in (step, step + 1)
        )
        cell = browser.run(f"{middle}(document.querySelector('.map td[data-step=\"{step}\"]'))")
        assert cell == pytest.approx((before + after) / 2, abs=1)
        drawn = "wide" if width > 640 else "narrow"
        state = browser.run(f"""(() => {{ const c = document.querySelector('.{drawn}-only svg.curves');
            return c.getBoundingClientRect().x + Number(c.dataset.left) + {step} * c.dataset.pitch }})()""")
        assert state == pytest.approx(before, abs=1)


def test_pictures_are_enlarged_by_whole_factors_without_blur(opened):
    image = "document.querySelector('.strip img')"
    width = opened.run(f"{image}.getBoundingClientRect().width")
    assert width % 8 == 0
    assert width > 8
    assert opened.run(f"getComputedStyle({image}).imageRendering") == "pixelated"


def test_on_paper_there_is_no_control(opened):
    opened.send("Emulation.setEmulatedMedia", media="print")
    assert opened.run("getComputedStyle(document.querySelector('.controls')).display") == "none"
    assert opened.run("getComputedStyle(document.querySelector('.dock')).position") == "static"
    opened.send("Emulation.setEmulatedMedia", media="")
