"""Properties that many exercises share, as data.

Their arguments come from a function that takes a generator and sizes, and
returns the arguments by name and in order. A size is a tuple, a mapping, or one
value; with several sizes, the property has to hold for each.
"""

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fwlab.exercises.asking import (
    CUT,
    Answer,
    Wrong,
    ask,
    compare,
    compare_gradients,
)
from fwlab.exercises.exercise import Catches, Property

Draw = Callable[..., dict[str, Any]]
#: A part of the result: takes the result, and then the arguments.
Part = Callable[..., Any]


def shape(
    says: str,
    draw: Draw,
    sizes: Sequence[Any] = ((),),
    *,
    names: Sequence[str] = (),
    catches: Catches | None = None,
) -> Property:
    """The answer returns what the reference does: tensors of its shapes, or a number.

    - `says`, `catches`: as in `Property`.
    - `draw`: draws the arguments, for each of the `sizes`.
    - `names`: those of the results, if there are several.
    - Returns the property.
    """

    def holds(answer: Answer, reference: Answer, generator: Generator) -> None:
        for inputs, _ in _cases(draw, sizes, generator):
            _asked(answer, reference, names, inputs)

    return Property(says, holds, catches or {})


def agrees(
    says: str,
    draw: Draw,
    sizes: Sequence[Any] = ((),),
    *,
    change: Mapping[str, Callable[[Any], Any]] | None = None,
    expected: Answer | None = None,
    of: Part | None = None,
    names: Sequence[str] = (),
    only: Sequence[str] = (),
    because: str = "",
    catches: Catches | None = None,
) -> Property:
    """The answer agrees with the reference.

    - `says`, `catches`: as in `Property`.
    - `draw`: draws the arguments, for each of the `sizes`.
    - `change`: functions of single arguments, which replace what was drawn.
    - `expected`: what is right here, as a function of the arguments; None = the
      result of the reference.
    - `of`: the part of the result that counts; None = all of it.
    - `names`: those of the results, if there are several.
    - `only`: those of the results that count; none = all of them.
    - `because`: a sentence on the likely cause, for `str.format` with the sizes,
      the arguments, and the `name` of the result.
    - Returns the property.
    """

    def holds(answer: Answer, reference: Answer, generator: Generator) -> None:
        for inputs, named in _cases(draw, sizes, generator, change):
            result, target = _asked(answer, reference, names, inputs)
            if of:
                result, target = (of(x, *inputs.values()) for x in (result, target))
            if expected:
                target = expected(*inputs.values())
            pairs = [("", result, target)]
            if names and not of:
                pairs = [*zip(names, result, target, strict=True)]
            for name, x, y in pairs:
                if name in only or not only:
                    _compare(x, y, because.format(name=name, **named), inputs)

    return Property(says, holds, catches or {})


def takes_heads(
    draw: Draw,
    leads: Sequence[tuple[int, ...]],
    says: str = "works on any leading dimensions, such as [batch, heads]",
    catches: Catches | None = None,
) -> Property:
    """The answer agrees with the reference for each of these leading dimensions.

    - `draw`: takes a generator and `lead`.
    """
    because = "The leading dimensions were {lead}."
    sizes = [{"lead": lead} for lead in leads]
    return agrees(says, draw, sizes, because=because, catches=catches)


def is_causal(draw: Draw, catches: Catches | None = None) -> Property:
    """The first steps of the result, which is shaped like v, ignore the others."""

    def holds(answer: Answer, reference: Answer, generator: Generator) -> None:
        inputs = draw(generator)
        later = {name: torch.cat([x[:3], x[3:] * 2 + 1]) for name, x in inputs.items()}
        compare(
            ask(answer, inputs["v"], **later)[:3],
            ask(answer, inputs["v"], **inputs)[:3],
            "Only steps 3 and 4 were changed, and steps 0 to 2 changed with them.",
        )

    return Property("does not look at later steps", holds, catches or {})


def gradient(
    says: str,
    draw: Draw,
    size: Any = (),
    *,
    of: Part | None = None,
    because: str = CUT,
    catches: Catches | None = None,
) -> Property:
    """Each tensor among the arguments gets the gradient that the reference gives it.

    - `says`, `catches`: as in `Property`.
    - `draw`, `size`: draws the arguments.
    - `of`: the part of the result to differentiate; None = all of it.
    - `because`: a sentence on the likely cause.
    - Returns the property.
    """

    def holds(answer: Answer, reference: Answer, generator: Generator) -> None:
        for inputs, _ in _cases(draw, [size], generator):
            part = partial(_part, of, inputs)
            compare_gradients(answer, reference, generator, because, part, **inputs)

    return Property(says, holds, catches or {})


#: Operators that multiply and add along the last dimension of the argument before
#: the last.
PRODUCTS = {"mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addmv"}
PRODUCTS |= {"linalg_solve_triangular", "_linalg_solve_ex"}


