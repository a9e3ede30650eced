"""Records what the lines of a rule compute: the numbers behind "Step".

A toy sequence goes through the naive version of an operation, and as much of it
as naive has read through another version. These are the real functions; Python
reports each statement that they run. So the pages show what the code computed
when the site was built.
"""

import ast
import math
import re
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
from fwlab.ops.feedback.weights import FeedbackWeights
from fwlab.ops.parts import chunks

#: Tokens per chunk: three of them make two chunks.
LENGTH = 2
#: What the tokens of all rules are: the third writes another value under the key
#: of the first. Queries are the keys: each token reads what it has just written.
KEYS = [[1, 0], [0.6, 0.8], [1, 0]]
VALUES = [[1, 2], [3, 0], [-1, 1]]
#: Biases of AFT: for each step, its own key counts twice.
BIASES = (math.log(2) * torch.eye(3)).tolist()
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


def runs(records: Iterable[Operation]) -> dict[str, tuple[Operation, Callable]]:
    """What a page computes: call one with an implementation and a number of tokens."""
    found: dict[str, tuple[Operation, Callable]] = {}
    loops: list[Any] = []
    for record in records:
        naive = record.implementations["naive"]
        if naive in loops:
            continue  # the same on other features, or other biases
        loops.append(naive)
        rule = isinstance(record, Rule)
        given = {"normalize": False} if rule and record.normalizes else {}
        found[record.name] = record, _call(record, **given)
        if given:
            given = {"normalize": True}
            found[f"{record.name}, normalize=True"] = record, _call(record, **given)
    return found


def _call(record: Operation, **options: bool) -> Callable[[str, int], Any]:
    def call(implementation: str, time: int) -> Any:
        if isinstance(record, Rule):
            x = {name: x[:, :time] for name, x in arguments(record).items()}
        else:
            x = _tokens(record.name, time)
        given = options | {"implementation": implementation, "return_state": True}
        return getattr(ops, record.name)(**x, **given)

    return call


def _tokens(name: str, time: int) -> dict[str, Any]:
    """The first tokens for an operation that is no rule."""
    k, v = (torch.tensor([x[:time]], dtype=torch.float64) for x in (KEYS, VALUES))
    bias = torch.tensor(BIASES, dtype=torch.float64)
    one = torch.eye(2, dtype=torch.float64)[None]
    match name:
        case "fwp":
            return {"a": v[:, :, None], "b": k[:, :, None], "x": k[:, :, None]}
        case "aft_simple":
            return {"q": k, "k": k, "v": v}
        case "aft_full":
            return {"q": k, "k": k, "v": v, "bias": bias[:time, :time]}
        case "aft_local":  # the biases of the step itself and of the one before it
            return {"q": k, "k": k, "v": v, "band": bias[:time, :2]}
        case "feedback":  # one layer; all matrices are the identity, or swap entries
            ones = one.new_ones(1, 2)
            weights = FeedbackWeights(
                ones[0], ones, one, one, one.flip(1), one[0], one, ones, one, one
            )
            return {"x": v, "weights": weights, "heads": 1}
    raise ValueError(f"docs/hooks/stepped.py needs a toy sequence for {name}")


def _steps(record: Operation) -> int:
    """The steps of the recurrence that a token takes."""
    if not isinstance(record, Rule):
        return 1
    x = arguments(record)
    return (x | record.inputs(**x))["k"].shape[1] // len(KEYS)


def record(
    records: Iterable[Operation], naive: Source, other: Source
) -> dict[str, list[dict]]:
    """For each operation its steps: one for each equation that both versions
    compute, and one for the result.

    A step has the number of its `token`, from 1, its `equations`, and `lines`: the
    values that lines have computed, by their anchors. Those of the other version
    belong to the same equations; it has read the same tokens, and no more. `last`
    are the anchors of the values to compare, `equal` is whether they are the same.

    - `other`: its prefix is the name of the implementation.
    """
    found = {}
    version = other.prefix.rstrip("-")
    for name, (operation, call) in runs(records).items():

        def run(source: Source, version: str, time: int, call=call) -> list[Moment]:
            return moments(lambda: call(version, time), source)

        with _short_chunks(LENGTH * _steps(operation)), _nothing_in_empty():
            *ours, end = run(naive, "naive", len(KEYS))
            theirs = [run(other, version, t + 1) for t in range(len(KEYS))]
        steps, events = [], []
        for moment in ours:
            events += moment.events
            *parts, _ = theirs[moment.turn]
            same = [
                event
                for part in parts
                if moment.tags & equations.by_steps(operation.folder, part.tags)
                for event in part.events
            ]
            all_ = [event for part in parts for event in part.events]
            if step := _step(moment.turn + 1, events, same, all_):
                steps.append(step)
                events = []  # else they belong to the next step
        last = theirs[-1][-1].events
        found[name] = [*steps, _step(len(KEYS), events + end.events, last, last)]
    return found


