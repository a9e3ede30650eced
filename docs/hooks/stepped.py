"""Records what the lines of a rule compute: the numbers behind "Step".

A toy sequence goes through the naive and the chunked version of a rule. These
are the real functions; Python reports each statement that they run. So the
pages show what the code computed when the site was built.
"""

import ast
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import equations
import torch
from literate import Source
from repository import ROOT

from fwlab import ops
from fwlab.ops import TABLE
from fwlab.ops.call.call import Operation
from fwlab.ops.call.rule import Rule
from fwlab.ops.parts import chunks

#: Tokens per chunk: three of them make two chunks.
LENGTH = 2
#: What the tokens of all rules are: the third writes another value under the key
#: of the first. Queries are the keys: each token reads what it has just written.
KEYS = [[1, 0], [0.6, 0.8], [1, 0]]
VALUES = [[1, 2], [3, 0], [-1, 1]]
#: Gates with values that are easy to follow; others are those of `Rule.example`.
GATES = {
    "beta": [1, 0.5, 0.5],
    "log_decay": [0, math.log(0.5), math.log(0.5)],
}


def arguments(rule: Rule) -> dict[str, torch.Tensor]:
    """Three tokens for a rule, by the names of its arguments."""
    sizes = {"batch": 1, "time": len(KEYS), "heads": 1, "key": 2, "value": 2}
    x = rule.example(torch.Generator().manual_seed(0), **sizes)
    toys = GATES | {"q": KEYS, "k": KEYS, "v": VALUES}
    for name, usual in x.items():
        if name in toys:
            x[name] = _toy(toys[name], rule.dims(name, None).split()[2:], usual)
        else:
            x[name] = (usual * 4).round() / 4
    return x | rule.related(**x)


def _toy(numbers: list, dims: list[str], usual: torch.Tensor) -> torch.Tensor:
    """Numbers of each token in the shape of others."""
    toy = torch.tensor(numbers, dtype=usual.dtype)
    if "steps" in dims:  # each step has the numbers of another token
        toy = torch.stack([toy.roll(-j, 0) for j in range(usual.shape[2])], 1)
    toy = toy.unsqueeze(1 + dims.index("heads"))
    if toy.dim() <= len(dims):  # a gate per channel leaves the second alone
        toy = toy[..., None] * toy.new_tensor([1, 0])
    return toy[None]


def rules(records: Iterable[Operation]) -> dict[str, tuple[Rule, Callable]]:
    """What a page computes: call one with the name of an implementation."""
    found: dict[str, tuple[Rule, Callable]] = {}
    loops: list[Any] = []
    for rule in records:
        naive = rule.implementations["naive"]
        if not isinstance(rule, Rule) or naive in loops:
            continue  # the same on other features
        loops.append(naive)
        found[rule.name] = rule, _call(rule)
        if rule.normalizes:
            found[f"{rule.name}, normalize=True"] = rule, _call(rule, normalize=True)
    return found


def _call(rule: Rule, **options: bool) -> Callable[[str], Any]:
    def call(implementation: str) -> Any:
        given = ({"normalize": False} if rule.normalizes else {}) | options
        given |= {"implementation": implementation, "return_state": True}
        return getattr(ops, rule.name)(**arguments(rule), **given)

    return call


def _steps(rule: Rule) -> int:
    """The steps of the recurrence that a token takes."""
    x = arguments(rule)
    return (x | rule.inputs(**x))["k"].shape[1] // len(KEYS)


def record(
    records: Iterable[Operation], naive: Source, chunked: Source
) -> dict[str, list[dict]]:
    """For each rule its steps: one for each equation that naive computes, and
    one for the result.

    A step has the number of its `token`, from 1, its `equations`, and `lines`:
    the values that lines have computed, by their anchors. Those of the chunked
    version belong to the same equations and to the chunk with this token.
    """
    found = {}
    for name, (rule, call) in rules(records).items():
        with _short_chunks(LENGTH * _steps(rule)):
            ours, theirs = (
                moments(lambda version=version, call=call: call(version), source)
                for version, source in (("naive", naive), ("chunked", chunked))
            )
        found[name] = [
            {
                "token": moment.turn + 1,
                "equations": sorted(moment.tags, key=lambda tag: (len(tag), tag)),
                "lines": _lines(
                    moment,
                    *(
                        other
                        for other in theirs
                        if other.turn == moment.turn // LENGTH
                        and _same(
                            moment.tags, equations.by_steps(rule.folder, other.tags)
                        )
                    ),
                ),
            }
            for moment in ours
        ]
    return found


def _same(tags: set[str], others: set[str]) -> bool:
    """Whether an equation is common; what only returns a result has none."""
    return bool(tags & others) if tags else not others


def _lines(*found: "Moment") -> dict[str, str]:
    return {
        event.source.anchor(event.line): event.values
        for moment in found
        for event in moment.events
    }


