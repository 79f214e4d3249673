"""Imports point one way, at module load: the table, checked over the source."""

import ast
import subprocess
import sys

import pytest

from tests.source_tree import PACKAGES, ROOT, Source, imports, parse, sources

# What each package may import of ours. Nothing of ours may import anything that is not listed.
MAY_IMPORT = {
    "pallas_kernels": set(),
    "cache": set(),
    "qwen_hybrid": {"pallas_kernels"},
    "spec": {"qwen_hybrid", "pallas_kernels"},
    "serve": {"cache", "qwen_hybrid", "spec", "pallas_kernels"},
}
OURS = {*MAY_IMPORT, "tests", "benchmarks", "examples"}
MUST_NOT_IMPORT = {"cache": {"jax", "jaxlib", "flax"}}

# Only the command line reads the environment; it hands what it found to the libraries.
MAY_READ_ENVIRONMENT = ("serve/cli/", "serve/__main__.py")
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb"}

# Needed by an optional extra only: importing our packages must not import them.
LAZY = {"grpc", "torch", "transformers", "optax", "matplotlib", "triton", "jax_triton"}


def crossing(source: Source) -> list[str]:
    """Return the imports that the table forbids."""
    allowed = MAY_IMPORT[source.package] | {source.package}
    forbidden = (OURS - allowed) | MUST_NOT_IMPORT.get(source.package, set())
    return [
        f"{source.path}:{found.line}: {source.package} must not import {found.names[0]}"
        for found in imports(source)
        if found.top in forbidden
    ]


def deferred(source: Source) -> list[str]:
    """Return the imports that do not stand at the top level of the file."""
    top = {id(node) for node in source.tree.body}
    return [
        f"{source.path}:{node.lineno}: import inside a function, class or condition"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in top
    ]


def blinding(source: Source) -> list[str]:
    """Return the imports of postponed annotations, which hide shapes from the checker."""
    return [
        f"{source.path}:{found.line}: postponed annotations"
        for found in imports(source)
        if found.names[0] == "__future__"
    ]


def environment_reads(source: Source) -> list[str]:
    """Return the places that reach for the process's environment."""
    if source.path.as_posix().startswith(MAY_READ_ENVIRONMENT):
        return []
    reads = [
        node.lineno
        for node in ast.walk(source.tree)
        if (isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT)
        or (isinstance(node, ast.ImportFrom) and ENVIRONMENT & {a.name for a in node.names})
    ]
    return [f"{source.path}:{line}: reads the environment" for line in reads]


def past_the_front_door(source: Source) -> list[str]:
    """Return the imports from another package that reach into a folder, an op's for one."""
    return [
        f"{source.path}:{found.line}: import from {found.names[0].rpartition('.')[0]} instead"
        for found in imports(source)
        if found.top in MAY_IMPORT and found.top != source.package and found.names[0].count(".") > 1
    ]


RULES = [crossing, deferred, blinding, environment_reads, past_the_front_door]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_packages_keep_the_rule(rule):
    problems = [line for source in sources(*PACKAGES) for line in rule(source)]
    assert not problems, "\n" + "\n".join(problems)


def test_modules_of_a_package_form_no_cycle():
    known = {source.module: source for source in sources(*PACKAGES)}
    edges = {
        name: {n for found in imports(source) for n in found.names if n in known and n != name}
        for name, source in known.items()
    }
    # A package's front door may be named while its own modules load: the front door is below.
    doors = {s.module for s in known.values() if s.path.name == "__init__.py"}
    done: set[str] = set()
    while True:
        ready = {n for n in edges if n not in done and edges[n] <= done | _own_doors(n, doors)}
        if not ready:
            break
        done |= ready
    left = sorted(set(edges) - done)
    assert not left, f"import cycle among {left}"


def _own_doors(module: str, doors: set[str]) -> set[str]:
    """Return the packages that contain `module`."""
    return {door for door in doors if module.startswith(door + ".")}


def test_every_package_has_a_row():
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert folders - {"tests", "benchmarks", "examples"} <= set(MAY_IMPORT)


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (crossing, "pallas_kernels/a.py", "from qwen_hybrid import x\n"),
        (crossing, "qwen_hybrid/a.py", "import serve.engine\n"),
        (crossing, "spec/a.py", "from cache import radix\n"),
        (crossing, "cache/a.py", "import jax.numpy as jnp\n"),
        (crossing, "serve/a.py", "from tests import source_tree\n"),
        (crossing, "qwen_hybrid/b/c.py", "from ...serve import x\n"),
        (deferred, "serve/a.py", "def f():\n    import os\n"),
        (deferred, "serve/a.py", "if TYPE_CHECKING:\n    import os\n"),
        (blinding, "serve/a.py", "from __future__ import annotations\n"),
        (environment_reads, "serve/a.py", "import os\nos.environ['X']\n"),
        (environment_reads, "serve/a.py", "from os import getenv\n"),
        (past_the_front_door, "serve/a.py", "from pallas_kernels.qsa.tiled import x\n"),
    ],
)
def test_rules_catch_what_they_are_for(rule, path, text):
    assert rule(parse(text, path))


def test_rules_let_pass_what_is_fine():
    fine = parse(
        "import os\nfrom serve.cli.main import main\n\nos.environ['X']\n", "serve/cli/a.py"
    )
    assert not [line for rule in RULES for line in rule(fine)]


def test_importing_the_api_loads_no_optional_package():
    code = "import sys, serve; print(*sorted({n.split('.')[0] for n in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not LAZY & set(done.stdout.split())
