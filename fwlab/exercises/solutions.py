"""The solution of each exercise, as one would write it on a board.

`solution` prints a function of this file with its imports, and with the
functions of earlier exercises that it calls. Only those that are nowhere else
in the package are also what answers are compared with.
"""
# mypy: ignore-errors
# There are no type hints on a board.

from itertools import combinations

import torch
from torch.nn import functional as F

from fwlab import ops
from fwlab.feature_maps import DPFP, l2_normalize
from fwlab.layers import FeedbackTransformer
from fwlab.ops.feedback import naive

# --- Fast weights


def read_memory(W, q):
    # Each query meets the columns of its own W.
    return torch.einsum("...vk,...k->...v", W, q)


def write(W, k, v):
    # Entry (i, j) of v ⊗ k is v_i k_j (Eq. 17).
    return W + v[..., :, None] * k[..., None, :]


def linear_attention(q, k, v):
    weights = q @ k.mT  # row i, column j: k_j · q_i
    return weights.tril() @ v  # j up to i (Eqs. 8-11)


def predict_error(S, d):
    # S - 1 other values come in, each with a weight whose square is 1/d on average.
    return (S - 1) / d


def correct(W, k, v):
    difference = v - read_memory(W, k)  # from what k reads now
    return W + difference[..., :, None] * k[..., None, :]


# --- Feature maps


def normaliser(phi_q, phi_k, v):
    weights = (phi_q @ phi_k.mT).tril()
    return weights @ v / weights.sum(-1, keepdim=True)  # their sum is z · phi(q)


def positive_features(x, R):
    along = x @ R.mT
    h = (-(x * x).sum(-1, keepdim=True) / 2).exp()
    features = torch.cat([along.exp(), (-along).exp()], -1)
    return h * features / (2 * len(R)) ** 0.5


def favor(q, k, R):
    def exponents(x):
        along = x @ R.mT
        return torch.cat([along, -along], -1) - (x * x).sum(-1, keepdim=True) / 2

    of_q, of_k = exponents(q), exponents(k)
    top_q = of_q.amax(-1, keepdim=True)  # one for each query
    top_k = of_k.amax((-2, -1), keepdim=True)  # one for all keys
    return (of_q - top_q.detach()).exp(), (of_k - top_k.detach()).exp()


# --- DPFP


def dpfp(x, nu):
    r = torch.cat([x, -x], -1).relu()
    # Roll by -j, so that entry i + j comes to place i.
    return torch.cat([r * r.roll(-j, -1) for j in range(1, nu + 1)], -1)


def useful_nu(d):
    # Shift d multiplies r(k_i) by r(-k_i), which is 0, and shift 2d - j
    # repeats shift j.
    return d - 1


def dot_capacity(d, nu):
    return 2 * d * min(nu, useful_nu(d))


def my_features(x):
    # A power makes large products larger, so a key weights itself more.
    return dpfp(x, 3) ** 3


# --- The delta rule


def delta_step(W, k, v, beta):
    old = torch.einsum("...vk,...k->...v", W, k)  # Eq. 20
    new = beta[..., None] * (v - old)
    return W + new[..., :, None] * k[..., None, :]  # Eq. 24


def gradient_step(W, k, v, beta):
    error = torch.einsum("...vk,...k->...v", W, k) - v
    gradient = error[..., :, None] * k[..., None, :]
    return W - beta[..., None, None] * gradient


def gated_step(W, k, v, beta):
    new = beta[..., None] * v
    return (1 - beta[..., None, None]) * W + new[..., :, None] * k[..., None, :]


# --- Normalisation


def stable_beta(phi):
    # The factor 1 - beta |phi|² may fall to -1. And 2 / 0 is infinite.
    return 2 / (phi * phi).sum(-1)


def sum_normalize(x):
    total = x.sum(-1, keepdim=True)
    # Divide by 1 where the sum is 0, so that no gradient is NaN.
    shares = x / torch.where(total == 0, 1, total)
    return torch.where(total == 0, 0, shares)


