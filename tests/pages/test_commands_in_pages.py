"""Every command of the pages works: executed from top to bottom of its page, or at least read by its parser."""

import ast
import re
import shutil

import pytest
import table
from reading import PAGES, ROOT, blocks, commands, mentions
from running import check, run

from stepcredit import rewards
from stepcredit.rewards import registry
from stepcredit.training import recipe as recipes

pytestmark = pytest.mark.filterwarnings("ignore::stepcredit.policies.diffusers_common.PolicyWarning")
EVERY = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)

READ_ONCE: set[str] = set()
"""Plans that have been made: they look at nothing but their words, so one page is enough."""


@EVERY
def test_commands_run_from_top_to_bottom(page, here, request, monkeypatch):
    wanted = commands(page)
    ruled = (*table.FOREIGN, table.BENCHMARKS)
    unknown = [c for c in wanted if c not in table.RUN | table.CANNOT_RUN and not c.startswith(ruled)]
    assert unknown == [], f"{page.name}: give each a row in tests/pages/table.py"
    if any(command in table.RUN for command in wanted):
        _prepare(page, here, request)
        monkeypatch.setattr(registry, "_registered", {})
    for command in wanted:
        if command in table.RUN and command not in READ_ONCE:
            code = run(_small(command, table.RUN[command]))
            assert code == 0, f"{page.name}: `{command}` ended with {code}"
            if command.startswith("stepcredit plan "):
                READ_ONCE.add(command)


@EVERY
def test_what_cannot_run_is_read_by_its_parser(page, desk_run, here):
    _lay_out(here, "runs/sd35", "RUN", desk_run=desk_run)
    for command in commands(page):
        if command in table.CANNOT_RUN or command.startswith(table.BENCHMARKS):
            check(command)


@EVERY
def test_commands_in_sentences_are_read_by_their_parsers(page, desk_run, here):
    _lay_out(here, "runs/compose-stepwise", "runs/spell-stepwise", "prompts.txt", desk_run=desk_run)
    for mention in mentions(page):
        check(" ".join(table.PLACEHOLDERS.get(word, word) for word in mention.split(" ")))


def test_no_row_is_stale():
    there = {command for page in PAGES for command in commands(page)}
    assert set(table.RUN) & set(table.CANNOT_RUN) == set()
    assert (set(table.RUN) | set(table.CANNOT_RUN)) - there == set()
    numbered = {(page.name, n) for page in PAGES for n in range(len(blocks(page, "python")))}
    assert set(table.PYTHON_RUNS) | set(table.PYTHON_CANNOT_RUN) == numbered


@EVERY
def test_python_blocks_run(page, monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    for number, block in enumerate(blocks(page, "python")):
        names = {"__name__": "a_page"}
        exec(table.PYTHON_RUNS.get((page.name, number), ""), names)
        if (page.name, number) in table.PYTHON_RUNS:
            exec(compile(block.text, f"{page.name}, block {number}", "exec"), names)
        else:
            tree = ast.parse(block.text)
            tree.body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
            if any("diffusers" in ast.unparse(node) for node in tree.body):
                pytest.importorskip("diffusers")
            exec(compile(tree, page.name, "exec"), names)


@EVERY
def test_yaml_blocks_are_recipes(page):
    for block in blocks(page, "yaml"):
        recipe = recipes.parse(block.text, page.name)
        for name in (recipe.reward, recipe.watch):
            assert name is None or name in rewards.names()


def test_every_page_is_in_the_index():
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    index = next(page for page in PAGES if page.name == "index.md").read_text(encoding="utf-8")
    assert pages - set(re.findall(r"\]\(([\w-]+\.md)", index)) == set()


def _small(command, flags):
    for word, stand_in in table.STAND_INS.items():
        command = command.replace(word, stand_in)
    if command.startswith("torchrun "):
        command = command.replace("torchrun ", "torchrun --standalone ", 1)
    return f"{command} {flags}".strip()


def _prepare(page, here, request):
    """What the page's reader has: its own scripts, and what GIVEN says."""
    for block in blocks(page, "python"):
        name = re.match(r"# (\w+\.py)\n", block.text)
        if name:
            (here / name[1]).write_text(block.text, encoding="utf-8")
    given = table.GIVEN.get(page.name, ())
    if page.name in table.NEEDS:
        pytest.importorskip(table.NEEDS[page.name])
    made = {} if not given else {"desk_run": request.getfixturevalue("desk_run")}
    if {"runs/my-run", "runs/sd35"} & set(given):
        made["pipeline_run"] = request.getfixturevalue("pipeline_run")
    _lay_out(here, *given, **made)


def _lay_out(here, *given, desk_run=None, pipeline_run=None):
    for name in given:
        target = here / name
        target.parent.mkdir(exist_ok=True)
        if name.endswith(".yaml"):
            kernel = "cps" if "kernel" in name else "flow_sde"
            target.write_text(recipes.text("compose-uniform").replace("flow_sde", kernel), encoding="utf-8")
        elif name.endswith(".txt"):
            target.write_text("a red circle\ntwo circles on black\n", encoding="utf-8")
        else:
            source = pipeline_run if pipeline_run is not None and name != "RUN" else desk_run
            shutil.copytree(source, target, symlinks=True)
