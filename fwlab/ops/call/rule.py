"""Fast weight rules: their record, and how they are called.

A rule is a loop and the inputs that it gives to its recurrence. All
other implementations compute the recurrence, which several rules share.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from fwlab.feature_maps import (
    FeatureMap,
    Identity,
    _extreme,
    _power,
    finite_gradient,
    l2_normalize,
    unit_range,
)
from fwlab.ops.call import checks, units, whole
from fwlab.ops.call.call import Call, Operation
from fwlab.ops.call.choice import KERNELS
from fwlab.ops.call.operators import traced
from fwlab.ops.parts import autograd
from fwlab.ops.parts.autograd import full_precision
from fwlab.ops.parts.one_step import FORMS, one_step
from fwlab.ops.parts.state import NormalizedState, separate

State = Tensor | NormalizedState
#: The states of a rule, by the names that its implementations use.
MEMORIES = ("W", "z")
#: By how much a gate may leave its range: rounding, and steps of numerical gradients.
SLACK = 1e-4


class Gate(NamedTuple):
    """What a rule takes besides queries, keys and values.

    - `dims`: its dimensions after batch and time: "heads", "heads key"
      and so on; "heads [key]" = the last one may be missing.
    - `of`: makes usual values from any numbers.
    - `edges`: the borders of its range, where a rule is still exact.
    - `optional`: it may be None.
    - `kind`: how a layer makes it, a name of `KINDS` in
      `fwlab/layers/gates.py`; None = the name of the gate.
    - `least`, `most`: a smaller or larger number is refused, where
      looking is free; None = any number is a gate.
    - `hint`: what was probably meant then.
    """

    dims: str
    of: Callable[[Tensor], Tensor] = torch.sigmoid
    edges: tuple[float, ...] = (0.0, 1.0)
    optional: bool = False
    kind: str | None = None
    least: float | None = None
    most: float | None = None
    hint: str = ""

    def check(self, where: str, x: Tensor) -> None:
        """Raise `ValueError` for a number out of range.

        - `where`: the names of the operation and of the argument.
        """
        if self.least is None and self.most is None:
            return
        low, high = (end.item() for end in x.detach().aminmax())
        wrong = ""
        if self.least is not None and low < self.least - SLACK:
            wrong = f"at least {self.least:g}, got values down to {low:.3g}"
        if self.most is not None and high > self.most + SLACK:
            wrong = f"at most {self.most:g}, got values up to {high:.3g}"
        if wrong:
            raise ValueError(f"{where} to be {wrong}; {self.hint}")


def decay_gate(dims: str, optional: bool = False, kind: str | None = None) -> Gate:
    """The logarithm of a decay: at most 0."""

    def usual(x: Tensor) -> Tensor:
        return -F.softplus(x - 1)

    hint = "pass the logarithm of a decay, such as decay.log()"
    return Gate(dims, usual, (0.0, -1000.0), optional, kind, most=0.0, hint=hint)


@dataclass(frozen=True)
class Rule(Operation):
    r"""A rule $W_t = f(W_{t-1}, k_t, v_t, \text{gates}_t)$.

    - `gates`: what it takes besides `q`, `k` and `v`, in this order.
    - `inputs`: the inputs of its recurrence. It takes `q`, `k`, `v` and the gates by
      name, and returns `decay`, `strength`, `ask` and others by name; what it leaves
      out stays as it is, and a gate goes nowhere else.
    - `corrects`: whether it writes the difference between the value and
      what the key retrieves.
    - `steps`: how many steps of the recurrence a token usually takes,
      if that is a dimension of `k` and `v`, after time; 0 = it is not.
    - `normalizes`: whether it can divide by $z$. With a decay, `k` then comes
      in units of the memory: `inputs` may multiply it, but not measure it.
    - `related`: corrects examples of gates that depend on each other.
    - `benchmarks`: (time, width) of problems for `fwlab bench`.

    The name of its layer in `--mixer`, None = it has none, and the
    defaults of the layer:

    - `mixer`: such as "gated-delta".
    - `feature_map`: the class of the feature map.
    - `key_norm`: "sum", "l2" or None.
    - `normalize`: whether it divides by $z$.
    - `with_decay`, `with_dpfp`: the functions that compute it with a
      decay, or make DPFP features themselves; None = its own.
    """

    gates: Mapping[str, Gate] = field(default_factory=dict)
    inputs: Callable[..., dict[str, Any]] = lambda **_: {}
    corrects: bool = False
    steps: int = 0
    normalizes: bool = True
    related: Callable[..., dict[str, Tensor]] = lambda **_: {}
    benchmarks: tuple[tuple[int, int], ...] = ()
    mixer: str | None = None
    feature_map: Callable[[], FeatureMap] = Identity
    key_norm: str | None = None
    normalize: bool = False
    with_decay: str | None = None
    with_dpfp: str | None = None

    @property
    def required(self) -> tuple[str, ...]:
        """The gates that cannot be None."""
        return tuple(n for n, g in self.gates.items() if not g.optional)

    def dims(self, name: str, x: Any) -> str:
        """The dimensions of an argument, in words."""
        if name in self.gates:
            dims = self.gates[name].dims
            if isinstance(x, Tensor) and "[" in dims:
                short, _, last = dims.partition(" [")
                more = x.dim() > 2 + len(short.split())
                dims = f"{short} {last[:-1]}" if more else short
            return f"batch time {dims}"
        steps = "steps " if self.steps and name != "q" else ""
        last = "value" if name == "v" else "key"
        return f"batch time {steps}heads {last}"

    def example(
        self,
        generator: Generator,
        options: Mapping[str, str] | None = None,
        **sizes: int,
    ) -> dict[str, Tensor]:
        """Usual arguments by name, in float64, drawn by `generator`.

        - `options`: optional gates that it also makes, with their
          dimensions after batch and time.
        - `sizes`: `batch`, `time`, `heads`, `key` and `value`, perhaps `steps`.
        - Returns `q` and `k` of length 1, `v`, and the gates.
        """
        options, sizes = options or {}, {"steps": self.steps} | sizes
        x: dict[str, Tensor] = {}
        for name in ("q", "k", "v", *self.required, *options):
            dims = self.dims(name, None)
            if name in options:
                dims = f"batch time {options[name]}"
            shape = [sizes[dim] for dim in dims.split()]
            draw = torch.randn(shape, generator=generator, dtype=torch.float64)
            if name in self.gates:
                draw = self.gates[name].of(draw)
            x[name] = draw if name not in "qk" else l2_normalize(draw)
        return x | self.related(**x)

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
        call, dims, group = self._checked(
            q, k, v, gates, normalize, key_mask, cu_seqlens, return_state
        )
        if normalize and self._needs_units(call, state):
            # Units are changed by a decay: this memory keeps all of itself.
            gates = gates | {"log_decay": torch.zeros_like(k[..., 0])}
            options |= {"scale": scale, "key_mask": key_mask, "state": state}
            options |= {"cu_seqlens": cu_seqlens, "return_state": return_state}
            options |= {"normalize": True, "implementation": implementation}
            if self.with_decay is None:
                return self(q, k, v, gates, **options)
            return whole.FUNCTIONS[self.with_decay](q, k, v, **gates, **options)
        call.sizes["key"] *= wider
        name, compute = call.choose(
            implementation,
            *("q", "k", "v"),
            normalize=normalize,
            gates=tuple(dims)[3:],
            by_channel=_by_channel(dims),
        )
        # Our kernels begin without a state that would be all zeros, and
        # convert the strengths that they load.
        own = name == "triton"
        start = None
        as_one = call.hidden or (name == "fla" and traced(q))
        alone = group == 1 and call.lengths is None
        fades = normalize and "log_decay" in self.gates and len(dims) > 3
        fades = fades and call.sizes["key"] > 0
        # The efficient form can do without a state before and after it.
        bare = name == "efficient" and alone and not (as_one or return_state)
        if state is not None or fades or (normalize and self.corrects):
            bare = False
        empty = own and state is None and not (normalize or call.lengths or as_one)
        if not (bare or empty):
            start = self._start(call, state, normalize)
        if scale is not None:
            checks.scale(self.name, scale)
        for gate in self.gates:
            given = call.tensors.get(gate)
            if given is not None and given.numel() and units.known(given):
                where = f"{self.name}: expected {gate}"
                self.gates[gate].check(where, call.masked(given))
        if as_one:
            return call.whole(
                start,
                return_state,
                **{"implementation": name, "normalize": normalize},
                **{"scale": scale, "nu": options.get("nu", 0)},
            )
        if call.like.shape[1] == 0:
            return call.run(None, start, return_state)  # nothing to do
        by_kernel = name in KERNELS
        # `scale` multiplies the result, which has full precision. A kernel
        # rounds it first; but features of its own lose the scale of `q`.
        scales_q = normalize or (by_kernel and not options)
        with full_precision(call.like):
            x = self._read(
                call,
                None if by_kernel else features,
                scale if scales_q else None,
                normalize,
                bare,
                by_kernel,
                ("beta",) if own and self.corrects else (),
            )
            # Kernels and the efficient form convert one piece of
            # half-precision inputs at a time.
            if not by_kernel and name != "efficient":
                x = {n: part.to(call.dtype) for n, part in x.items()}
            x["real"] = call.key_mask
            if call.lengths is not None and call.key_mask is None:
                x["real"] = call.like.new_ones(call.like.shape[:2], dtype=torch.bool)
            loop = name == "naive"
            if fades or loop or not alone:
                compute = partial(self._computed, compute, fades, loop)
                if group > 1:
                    compute = grouped(compute, group, dims)
                # Steps that fill up a document are masked ones, too.
                compute = call.by_document(compute, MEMORIES)
            else:
                x = self._recurrence(**x)
            x |= options if by_kernel else {}
            memory = _memory(start)
            if normalize and start is None:
                memory |= {"mean": True}
            y, *after = compute(**x, **memory)
            y = call.masked(last_steps(y, call.like.shape[1]))
            if scale is not None and not scales_q:
                y = y * scale
            y = y.to(call.like.dtype)
        if not return_state:
            return y
        return y, separate(NormalizedState(*after) if normalize else after[0])

    def steps_from(
        self, state: Any, x: Tensor, W: tuple[int, ...], normalize: bool
    ) -> bool:
        """Whether `step` can continue from a state.

        If not, the public function can, or says what does not fit.

        - `x`: the input of the layer.
        - `W`: the shape that the fast weights should have.
        """
        if self.implementations["efficient"] not in FORMS:
            return False
        if not autograd.only_numbers(x):
            return False
        if normalize:
            if not isinstance(state, NormalizedState):
                return False
            state, z = state
            if not checks.fits(z, (*W[:2], W[3]), x):
                return False
        return checks.fits(state, W, x)

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: dict[str, Tensor],
        state: Any,
        normalize: bool,
    ) -> tuple[Tensor, State]:
        """One token of a layer, without gradients and without checks.

        - `state`: one for which `steps_from` is true.
        """
        x: dict[str, Any] = {"q": q, "k": k, "v": v}
        if normalize and (self.corrects or "log_decay" in gates):
            x |= self._in_range(q, k) | gates | _memory(state)
            efficient, fades = self.implementations["efficient"], "log_decay" in gates
            y, *after = self._computed(efficient, fades, False, **x)
            return y, NormalizedState(*after)
        W, z = state if normalize else (state, None)
        x |= self.inputs(**x, **gates)
        for each in _one_by_one(x):
            y, z, W = one_step(**each, W=W, z=z, corrects=self.corrects)
        return y, W if z is None else NormalizedState(W, z)

    def _checked(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: dict[str, Tensor | None],
        normalize: bool,
        key_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        return_state: bool,
    ) -> tuple[Call, dict[str, str], int]:
        """The call, its arguments' dimensions, and queries per memory."""
        # Each step of a token has the heads of its first one.
        several = self.steps and checks.dense(k) and k.dim() == 5
        if several and not k.shape[2]:
            raise ValueError(
                f"{self.name}: expected k of shape [batch, time, steps, heads, "
                f"key] with at least 1 step, got {list(k.shape)}"
            )
        group = checks.group(self.name, q, k[:, :, 0] if several else k)
        x: dict[str, Any] = {"q": q, "k": k, "v": v} | {
            name: gate
            for name, gate in gates.items()
            if gate is not None or not self.gates[name].optional
        }
        dims = {name: self.dims(name, part) for name, part in x.items()}
        if group > 1:
            dims["q"] = "batch time queries key"
        call = Call(
            self,
            {name: (part, dims[name]) for name, part in x.items()},
            like="v",
            key_mask=key_mask,
            cu_seqlens=cu_seqlens,
            normalize=normalize,
            return_state=return_state,
        )
        if normalize and _by_channel(dims):
            raise ValueError(
                f"{self.name}: expected normalize=False with a decay per "
                "key channel, got True"
            )
        if self.steps or group > 1:
            like = v[:, :, 0] if self.steps else v
            call.like = like[:, :, :1].expand(-1, -1, q.shape[2], -1)
        return call, dims, group

    def _needs_units(self, call: Call, state: Any) -> bool:
        """Whether a memory that does not fade is too small for its means."""
        if "log_decay" in self.gates:
            if len(call.tensors) > 3:
                return False  # it fades, and gets units anyway
        elif self.with_decay is None:
            return False
        parts = state if isinstance(state, tuple) else ()
        z = parts[1] if len(parts) == 2 and checks.dense(parts[1]) else None
        return units.needed(call.masked(call.tensors["k"]), z, call.cu_seqlens)

    def _read(
        self,
        call: Call,
        features: Callable[[Tensor], Tensor] | None,
        scale: Any,
        normalize: bool,
        bare: bool,
        by_kernel: bool,
        as_given: tuple[str, ...],
    ) -> dict[str, Any]:
        """What the rule reads, by name: masked, and in a safe range.

        Gates get full precision, except those that stay `as_given`.
        """
        # In a masked step all inputs are 0, whatever they contain: see `_inputs`.
        x = {name: call.masked(part) for name, part in call.tensors.items()}
        if features is not None:
            # Side by side, in half the calls.
            both = features(torch.cat([x["q"], x["k"]], 2).to(call.dtype))
            x["q"], x["k"] = both.split([x["q"].shape[2], x["k"].shape[2]], 2)
        if normalize:
            # Float16 has so few exponents that their gradients may be beyond all its
            # numbers; in float32 the parts of a gradient are added up.
            for name in "qk":
                if x[name].dtype == torch.float16:
                    x[name] = finite_gradient(x[name])
                    x[name] = x[name] if by_kernel else x[name].to(call.dtype)
            x |= {} if bare else self._in_range(**x)
            if scale is not None:  # its size cancels in the quotient
                scale = torch.as_tensor(scale).sign()
        if scale is not None:
            x["q"] = x["q"] * scale
        return x | {
            gate: x[gate].to(call.dtype)
            for gate in self.gates
            if gate in x and gate not in as_given
        }

    def _in_range(self, q: Tensor, k: Tensor, **_: Any) -> dict[str, Tensor]:
        """The keys that read, where their size cancels in a quotient."""
        x = {"q": unit_range(q)}
        if self.corrects:
            ask, power = k, _power(k)
            if k.requires_grad and _extreme(power):
                # Both gradients are finite, and so is their sum.
                k = finite_gradient(k)
                k, ask = finite_gradient(k), finite_gradient(k)
            x |= {"k": k, "ask": ask / power}
        return x

    def _recurrence(self, real: Tensor | None = None, **x: Any) -> dict[str, Any]:
        """The inputs of the recurrence for those of the rule."""
        rest = {n: part for n, part in x.items() if n not in self.gates}
        return {"decay": None, "strength": None} | rest | self._inputs(real, **x)

    def _inputs(self, real: Tensor | None, **x: Any) -> dict[str, Any]:
        """What `inputs` returns, but a masked step keeps all, and writes nothing.

        - `real`: `[batch, time]`, which steps are not masked; None = all. Their
          inputs are 0. But a rule may fade by a constant, or move its keys.
        """
        made = self.inputs(**x)
        for name, idle in (("decay", 1), ("k", 0)):
            if real is not None and made.get(name) is not None:
                steps = made[name].shape[1] // real.shape[1]
                each = real.repeat_interleave(steps, 1) if steps > 1 else real
                made |= {name: torch.where(each[..., None, None], made[name], idle)}
        return made

    def _computed(
        self,
        compute: Callable[..., tuple[Tensor, ...]],
        fades: bool,
        loop: bool,
        sure: bool = False,
        real: Tensor | None = None,
        **x: Any,
    ) -> tuple[Tensor, ...]:
        """The rule by its recurrence or its own `loop`.

        - `real`: as for `_inputs`.
        - `fades`: a mean of a memory that fades is wanted, which may need units.
        - `sure`: find out which, even for a single step.
        """
        # Text is generated step by step: there, look at the state only.
        quick = fades and not sure and x["k"].shape[1] == 1 and units.known(x["k"])
        given, unit = x, None
        if fades and not quick:
            inputs = partial(self._inputs, real)
            given, unit = units.scaled(inputs, self.corrects, x)
        if fades and self.corrects:
            given = self._retrievable(compute, **given)
        if loop:
            y, *after = by_step(compute, real, **given)
        else:
            y, *after = compute(**self._recurrence(real, **given))
        y, *after = (part.to(x["W"].dtype) for part in (y, *after))
        if quick and not (after[-1].detach().abs().amax(-1) > 1e-17).all():
            return self._computed(compute, fades, loop, sure=True, real=real, **x)
        if unit is not None:
            W, z = after
            after = [unit[..., None] * W, unit * z]
        return last_steps(y, x["q"].shape[1]), *after

    def _retrievable(self, compute: Callable[..., Any], **x: Any) -> dict[str, Any]:
        """The arguments, such that a key retrieves from a memory that fades.

        That is a quotient, in which a decay cancels; but one of 0 empties the memory.
        The efficient form divides after the decay: then as much is left in float64 as
        a quotient needs. What is written later hides it.
        """
        decay = x["log_decay"]
        x["ask"] = x["ask"].masked_fill((decay == -torch.inf)[..., None], 0)
        if compute is self.implementations["efficient"]:
            strong = (decay < -80) & (decay > -torch.inf)
            if not traced(decay) and strong.any():
                least = -300 if x["W"].dtype == torch.float32 else -600
                fades = strong & (decay < least)
                x = {n: part.double() for n, part in x.items()}
                x["log_decay"] = x["log_decay"].masked_fill(fades, least)
        return x

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