def l2_write(W, k, v, beta):
    squares = (k * k).sum(-1, keepdim=True)
    nothing = squares == 0
    unit = k / torch.where(nothing, 1, squares).sqrt()
    return delta_step(W, torch.where(nothing, 0, unit), v, beta)


# --- Retrieval


def retrieval_loss(found, wanted):
    error = found - F.one_hot(wanted, found.shape[-1])
    return (error * error).sum(-1).mean() / 2


def capacity(S, features):
    # S - features of S directions are lost, and each costs 1/2.
    return max(0, S - features) / S / 2


def make_batch(keys, values, symbols):
    held = torch.full((len(keys), symbols), -1)
    rows = torch.arange(len(keys))
    for t in range(keys.shape[1]):
        held[rows, keys[:, t]] = values[:, t]
    return held


# --- A transformer


def fast_weight_layer(x, W_q, W_k, W_v, W_beta, W_out):
    phi = DPFP(nu=1)
    q = sum_normalize(phi(x @ W_q.T))  # Eqs. 37 and 29
    k = sum_normalize(phi(x @ W_k.T))
    v = x @ W_v.T
    beta = torch.sigmoid(x @ W_beta.T)  # Eq. 21
    # One head, which writes, then reads (Eqs. 20, 24 and 25).
    y = ops.delta_rule(q[:, :, None], k[:, :, None], v[:, :, None], beta)
    return x + y[:, :, 0] @ W_out.T


def generate(step, prompt, length):
    state, text = None, []
    for token in prompt:
        logits, state = step(token, state)
    while len(text) < length:
        token = logits.argmax()
        text.append(token)
        if len(text) < length:  # nobody needs the logits after the last one
            logits, state = step(token, state)
    return torch.stack(text)


def ablate(model, tokens, loss):
    def never(module, inputs, output):
        return torch.full_like(output, -torch.inf)  # whose sigmoid is 0

    losses = []
    for block in model.blocks:
        hook = block.mixer.gates.beta.projection.register_forward_hook(never)
        losses.append(loss(model, tokens))
        hook.remove()
    return torch.stack(losses)


def mended_layer(x, W_q, W_k, W_v, W_beta, W_out):
    def features(x):
        phi = DPFP(nu=1)(x)
        return sum_normalize(phi)  # over the features of each token (Eq. 29)

    q, k, v = features(x @ W_q.T), features(x @ W_k.T), x @ W_v.T
    beta = torch.sigmoid(x @ W_beta.T)
    y = ops.delta_rule(q[:, :, None], k[:, :, None], v[:, :, None], beta)
    return x + y[:, :, 0] @ W_out.T


# --- Memory


def recomputing_backward(q, k, v, beta, dy):
    # Forward: keep the last W, and the increment of each step.
    W, U = torch.zeros_like(torch.outer(v[0], k[0])), []
    for t in range(len(q)):
        U.append(beta[t] * (v[t] - W @ k[t]))
        W = W + torch.outer(U[t], k[t])
    # Backward: undo one write after the other.
    dW = torch.zeros_like(W)
    dq, dk, dv, dbeta = (torch.zeros_like(x) for x in (q, k, v, beta))
    for t in reversed(range(len(q))):
        dW = dW + torch.outer(dy[t], q[t])
        dq[t] = dy[t] @ W
        W = W - torch.outer(U[t], k[t])  # now the one before the step
        du = dW @ k[t]
        dk[t] = U[t] @ dW - beta[t] * du @ W
        dv[t] = beta[t] * du
        dbeta[t] = du @ (v[t] - W @ k[t])
        dW = dW - beta[t] * torch.outer(du, k[t])
    return dq, dk, dv, dbeta


def chunked_sum(q, k, v, chunk):
    W, y = torch.zeros_like(v[..., :1, :].mT @ k[..., :1, :]), []
    for i in range(0, q.shape[-2], chunk):
        Q, K, V = (x[..., i : i + chunk, :] for x in (q, k, v))
        y.append(Q @ W.mT + (Q @ K.mT).tril() @ V)  # (c1)
        W = W + V.mT @ K  # (c2)
    return torch.cat(y, -2)


