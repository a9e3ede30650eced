"""Fast weight rules: their record, and how they are called.

A rule has its own loop (`naive.py`). The other implementations compute
a recurrence, which several rules share.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fwlab.feature_maps import FeatureMap, Identity, unit_range
from fwlab.ops import checks, units
from fwlab.ops.dispatch import KERNELS
from fwlab.ops.operation import Call, Operation
from fwlab.ops.state import NormalizedState

State = Tensor | NormalizedState
#: The states of a rule, by the names that its implementations use.
MEMORIES = ("W", "z")


@dataclass(frozen=True)
class Rule(Operation):
    r"""A rule $W_t = f(W_{t-1}, k_t, v_t, \text{gates}_t)$.

    - `gates`: name -> its dimensions after batch and time: "heads", or
      "heads key".
    - `optional`: gates that may be None.
    - `factors`: makes decay and strength from the gates, 0 to 1, for
      all implementations but naive; None = 1.
    - `corrects`: whether it writes the difference between the value and
      what the key retrieves.
    - `normalizes`: whether it can divide by $z$.
    - `benchmarks`: (time, width) of problems for `fwlab bench`.

    The name of its layer in `--mixer`, None = it has none, and the
    defaults of the layer:

    - `mixer`: such as "gated-delta".
    - `feature_map`: the class of the feature map.
    - `key_norm`: "sum", "l2" or None.
    - `normalize`: whether it divides by $z$.
    """

    gates: Mapping[str, str] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    factors: Callable[..., tuple[Tensor | None, Tensor | None]] = (
        lambda: (None, None)
    )
    corrects: bool = False
    normalizes: bool = True
    benchmarks: tuple[tuple[int, int], ...] = ()
    mixer: str | None = None
    feature_map: Callable[[], FeatureMap] = Identity
    key_norm: str | None = None
    normalize: bool = False

    @property
    def required(self) -> tuple[str, ...]:
        """The gates that cannot be None."""
        return tuple(n for n in self.gates if n not in self.optional)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: dict[str, Tensor | None],
        *,
        normalize: bool = False,
        scale: float | None = None,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: State | None = None,
        return_state: bool = False,
        implementation: str = "auto",
        features: Callable[[Tensor], Tensor] | None = None,
        wider: int = 1,
        **options: Any,
    ) -> Any:
        """Compute the rule; for the arguments see its public function.

        - `features`: maps `q` and `k` to features that are `wider`
          times as wide. A kernel does this itself, using the `options`.
        """
        given = {
            name: gate
            for name, gate in gates.items()
            if gate is not None or name not in self.optional
        }
        dims, group = "batch time heads", checks.group(self.name, q, k)
        queries = dims if group == 1 else "batch time queries"
        arguments: dict[str, Any] = {
            "q": (q, f"{queries} key"),
            "k": (k, f"{dims} key"),
            "v": (v, f"{dims} value"),
        }
        for name, gate in given.items():
            arguments[name] = (gate, f"batch time {self.gates[name]}")
        call = Call(
            self,
            arguments,
            like="v",
            key_mask=key_mask,
            cu_seqlens=cu_seqlens,
        )
        call.sizes["key"] *= wider
        if group > 1:
            call.like = v[:, :, :1].expand(-1, -1, q.shape[2], -1)
        name, compute = call.choose(
            implementation,
            *("q", "k", "v"),
            normalize=normalize,
            gates=tuple(given),
        )
        # Naive takes the gates as the paper has them. All others take
        # the decay and the strength of the recurrence: see `factors`.
        if name != "naive":
            compute = partial(self._factored, compute)
        if normalize and "log_decay" in self.gates:
            compute = units.in_range(
                compute, self.gates, self.factors, self.corrects
            )
        if group > 1:
            compute = grouped(compute, group)
        # As a masked step: all its inputs are 0, and it keeps the state.
        compute = call.by_document(compute, MEMORIES)
        # Our kernels begin without a state that would be all zeros, and
        # convert the strengths that they load.
        own = name == "triton" and not call.only_shapes
        start = None
        if not own or state is not None or normalize or call.lengths:
            start = self._start(call, state, normalize)
        as_given = ("beta",) if own and self.corrects else ()
        if scale is not None:
            checks.scale(self.name, scale)
        by_kernel = name in KERNELS
        # These convert one piece of half-precision inputs at a time.
        in_pieces = by_kernel or name == "efficient"

        # `scale` multiplies the result, which has full precision. A kernel
        # rounds it first; but features of its own lose the scale of `q`.
        scales_q = normalize or (by_kernel and not options)

        def run() -> tuple[Tensor, State]:
            inputs = self._inputs(
                call,
                None if by_kernel else features,
                scale if scales_q else None,
                normalize,
                as_given,
            )
            if isinstance(start, NormalizedState):
                inputs |= start._asdict()
            else:
                inputs["W"] = start
            if not in_pieces:
                inputs = {
                    n: x.to(call.dtype) for n, x in inputs.items()
                }
            y, *after = compute(
                **inputs, **(options if by_kernel else {})
            )
            if scale is not None and not scales_q:
                y = y * scale
            return y, NormalizedState(*after) if normalize else after[0]

        return call.run(run, start, return_state)

    def _inputs(
        self,
        call: Call,
        features: Callable[[Tensor], Tensor] | None,
        scale: Any,
        normalize: bool,
        as_given: tuple[str, ...],
    ) -> dict[str, Any]:
        """What the rule reads, by name: masked, and in a safe range.

        Gates get full precision, except those that stay `as_given`.
        """
        # In a masked step all inputs are 0: a zero key writes nothing,
        # and a log decay of 0 keeps the state.
        x = {
            name: call.masked(part) for name, part in call.given.items()
        }
        if features is not None:
            x |= {
                part: features(x[part].to(call.dtype)) for part in "qk"
            }
        if normalize:
            x["q"] = unit_range(x["q"])
            if scale is not None:  # its size cancels in the quotient
                scale = torch.as_tensor(scale).sign()
            if self.corrects:
                x["ask"] = unit_range(x["k"])
        if scale is not None:
            x["q"] = x["q"] * scale
        return x | {
            gate: x[gate].to(call.dtype)
            for gate in self.gates
            if gate in x and gate not in as_given
        }

    def _factored(
        self, compute: Callable[..., Any], **given: Any
    ) -> tuple[Tensor, ...]:
        """`compute` with the factors of the recurrence for the gates."""
        gates = {n: given.pop(n) for n in self.gates if n in given}
        decay, strength = self.factors(**gates)
        return compute(**given, decay=decay, strength=strength)

    def _start(self, call: Call, state: Any, normalize: bool) -> State:
        """The given state, or an empty one."""
        batch, heads, value, key = (
            call.sizes[n] for n in ("batch", "heads", "value", "key")
        )
        W, z = (batch, heads, value, key), (batch, heads, key)
        if normalize:
            return call.start(NormalizedState, state, {"W": W, "z": z})
        if isinstance(state, NormalizedState):
            raise TypeError(
                f"{self.name}: expected a state without normaliser for "
                "normalize=False, got a NormalizedState (W, z)"
            )
        return call.start(lambda W: W, state, {"": W})


def grouped(compute: Callable[..., Any], group: int) -> Callable:
    """The same where `group` consecutive queries read one memory.

    Each query gets a copy of it, and what it writes: exact for every
    implementation, at the cost of as many memories as queries.
    """

    # States have heads in dimension 1, all others in dimension 2.
    # Copies of one memory stay equal, so the first is enough
    # afterwards.
    def run(q: Tensor, **given: Any) -> tuple[Tensor, ...]:
        copies = {
            name: x.repeat_interleave(
                group, 1 if name in MEMORIES else 2
            )
            if isinstance(x, Tensor)
            else x
            for name, x in given.items()
        }
        y, *after = compute(q=q, **copies)
        return y, *(x[:, ::group].clone() for x in after)

    return run


def factor(log_decay: Tensor | None) -> Tensor | None:
    """A decay from 0 to 1, `[batch, time, heads, 1 or key]`."""
    if log_decay is None:
        return None
    decay = log_decay.exp()
    return decay if decay.dim() == 4 else decay[..., None]
