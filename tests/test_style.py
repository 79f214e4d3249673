"""Sizes, docstrings and forbidden text, checked over the source."""

import ast
import re
from collections.abc import Iterator

from tests.source_tree import AROUND, PACKAGES, ROOT, Source, parse, sources, text_files

MAX_FILE_LINES = 600
MAX_BODY_LINES = 50
MAX_KERNEL_LINES = 150

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef

# Methods that a framework calls, by its own contract.
HOOKS = {"setup"}

# Written in pieces, so that this file does not contain what it looks for.
FORBIDDEN_TEXT = {
    "a machine's path": re.compile(
        r"(?<![\w.\-/])/" + r"(?:work|root|opt|home|Users)" + r"/(?!bin)[\w.]"
    ),
    "a package index": re.compile(
        "|".join(["py" + r"pi\.", "python" + "hosted", "regi" + r"stry\.npm", "find-" + "links"])
        + "|--(?:extra-)?index"
        + "-url"
    ),
}
# Vocabularies and captured data hold whatever their texts held.
NOT_OUR_WORDS = ("qwen_hybrid/demos/", "tests/vectors/", "LICENSE")


def body_lines(function: Function) -> int:
    """Return how many lines a function's body has, its docstring left out."""
    body = function.body
    code = body[1:] if ast.get_docstring(function) is not None else body
    return (code[-1].end_lineno or 0) - code[0].lineno + 1 if code else 0


def long_functions(source: Source) -> list[str]:
    """Return the functions over their limit; a Pallas kernel's body may be longer."""
    found = []
    for node in ast.walk(source.tree):
        if isinstance(node, Function):
            kernel = source.package == "pallas_kernels" and node.name.endswith("_kernel")
            limit = MAX_KERNEL_LINES if kernel else MAX_BODY_LINES
            if body_lines(node) > limit:
                found.append(f"{source.path}:{node.lineno}: {node.name}, {body_lines(node)} lines")
    return found


def undocumented(source: Source) -> list[str]:
    """Return the module, public classes, functions and methods without a docstring."""
    found = [] if ast.get_docstring(source.tree) else [f"{source.path}: module"]
    return found + [
        f"{source.path}:{node.lineno}: {node.name}"
        for node in _public(source.tree)
        if not ast.get_docstring(node)
    ]


def _public(parent: ast.Module | ast.ClassDef) -> Iterator[Definition]:
    """Yield the public definitions at module level and inside public classes."""
    for node in parent.body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            # A protocol's members are explained in its own docstring.
            if not _is_stub(node) and node.name not in HOOKS:
                yield node
            if isinstance(node, ast.ClassDef):
                yield from _public(node)


def _is_stub(node: Definition) -> bool:
    """Return whether a definition's body is just an ellipsis."""
    match node.body:
        case [ast.Expr(value=ast.Constant(value=constant))]:
            return constant is Ellipsis
    return False


def test_files_and_functions_are_short():
    every = sources(*PACKAGES, *AROUND)
    problems = [f"{s.path}: {s.num_lines} lines" for s in every if s.num_lines > MAX_FILE_LINES]
    problems += [line for source in every for line in long_functions(source)]
    assert not problems, "\n" + "\n".join(problems)


def test_everything_public_has_a_docstring():
    problems = [line for source in sources(*PACKAGES) for line in undocumented(source)]
    problems += [
        f"{source.path}: module"
        for source in sources(*AROUND)
        if not ast.get_docstring(source.tree)
    ]
    assert not problems, "\n" + "\n".join(problems)


def test_no_machine_paths_or_index_addresses():
    problems = []
    for path in text_files():
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(NOT_OUR_WORDS):
            continue
        text = path.read_text(errors="replace")
        for what, pattern in FORBIDDEN_TEXT.items():
            problems += [f"{name}: {what}: {m.group()!r}" for m in pattern.finditer(text)]
    assert not problems, "\n" + "\n".join(problems)


def test_the_checks_catch_what_they_are_for():
    long = "def f():\n" + "    x = 1\n" * (MAX_BODY_LINES + 1)
    assert long_functions(parse(long, "serve/a.py"))
    assert not long_functions(parse(long.replace("f()", "f_kernel()"), "pallas_kernels/a.py"))
    assert len(undocumented(parse("class A:\n    def f(self): pass\n", "serve/a.py"))) == 3
    assert not undocumented(parse('"""D."""\n\ndef _f(): ...\n', "serve/a.py"))
    assert FORBIDDEN_TEXT["a machine's path"].search("see /" + "work/main")
    assert FORBIDDEN_TEXT["a package index"].search("https://" + "py" + "pi.org/simple")
