"""Rules as text, as the site's editor has them, become steps in PyTorch."""

import ast
from collections.abc import Callable

import torch
from torch import Tensor

#: The functions of the language.
FUNCTIONS = {
    f.__name__.removeprefix("linalg_vector_"): f
    for f in (
        *(torch.outer, torch.diag, torch.sum, torch.linalg.vector_norm, torch.exp),
        *(torch.log, torch.sqrt, torch.abs, torch.sign, torch.relu, torch.tanh),
        *(torch.sigmoid, torch.maximum, torch.minimum, torch.where),
    )
}
#: What else a text may be made of: it may run, since it reaches nothing else.
ALLOWED = (
    *(ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign),
    *(ast.Name, ast.Load, ast.Store, ast.Constant, ast.Call, ast.BinOp, ast.UnaryOp),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.MatMult, ast.UAdd, ast.USub),
    *(ast.Compare, ast.Lt, ast.Gt, ast.LtE, ast.GtE),
)


class _OutOfPlace(ast.NodeTransformer):
    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        """Make `W = W + x` of `W += x`, which would change the caller's tensor."""
        before = ast.parse(ast.unparse(node.target), mode="eval").body
        changed = ast.Assign([node.target], ast.BinOp(before, node.op, node.value))
        return ast.copy_location(changed, node)


def compiled(text: str) -> tuple[Callable[..., Tensor], list[str]]:
    """Compile a rule of the editor, for one head.

    - `text`: a function `step` of assignments and `return`.
    - Returns the function, and the names of its inputs.
    - Raises `ValueError` for what the language does not have, with the line.
    """

    tree = ast.fix_missing_locations(_OutOfPlace().visit(ast.parse(text)))
    step, *more = tree.body or [tree]
    if more or not isinstance(step, ast.FunctionDef):
        raise ValueError("line 1: write def step(W, k, v, beta): and nothing else")
    takes = [each.arg for each in step.args.args]
    called = [node.func for node in ast.walk(step) if isinstance(node, ast.Call)]
    names = [node for node in ast.walk(step) if isinstance(node, ast.Name)]
    known = {*takes, *(node.id for node in names if isinstance(node.ctx, ast.Store))}
    for node in ast.walk(step):
        why = ""
        if not isinstance(node, ALLOWED) or getattr(node, "decorator_list", None):
            why = f"there is no {type(node).__name__} here"
        elif isinstance(node, ast.Constant) and type(node.value) not in (int, float):
            why = f"expected a number, got {node.value!r}"
        elif node in called and not (
            isinstance(node, ast.Name) and node.id in FUNCTIONS
        ):
            why = f"no function {ast.unparse(node)}; there are {', '.join(FUNCTIONS)}"
        elif isinstance(node, ast.Name) and node not in called and node.id not in known:
            why = f"no name {node.id}; there are {', '.join(sorted(known))}"
        if why:
            raise ValueError(f"line {getattr(node, 'lineno', 1)}: {why}")
    scope = {name: _of_numbers(f) for name, f in FUNCTIONS.items()}
    exec(compile(tree, "rule", "exec"), scope | {"__builtins__": {}}, scope)
    return scope[step.name], takes


def _of_numbers(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let a function take numbers, which change no tensor's dtype."""

    def tensor(x: Tensor | float) -> Tensor:
        return x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64)

    return lambda *values: f(*map(tensor, values))


def from_editor(
    text: str, beta: float = 0.7
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Turn a rule of the site's editor into a step, for any number of heads.

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
        return step(*(given[name] for name in takes))

    return rule