def triangular(k, v, beta):
    b = beta[..., None]
    A = (b * (k @ k.mT)).tril(-1)
    return torch.linalg.solve_triangular(A, b * v, upper=False, unitriangular=True)


def chunked_delta(q, k, v, beta, chunk):
    W, y = torch.zeros_like(v[..., :1, :].mT @ k[..., :1, :]), []
    for i in range(0, q.shape[-2], chunk):
        Q, K, V = (x[..., i : i + chunk, :] for x in (q, k, v))
        U = triangular(K, V - K @ W.mT, beta[..., i : i + chunk])  # (d1)
        y.append(Q @ W.mT + (Q @ K.mT).tril() @ U)  # (d2)
        W = W + U.mT @ K  # (d3)
    return torch.cat(y, -2)


# --- Attention Free Transformer


def aft_row(q, k, v, w):
    weights = torch.softmax(k + w[:, None], 1)  # of each channel, over the keys
    return torch.sigmoid(q) * (weights * v).sum(1)  # the query only gates


def local_band(band):
    w = band.new_zeros(len(band), len(band))  # outside the window: 0 (Eq. 4)
    for t, row in enumerate(band):
        near = row[: t + 1]  # a row has t + 1 keys
        w[t, t + 1 - len(near) : t + 1] = near.flip(0)
    return w


def conv_bias(k, v, kernel):
    def near_and_all(x):
        total = x.cumsum(0)
        for j, bias in enumerate(kernel):
            moved = F.pad(x, (0, 0, j, 0))[: len(x)]  # by j steps
            total = total + (bias.exp() - 1) * moved
        return total

    return near_and_all(k.exp() * v) / near_and_all(k.exp())  # Eq. 6


def aft_layer(q, k, v, w):
    e_k, e_w = k.exp(), w.exp().tril()  # no weight above the diagonal
    return torch.sigmoid(q) * (e_w @ (e_k * v)) / (e_w @ e_k)


def unseal(layer, time):
    values = torch.eye(time, dtype=torch.float64)  # a channel for each step
    weights = layer(50 + 0 * values, 0 * values, values)  # an open gate, equal keys
    return weights.log() - weights.diagonal()[:, None].log()


# --- Stability


def break_it(trick):
    k, w = torch.zeros(8).double(), torch.zeros(8, 8).double()
    v = torch.tensor([1.0, -1]).double().repeat(4)
    if trick == "no maximum":  # 8 e^88 is infinite
        k, w = k + 44, w + 44
    elif trick == "plus epsilon":  # e^-12 is about as small as 1e-6
        k, w = k - 6, w - 6
    elif trick == "clamped keys":  # both count as 30
        k[0], k[1] = 30, 31
    elif trick == "maximum over time":  # e^-104 is 0
        k[:7], k[7] = -52, 52
    elif trick == "running maximum":  # row 1: k + w is 0 twice
        k[0], k[1], w[1, 0], w[1, 1] = -52, 52, 52, -52
    else:  # row 0 has the exponent -52, and its tile 52
        k[:1], k[1:], w[:, :1], w[:, 1:] = -26, 26, -26, 26
    return k, v, w


def mean_of(k, v, w):
    exponent = k + w
    nothing = (exponent == -torch.inf).all(1, keepdim=True)
    weights = torch.softmax(torch.where(nothing, 0, exponent), 1)
    return torch.where(nothing[:, 0], 0, (weights * v).sum(1))  # Eq. 2


def running_step(log_sum, mean, k, v):
    top = torch.maximum(log_sum, k).detach()
    top = torch.where(top == -torch.inf, 0, top)  # no inf - inf
    old, new = (log_sum - top).exp(), (k - top).exp()
    nothing = old + new == 0
    total = torch.where(nothing, 1, old + new)
    log_sum = torch.where(nothing, -torch.inf, top + total.log())
    return log_sum, (old * mean + new * v) / total


