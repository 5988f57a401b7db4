"""The paper's figure 2: linear and softmax attention learn to copy.  OMP_NUM_THREADS=1 python3 copy_task.py

A sequence is t_1 ... t_n 0 t_1 ... t_n 0 ...: n of ten symbols, the separator 0, the same symbols again. The model says
the next token; counted are the places n - 1 ... 2 n - 1 (the separator, then the copy): a loss of 0 can be reached.
The defaults are a small setting for one core; --paper takes the sizes, steps and dropout of the public implementation.
"""

import argparse
import math
import os
import signal
import time

import numpy
import torch
import torch.nn.functional as functional

import common

SYMBOLS = 11


def sequences(count, length, random):
    """Inputs, targets and the places that count, each (count, length)."""
    low, high = length // 4, (length - 1) // 2
    sizes = torch.randint(low, high, (count, 1), generator=random)
    symbols = torch.randint(1, SYMBOLS, (count, high), generator=random)
    place = torch.arange(length + 1).expand(count, -1)
    within = place % (sizes + 1)
    tokens = torch.where(within == sizes, torch.zeros_like(place), symbols.gather(1, within.clamp(max=high - 1)))
    counted = (place >= sizes - 1) & (place <= 2 * sizes - 1)
    return tokens[:, :-1], tokens[:, 1:], counted[:, :-1]


def judge(model, tokens, targets, counted):
    """Loss in nats and accuracy over the counted places, and the share of sequences that are right at all of them."""
    with torch.no_grad():
        logits = model.forward(tokens)
        loss = functional.cross_entropy(logits[counted], targets[counted]).item()
        wrong = (logits.argmax(dim=-1) != targets) & counted
    return loss, 1 - (wrong.sum() / counted.sum()).item(), (~wrong.any(dim=1)).float().mean().item()


