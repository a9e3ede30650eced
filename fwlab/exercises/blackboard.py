"""Compile rules, written as text in the site's editor, to steps in PyTorch."""

import ast
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: Functions of the rule language, by name.
FUNCTIONS = {
    f.__name__.removeprefix("linalg_vector_"): f
    for f in (
        *(torch.outer, torch.diag, torch.sum, torch.linalg.vector_norm, torch.exp),
        *(torch.log, torch.sqrt, torch.abs, torch.sign, torch.relu, torch.tanh),
        *(torch.sigmoid, torch.maximum, torch.minimum, torch.where),
    )
}
TAKES = {"outer": 2, "maximum": 2, "minimum": 2, "where": 3}  # Others take 1 argument.
#: Further syntax that a rule may use. It is safe, as it has no attributes or imports.
ALLOWED = (
    *(ast.Return, ast.Assign, ast.AugAssign, ast.Call, ast.Name, ast.expr_context),
    *(ast.Constant, ast.BinOp, ast.UnaryOp, ast.UAdd, ast.USub, ast.Add, ast.Sub),
    *(ast.Mult, ast.Div, ast.Pow, ast.MatMult, ast.Compare, ast.Lt, ast.Gt, ast.LtE),
    ast.GtE,
)


class _ToTensors(ast.NodeTransformer):
    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        """Replace `W += x`, which would change the caller's tensor, by `W = W + x`."""
        before = ast.parse(ast.unparse(node.target), mode="eval").body
        right = ast.BinOp(before, node.op, self.visit(node.value))
        return ast.copy_location(ast.Assign([node.target], right), node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        """Replace a number by a name that stands for its tensor."""
        return ast.copy_location(ast.Name(f"#{node.value!r}", ast.Load()), node)


def compiled(text: str) -> tuple[Callable[..., Tensor], list[str]]:
    """Compile the text of an update rule, as in the site's editor, for one head.

    - `text`: a function `step` of assignments and `return`.
    - Returns the function, and the names of its inputs.
    - Raises `ValueError` for what the language does not have, with the line.
    """
    if len(text) > 2_000:  # The site's editor has this limit.
        raise ValueError(f"line 1: expected at most 2000 characters, got {len(text)}")
    try:
        tree = ast.parse(text)
        compile(tree, "rule", "exec")  # This finds duplicate inputs.
        made = ast.fix_missing_locations(_ToTensors().visit(ast.parse(text)))
    except (SyntaxError, RecursionError, MemoryError) as error:
        why = getattr(error, "msg", "this is too deep")
        raise ValueError(f"line {getattr(error, 'lineno', 1)}: {why}") from None
    step: Any = tree.body[0] if len(tree.body) == 1 else tree
    takes = [x.arg for x in step.args.args] if isinstance(step, ast.FunctionDef) else []
    plain = takes and ast.unparse(step.args) == ", ".join(takes)
    if not plain or step.decorator_list or step.returns:
        raise ValueError("line 1: write def step(W, k, v, beta): and nothing else")
    known, scope = {*takes}, dict[str, Any](FUNCTIONS)
    for line in step.body:
        pairs = [(x, y) for x in ast.walk(line) for y in ast.iter_child_nodes(x)]
        for parent, node in [(step, line), *pairs]:
            if why := _refused(node, parent, known):
                at = getattr(node, "lineno", getattr(parent, "lineno", 1))
                raise ValueError(f"line {at}: {why}")
            if isinstance(node, ast.Constant):
                x = torch.tensor(float(str(node.value)), dtype=torch.float64)
                scope[f"#{node.value!r}"] = x
        known |= {each.id for each in getattr(line, "targets", [])}
    if not isinstance(line, ast.Return) or line.value is None:
        raise ValueError(f"line {line.lineno}: end with return, and the new W")
    exec(compile(made, "rule", "exec"), scope | {"__builtins__": {}}, scope)
    return scope[step.name], takes


def _refused(node: Any, parent: Any, known: set[str]) -> str:
    """Return why the rule language forbids a part of a text, or "" if it is allowed."""
    name = getattr(node, "id", None)
    if isinstance(node, ast.operator) and not isinstance(node, ALLOWED):
        both = ast.BinOp(ast.Name("a"), node, ast.Name("b"))
        return f"no operator {ast.unparse(both)[2:-2]}"
    if not isinstance(node, ALLOWED):
        return f"there is no {type(node).__name__} here"
    if isinstance(node, ast.Constant) and type(node.value) not in (int, float):
        return f"expected a number, got {node.value!r}"
    if isinstance(parent, ast.Call) and node is parent.func:
        if name not in FUNCTIONS:
            return f"no function {ast.unparse(node)}; there are {', '.join(FUNCTIONS)}"
        count, given = TAKES.get(name, 1), len(parent.args)
        return f"{name} takes {count}, not {given}" * (count != given)
    stored = isinstance(getattr(node, "ctx", None), ast.Store)
    if stored and name in FUNCTIONS:
        return f"{name} is a function; take another name"
    if name and name not in known and not (stored and isinstance(parent, ast.Assign)):
        return f"no name {name}; there are {', '.join(sorted(known))}"
    return ""


def from_editor(
    text: str, beta: float = 0.7
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Convert a rule of the site's editor into a step, for any number of heads.

        >>> step = from_editor('''
        ... def step(W, k, v, beta):
        ...     return W + beta * outer(v - W @ k, k)
        ... ''')
        >>> k, v = torch.eye(2)[0].expand(3, 2), torch.ones(3, 2)
        >>> step(torch.zeros(3, 2, 2), k, v)[0]
        tensor([[0.7000, 0.0000],
                [0.7000, 0.0000]])

    - `text`: a function `step` of assignments and `return`, with the operators
      `+ - * / ** @` and the functions `outer`, `diag`, `sum`, `norm`, `exp`, `log`,
      `sqrt`, `abs`, `sign`, `relu`, `tanh`, `sigmoid`, `maximum`, `minimum`, `where`.
      It takes some of `W`, `k`, `v`, `beta`, for one head.
    - `beta`: the strength, the same at each token.
    - Returns a function of `W` `[..., value, key]`, `k` `[..., key]` and `v`
      `[..., value]`, which returns the new `W`.
    - Raises `ValueError` for what the language does not have, with the line. Nothing
      else of Python is run.
    """
    one, takes = compiled(text)
    if other := {*takes} - {"W", "k", "v", "beta"}:
        raise ValueError(f"expected W, k, v and beta, got {', '.join(sorted(other))}")

    def rule(W: Tensor, k: Tensor, v: Tensor) -> Tensor:
        given = {"W": W, "k": k, "v": v, "beta": torch.tensor(beta, dtype=W.dtype)}
        step = one
        for _ in W.shape[:-2]:
            step = torch.vmap(step, tuple(None if n == "beta" else 0 for n in takes))
        new = step(*(given[name] for name in takes))
        if new.shape != W.shape:
            raise ValueError(f"expected a new W of {[*W.shape]}, got {[*new.shape]}")
        return new

    return rule
