"""What the package may not contain: ways to run code that came as data."""

import ast
from pathlib import Path

import pytest

import stepcredit

PACKAGE = Path(stepcredit.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
# The one-off conversion of published pickles, weights-only and in a process of its own.
MAY_LOAD = {"rewards/convert.py"}


def calls(tree):
    """Dotted names of everything that is called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_nothing_unpickles_or_evaluates_text(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    name = path.relative_to(PACKAGE).as_posix()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not {alias.name for alias in node.names} & {"pickle", "marshal", "shelve", "dill"}, name
        if isinstance(node, ast.ImportFrom):
            assert node.module not in {"pickle", "marshal", "shelve", "dill"}, name
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            assert isinstance(node.value, ast.Constant), name
            assert node.value.value is False, name
    for called, node in calls(tree):
        assert called not in {"eval", "exec", "yaml.load", "yaml.unsafe_load", "np.load", "numpy.load"}, (
            name,
            node.lineno,
        )
        if called == "torch.load":
            assert name in MAY_LOAD, (name, node.lineno)
            assert any(k.arg == "weights_only" and k.value.value is True for k in node.keywords), (name, node.lineno)


def test_importing_the_package_is_light():
    """No torch, no diffusers: `stepcredit --help` and tab completion stay instant."""
    import subprocess
    import sys

    heavy = "{'torch', 'diffusers', 'transformers', 'matplotlib'}"
    code = f"import sys, stepcredit.cli; print(sorted({heavy} & set(sys.modules)))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"
