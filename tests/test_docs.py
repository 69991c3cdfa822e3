"""Documentation that cannot drift: the reference is current, links lead somewhere, every recipe has its row."""

import re
import runpy
from pathlib import Path

import pytest

from stepcredit.training import recipe as recipes

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def test_the_reference_is_made_from_the_docstrings_as_they_are():
    page = runpy.run_path(str(ROOT / "docs" / "build_reference.py"))["reference"]()
    written = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert written == page, "run: python docs/build_reference.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def anchors(page):
    """Where links into a page may lead: its headings as the sites that render them name them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_into_pages_lead_to_headings(page):
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
        assert anchor in anchors((page.parent / target) if target else page), f"{page.name} links to {target}#{anchor}"


def test_errors_point_to_entries_of_troubleshooting():
    entries = anchors(ROOT / "docs" / "troubleshooting.md")
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    pointed = set(re.findall(r"docs/troubleshooting\.md#([\w-]+)", source))
    assert len(pointed) >= 7
    assert pointed <= entries


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_pages_exist(page):
    from stepcredit.cli import COMMANDS

    for command in re.findall(r"(?:^|`)stepcredit ([a-z][a-z-]*)", page.read_text(encoding="utf-8"), re.MULTILINE):
        assert command in COMMANDS, f"{page.name} names `stepcredit {command}`"


def test_every_recipe_is_in_the_paper_index_or_is_named_ours():
    index = (ROOT / "docs" / "paper-index.md").read_text(encoding="utf-8")
    missing = [name for name in recipes.names() if name not in index and name.rsplit("-", 1)[0] not in index]
    assert missing == []


@pytest.mark.parametrize("name", recipes.names())
def test_recipes_named_in_the_pages_exist(name):
    assert recipes.text(name).splitlines()[0] == f"# stepcredit train {name}"