def _memory(state: State | None) -> dict[str, Any]:
    """The parts of a state, by the names in `MEMORIES`."""
    return state._asdict() if isinstance(state, NormalizedState) else {"W": state}


def _one_by_one(x: dict[str, Any]) -> list[dict[str, Any]]:
    """The inputs of each step of a token."""
    steps = x["k"].shape[1]
    return (
        [x]
        if steps == 1
        else [
            {
                n: part[:, [t]] if isinstance(part, Tensor) else part
                for n, part in x.items()
            }
            for t in range(steps)
        ]
    )


def _by_channel(dims: Mapping[str, str]) -> bool:
    """Whether each key channel has its own decay."""
    return "key" in dims.get("log_decay", "").split()


def last_steps(y: Tensor, time: int) -> Tensor:
    """What each of `time` tokens reads after the last of its steps."""
    steps = y.shape[1] // time
    return y if steps == 1 else y[:, steps - 1 :: steps]


def in_turn(*parts: Tensor) -> Tensor:
    """The steps of each token, one after another: `[batch, time, ...]`."""
    return torch.stack(parts, 2).flatten(1, 2)


def grouped(
    compute: Callable[..., Any], group: int, dims: Mapping[str, str]
) -> Callable:
    """The same where `group` consecutive queries read one memory.

    Each query gets a copy of it, and what it writes: exact for every
    implementation, at the cost of as many memories as queries.

    - `dims`: the dimensions of each argument but the states, in words.
    """
    place = {n: words.split().index("heads") for n, words in dims.items() if n != "q"}
    place |= {"W": 1, "z": 1, "ask": place.get("ask", 2)}

    # Copies of one memory stay equal, so the first is enough afterwards.
    def run(q: Tensor, **others: Any) -> tuple[Tensor, ...]:
        copies = {
            name: x.repeat_interleave(group, place[name])
            if isinstance(x, Tensor) and name in place
            else x
            for name, x in others.items()
        }
        y, *after = compute(q=q, **copies)
        return y, *(x[:, ::group].clone() for x in after)

    return run


def by_step(
    loop: Callable[..., tuple[Tensor, ...]], real: Tensor | None, **x: Any
) -> tuple[Tensor, ...]:
    """The same as `loop`, but a masked step leaves the memory as it is.

    - `real`: `[batch, time]`, which steps are not masked; None = all.
    """
    if real is None:
        return loop(**x)
    memory = {name: x.pop(name) for name in MEMORIES if name in x}
    y = []
    for real_t, *parts in zip(
        *(p.split(1, 1) for p in (real, *x.values())), strict=True
    ):
        y_t, *after = loop(**dict(zip(x, parts, strict=True)), **memory)
        y.append(y_t)
        for name, new in zip(memory, after, strict=True):
            here = real_t.view(-1, *[1] * (new.dim() - 1))
            memory[name] = torch.where(here, new, memory[name])
    return torch.cat(y, 1), *memory.values()


def factor(log_decay: Tensor | None) -> Tensor | None:
    """A decay from 0 to 1, `[batch, time, heads, 1 or key]`."""
    if log_decay is None:
        return None
    decay = log_decay.exp()
    return decay if decay.dim() == 4 else decay.unsqueeze(-1)
