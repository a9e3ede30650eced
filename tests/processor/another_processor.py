"""A processor of our own: PyTorch adds the same terms in another order.

What differs between processors is how many terms are added at once, and in
which order; digits that depend on it are no results. FWLAB_PROCESSOR=1 (or any
other number, which chooses where) makes a process cut the terms of products and
sums in two parts, and begin with the later ones. Parts are views, which cost
nothing: a permutation would take several times what it permutes for. The kernels
themselves are replaced: backward passes, compiled code, and other threads get
them, too.

A right test cannot fail by it. The order depends on the number of terms alone,
so equal calls give equal bits; sums that are exact stay exact; a cumulative
sum looks at nothing that comes later, and half precision is rounded once.

It does not reach `dot`, sums inside softmax, norms, `var`, `logcumsumexp`, losses,
convolutions and fused attention, in loops that Inductor generates, nor NumPy.
"""

import functools
import importlib.util
import os
import sys
import warnings
from pathlib import Path

SEED = os.environ.get("FWLAB_PROCESSOR")


def replace():
    """Replace PyTorch's kernels in this process."""
    import torch

    if not hasattr(torch.library, "get_kernel"):
        raise RuntimeError(
            f"FWLAB_PROCESSOR needs torch.library.get_kernel, got PyTorch {torch.__version__}"
        )
    library = torch.library.Library("aten", "IMPL")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    theirs = {}

    def parts(x, dim):
        """Return the later terms along a dimension, and the earlier ones."""
        terms = x.shape[dim]
        at = min(terms, max(1, terms // 4 + int(SEED) % max(1, terms // 2)))
        earlier, later = x.split_with_sizes((at, terms - at), dim)
        return later, earlier

    def original(name, *args, **kwargs):
        return theirs[name](*args, **kwargs)

    def kernel(name):
        there = torch.library.get_kernel(f"aten::{name}", "CPU")
        theirs[name] = functools.partial(there.call_boxed, keys)

        def register(ours):
            def alone(*args, **kwargs):
                with torch._C.DisableTorchFunction():
                    return ours(*args, **kwargs)

            library.impl(name, alone, "CPU", allow_override=True)
            return ours

        return register

    def kernel_and_variants(name, variants):
        """Besides `name`, those that write the same to `out` or in place."""

        def register(ours):
            kernel(name)(ours)

            def into(out, result):
                if out.shape != result.shape:
                    out.resize_(result.shape)
                return out.copy_(result)

            for variant in variants:
                if variant.endswith("_"):
                    kernel(variant)(lambda out, *a, **k: into(out, ours(out, *a, **k)))
                else:
                    kernel(variant)(lambda *a, out, **k: into(out, ours(*a, **k)))
            return ours

        return register

    def wide(dtype):
        half = dtype in (torch.float16, torch.bfloat16)
        return torch.float32 if half else dtype

    def inexact(dtype):
        return dtype.is_floating_point or dtype.is_complex

    def taken(a, b, dim):
        """Say whether there are terms to put in another order."""
        terms = a.shape[-1]
        same = a.dtype == b.dtype and terms == b.shape[dim]
        return same and inexact(a.dtype) and terms > 1

    def cut(a, b, dim):
        if (kind := wide(a.dtype)) != a.dtype:
            a, b = a.to(kind), b.to(kind)
        return zip(parts(a, -1), parts(b, dim), strict=True)

    def product(name, added, dim):
        """Replace the kernels of a product (mm), and of the one that adds (addmm)."""

        def add(out, a, b, *, beta=1, alpha=1):
            if out.dtype != a.dtype or not taken(a, b, dim):
                return original(added, out, a, b, beta=beta, alpha=alpha)
            first, second = cut(a, b, dim)
            out = out.to(first[0].dtype)
            result = original(added, out, *first, beta=beta, alpha=alpha)
            return original(added, result, *second, alpha=alpha).to(a.dtype)

        kernel_and_variants(added, [f"{added}.out", f"{added}_"])(add)
        if not name:
            return

        def multiply(a, b):
            if not taken(a, b, dim):
                return original(name, a, b)
            first, second = cut(a, b, dim)
            result = original(added, original(name, *first), *second)
            return result.to(a.dtype)

        kernel_and_variants(name, [f"{name}.out"])(multiply)

    product("mm", "addmm", -2)
    product("bmm", "baddbmm", -2)
    product(None, "addmv", -1)  # mv calls it

    # sum without dimensions, mean, and logsumexp call it.
    @kernel_and_variants("sum.dim_IntList", ["sum.IntList_out"])
    def total(x, dims, keepdim=False, *, dtype=None):
        kind = dtype or x.dtype
        dims = sorted({dim % max(x.ndim, 1) for dim in dims or range(x.ndim)})
        shape = [1 if dim in dims else size for dim, size in enumerate(x.shape)]
        if not inexact(kind) or x.numel() < 3 or x.numel() == _count(shape):
            return original("sum.dim_IntList", x, dims, keepdim, dtype=dtype)
        kept = [dim for dim in range(x.ndim) if dim not in dims]
        terms = x.permute(dims + kept).flatten(0, len(dims) - 1).to(wide(kind))
        first, second = (
            original("sum.dim_IntList", part, [0]) for part in parts(terms, 0)
        )
        result = (first + second).to(kind)
        return result.reshape(shape) if keepdim else result

    # In blocks, whose length depends on the seed alone: what comes later, and
    # how much of it, is nothing to the sums before, and PyTorch keeps to that.
    @kernel_and_variants("cumsum", ["cumsum.out", "cumsum_"])
    def running(x, dim, *, dtype=None):
        kind = dtype or x.dtype
        block = 3 + int(SEED) % 5
        if not inexact(kind) or not x.ndim or x.shape[dim] <= block or not x.numel():
            return original("cumsum", x, dim, dtype=dtype)
        rest = x.to(wide(kind)).movedim(dim, 0)
        sums = []
        before = 0
        for part in rest.split(block):
            sums.append(original("cumsum", part, 0) + before)
            before = sums[-1][-1]
        return torch.cat(sums).movedim(0, dim).to(kind).contiguous()

    # The order in which unknowns are found is given; where it is cut, is not.
    solve = "linalg_solve_triangular"

    @kernel_and_variants(solve, [f"{solve}.out"])
    def solution(A, B, *, upper, left=True, unitriangular=False):
        kind = {"upper": upper, "left": left, "unitriangular": unitriangular}
        at = 1 + (int(SEED) + A.shape[-1]) % 5
        if A.shape[-1] <= at or not left:
            return original(solve, A, B, **kind)
        first, second = slice(None, at), slice(at, None)
        if upper:
            first, second = second, first
        x = original(solve, A[..., first, first], B[..., first, :], **kind)
        rest = B[..., second, :] - A[..., second, first] @ x
        y = original(solve, A[..., second, second], rest, **kind)
        return torch.cat([y, x] if upper else [x, y], -2)

    return library


def _count(shape):
    return functools.reduce(int.__mul__, shape, 1)


class AfterTorch:
    """Replaces them as soon as PyTorch has been imported, which takes seconds."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(cls)
        spec = importlib.util.find_spec(name)
        if spec:
            execute = spec.loader.exec_module

            def exec_module(module):
                global kept
                execute(module)
                with warnings.catch_warnings(action="ignore"):  # That they are.
                    kept = replace()

            spec.loader.exec_module = exec_module
        return spec


if SEED:
    here = str(Path(__file__).parent)
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if here not in path:  # Processes that this one starts get it by this.
        os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, path)])
    sys.meta_path.insert(0, AfterTorch)
