"""Compare Transformer-XL with an explicit computation of its formula."""

import pytest
import torch
from alike import drawn_mask, refuses
from torch.nn import functional as F

from fwlab import detach
from fwlab.layers import TransformerXL
from fwlab.layers.positions import sinusoids

CUTS = [(5, 4), (3, 7), (0, 3), (10, 3), (6, 1), (64, 64)]
cuts = pytest.mark.parametrize(("memory", "segment"), CUTS)


def make(memory, segment, layers=2, d_model=12, dtype=torch.float64):
    torch.manual_seed(0)
    model = TransformerXL(d_model, 3, layers, 20, memory, segment).to(dtype)
    for p in model.parameters():  # Set biases, too.
        torch.nn.init.normal_(p, std=0.4)
    return model, torch.randn(2, 23, d_model, dtype=dtype)


def written_out(layer, x):
    """Compute relative attention for each query and key, term by term."""
    heads, width = layer.content_bias.shape
    W_q, W_kE, W_v, W_kR = (
        project.weight.view(heads, width, -1)
        for project in (layer.to_q, layer.to_k, layer.to_v, layer.to_r)
    )
    u, v, R = layer.content_bias, layer.position_bias, layer.codes
    y = []
    for i in range(x.shape[1]):
        start = i // layer.segment * layer.segment
        scores, values = [], []
        for j in range(max(start - layer.memory, 0), i + 1):
            x_j = x[:, j].detach() if j < start else x[:, j]
            q = torch.einsum("hdm,bm->bhd", W_q, x[:, i])
            k = torch.einsum("hdm,bm->bhd", W_kE, x_j)
            r = torch.einsum("hdm,m->hd", W_kR, R[i - j])
            scores.append(
                (q * k).sum(-1) + (q * r).sum(-1) + (u * k).sum(-1) + (v * r).sum(-1)
            )
            values.append(torch.einsum("hdm,bm->bhd", W_v, x_j))
        weights = torch.softmax(torch.stack(scores, -1) / width**0.5, -1)
        y.append(torch.einsum("bhj,jbhd->bhd", weights, torch.stack(values)).flatten(1))
    return torch.stack(y, 1) @ layer.to_out.weight.T


@cuts
def test_formula(memory, segment):
    """Outputs and all gradients of two layers agree with the formula."""
    model, x = make(memory, segment)
    x.requires_grad_()
    plain = x
    for block in model.blocks:
        plain = plain + written_out(block.mixer, block.norm_mixer(plain))
        hidden = F.gelu(block.expand(block.norm_mlp(plain)))
        plain = plain + block.contract(hidden)
    y, r = model(x), torch.randn(2, 23, 12, dtype=torch.float64)
    torch.testing.assert_close(y, plain, rtol=1e-10, atol=1e-11)
    leaves = [x, *model.parameters()]
    gradients, wanted = (torch.autograd.grad((z * r).sum(), leaves) for z in (y, plain))
    torch.testing.assert_close(gradients, wanted, rtol=1e-9, atol=1e-10)


PART = torch.zeros(2, 3, 3, 8, dtype=torch.float64)
MASK = torch.ones(2, 6, dtype=torch.bool)


@cuts
@pytest.mark.parametrize("masked", [False, True])
def test_prefill_and_step_are_forward(memory, segment, masked):
    model, x = make(memory, segment)
    mask = drawn_mask(2, 23) if masked else torch.ones(2, 23, dtype=torch.bool)
    mask[:, -8:] = True
    whole = model(x, key_mask=mask if masked else None)
    pieces, state = [], None
    for part in (slice(0, 6), slice(6, 7), slice(7, 7), slice(7, 15)):
        y, state = model.prefill(x[:, part], state, mask[:, part] if masked else None)
        pieces.append(y)
    for t in range(15, 23):
        y, state = model.step(x[:, t], state)
        pieces.append(y[:, None])
        size = sum(part.numel() for layer in state for part in layer[:2])
        assert size == 2 * model.state_size(t + 1)  # The batch has two sequences.
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-10, atol=1e-11)
    assert model.state_size(10**6) <= model.state_size()


def test_state_sizes_of_table_4():
    """State sizes for each memory and target length agree with table 4, in millions."""
    millions = []
    for memory, segment in ((15, 1), (64, 64), (128, 128), (384, 384)):
        with torch.device("meta"):
            model = TransformerXL(256, 8, 16, memory=memory, segment=segment)
        millions.append(round(model.state_size() / 1e6, 3))
    assert millions == [0.131, 1.049, 2.097, 6.291]


def test_gradients_through_the_state():
    """Gradients pass through the state within a segment, and stop between segments."""
    model, x = make(5, 8)
    x.requires_grad_()
    r = torch.randn(2, 5, 12, dtype=torch.float64)
    (whole,) = torch.autograd.grad((model(x[:, :8])[:, 3:] * r).sum(), x)
    _, state = model.prefill(x[:, :3])
    y, state = model.prefill(x[:, 3:8], state)
    (gradient,) = torch.autograd.grad((y * r).sum(), x, retain_graph=True)
    torch.testing.assert_close(gradient, whole, rtol=1e-9, atol=1e-10)
    y, _ = model.prefill(x[:, 8:13], state)
    (gradient,) = torch.autograd.grad((y * r).sum(), x, retain_graph=True)
    assert not gradient[:, :8].any()
    model.prefill(x[:, 8:13], detach(state))[0].sum().backward()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (3, "state to be a list of 2 SegmentStates, one per layer, got int"),
        ([None], "state to be a list of 2 SegmentStates, .*got 1"),
        ([PART, PART], r"expected state to be a SegmentState \(memory, segment, mask\), got Tensor"),
        ([(PART[0], PART, None)] * 2, r"expected state.memory of shape \[2, 0, 3, 8\].*got \[3, 3, 8\]"),
        ([(PART, PART[:1], None)] * 2, r"expected state.segment of shape \[2, 3, 3, 8\].*got \[1, 3"),
        # These parts are longer than the memory and the segment of this model.
        ([(PART.repeat(1, 2, 1, 1), PART, None)] * 2, r"state.memory .*\[2, 5, 3, 8\]"),
        ([(PART, PART.repeat(1, 2, 1, 1), None)] * 2, r"state.segment .*\[2, 4, 3, 8\]"),
        ([(PART, PART, PART)] * 2, "expected state.mask to be a bool tensor"),
        ([(PART, PART, MASK[:, :5])] * 2, r"expected state.mask of shape \[2, 6\].*got \[2, 5\]"),
    ],
)  # fmt: skip
def test_states_that_do_not_fit(state, message):
    model, x = make(5, 4)
    refuses(lambda: model.prefill(x, state), message)
    refuses(lambda: model.step(x[:, 0], state), message)
    model.prefill(x, [(PART, PART, MASK)] * 2)  # This state has the expected shapes.


def test_sinusoids():
    R = sinusoids(torch.arange(5), 6)
    assert R.shape == (5, 6)
    assert R[0].tolist() == [0, 0, 0, 1, 1, 1]
    assert R[3, 0].item() == pytest.approx(0.14112, abs=1e-5)  # sin 3
    assert R[3, 5].item() == pytest.approx(0.99998, abs=1e-5)
    assert sinusoids(torch.arange(5), 5).shape == (5, 5)
