"""Check properties that many exercises share, and count operations and memory.

The code below a ✓ of an exercise calls `shape`, `agrees`, `gradient`, `is_causal` or
`in_chunks`, the methods of `Checks`. Each returns a function of answer, reference
and a seeded generator, which raises `Wrong` if the property does not hold.
"""

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fwlab.exercises.answers import (
    CUT,
    Answer,
    Wrong,
    ask,
    compare,
    compare_gradients,
    copied,
)

#: Function that takes a generator and sizes, and returns arguments by name, in order.
Draw = Callable[..., dict[str, Any]]
#: Function that takes a result and the arguments, and returns a part of the result.
Part = Callable[..., Any]
Holds = Callable[[Answer, Answer, Generator], None]


@dataclass(frozen=True)
class Checks:
    """Provide the functions that the code below a ✓ may call.

    A size is a tuple, a mapping, or one value, for `draw`; with several sizes, the
    property has to hold for each.

    - `draw`: draws the arguments, unless a check names another.
    - `names`: the names of the results, if there are several.
    - `because`: the likely cause, for `str.format` with the sizes, the arguments, and
      the `name` of the result.
    - `expected`: what is right, as a function of the arguments; None = the result of
      the reference.
    """

    draw: Draw
    names: Sequence[str] = ()
    because: str = ""
    expected: Answer | None = None

    def shape(self, *sizes: Any, draw: Draw | None = None) -> Holds:
        """Check that an answer returns the shape and dtype of the solution."""

        def holds(answer: Answer, reference: Answer, generator: Generator) -> None:
            for inputs, _ in _cases(draw or self.draw, sizes, generator):
                self._asked(answer, reference, inputs)

        return holds

    def agrees(
        self,
        *sizes: Any,
        draw: Draw | None = None,
        of: Part | None = None,
        only: Sequence[str] = (),
        **change: Callable[[Any], Any],
    ) -> Holds:
        """Check that an answer agrees with the solution, or with the expected result.

        - `of`: the part of the result that counts; None = all of it.
        - `only`: the names of the results that count; none = all results.
        - `change`: functions of single arguments, which replace what was drawn.
        """

        def holds(answer: Answer, reference: Answer, generator: Generator) -> None:
            for inputs, named in _cases(draw or self.draw, sizes, generator):
                for name, function in change.items():
                    inputs[name] = function(inputs[name])
                result, target = self._asked(answer, reference, inputs)
                if of:
                    result, target = (of(x, *inputs.values()) for x in (result, target))
                if self.expected:
                    target = self.expected(*inputs.values())
                pairs = [("", result, target)]
                if self.names and not of:
                    pairs = [*zip(self.names, result, target, strict=True)]
                for name, x, y in pairs:
                    if name in only or not only:
                        said = self.because.format(name=name, **inputs | named)
                        _compare(x, y, said, inputs)

        return holds

    def gradient(
        self, size: Any = (), *, draw: Draw | None = None, of: Part | None = None
    ) -> Holds:
        """Check the gradient of each tensor argument against the reference.

        - `of`: the part of the result to differentiate; None = all of it.
        """

        def holds(answer: Answer, reference: Answer, generator: Generator) -> None:
            ((inputs, _),) = _cases(draw or self.draw, [size], generator)

            def part(result: Any) -> Any:
                return of(result, *inputs.values()) if of else result

            because = self.because or CUT
            compare_gradients(answer, reference, generator, because, part, **inputs)

        return holds

    def is_causal(self, draw: Draw | None = None) -> Holds:
        """Check that the first steps of the result do not depend on later steps."""

        def holds(answer: Answer, reference: Answer, generator: Generator) -> None:
            inputs = (draw or self.draw)(generator)
            later = {n: torch.cat([x[:3], x[3:] * 2 + 1]) for n, x in inputs.items()}
            compare(
                ask(answer, inputs["v"], **later)[:3],
                ask(answer, inputs["v"], **inputs)[:3],
                "Only steps 3 and 4 were changed, and steps 0 to 2 changed with them.",
            )

        return holds

    def in_chunks(self, draw: Draw | None = None, time: int = 1024) -> Holds:
        """Check that an answer computes in chunks, by measuring its work and memory.

        - `draw`: takes a generator, a number of steps and a size of chunks; keys `k`
          and values `v` have to be wide.
        """

        def holds(answer: Answer, reference: Answer, generator: Generator) -> None:
            def drawn(chunk: int) -> dict[str, Any]:
                return (draw or self.draw)(generator, time, chunk)

            _works_in_chunks(answer, reference, drawn, time)

        return holds

    def _asked(
        self, answer: Answer, reference: Answer, inputs: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Return the results of the answer and of the reference."""
        target = reference(*copied(inputs).values())
        like: Any = target if isinstance(target, Tensor) else type(target)
        if self.names:
            like = dict(zip(self.names, target, strict=True))
        return ask(answer, like, **inputs), target


#: Operators that sum products along the last dimension of the second-last argument.
PRODUCTS = {"mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addmv"}
PRODUCTS |= {"linalg_solve_triangular", "_linalg_solve_ex"}


class Mode(TorchDispatchMode):
    """Record each operator without loading PyTorch's compiler, which takes a second."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Work(Mode):
    """Count operator calls, computed numbers and tensor entries in a `with` block.

    - `operators`: the number of operators that the block calls.
    - `products`: the number of results, where a sum of products of numbers
      counts once for each product.
    - `peak`: the maximum number of entries that the new tensors hold at once.
    - `largest`: the number of entries of the largest new tensor.
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
        if key not in self._known:  # A tensor that changes in place counts once.
            self._known.add(key)
            self._now += numbers
            self.peak = max(self.peak, self._now)
            self.largest = max(self.largest, numbers)
            weakref.finalize(storage, self._free, key, numbers)

    def _free(self, key: int, numbers: int) -> None:
        self._known.discard(key)
        self._now -= numbers


def _works_in_chunks(
    answer: Answer, reference: Answer, draw: Callable[[int], dict[str, Any]], time: int
) -> None:
    """Raise `Wrong` unless an answer computes in chunks of the size given to `draw`."""
    more = []
    for chunk in (64, 32):
        inputs = draw(chunk)
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
    # The ratio is 2 for chunks of twice the length, 1.91 for a delta rule by inversion.
    if many - few > 1.95 * (many_right - few_right):
        raise Wrong(
            "Between chunks of 64 and of 32 steps, your work changes by more than "
            "the pairs of steps of a chunk. Are your chunks longer than chunk?"
        )


def exactly(*names: str) -> Draw:
    """Return a `draw` function that takes the values of arguments in place of sizes.

    - `names`: the names of the arguments.
    - Returns what `exercise` and the checks take as `draw`.
    """

    def draw(generator: Generator, value: Any, *others: Any) -> dict[str, Any]:
        return dict(zip(names, (value, *others), strict=True))

    return draw


def _cases(
    draw: Draw, sizes: Sequence[Any], generator: Generator
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Draw and yield the arguments for each size, and the sizes by name."""
    for size in sizes or ((),):
        if isinstance(size, Mapping):
            bound = inspect.signature(draw).bind(generator, **size)
        else:
            size = size if isinstance(size, tuple) else (size,)
            bound = inspect.signature(draw).bind(generator, *size)
        bound.apply_defaults()
        yield (
            draw(*bound.args, **bound.kwargs),
            {
                n: [*x] if isinstance(x, tuple) else x
                for n, x in bound.arguments.items()
            },
        )


def _compare(result: Any, target: Any, because: str, inputs: dict[str, Any]) -> None:
    """Raise `Wrong` unless two tensors, or two numbers, agree up to rounding."""
    if isinstance(target, Tensor):
        compare(result, target, because)
    elif not abs(result - target) <= 1e-9 * (abs(target) or 1):
        case = ", ".join(f"{name} = {x}" for name, x in inputs.items())
        wanted, got = (
            x if isinstance(x, int) else f"{x:.4g}" for x in (target, result)
        )
        raise Wrong(f"{case}: expected {wanted}, got {got}. {because}".strip())