def train(options, attention, name):
    torch.manual_seed(options.seed)
    random = torch.Generator().manual_seed(options.seed + 1)
    model = common.Transformer(common.Architecture(
        symbols=SYMBOLS, outputs=SYMBOLS, length=options.length, width=options.width, layers=options.layers,
        heads=options.heads, feed_forward=4 * options.width, attention=attention, wiring="post_norm",
        activation="relu", positions="sinusoid_concatenated"), options.dropout, options.dropout)
    unseen = sequences(256, options.length, torch.Generator().manual_seed(options.seed + 2))
    optimiser = torch.optim.RAdam(model.weights.values(), lr=options.learning_rate)
    step, seconds, rows, losses = 0, 0.0, [], []
    path = os.path.join(options.checkpoints, name + ".pt")
    if options.resume and os.path.exists(path):
        stored = torch.load(path)
        with torch.no_grad():
            for n, w in model.weights.items():
                w.copy_(stored["weights"][n])
        optimiser.load_state_dict(stored["optimiser"])
        random.set_state(stored["sequences"])
        torch.set_rng_state(stored["random"])
        step, seconds, rows = stored["step"], stored["seconds"], stored["rows"]
    stopped = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.append(True))
    print(f"{name}: {model.parameters()} parameters", flush=True)
    begun = time.time() - seconds
    while step < options.steps and not stopped:
        rate = options.learning_rate * (0.1 if step >= options.drop_after else 1.0)
        optimiser.param_groups[0]["lr"] = rate
        tokens, targets, counted = sequences(options.batch, options.length, random)
        loss = functional.cross_entropy(model.forward(tokens, training=True)[counted], targets[counted])
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        with torch.no_grad():  # As the public code: each tensor clipped by its own norm, the decay apart from RAdam.
            for weight in model.weights.values():
                torch.nn.utils.clip_grad_norm_(weight, 1.0)
                weight.mul_(1 - rate * options.weight_decay)
        optimiser.step()
        losses.append(loss.item())
        step += 1
        if step % options.every == 0 or step == options.steps or stopped:
            loss, accuracy, whole = judge(model, *unseen)
            rows.append((step, time.time() - begun, sum(losses) / len(losses), loss, accuracy, whole))
            losses = []
            print(f"{name}: step {step}, {rows[-1][1]:.0f} s, training {rows[-1][2]:.4f}, unseen {loss:.4f} nats, "
                  f"accuracy {100 * accuracy:.2f} %, whole sequences {100 * whole:.1f} %", flush=True)
            if step % (10 * options.every) == 0 or stopped:
                common.save_checkpoint(path, {
                    "weights": {n: w.detach() for n, w in model.weights.items()}, "optimiser": optimiser.state_dict(),
                    "sequences": random.get_state(), "random": torch.get_rng_state(), "step": step,
                    "seconds": time.time() - begun, "rows": rows})
    return model, unseen, rows, step >= options.steps


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--paper", action="store_true", help="the defaults of the public implementation")
    parser.add_argument("--attention", choices=["elu_plus_one", "softmax", "both"], default="both")
    small = {"length": 64, "layers": 2, "width": 64, "heads": 2, "batch": 32, "steps": 4000, "drop_after": 3000,
             "dropout": 0.0, "learning_rate": 1e-3, "weight_decay": 0.01}
    paper = {"length": 128, "layers": 4, "width": 256, "heads": 8, "batch": 64, "steps": 10000, "drop_after": 3000,
             "dropout": 0.1, "learning_rate": 1e-3, "weight_decay": 0.01}
    for option, value in small.items():
        parser.add_argument("--" + option.replace("_", "-"), type=type(value), help=f"{value}; paper: {paper[option]}")
    parser.add_argument("--every", type=int, default=50, help="steps from one row of the curve to the next")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint, where there is one")
    parser.add_argument("--checkpoints", default="checkpoints")
    parser.add_argument("--data", default=os.path.join(here, "..", "data"), help="folder for the weights")
    parser.add_argument("--curves", default=os.path.join(here, "curves"))
    options = parser.parse_args()
    for option, value in (paper if options.paper else small).items():
        if getattr(options, option) is None:
            setattr(options, option, value)
    torch.set_num_threads(1)
    for folder in (options.checkpoints, options.data, options.curves):
        os.makedirs(folder, exist_ok=True)
    prefix = "copy_task_paper" if options.paper else "copy_task"
    for attention in ["elu_plus_one", "softmax"] if options.attention == "both" else [options.attention]:
        name = f"{prefix}_{'linear' if attention == 'elu_plus_one' else 'softmax'}"
        model, unseen, rows, finished = train(options, attention, name)
        common.save_csv(os.path.join(options.curves, name + ".csv"),
                        ["step", "seconds", "training_loss", "loss", "accuracy", "whole_sequences"], rows)
        stored = common.as_stored(model.weights, numpy.float16)
        common.set_weights(model, stored)
        loss, accuracy, whole = judge(model, *unseen)
        metadata = model.architecture.metadata()
        metadata.update({"dataset": "copy task", "length": str(options.length), "separator": "0",
                         "loss": f"{loss:.6f}", "accuracy": f"{accuracy:.6f}", "whole_sequences": f"{whole:.6f}"})
        folder = options.data if finished and attention == "elu_plus_one" else options.checkpoints
        common.save_safetensors(os.path.join(folder, name + ".safetensors"), stored, metadata)
        print(f"{name}: {'finished' if finished else 'NOT finished'} after {rows[-1][0]} steps, {rows[-1][1]:.0f} s; "
              f"as stored in F16: {loss:.6f} nats, accuracy {100 * accuracy:.2f} %, whole sequences "
              f"{100 * whole:.1f} %", flush=True)
        if not finished:
            break
    curves = [(os.path.join(options.curves, f"{prefix}_{kind}.csv"), kind) for kind in ("linear", "softmax")]
    curves = [(csv, kind) for csv, kind in curves if os.path.exists(csv)]
    common.plot(os.path.join(options.curves, prefix + ".svg"), f"copy task, length {options.length}", [
        ("step", "loss, nats", "log", [(csv, "step", "loss", kind) for csv, kind in curves]),
        ("step", "accuracy", "", [(csv, "step", "accuracy", kind) for csv, kind in curves])])


if __name__ == "__main__":
    main()
