"""What the training scripts share: the transformer of plain tensor operations, its files, its curves.

The weights are named as in the state dicts of fast-transformers' TransformerEncoderBuilder, so that the files read the
same from C++, from this module and from that library. N tokens, F model width, H heads, D query/key dim, M value dim.
"""

import dataclasses
import json
import math
import os
import subprocess

import numpy
import torch
import torch.nn.functional as functional

CHUNK = 56  # Tokens of one chunk of linear attention; 784 = 14 x 56.


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The sizes and the wiring of one model; `metadata` says the part of it that the tensors' shapes do not."""

    symbols: int
    outputs: int
    length: int  # The longest sequence.
    width: int
    layers: int
    heads: int
    feed_forward: int
    attention: str = "elu_plus_one"  # or "elu_plus_one_decay", or "softmax"
    wiring: str = "pre_norm"  # or "post_norm"
    activation: str = "gelu"  # or "relu"
    positions: str = "learned"  # or "sinusoid_concatenated"

    def log_decay(self):
        """(H): 0, or 1 - 2^-(2 h + 1) as a logarithm: half a weight is left after 1, 5, 22, 88, ... tokens."""
        decays = self.attention == "elu_plus_one_decay"
        return torch.tensor([math.log1p(-(2.0 ** -(2 * h + 1))) if decays else 0.0 for h in range(self.heads)])

    def metadata(self):
        decays = {"log_decay": json.dumps([round(x, 6) for x in self.log_decay().tolist()])}
        return {
            "wiring": self.wiring,
            "attention": self.attention,
            **(decays if self.attention == "elu_plus_one_decay" else {}),
            "heads": str(self.heads),
            "head_dim": str(self.width // self.heads),
            "activation": self.activation,
            "positions": self.positions,
            "final_norm": "1",
        }


def sinusoids(length, width, period=10000.0):
    """positions (length, width): sin and cos of i / period^(2 c / width), interleaved."""
    angles = torch.arange(length)[:, None] * period ** (-torch.arange(0, width, 2) / width)
    return torch.stack([torch.sin(angles), torch.cos(angles)], dim=-1).reshape(length, width)


def dropout(x, share, training):
    """Drops a share (rounded to 1/256) of the elements, by a random byte each: a quarter of the time of torch's own."""
    lost = round(256 * share)
    if not training or lost == 0:
        return x
    bits = torch.empty((x.numel() + 7) // 8, dtype=torch.int64).random_(-2**63, None)
    bits = bits.view(torch.uint8)[:x.numel()].view(x.shape)
    return x * (bits >= lost).float().mul_(256 / (256 - lost))


def feature_map(x):
    """elu(x) + 1, but exp(x) below 0: torch's elu is near -1 there, and the sum is 0 from -17 on in float."""
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def linear_attention(query, key, value, log_decay, chunk=CHUNK):
    """Causal linear attention of (B, H, N, D), (B, H, N, D), (B, H, N, M), exact, in memory that grows as N.

    The weight of a key fades by exp(log_decay (H)) with every token after it. A column of ones beside the values makes
    the denominator one more output. Inside a chunk the scores are formed and masked; everything before the chunk
    arrives as one (D, M + 1) state, so that autograd keeps N / chunk states rather than N. No 1 / sqrt(D), and nothing
    is added to the denominator.
    """
    query, key = feature_map(query), feature_map(key)
    value = functional.pad(value, (0, 1), value=1.0)
    length = query.shape[2]
    chunk = length if length < 2 * chunk else chunk
    missing = -length % chunk
    if missing:  # Keys of zero features weigh nothing; what is computed for them is cut off before the division.
        query, key, value = (functional.pad(x, (0, 0, 0, missing)) for x in (query, key, value))
    query, key, value = (x.unflatten(2, (-1, chunk)) for x in (query, key, value))
    log_decay = log_decay.to(query.dtype)[:, None, None, None]  # (H, chunks, rows, columns)
    place = torch.arange(chunk)
    distance = place[:, None] - place[None, :]
    scores = (query @ key.transpose(-1, -2)) * torch.exp(log_decay * distance.clamp(min=0)).tril()
    out = scores @ value
    if query.shape[2] > 1:
        left = torch.exp(log_decay * (chunk - 1 - place)[:, None])  # of a key's weight when its chunk ends
        totals = (key * left).transpose(-1, -2) @ value
        states = [torch.zeros_like(totals[:, :, 0])]
        for total in totals.unbind(dim=2)[:-1]:
            states.append(states[-1] * torch.exp(log_decay[:, 0] * chunk) + total)
        out = out + (query * torch.exp(log_decay * (place + 1)[:, None])) @ torch.stack(states, dim=2)
    out = out.flatten(2, 3)[:, :, :length]
    return out[..., :-1] / out[..., -1:]


def softmax_attention(query, key, value, share=0.0, training=False, block=112):
    """Causal softmax attention, scaled by 1 / sqrt(D); the dropout is the public code's, on the weights.

    A block of queries meets the keys up to its own end alone: half the work of the whole matrix, in smaller pieces.
    """
    query, out = query / math.sqrt(query.shape[-1]), []
    for first in range(0, query.shape[-2], block):
        part = query[..., first:first + block, :]
        last = first + part.shape[-2]
        later = torch.full((part.shape[-2], last), -math.inf).triu(1 + first)  # Added: half the time of masked_fill.
        weights = torch.softmax(part @ key[..., :last, :].transpose(-1, -2) + later, dim=-1)
        out.append(dropout(weights, share, training) @ value[..., :last, :])
    return torch.cat(out, dim=-2)


class Transformer:
    """A causal transformer whose weights are a dict of tensors; `forward` runs whole sequences, `step` one token."""

    def __init__(self, architecture, dropout=0.0, attention_dropout=0.0):
        self.architecture = architecture
        self.dropout = dropout
        self.attention_dropout = attention_dropout
        self.weights = self._initial_weights()

    def _initial_weights(self):
        a = self.architecture
        weights = {}

        def dense(name, outputs, inputs, gain=1.0):  # As torch.nn.Linear starts, but for the gain.
            bound = gain / math.sqrt(inputs)
            weights[name + ".weight"] = torch.empty(outputs, inputs).uniform_(-bound, bound)
            weights[name + ".bias"] = torch.empty(outputs).uniform_(-bound, bound)

        def norm(name):
            weights[name + ".weight"] = torch.ones(a.width)
            weights[name + ".bias"] = torch.zeros(a.width)

        if a.positions == "sinusoid_concatenated":
            weights["embedding.weight"] = torch.randn(a.symbols, a.width // 2)
            self.sinusoids = sinusoids(a.length, a.width // 2)
        else:
            weights["embedding.weight"] = 0.5 * torch.randn(a.symbols, a.width)
            weights["positions.weight"] = self._initial_positions()
        for layer in range(a.layers):
            prefix = f"layers.{layer}."
            for projection in ("query", "key", "value", "out"):
                gain = math.sqrt(3) if projection in ("query", "key") else 1.0  # Their elements then vary by 1.
                dense(f"{prefix}attention.{projection}_projection", a.width, a.width, gain)
            dense(prefix + "linear1", a.feed_forward, a.width)
            dense(prefix + "linear2", a.width, a.feed_forward)
            norm(prefix + "norm1")
            norm(prefix + "norm2")
        norm("norm")
        dense("predictor", a.outputs, a.width)
        return {name: weight.requires_grad_() for name, weight in weights.items()}

    def _initial_positions(self):
        """Learned positions start as sinusoids of row and column: 'the pixel above' is then one rotation away."""
        a = self.architecture
        side = math.isqrt(a.length)
        table = 0.5 * sinusoids(side, a.width // 2, period=2.0 * side)
        rows = table[:, None, :].expand(side, side, -1)
        columns = table[None, :, :].expand(side, side, -1)
        return torch.cat([rows, columns], dim=-1).reshape(a.length, a.width).clone()

    def parameters(self):
        return sum(weight.numel() for weight in self.weights.values())

    def _dense(self, name, x):
        return functional.linear(x, self.weights[name + ".weight"], self.weights[name + ".bias"])

    def _norm(self, name, x):
        return functional.layer_norm(x, x.shape[-1:], self.weights[name + ".weight"], self.weights[name + ".bias"])

    def _embed(self, tokens, first):
        """x (..., N, F) of the tokens (..., N) at the positions first, first + 1, ..."""
        x = functional.embedding(tokens, self.weights["embedding.weight"])
        last = first + tokens.shape[-1]
        if self.architecture.positions == "learned":
            return x + self.weights["positions.weight"][first:last]
        return torch.cat([x, self.sinusoids[first:last].expand(*x.shape)], dim=-1)

    def _heads(self, name, x):
        return self._dense(name, x).unflatten(-1, (self.architecture.heads, -1)).transpose(-2, -3)

    def _layer(self, prefix, x, attention, training):
        def attend(y):
            query, key, value = (self._heads(f"{prefix}attention.{p}_projection", y) for p in ("query", "key", "value"))
            mixed = attention(query, key, value).transpose(-2, -3).flatten(-2)
            return self._dense(prefix + "attention.out_projection", mixed)

        def feed(y):
            hidden = self._dense(prefix + "linear1", y)
            hidden = functional.gelu(hidden) if self.architecture.activation == "gelu" else functional.relu(hidden)
            return self._dense(prefix + "linear2", dropout(hidden, self.dropout, training))

        def drop(y):
            return dropout(y, self.dropout, training)

        if self.architecture.wiring == "pre_norm":
            x = x + drop(attend(self._norm(prefix + "norm1", x)))
            return x + drop(feed(self._norm(prefix + "norm2", x)))
        x = self._norm(prefix + "norm1", x + drop(attend(x)))
        return self._norm(prefix + "norm2", x + drop(feed(x)))

    def _run(self, tokens, first, attentions, training):
        x = dropout(self._embed(tokens, first), self.dropout, training)
        for layer, attention in enumerate(attentions):
            x = self._layer(f"layers.{layer}.", x, attention, training)
        return self._dense("predictor", self._norm("norm", x))

    def forward(self, tokens, training=False):
        """logits (B, N, outputs) of the tokens (B, N)."""
        if self.architecture.attention == "softmax":
            def attention(query, key, value):
                return softmax_attention(query, key, value, self.attention_dropout, training)
        else:
            def attention(query, key, value):
                return linear_attention(query, key, value, self.architecture.log_decay())
        return self._run(tokens, 0, [attention] * self.architecture.layers, training)

    def step(self, tokens, position, states):
        """logits (B, outputs) of one token (B,) a sequence; `states` (a list, at first empty) is brought up to date."""
        if not states:
            states.extend([None] * self.architecture.layers)
        decay = torch.exp(self.architecture.log_decay())[:, None, None]
        attentions = [
            lambda query, key, value, layer=layer: (
                _softmax_step(query, key, value, states, layer) if self.architecture.attention == "softmax" else
                _linear_step(query, key, value, states, layer, decay))
            for layer in range(self.architecture.layers)
        ]
        return self._run(tokens[:, None], position, attentions, False)[:, 0]


def _linear_step(query, key, value, states, layer, decay):
    query, key = feature_map(query), feature_map(key)
    value = functional.pad(value, (0, 1), value=1.0)
    write = key.transpose(-1, -2) @ value
    states[layer] = write if states[layer] is None else decay * states[layer] + write
    out = query @ states[layer]
    return out[..., :-1] / out[..., -1:]


def _softmax_step(query, key, value, states, layer):
    if states[layer] is not None:
        key = torch.cat([states[layer][0], key], dim=-2)
        value = torch.cat([states[layer][1], value], dim=-2)
    states[layer] = key, value
    return torch.softmax(query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1]), dim=-1) @ value


# ---- Files ----------------------------------------------------------------------------------------------------------

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "U8": "|u1", "U16": "<u2", "I32": "<i4", "I64": "<i8"}


def save_safetensors(path, tensors, metadata):
    """Writes numpy arrays: 8 bytes of header length, a header of JSON, the arrays one after another."""
    names = {numpy.dtype(code): name for name, code in DTYPES.items()}
    header, data = {"__metadata__": metadata}, []
    offset = 0
    for name, array in tensors.items():
        array = numpy.ascontiguousarray(array)
        end = offset + array.nbytes
        header[name] = {"dtype": names[array.dtype], "shape": list(array.shape), "data_offsets": [offset, end]}
        data.append(array.tobytes())
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # The data then starts at a multiple of 8.
    write_whole(path, len(text).to_bytes(8, "little") + text + b"".join(data))


def load_safetensors(path):
    """(arrays by name, metadata) of a file that `save_safetensors` wrote."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = file.read()
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = numpy.frombuffer(data[begin:end], DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors, metadata


def write_whole(path, content):
    """Writes beside the file and renames, so that a run cut short leaves the old file or the new one."""
    with open(path + ".part", "wb") as file:
        file.write(content)
    os.replace(path + ".part", path)


def as_stored(weights, dtype):
    """The weights as a file of that numpy dtype keeps them."""
    return {name: weight.detach().numpy().astype(dtype) for name, weight in weights.items()}


def set_weights(model, arrays):
    with torch.no_grad():
        for name, weight in model.weights.items():
            weight.copy_(torch.from_numpy(arrays[name].astype(numpy.float32)))


def save_checkpoint(path, content):
    torch.save(content, path + ".part")
    os.replace(path + ".part", path)


# ---- Curves ---------------------------------------------------------------------------------------------------------

def save_csv(path, names, rows):
    lines = [",".join(names)] + [",".join(f"{x:.6g}" for x in row) for row in rows]
    write_whole(path, ("\n".join(lines) + "\n").encode())


def plot(path, title, panels):
    """An SVG of panels side by side: (x label, y label, 'log' or '', [(csv path, x column, y column, title), ...])."""
    script = [
        "set datafile separator comma",
        f"set terminal svg size {470 * len(panels)},340 font 'sans,12' background rgb 'white'",
        f"set output '{path}'",
        f"set multiplot layout 1,{len(panels)} title '{title}'",
        "set grid",
        "set key center right",
    ]
    for x_label, y_label, scale, lines in panels:
        script += [f"set xlabel '{x_label}'", f"set ylabel '{y_label}'", "unset logscale"]
        script += ["set logscale y"] if scale == "log" else []
        script.append("plot " + ", ".join(
            f"'{csv}' using '{x}':'{y}' with lines lw 2 title '{label}'" for csv, x, y, label in lines))
    subprocess.run(["gnuplot"], input="\n".join(script), text=True, check=True)