def stream_mean(k, v):
    top = torch.full_like(k[0], -torch.inf)  # of no keys
    above, below, y = 0, 0, []
    for k_t, v_t in zip(k, v, strict=True):
        new_top = torch.maximum(top, k_t)
        old, new = (top - new_top).exp(), (k_t - new_top).exp()
        above, below, top = above * old + new * v_t, below * old + new, new_top
        y.append(above / below)
    return torch.stack(y)


# --- Feedback Transformer


def chain_depth(reads, layers, steps):
    depth = torch.zeros(layers + 1, steps, dtype=torch.long)
    for t in range(steps):  # upper layers of the past come first
        for l in range(1, layers + 1):
            depth[l, t] = 1 + max(depth[state] for state in reads(l, t))
    return depth


def merge_memory(states, w):
    weights = torch.softmax(w, 0)
    return torch.einsum("l,l...->...", weights, states)  # Eq. f1


def feedback_attention(q, k, v, positions):
    past, (key, features) = k.shape[1], positions.shape
    back = torch.arange(past, 0, -1, dtype=q.dtype)  # the last one is 1 step back
    r = naive.sinusoids(back, features) @ positions.T
    content = torch.einsum("bhd,bjhd->bhj", q, k)
    position = torch.einsum("bhd,jd->bhj", q, r)
    weights = torch.softmax((content + position) / key**0.5, -1)  # Eq. f4
    return torch.einsum("bhj,bjhd->bhd", weights, v)  # Eq. f5


def feedback_step(x, keys, values, w, layer, project):
    states = [x]
    for l in range(len(w) - 1):
        states.append(layer(l, states[-1], keys, values))
    k, v = project(merge_memory(torch.stack(states), w))
    return states[-1], torch.cat([keys, k[None]]), torch.cat([values, v[None]])


def cheap_mask(steps):
    # The place of each step in its chain: a new one may begin at any time.
    place = torch.tensor([1, 2, 1, 2, 3, 4, 2, 3, 4, 3, 4, 4])
    return (place < place[:, None]).tril(-1)  # row t: earlier, with a lower place


# --- The delta rule: a layer


def delta_layer(q, k, v, logits):
    W, beta = v.new_zeros(v.shape[1], k.shape[1]), torch.sigmoid(logits)  # Eq. 21
    y = []
    for t in range(len(k)):
        W = delta_step(W, k[t], v[t], beta[t])  # first write
        y.append(W @ q[t])  # then read (Eq. 25)
    return torch.stack(y)


# --- Retrieval: beat the table


def few_features(x):
    # A power makes large features larger, so different keys overlap less.
    return l2_normalize(DPFP(nu=3)(x) ** 3)


# --- Layers of today