class Mode(TorchDispatchMode):
    """Sees each operator, and does not load PyTorch's compiler, which takes a second."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Work(Mode):
    """Counts what PyTorch does meanwhile.

    - `operators`: how many it calls.
    - `products`: how many numbers they make, where a sum of products of numbers
      counts once for each product.
    - `peak`: how many numbers the tensors made meanwhile hold at once.
    - `largest`: how many the largest of them holds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.products = self.peak = self.largest = self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        self.operators += 1
        times = 1
        if operator._schema.name.removeprefix("aten::").rstrip("_") in PRODUCTS:
            times = args[-2].shape[-1]
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor) and not operator.is_view:
                self.products += times * x.numel()
                self._hold(x.untyped_storage(), x.element_size())
        return result

    def _hold(self, storage: torch.UntypedStorage, size: int) -> None:
        key, numbers = id(storage), storage.nbytes() // size
        if key not in self._known:  # else it is changed in place
            self._known.add(key)
            self._now += numbers
            self.peak = max(self.peak, self._now)
            self.largest = max(self.largest, numbers)
            weakref.finalize(storage, self._free, key, numbers)

    def _free(self, key: int, numbers: int) -> None:
        self._known.discard(key)
        self._now -= numbers


def in_chunks(draw: Draw, time: int = 1024) -> Property:
    """The answer does about as much work as the reference, for two sizes of chunks.

    - `draw`: takes a generator, a number of steps and a size of chunks; keys `k`
      and values `v` have to be wide.
    """

    def holds(answer: Answer, reference: Answer, generator: Generator) -> None:
        more = []
        for chunk in (64, 32):
            inputs = draw(generator, time, chunk)
            with Work() as right:
                target = reference(*inputs.values())
            with Work() as yours:
                y = ask(answer, target, **inputs)
            case = f"With {time} steps in chunks of {chunk}"
            compare(y, target, f"{case}.")
            states = time * inputs["k"].shape[-1] * inputs["v"].shape[-1]
            if yours.peak > min(time**2, states) / 2:
                all_pairs = time**2 <= yours.largest < states
                what = "the matrix of all pairs of steps" if all_pairs else "every W_i"
                raise Wrong(
                    f"{case}, your tensors held {yours.peak:,} numbers at once; "
                    f"{right.peak:,} are enough. Do you keep {what}?"
                )
            if yours.products > 3 * right.products:
                raise Wrong(
                    f"{case}, your function makes {yours.products:,} products; "
                    f"{right.products:,} are enough. Does each chunk meet all earlier "
                    "keys again? A state W holds them."
                )
            if yours.operators > 64 * time / chunk:
                raise Wrong(
                    f"{case}, your function calls {yours.operators:,} operators. A "
                    "chunk needs a few matrix products. Does it go through the steps "
                    "one by one, or in chunks of another size?"
                )
            more.append((yours.products, right.products))
        (many, many_right), (few, few_right) = more
        if many - few < (many_right - few_right) / 4:
            raise Wrong(
                "Your function does the same work in chunks of 64 and of 32 steps: "
                "chunk is not used. A chunk of n steps has n x n products of its own."
            )
        if many - few > 7 / 4 * (many_right - few_right):
            raise Wrong(
                "Between chunks of 64 and of 32 steps, your work changes by more than "
                "the pairs of steps of a chunk. Are your chunks longer than chunk?"
            )

    says = "works in chunks: a few matrix products for each, and one state between them"
    return Property(says, holds)


def exactly(*names: str) -> Draw:
    """Nothing is drawn: a size is the values of the arguments with these names."""

    def draw(generator: Generator, *values: Any) -> dict[str, Any]:
        return dict(zip(names, values, strict=True))

    return draw


def _cases(
    draw: Draw,
    sizes: Sequence[Any],
    generator: Generator,
    change: Mapping[str, Callable[[Any], Any]] | None = None,
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The arguments for each size; and all that an explanation may name."""
    for size in sizes:
        if isinstance(size, Mapping):
            bound = inspect.signature(draw).bind(generator, **size)
        else:
            size = size if isinstance(size, tuple) else (size,)
            bound = inspect.signature(draw).bind(generator, *size)
        bound.apply_defaults()
        inputs = draw(*bound.args, **bound.kwargs)
        for name, function in (change or {}).items():
            inputs[name] = function(inputs[name])
        named = {
            name: list(x) if isinstance(x, tuple) else x
            for name, x in bound.arguments.items()
        }
        yield inputs, inputs | named


def _asked(
    answer: Answer, reference: Answer, names: Sequence[str], inputs: dict[str, Any]
) -> tuple[Any, Any]:
    """The results of the answer and of the reference."""
    target = reference(*inputs.values())
    like: Any = target if isinstance(target, Tensor) else type(target)
    if names:
        like = dict(zip(names, target, strict=True))
    return ask(answer, like, **inputs), target


def _part(of: Part | None, inputs: dict[str, Any], result: Any) -> Any:
    return of(result, *inputs.values()) if of else result


def _compare(result: Any, target: Any, because: str, inputs: dict[str, Any]) -> None:
    """Raise `Wrong` unless two tensors, or two numbers, agree to rounding."""
    if isinstance(target, Tensor):
        compare(result, target, because)
    elif not abs(result - target) <= 1e-9 * (abs(target) or 1):
        case = ", ".join(f"{name} = {x}" for name, x in inputs.items())
        wanted, got = (
            x if isinstance(x, int) else f"{x:.4g}" for x in (target, result)
        )
        raise Wrong(f"{case}: expected {wanted}, got {got}. {because}".strip())
