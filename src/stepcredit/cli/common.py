"""What the commands share: recipes with every key as a flag, and where runs are."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stepcredit.errors import UserError, nearest
from stepcredit.training import recipe as recipes
from stepcredit.training.recipe import Recipe
from stepcredit.untrusted import clean_lines

Args = TypeVar("Args")
DEFAULT_RECIPE = "compose-stepwise"


@dataclasses.dataclass(frozen=True)
class Parsed(Generic[Args]):
    """A command line: the command's own arguments, the recipe, and the recipe keys given as flags."""

    own: Args
    recipe: Recipe
    source: str
    overrides: dict[str, Any]


def parse(own: type[Args], command: str, argv: Sequence[str]) -> Args:
    """The arguments of a command that takes no recipe keys."""
    return tyro.cli(own, prog=f"stepcredit {command}", args=list(argv), config=(tyro.conf.FlagCreatePairsOff,))


def parse_with_recipe(own: type[Args], command: str, argv: Sequence[str], base: Recipe | None = None) -> Parsed[Args]:
    """The arguments of a command whose first word is a recipe and whose flags may set any recipe key.

    ``base`` stands in for the named recipe (a run being resumed). Raises UserError for an unknown recipe or a value
    that the recipe refuses; tyro itself reports unknown flags and exits with 2.
    """
    source = argv[0] if argv and not argv[0].startswith("-") else DEFAULT_RECIPE
    wants_help = any(word in ("-h", "--help") for word in argv)
    start = base or (Recipe() if wants_help and source == DEFAULT_RECIPE else resolve(source))
    shown = start.model_dump()
    fields = [
        (
            key,
            Annotated[field.annotation, tyro.conf.arg(help=_plain(field.description))],
            dataclasses.field(default_factory=partial(copy.copy, shown[key])),
        )
        for key, field in Recipe.model_fields.items()
        if key not in {f.name for f in dataclasses.fields(own)}  # type: ignore[arg-type]
    ]
    keys: Any = dataclasses.make_dataclass("recipe_keys", fields)
    flat: Any = tyro.conf.OmitArgPrefixes
    both: Any = dataclasses.make_dataclass("both", [("own", flat[own]), ("keys", flat[keys])])
    result = tyro.cli(both, prog=f"stepcredit {command}", args=list(argv), description=own.__doc__)
    given = {key: value for key, value in vars(result.keys).items() if value != shown[key]}
    recipe = recipes.build({**shown, **given}, "the command line") if given else start
    return Parsed(result.own, recipe, source, given)


@dataclasses.dataclass(frozen=True)
class ParsedMany(Generic[Args]):
    """A command line that names several recipes; ``recipes`` by label, in the order given, flags applied to each."""

    own: Args
    recipes: dict[str, Recipe]
    sources: tuple[str, ...]
    overrides: dict[str, Any]


def parse_with_recipes(own: type[Args], command: str, argv: Sequence[str]) -> ParsedMany[Args]:
    """The arguments of a command whose first words are recipes and whose flags set keys of all of them.

    Labels are the recipes' names, with a number where one occurs twice. Raises UserError as ``parse_with_recipe``.
    """
    split = next((k for k, word in enumerate(argv) if word.startswith("-")), len(argv))
    sources, flags = tuple(argv[:split]) or (DEFAULT_RECIPE,), argv[split:]
    first = parse_with_recipe(own, command, [sources[0], *flags])
    # a flag that repeats the first recipe's value is an override for the others all the same
    words = {word.lstrip("-").split("=")[0].replace("-", "_").removeprefix("no_") for word in flags if word[:2] == "--"}
    owned = {field.name for field in dataclasses.fields(own)}  # type: ignore[arg-type]
    overrides = {key: getattr(first.recipe, key) for key in Recipe.model_fields if key in words - owned}
    found: dict[str, Recipe] = {}
    for source in sources:
        stem = Path(source).stem
        label = next(name for name in (stem, *(f"{stem}-{k}" for k in range(2, 10_000))) if name not in found)
        keys = {**resolve(source).model_dump(), **overrides}
        found[label] = (
            recipes.build(keys, f"{source!r} with the flags of the command line") if overrides else resolve(source)
        )
    return ParsedMany(first.own, found, sources, overrides)


def resolve(source: str) -> Recipe:
    """The recipe of a bundled name, a YAML file or a run folder. Raises UserError."""
    stored = Path(source) / "recipe.yaml"
    if stored.is_file():
        return recipes.parse(stored.read_text(encoding="utf-8"), f"run {source!r}")
    return recipes.load(source)


def run_folder(run: str, out: Path) -> Path:
    """The folder of a run given as a path or as a name under ``out``. Raises UserError if it is not a run."""
    for candidate in (Path(run), out / run):
        if (candidate / "recipe.yaml").is_file():
            return candidate
    found = sorted(path.parent.name for path in out.glob("*/recipe.yaml"))
    listed = f" The runs in {str(out)!r} are {', '.join(found[-8:])}" if found else ""
    raise UserError(f"no run {run!r}{nearest(run, found)}{listed}")


def console(stderr: bool = False) -> Console:
    """Where commands print: as wide as the terminal, or wide enough for a table where the output goes to a file.

    Texts are printed as they are: brackets and colons in them are no markup, and control codes are taken out.
    """
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else 120
    return _Plain(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True, width=width)


class _Plain(Console):
    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(clean_lines(text), **options)


def table(title: str, *columns: str) -> Table:
    """A plain table: first column left, the others right."""
    result = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for k, column in enumerate(columns):
        result.add_column(column, justify="left" if k == 0 else "right")
    return result


def _plain(text: str | None) -> str:
    return (text or "").replace("`", "").replace("\n", " ")
