"""Generate mutants of the solutions of exercises by changing their syntax trees."""

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fwlab.exercises.notation import Exercise, bare

SWAPPED = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.MatMult: ast.Mult,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}


def mutants(exercise: Exercise) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield a description and a function for each mutant of a solution."""
    tree = ast.parse(bare(exercise.reference))
    for what in _changes(tree):
        scope = dict(exercise.reference.__globals__)
        exec(compile(ast.fix_missing_locations(tree), "<mutant>", "exec"), scope)
        yield what, scope[exercise.name]


@contextmanager
def _replaced(node: ast.AST, **fields: Any) -> Iterator[None]:
    kept = {name: getattr(node, name) for name in fields}
    vars(node).update(fields)
    yield
    vars(node).update(kept)


def _changes(tree: ast.AST) -> Iterator[str]:
    """Mutate a syntax tree in place, one change at a time, and yield descriptions."""
    for node in [*ast.walk(tree)]:
        said = ast.unparse(node) if isinstance(node, ast.expr) else ""
        if isinstance(node, ast.BinOp):
            if type(node.op) in SWAPPED:
                with _replaced(node, op=SWAPPED[type(node.op)]()):
                    yield f"{said} -> {ast.unparse(node)}"
            for side in (node.left, node.right):
                one = ast.Constant(1)
                with _replaced(node, left=side, op=ast.Mult(), right=one):
                    yield f"{said} -> {ast.unparse(side)}"
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
            with _replaced(node, ops=[SWAPPED[type(node.ops[0])]()]):
                yield f"{said} -> {ast.unparse(node)}"
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            for new in {node.value + 1, -node.value} - {node.value}:
                with _replaced(node, value=new):
                    yield f"{said} -> {new}"
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and not node.args
            and not node.keywords
        ):
            same = ast.parse("lambda x: x", mode="eval").body
            with _replaced(node, func=same, args=[node.func.value]):
                yield f"{said} -> {ast.unparse(node.args[0])}"
        for place, each in enumerate(_body(node)):
            if not isinstance(each, ast.Return | ast.FunctionDef):
                with _replaced(node, body=_without(node.body, place)):
                    yield f"without {ast.unparse(each).splitlines()[0]}"


def _body(node: ast.AST) -> list[ast.stmt]:
    body = getattr(node, "body", None)
    return body if isinstance(body, list) and not isinstance(node, ast.Module) else []


def _without(body: list[ast.stmt], place: int) -> list[ast.stmt]:
    return [*body[:place], ast.Pass(), *body[place + 1 :]]
