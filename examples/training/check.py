"""Checks of common.py, in seconds and without training.  python3 check.py"""

import itertools
import os
import tempfile

import numpy
import torch

import common


def difference(a, b):
    return (a - b).abs().max().item()


def attention_by_definition(query, key, value, log_decay):
    query, key = (torch.nn.functional.elu(x) + 1 for x in (query, key))
    place = torch.arange(query.shape[-2])
    fading = torch.exp(log_decay)[:, None, None] ** (place[:, None] - place).clamp(min=0)
    weights = (query @ key.transpose(-1, -2) * fading).tril()
    return weights @ value / weights.sum(dim=-1, keepdim=True)


def main():
    torch.manual_seed(1)
    bound = 1e-12  # Doubles; the sums have at most some hundred terms of order one.
    for length in (1, 7, 56, 57, 200):
        query, key, value = (torch.randn(2, 3, length, 5, dtype=torch.float64, requires_grad=True) for _ in range(3))
        weight = torch.randn(2, 3, length, 5, dtype=torch.float64)
        for chunk, log_decay in itertools.product((1, 8, 56), (torch.zeros(3), torch.tensor([-0.7, -0.1, 0.0]))):
            a = common.linear_attention(query, key, value, log_decay.double(), chunk)
            b = attention_by_definition(query, key, value, log_decay.double())
            assert difference(a, b) < bound, (length, chunk)
            for x, y in zip(torch.autograd.grad((a * weight).sum(), (query, key, value)),
                            torch.autograd.grad((b * weight).sum(), (query, key, value))):
                assert difference(x, y) < 100 * bound, (length, chunk)
    print("linear attention by chunks, and its gradients: as by definition")

    for length in (1, 7, 8, 9, 30):
        query, key, value = (torch.randn(2, 3, length, 5, dtype=torch.float64) for _ in range(3))
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = (query @ key.transpose(-1, -2) / 5**0.5).masked_fill(later, -float("inf"))
        assert difference(common.softmax_attention(query, key, value, block=8),
                          torch.softmax(scores, dim=-1) @ value) < bound, length
    print("softmax attention by blocks: as by definition")

    for attention in ("elu_plus_one", "elu_plus_one_decay", "softmax"):
        for wiring, positions in (("pre_norm", "learned"), ("post_norm", "sinusoid_concatenated")):
            model = common.Transformer(
                common.Architecture(13, 11, 64, 32, 2, 4, 64, attention, wiring, "gelu", positions))
            tokens = torch.randint(13, (3, 64))
            states = []
            with torch.no_grad():
                whole = model.forward(tokens)
                steps = torch.stack([model.step(tokens[:, i], i, states) for i in range(64)], dim=1)
            assert difference(whole, steps) < 1e-4, (attention, wiring)  # Floats.
    print("step by step: as whole sequences")

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "weights.safetensors")
        arrays = common.as_stored(model.weights, numpy.float16)
        arrays["bytes"] = numpy.arange(5, dtype=numpy.uint8)
        common.save_safetensors(path, arrays, model.architecture.metadata())
        again, metadata = common.load_safetensors(path)
    assert metadata == model.architecture.metadata() and list(again) == list(arrays)
    for name, array in arrays.items():
        assert numpy.array_equal(again[name], array) and again[name].dtype == array.dtype, name
    print("safetensors: what was written")

    x = common.dropout(torch.ones(1001, 997), 0.1, True)
    assert abs(x.mean().item() - 1) < 0.003 and abs((x == 0).float().mean().item() - 26 / 256) < 0.003  # 9 deviations
    print("dropout: its share, its mean")


if __name__ == "__main__":
    main()