@dataclass
class Event:
    """A statement that has run."""

    source: Source
    line: int
    values: str
    tags: set[str]  # the equations that its comment names
    turn: int  # of the loop over steps or chunks, from 0
    start: int  # how many events there were when it began


@dataclass
class Moment:
    """The events up to one that computes an equation."""

    events: list[Event]

    @property
    def tags(self) -> set[str]:
        return set().union(*(event.tags for event in self.events))

    @property
    def turn(self) -> int:
        return max(event.turn for event in self.events)


def moments(call: Callable[[], Any], source: Source) -> list[Moment]:
    """Run something, and report the lines of a file, equation by equation."""
    found: list[Moment] = []
    open_: list[Event] = []  # no moment has them yet
    count = 0  # events in moments
    for event in _events(call, source):
        if found and open_ and open_[-1].turn < event.turn:
            found[-1].events += open_  # what comes after its last equation
            count += len(open_)
            open_ = []
        open_.append(event)
        if not event.tags:
            continue
        if found and all(e.start < count for e in open_):
            found[-1].events += open_  # these only pass on what it computed
        else:
            found.append(Moment(open_))
        count += len(open_)
        open_ = []
    # The last one passes on the result of all steps.
    found[-1].events += open_[:-1]
    return [*found, Moment(open_[-1:])]


def _events(call: Callable[[], Any], source: Source) -> list[Event]:
    file, statements = str(ROOT / source.path), _statements(source)
    events: list[Event] = []
    #: Of each frame, the statement that it runs and the events before that.
    running: dict[FrameType, tuple[ast.stmt, int]] = {}
    turn, outermost = -1, None

    def end(frame: FrameType, next_line: int | None, result: Any = None) -> None:
        nonlocal turn, outermost
        statement, start = running.pop(frame)
        tags: set[str] = set()
        if isinstance(statement, ast.For):
            if next_line is None or statements[next_line] not in statement.body:
                return  # the end of the loop
            outermost = outermost or statement
            turn += statement is outermost
        else:
            lines = {*range(statement.lineno, statement.end_lineno + 1)}
            tags = {tag for tag, at in source.computed.items() if lines & {*at}}
        if values := _values(statement, frame.f_locals, result):
            events.append(Event(source, statement.lineno, values, tags, turn, start))

    def trace(frame: FrameType, kind: str, result: Any) -> Any:
        name = frame.f_code.co_name
        if frame.f_code.co_filename != file or name.startswith("<") or name in TABLE:
            return None  # another file, or only the call of a record
        if kind == "line":
            statement = statements[frame.f_lineno]
            if frame in running:
                if running[frame][0] is statement:
                    return trace  # another line of it
                end(frame, frame.f_lineno)
            running[frame] = statement, len(events)
        elif kind == "return" and frame in running:
            end(frame, None, result)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return events


def _statements(source: Source) -> dict[int, ast.stmt]:
    """The innermost statement of each line."""
    found: dict[int, ast.stmt] = {}
    for node in ast.walk(ast.parse(source.text)):  # the outer ones come first
        if isinstance(node, ast.stmt):
            found |= dict.fromkeys(range(node.lineno, node.end_lineno + 1), node)
    return found


@contextmanager
def _short_chunks(length: int) -> Iterator[None]:
    usual = chunks.length
    chunks.length = lambda decay: length
    try:
        yield
    finally:
        chunks.length = usual


def _values(statement: ast.stmt, names: dict[str, Any], result: Any) -> str:
    """What a statement has computed, such as `W = [[1, 0], [0, 1]]`."""
    match statement:
        case ast.Return():
            parts = result if isinstance(result, tuple) else (result,)
            return "→ " + ", ".join(filter(None, map(_text, parts)))
        case ast.Expr(
            ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"))
        ):
            return f"{name}[-1] = {_text(names[name][-1])}"
        case ast.Assign(targets=targets):
            pass
        case ast.For(target=target) | ast.AugAssign(target=target):
            targets = [target]
        case _:
            return ""
    inner = [node for target in targets for node in ast.walk(target)]
    texts = {n.id: _text(names[n.id]) for n in inner if isinstance(n, ast.Name)}
    return ", ".join(f"{name} = {text}" for name, text in texts.items() if text)


def _text(value: Any) -> str:
    """Numbers with two decimals, without the dimensions of size 1."""
    if isinstance(value, torch.Tensor):
        return _rounded(value.squeeze().tolist())
    return str(value) if isinstance(value, int | float) else ""


def _rounded(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_rounded, value))}]"
    # Another processor adds in another order: what is half a hundredth up to an
    # error of rounding is to be written alike.
    text = f"{round(value, 9):.2f}".rstrip("0").rstrip(".")
    return {"-0": "0"}.get(text, text).replace("-", "−")
