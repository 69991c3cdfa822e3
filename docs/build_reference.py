"""Writes reference.md from the docstrings of the public modules: ``python docs/build_reference.py``."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

HERE = Path(__file__).parent
PACKAGE = HERE.parent / "src" / "stepcredit"
MODULES = (
    "grids", "interpolant", "kernels", "noise", "storage", "rollout", "scoring", "ledger", "credit", "advantage",
    "objective", "sampling", "policies.base", "rewards.base", "rewards.geneval_rules", "tasks.base",
    "training.recipe", "training.setup", "training.iteration", "training.cells", "training.collect", "training.holding",
    "training.update", "training.gradients", "training.distributed", "training.sharding", "training.evaluation",
    "training.trainer", "training.account", "training.guards", "training.checkpoint",
    "inspection.collect", "inspection.schemes",
    "audit.estimators", "audit.gradients", "audit.schemes", "audit.measure", "audit.result",
    "comparison.curves", "comparison.runs", "comparison.summary", "comparison.diversity",
)  # fmt: skip


def reference() -> str:
    """The whole page."""
    parts = [
        "# API reference\n\nMade from the docstrings by `python docs/build_reference.py`. Names that begin with an "
        "underscore are left out.\n"
    ]
    parts += [_module(name) for name in MODULES]
    return "\n".join(parts)


def _module(name: str) -> str:
    path = PACKAGE / (name.replace(".", "/") + ".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    lines = [f"## `stepcredit.{name}`\n", (ast.get_docstring(tree) or "") + "\n"]
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            lines += _entry(node, "###", "")
    return "\n".join(lines)


def _entry(node: ast.FunctionDef | ast.ClassDef, level: str, owner: str) -> list[str]:
    if isinstance(node, ast.FunctionDef):
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        lines = [f"{level} `{owner}{node.name}({ast.unparse(node.args)}){returns}`\n", _doc(node)]
        return [*lines, ""]
    lines = [f"{level} class `{node.name}`\n", _doc(node), ""]
    fields = []
    for entry, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name) and entry.target.id[0] != "_":
            default = f" = {ast.unparse(entry.value)}" if entry.value else ""
            text = after.value.value if _is_text(after) else ""
            meaning = f": {' '.join(inspect.cleandoc(text).split())}" if text else ""
            fields.append(f"- `{entry.target.id}: {ast.unparse(entry.annotation)}{default}`{meaning}")
    lines += [*fields, ""] if fields else []
    for entry in node.body:
        if isinstance(entry, ast.FunctionDef) and entry.name[0] != "_" and ast.get_docstring(entry):
            lines += _entry(entry, "####", f"{node.name}.")
    return lines


def _doc(node: ast.FunctionDef | ast.ClassDef) -> str:
    return ast.get_docstring(node) or ""


def _is_text(node: ast.stmt | None) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


if __name__ == "__main__":
    (HERE / "reference.md").write_text(reference(), encoding="utf-8")
