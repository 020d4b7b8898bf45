"""The house rules that imports can break: one direction, and one package that touches the extension."""

import ast

import pytest

# Imports point rightward only. config and the package itself stand outside the order.
ORDER = ("cli", "bench", "plugin", "specs", "guard", "build", "plan", "runtime", "reference", "kernels")


def imported_modules(path):
    """Names of the sgl_lowlatency modules that a file imports when it runs, in functions too; not for type checkers."""
    tree = ast.parse(path.read_text())
    typing_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "sgl_lowlatency")


@pytest.fixture
def imports(repo_root):
    """(file relative to the package, its layer, imported module) for every import."""
    package = repo_root / "src/sgl_lowlatency"
    found = []
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package)
        found += [(relative, relative.parts[0].removesuffix(".py"), name) for name in imported_modules(path)]
    assert found
    return found


def test_imports_point_one_way(imports):
    wrong = []
    for path, layer, name in imports:
        target = (name.split(".") + [""])[1]
        if layer in ORDER and target in ORDER and ORDER.index(target) < ORDER.index(layer):
            wrong.append(f"{path} imports {name}")
    assert wrong == []


def test_every_layer_is_in_the_order(imports):
    assert {layer for _, layer, _ in imports} <= {*ORDER, "__init__", "config"}


def test_only_kernels_touch_the_extension(imports):
    assert [f"{path} imports {name}" for path, layer, name in imports if "._C" in name and layer != "kernels"] == []


def test_a_plugin_process_imports_no_torch_for_us(repo_root):
    """plugin and config are imported in every SGLang process; guard runs on stand-ins without torch."""
    package = repo_root / "src/sgl_lowlatency"
    for path in [package / "plugin.py", package / "config.py", package / "kernels/geometry.py", *package.glob("guard/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert "torch" not in {module.split(".")[0] for module in modules}, path
