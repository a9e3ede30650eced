"""Time fwlab next to common alternatives.

A peer is a function of another package if that is installed, else the usual form,
written out here. Both sides are measured in turns in one process, on as many threads as
`OMP_NUM_THREADS` says. A ratio above 1 means that fwlab is faster.
"""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fwlab import ops
from fwlab.bench import operations
from fwlab.bench.measure import in_turns, peak_mib
from fwlab.bench.operations import BLOCK, D_MODEL, HEADS, LAYERS, VOCAB
from fwlab.feature_maps import l2_normalize
from fwlab.models import LanguageModel

ROUNDS = 5
#: Functions without arguments that are timed, by name.
Sides = dict[str, Callable[[], Any]]


def both_ways(call: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], Any]:
    """Return a function that runs a call's forward and backward pass."""
    for x in inputs:
        x.requires_grad_()
    gradient = torch.ones_like(call(*inputs))
    return lambda: torch.autograd.grad(call(*inputs), inputs, gradient)


def gated_delta(batch: int, time: int, heads: int, width: int) -> Sides:
    """Return chunked gated delta rules of fwlab and Hugging Face, with unit keys."""
    from transformers.models.qwen3_next import modeling_qwen3_next as peer

    row = (batch, time, heads, width)
    gates = torch.rand(row[:3]), -0.1 * torch.rand(row[:3])
    inputs = *(torch.randn(row) for _ in range(3)), *gates

    def ours(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
        q, k = l2_normalize(q), l2_normalize(k)
        return ops.gated_delta_rule(q, k, v, beta, decay, scale=width**-0.5)

    def theirs(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
        chunks = peer.torch_chunk_gated_delta_rule
        return chunks(q, k, v, decay, beta, use_qk_l2norm_in_kernel=True)[0]

    return {"fwlab": both_ways(ours, *inputs), "peer": both_ways(theirs, *inputs)}


def one_token(batch: int, heads: int, width: int) -> Sides:
    """Return one forward step of the gated delta rule, for fwlab and Hugging Face."""
    from transformers.models.qwen3_next import modeling_qwen3_next as peer

    row = (batch, 1, heads, width)
    q, k, v = (torch.randn(row) for _ in range(3))
    beta, decay = torch.rand(row[:3]), -torch.rand(row[:3])
    W = torch.randn(batch, heads, width, width)
    ours = partial(ops.gated_delta_rule, state=W, return_state=True)
    step = peer.torch_recurrent_gated_delta_rule
    theirs = partial(step, initial_state=W.mT.contiguous(), output_final_state=True)
    no_grad = torch.no_grad()
    return {
        "fwlab": no_grad(lambda: ours(q, k, v, beta, decay, scale=width**-0.5)),
        "peer": no_grad(lambda: theirs(q, k, v, decay, beta)),
    }


def aft_full(time: int, width: int) -> Sides:
    """Return fwlab's AFT-full and a T x T matrix form with a maximum over all keys."""
    q, k, v = (torch.randn(4, time, width) for _ in range(3))

    def theirs(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        weights, e = bias.exp().tril(), (k - k.amax(1, keepdim=True)).exp()
        return torch.sigmoid(q) * (weights @ (e * v)) / (weights @ e)

    inputs = q, k, v, torch.randn(time, time)
    ours: Any = ops.aft_full
    return {"fwlab": both_ways(ours, *inputs), "peer": both_ways(theirs, *inputs)}


def normalised_sum(batch: int, time: int, heads: int, width: int) -> Sides:
    """Return fwlab's linear attention and a chunked one differentiated by autograd."""
    row = (batch, time, heads, width)
    q, k, v = (torch.randn(row) for _ in range(3))

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        v = F.pad(v, (0, 1), value=1.0)  # A column of ones gives the normaliser.
        q, k, v = (x.unflatten(1, (-1, 64)).transpose(2, 3) for x in (q, k, v))
        W = k.mT @ v
        y = (q @ k.mT).tril() @ v + q @ (W.cumsum(1) - W)
        y = y.transpose(2, 3).flatten(1, 2)
        return y[..., :-1] / y[..., -1:]

    ours = partial(ops.sum_rule, normalize=True)
    inputs = F.elu(q) + 1, F.elu(k) + 1, v
    return {"fwlab": both_ways(ours, *inputs), "peer": both_ways(theirs, *inputs)}


def new_gpt2(max_len: int = BLOCK) -> Any:
    """Return Hugging Face's GPT-2 at nanoGPT's size, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCAB, "n_positions": max_len, "n_embd": D_MODEL}
    sizes |= {"n_layer": LAYERS, "n_head": HEADS}
    without = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    without |= dict.fromkeys(("bos_token_id", "eos_token_id"))
    return GPT2LMHeadModel(GPT2Config(**sizes, **without))


def only_logits() -> nn.Module:
    model = new_gpt2()
    model.register_forward_hook(lambda *given: given[-1].logits)
    return model


def training(mixer: str, other: str) -> Sides:
    """Return training steps of an fwlab model and of an equally large second model."""
    make = only_logits if other == "GPT-2" else partial(operations.new_model, other)
    return {
        "fwlab": operations.TrainingStep(partial(operations.new_model, mixer)),
        "peer": operations.TrainingStep(make),
    }


def generation(mixer: str, context: int) -> Sides:
    """Return calls that generate a token with an fwlab model and a cached GPT-2."""
    sizes = (VOCAB, mixer, LAYERS, HEADS, D_MODEL)
    model = LanguageModel(*sizes, max_len=context + 1).eval()
    peer, text = new_gpt2(context + 1).eval(), torch.randint(VOCAB, (1, context))
    with torch.no_grad():
        _, state = model.prefill(text)
        cache = peer(text).cache

    @torch.no_grad()
    def theirs() -> None:
        peer(text[:, :1], cache=cache)
        cache.crop(-1)

    return {
        "fwlab": torch.no_grad()(lambda: model.step(text[:, 0], state)),
        "peer": theirs,
    }


COMPARISONS: tuple[tuple[Callable[..., Sides], tuple[Any, ...]], ...] = (
    *((gated_delta, (1, time, 4, 64)) for time in (512, 2048)),
    (gated_delta, (4, 1024, 4, 64)),
    (one_token, (4, 8, 64)),
    (aft_full, (128, 128)),
    (aft_full, (512, 128)),
    (normalised_sum, (4, 2048, 4, 32)),
    *((training, pair) for pair in (("delta", "softmax"), ("sum", "softmax"))),
    (training, ("softmax", "GPT-2")),
    *((generation, (mixer, 512)) for mixer in ("sum", "delta", "gated-delta")),
)


def main() -> None:
    """Measure all comparisons, and print a row for each comparison."""
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    print("work           sizes                    ms     peer  ratio     MiB    peer")
    for function, sizes in COMPARISONS:
        torch.manual_seed(0)
        row = f"{function.__name__:15}{', '.join(map(str, sizes)):18}"
        try:
            sides = function(*sizes)
        except ImportError as error:
            print(f"{row}  {error.name} is not installed")
            continue
        times = in_turns(sides, ROUNDS)
        ours, peer = (1e3 * statistics.median(times[name]) for name in sides)
        memory = "".join(f"{peak_mib(call):8.1f}" for call in sides.values())
        print(f"{row}{ours:9.2f}{peer:9.2f}{peer / ours:7.2f}{memory}", flush=True)


if __name__ == "__main__":
    main()