def _step(
    token: int, ours: list["Event"], same: list["Event"], all_: list["Event"]
) -> dict | None:
    """A step; None if the other version has nothing for it.

    - `same`: what it has computed for the same equations; `all_`: what it has
      computed. Of each line the last values count.
    """
    known = {event.anchor: event for event in same}
    others = {event.anchor: event for event in all_}
    pairs = [
        (our, their)
        for events in (known, others)
        for our in _ends(ours)
        # Shortest first, and what has a name before what is only returned.
        for their in sorted(
            reversed(events.values()), key=lambda e: (e.text[0] == "→", len(e.text))
        )
        if not their.begins
        and _equal(our.values, their.values)
        and (events is known or re.search("[1-9]", our.text))
    ]
    if not pairs and not same:
        return None
    computed = [event for event in same if event.tags]
    last = pairs[0] if pairs else (ours[-1], (computed or same)[-1])
    return {
        "token": token,
        "equations": sorted(Moment(ours).tags, key=lambda tag: (len(tag), tag)),
        "lines": {event.anchor: event.text for event in (*ours, *same, last[1])},
        "last": [event.anchor for event in last],
        "equal": bool(pairs),
    }


def _ends(events: list["Event"]) -> Iterator["Event"]:
    """From the last one back to the one that computes an equation."""
    for event in reversed(events):
        yield event
        if event.tags:
            return


def _equal(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether two statements have computed the same; of all tokens, the last counts."""

    def same(a: Any, b: Any) -> bool:
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            return False
        a, b = a.squeeze().double(), b.squeeze().double()
        rows = [b]
        if a.any():  # zeros are everywhere
            rows += [b.select(dim, -1) for dim in range(b.dim())]
        return any(a.shape == row.shape and torch.allclose(a, row) for row in rows)

    if len(ours) == 1:
        return any(
            same(value, other) for value in ours.values() for other in theirs.values()
        )
    # The last is the state: the outputs of several steps a token are not those of all.
    return len(ours) == len(theirs) and same(
        [*ours.values()][-1], [*theirs.values()][-1]
    )


@dataclass
class Event:
    """A statement that has run."""

    source: Source
    line: int
    values: dict[str, Any]  # by name
    tags: set[str]  # the equations that its comment names
    turn: int  # of the loop over steps or chunks, from 0
    start: int  # how many events there were when it began
    begins: bool  # a turn of a loop, with what it is given

    @property
    def anchor(self) -> str:
        return self.source.anchor(self.line)

    @property
    def text(self) -> str:
        """What it has computed, such as `W = [[1, 0], [0, 1]]`."""
        texts = {name: _text(value) for name, value in self.values.items()}
        if "→ 0" in texts:
            return "→ " + ", ".join(texts.values())
        return ", ".join(f"{name} = {text}" for name, text in texts.items())


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
    return [*found, Moment((open_ or found[-1].events)[-1:])]


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
            begins = isinstance(statement, ast.For)
            where = source, statement.lineno
            events.append(Event(*where, values, tags, turn, start, begins))

    def trace(frame: FrameType, kind: str, result: Any) -> Any:
        name = frame.f_code.co_name
        if frame.f_code.co_filename != file or name.startswith("<"):
            return None
        if name in TABLE and frame.f_code is getattr(ops, name).__code__:
            return None  # only the call of a record
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


@contextmanager
def _nothing_in_empty() -> Iterator[None]:
    """What is not computed yet is NaN: so nobody takes it for a value."""
    usual = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(usual)


def _values(statement: ast.stmt, names: dict[str, Any], result: Any) -> dict[str, Any]:
    """What a statement has computed, as far as it has a name, or is returned."""
    match statement:
        case ast.Return():
            parts = result if isinstance(result, tuple) else (result,)
            return {
                f"→ {i}": _kept(part) for i, part in enumerate(parts) if _text(part)
            }
        case ast.Expr(
            ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"))
        ):
            return {f"{name}[-1]": _kept(names[name][-1])}
        case ast.Expr(
            ast.Call(keywords=[*_, ast.keyword(arg="out", value=target)])
        ) | ast.Expr(ast.Call(func=ast.Attribute(value=target))):  # in place
            while not isinstance(target, ast.Name | ast.List):
                target = getattr(target, "value", getattr(target, "func", ast.List()))
            targets = [target]
        case ast.Assign(targets=targets):
            pass
        case ast.For(target=target) | ast.AugAssign(target=target):
            targets = [target]
        case _:
            return {}
    inner = [node for target in targets for node in ast.walk(target)]
    found = [node.id for node in inner if isinstance(node, ast.Name)]
    return {name: _kept(names[name]) for name in found if _text(names[name])}


def _kept(value: Any) -> Any:
    """A copy: what comes later may change it in place."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _text(value: Any) -> str:
    """Numbers with two decimals, without the dimensions of size 1."""
    if isinstance(value, torch.Tensor):
        if not value.numel() or value.isnan().any():
            return ""
        return _rounded(value.squeeze().tolist())
    return str(value) if isinstance(value, int | float) else ""


def _rounded(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_rounded, value))}]"
    # Another processor adds in another order: what is half a hundredth up to an
    # error of rounding is to be written alike.
    text = f"{round(value, 9):.2f}".rstrip("0").rstrip(".")
    return {"-0": "0"}.get(text, text).replace("-", "−").replace("inf", "∞")
