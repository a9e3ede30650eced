"""What can be checked without running: the fences before wgmma."""

from emulator.memory import Fault
from emulator.text import REGISTER, Instruction, Program


def fragments(product: Instruction) -> frozenset[str]:
    """The registers of the left factor, if it is in registers."""
    left = product.operands[1]
    return frozenset(REGISTER.findall(left if left[0] == "{" else ""))


def fences(program: Program) -> None:
    """Raise if a wgmma may take registers before they are written.

    What it takes or adds to needs a `wgmma.fence` after the last ordinary instruction
    that writes there. Copies from register to register are exempt: LLVM puts some
    behind the fence, and `ptxas` gives both the same register or orders them itself.
    """
    for index, product in enumerate(program.instructions):
        if product.parts[:2] != ("wgmma", "mma_async"):
            continue
        own = product.written | fragments(product)
        for before in reversed(program.instructions[:index]):
            if before.parts[:2] == ("wgmma", "fence"):
                break
            if before.parts[0] not in ("wgmma", "mov") and before.written & own:
                raise Fault(
                    f"line {product.line}: wgmma without wgmma.fence after {before.text!r}"
                )
        else:
            raise Fault(f"line {product.line}: wgmma without wgmma.fence")
