"""linattn as an operator of PyTorch: values, gradients, refusals, and a model trained with it.

usage: test_torch.py <path of liblinattn_torch.so>
"""

import math
import sys

import torch

torch.ops.load_library(sys.argv[1])
causal = torch.ops.linattn.causal


def reference(q, k, v):
    """out_i = sum_(j <= i) phi(q_i).phi(k_j) v_j / sum_(j <= i) phi(q_i).phi(k_j), phi = elu + 1; O(N^2)."""
    phi = lambda x: torch.nn.functional.elu(x) + 1
    weights = torch.tril(phi(q) @ phi(k).transpose(-1, -2))
    return weights @ v / weights.sum(-1, keepdim=True)


def inputs(dtype, batch=2, heads=3, tokens=70, dim=4, value_dim=5):
    torch.manual_seed(1)
    return [torch.randn(batch, heads, tokens, d, dtype=dtype) for d in (dim, dim, value_dim)]


def test_values():
    # A sum of 70 terms rounds each of them once: 70 epsilons of the largest |v|, about 4, are never all reached.
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-14)):
        q, k, v = inputs(dtype)
        torch.testing.assert_close(causal(q, k, v), reference(q, k, v), rtol=0, atol=tolerance)


def test_strides():
    """(B, N, H, D) memory, seen as (B, H, N, D), and tokens that are every other one, are read where they lie."""
    q, k, v = inputs(torch.float64)
    bnhd = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert not bnhd[0].is_contiguous()
    assert torch.equal(causal(*bnhd), causal(q, k, v))
    every_other = [x[:, :, ::2] for x in (q, k, v)]
    assert torch.equal(causal(*every_other), causal(*[x.contiguous() for x in every_other]))
    pending = torch._neg_view(v).requires_grad_()  # what conj() makes of imaginary parts: the sign is not in memory
    out = causal(q, k, pending)
    assert torch.equal(out, causal(q, k, -v)) and torch.autograd.grad(out.sum(), pending)[0].shape == v.shape
    assert causal(q[:, :, :0], k[:, :, :0], v[:, :, :0]).shape == (2, 3, 0, 5)


def test_gradients():
    small = [x.requires_grad_() for x in inputs(torch.float64, tokens=19, heads=2)]
    assert torch.autograd.gradcheck(causal, small)
    # A constant among the inputs, and strides that are not those of a contiguous tensor.
    q, k, v = small
    assert torch.autograd.gradcheck(lambda q, v: causal(q, k.detach(), v.transpose(0, 1).contiguous().transpose(0, 1)), (q, v))
    # Autograd and the operator behind it, and the gradient of sum(), whose strides are 0.
    torch.autograd.backward(causal(q, k, v).sum())
    expected = torch.ops.linattn.causal_vjp(q.detach(), k.detach(), v.detach(), torch.ones_like(v))
    for x, dx in zip((q, k, v), expected):
        assert torch.equal(x.grad, dx)
    for shape in ((2, 3, 0, 4), (0, 3, 5, 4)):  # no tokens, no sequences; of sum() again
        empty = torch.zeros(shape, requires_grad=True)
        causal(empty, empty, empty).sum().backward()
        assert empty.grad.shape == shape


def refused(error, text, call):
    try:
        call()
    except error as e:
        assert text in str(e), f"'{text}' is not in: {e}"
        return
    raise AssertionError(f"not refused: {text}")


def test_refusals():
    q, k, v = inputs(torch.float32)
    refused(TypeError, "k is Double, but q is Float", lambda: causal(q, k.double(), v))
    refused(TypeError, "q is Half; built are Float and Double", lambda: causal(q.half(), k.half(), v.half()))
    refused(ValueError, "v has 3 dimensions", lambda: causal(q, k, v[0]))
    refused(ValueError, "the last dimension of q is not contiguous", lambda: causal(q.mT.contiguous().mT, k, v))
    for other in (lambda x: x.to("meta"), lambda x: x.to_sparse()):
        for call in (lambda: causal(other(q).requires_grad_(), other(k), other(v)), lambda: causal(q, other(k), v)):
            refused(NotImplementedError, "Could not run 'linattn::causal'", call)
    # The library's own sentences, with both sizes.
    refused(ValueError, "linattn::forward_causal", lambda: causal(q, k[:, :, 1:], v))
    refused(ValueError, "linattn::forward_causal", lambda: causal(q, k[..., 1:], v))
    refused(ValueError, "linattn::forward_causal", lambda: causal(q, k, v[:1]))
    refused(ValueError, "linattn::vjp_causal", lambda: torch.ops.linattn.causal_vjp(q, k, v, v[:, :, 1:]))
    for none in ((q[..., :0], k[..., :0], v), (q[:, :0], k[:, :0], v[:, :0]), (q, k, v[..., :0])):
        refused(ValueError, "must be at least 1", lambda: causal(*none))
    x = q.clone().requires_grad_()
    y = causal(x, k, v).sum()
    refused(NotImplementedError, "second derivatives are not built", lambda: torch.autograd.grad(y, x, create_graph=True))
    refused(NotImplementedError, "second derivatives", lambda: torch.ops.linattn.causal_vjp(x, k, v, v))


class recall(torch.nn.Module):
    """One layer: what was beside this key before? 8 keys, 8 values, 2 heads of 8."""

    def __init__(self, width=16, heads=2, symbols=8):
        super().__init__()
        self.heads = heads
        self.keys, self.values = torch.nn.Embedding(symbols, width), torch.nn.Embedding(symbols + 1, width)
        self.q, self.k, self.v = (torch.nn.Linear(width, width) for _ in range(3))
        self.out = torch.nn.Linear(width, symbols)

    def forward(self, key, value):
        key, value = self.keys(key), self.values(value)
        split = lambda x: x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, N, H D) as (B, H, N, D)
        y = causal(split(self.q(key)), split(self.k(key)), split(self.v(value)))
        return self.out(y.transpose(1, 2).flatten(2))


def test_training():
    """Pairs of a key and a value, each key once, then the keys again, in another order and without their values."""
    torch.manual_seed(2)
    symbols, blank, batch, steps = 8, 8, 32, 300
    model = recall()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(steps):
        pairs = torch.argsort(torch.rand(batch, symbols))
        answers = torch.randint(symbols, (batch, symbols))
        questions = torch.argsort(torch.rand(batch, symbols))
        key = torch.cat([pairs, pairs.gather(1, questions)], 1)
        value = torch.cat([answers, torch.full_like(answers, blank)], 1)
        logits = model(key, value)[:, symbols:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), answers.gather(1, questions).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 0:
            first = loss.item()
    print(f"recall of 8 pairs: loss {first:.3f} before, {loss.item():.3f} after {steps} steps (chance {math.log(symbols):.3f})")
    # Guessing costs log 8; a model that cannot tell keys apart stays there.
    bound = 0.25
    assert first > 0.9 * math.log(symbols) and loss.item() < bound


for name, test in list(globals().items()):
    if name.startswith("test_"):
        test()
        print("passed:", name)