def value_groups(x, value_heads):
    key_heads = x.shape[-2]
    return x.repeat_interleave(value_heads // key_heads, -2)


def modern_layer(x, W_qkv, conv, W_z, W_b, W_a, A_log, dt_bias, norm, W_out, key_heads):
    heads, width = len(A_log), len(norm)
    qkv = F.pad((x @ W_qkv.T).mT, (conv.shape[1] - 1, 0))  # no token sees a later one
    qkv = F.silu(F.conv1d(qkv, conv[:, None], groups=len(conv))).mT
    keys = (qkv.shape[-1] - heads * width) // 2
    q, k, v = qkv.split([keys, keys, heads * width], -1)

    q, k = (p.unflatten(-1, (key_heads, -1)) for p in (q, k))
    q, k = (p / (p.square().sum(-1, keepdim=True) + 1e-6).sqrt() for p in (q, k))
    q, k = value_groups(q * q.shape[-1] ** -0.5, heads), value_groups(k, heads)
    beta = torch.sigmoid(x @ W_b.T)
    log_decay = -A_log.exp() * F.softplus(x @ W_a.T + dt_bias)
    y = ops.gated_delta_rule(q, k, v.unflatten(-1, (heads, -1)), beta, log_decay)
    y = F.rms_norm(y, (width,), norm, 1e-6)
    return (y.flatten(-2) * F.silu(x @ W_z.T)) @ W_out.T


def padded_state(k, v, beta, log_decay, mask):
    k, v = (torch.where(mask[..., None], x, 0) for x in (k, v))
    log_decay = torch.where(mask, log_decay, 0)  # padding does not fade
    W = v[:, 0, :, None] * k[:, 0, None, :] * 0
    for t in range(k.shape[1]):
        W = log_decay[:, t, None, None].exp() * W
        W = delta_step(W, k[:, t], v[:, t], beta[:, t])
    return W


def recall_by_hand(n):
    tokens = 2 * n
    W_qkv = torch.eye(tokens).repeat(3, 1)  # each of q, k, v is the token itself
    conv = torch.zeros(3, tokens, 4)
    conv[0, :, -1] = conv[2, :, -1] = 1  # query and value: of this token
    conv[1, :, -2] = 1  # key: the token before
    return W_qkv, conv.flatten(0, 1)


# --- Rules since 2021


def ask_is_not_write(W, d, r, k, v, s):
    W = W * d[..., None, :]  # fade each column
    answer = torch.einsum("...vk,...k->...v", W, r)
    u = s[..., None] * (v - answer)
    return W + u[..., :, None] * k[..., None, :]


def gated_delta_step(W, k, v, beta, decay):
    W = decay[..., None, None] * W  # first fade
    return delta_step(W, k, v, beta)  # then ask what is left


def erase_and_write(W, decay, k, v, e, w):
    one = torch.ones(W.shape[:-2], dtype=W.dtype)
    return ask_is_not_write(W, decay, e * k, k, w * v, one)


def parity(bits):
    # At a 1, W becomes 2 v - W = 1 - W; at a 0 it stays.
    return torch.full_like(bits, 0.5), 2 * bits


def two_steps(angle):
    # Two reflections turn by twice the angle between their keys.
    at = torch.stack([0 * angle, angle / 2])
    return torch.stack([at.cos(), at.sin()], -1)


def four_cups(p):
    corners = [[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]]
    C = torch.tensor(corners, dtype=torch.float64)
    M = C.mT @ C[p] / 4  # corner i goes to corner p[i]
    return M * torch.linalg.det(M)  # with the sign of p, all are turns


# --- A feedback transformer, trained


def interpreter(clauses):
    values, after, run = {}, [], True
    for clause in clauses:
        first, *rest = clause.split()
        if first == "if":
            name, sign, limit, _ = rest
            a = values[name]
            b = int(limit) if limit.isdigit() else values[limit]
            run = a < b if sign == "<" else a > b
            after.append(0)
            continue
        name = rest[0] if first == "print" else first
        if run and first != "print":
            change = {"++": 1, "--": -1}.get(rest[0])
            values[name] = values[name] + change if change else int(rest[1])
        run = True  # a condition is for one statement
        after.append(values.get(name, 0))
    return torch.tensor(after)


def fool():
    start = ["x = 5 ;", "if x > 4 :", "x ++ ;", "if x > 9 :", "x -- ;", "print x ;"]
    return start + ["x ++ ;", "print x ;"] * 4 + ["x -- ;", "print x ;"]


def curriculum(step, steps, first, last, share):
    done = min(1, step / (share * steps))
    return first + round((last - first) * done)


def warm_start(new, old, tokens):
    stack = FeedbackTransformer.from_transformer(old)
    new.blocks[0].load_state_dict(stack.state_dict())
    new.embedding.load_state_dict(old.embedding.state_dict())
    new.norm.load_state_dict(old.norm.state_dict())
    return new.eval()(tokens)


def fair_scores(first, second, tokens, labels):
    scores = []
    for model in (first, second):
        right = []
        for i in range(0, len(tokens), 4):  # from the first program, for both models
            x, y = tokens[i : i + 4], labels[i : i + 4]
            right.append((model(x).argmax(-1) == y)[y >= 0])
        scores.append(100 * torch.cat(right).double().mean())
    return torch.stack(scores)


# --- AFT: where a language model looks


def position_shift(band, past, time):
    rows = torch.arange(past, past + time)[:, None]
    back = rows - torch.arange(past + time)
    inside = (back >= 0) & (back < band.shape[1])
    entries = band[rows, back.clamp(0, band.shape[1] - 1)]
    return torch.where(inside, entries, 0)  # Eq. 4


def read_bias(w):
    time = len(w)
    later = torch.ones(time, time, device=w.device).triu(1).bool()
    a = torch.softmax(w.masked_fill(later, -torch.inf), 1)
    share = torch.arange(1, time + 1, device=w.device)[:, None] * a
    return torch.stack([share.diagonal(-n).mean() for n in range(time)])


def mended_kernel(raw, gamma, beta):
    std, mean = torch.std_mean(raw, 1, correction=0, keepdim=True)  # of each head
    unit = (raw - mean) / std
    return gamma[:, None] * unit + beta[:, None]  # Eq. 8


def frozen_kernels(heads, window):
    w = torch.zeros(heads, window)
    for i in range(heads):
        w[i, (i + 1) % window] = 6.0  # one key for each head
    return w


# --- Regression


def implicit_step(W, k, v, beta):
    strength = beta / (1 + beta * (k * k).sum(-1))
    return delta_step(W, k, v, strength)


def least_squares(k, v, ridge):
    # W H = G with H = sum of k k^T + ridge I and G = sum of v k^T. H is symmetric.
    H = k.mT @ k + ridge * torch.eye(k.shape[-1], dtype=k.dtype)
    return torch.linalg.solve(H, k.mT @ v).mT


def recursive_least_squares(k, v, ridge):
    W = v.new_zeros(v.shape[1], k.shape[1])
    P = torch.eye(k.shape[1], dtype=k.dtype) / ridge  # of H before the first pair
    for t in range(len(k)):
        Pk = P @ k[t]
        P = P - torch.outer(Pk, Pk) / (1 + k[t] @ Pk)  # first learn the key
        W = W + torch.outer(v[t] - W @ k[t], P @ k[t])  # then write
    return W


def better_step(W, z, k, v):
    pairs = z.sum(-1, keepdim=True)  # so far: each key has length 1
    z = z + k * k
    where = k / (0.1 + z)  # less in the channels that many keys share
    where = where / (where * k).sum(-1, keepdim=True)
    old = torch.einsum("...vk,...k->...v", W, k)
    u = (v - old) / (1 + pairs / k.shape[-1])  # later pairs move less
    return W + u[..., :, None] * where[..., None, :], z


# --- A project


def by_luck(mine, theirs):
    runs = torch.cat([mine, theirs]).tolist()
    groups = [sum(group) for group in combinations(runs, len(mine))]
    return sum(group <= sum(mine.tolist()) + 1e-9 for group in groups) / len(groups)


def gain(bar, mine):
    losses = []
    for validation, test in (bar, mine):
        best = validation.mean(1).argmin()  # the test loss has no say
        losses.append(test[best].mean())
    return losses[0] - losses[1]


def unequal(a, b):
    fields = "parameters", "data", "seeds", "tokens", "windows", "rates"

    def said(record, field):
        value = record.get(field)
        if value and field in ("seeds", "rates"):
            value = set(value)  # neither order nor repeats matter
        return len(value) if value and field == "rates" else value

    pairs = [(said(a, field), said(b, field)) for field in fields]
    return torch.tensor([0.0 if x and x == y else 1.0 for x, y in pairs])


def my_step(W, k, v):
    old = torch.einsum("...vk,...k->...v", W, k)
    used = torch.einsum("...vk,...v->...k", W, old)  # where W has other keys
    where = k - 0.1 * used / (v * v).sum(-1, keepdim=True)
    where = where / (where * k).sum(-1, keepdim=True)
    return W + 0.7 * (v - old)[..., :, None] * where[..., None, :]
