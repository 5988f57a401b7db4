"""Training and judging of class-conditional image models; train_digits.py and train_fashion.py bring the data.

An image of N = side^2 pixels is the sequence of its class (symbol levels + c) and its pixels 0 ... N - 2; output i is
the distribution over the levels of pixel i.
"""

import copy
import math
import os
import signal
import time

import numpy
import torch
import torch.nn.functional as functional

import common


def tokens_of(images, labels, levels):
    """The input sequences (B, N) of the images (B, N)."""
    return torch.cat([labels[:, None] + levels, images[:, :-1]], dim=1)


def bits_per_pixel(model, images, labels, levels, batch=100):
    nats = 0.0
    with torch.no_grad():
        for first in range(0, len(images), batch):
            part, classes = images[first:first + batch], labels[first:first + batch]
            logits = model.forward(tokens_of(part, classes, levels))
            nats += functional.cross_entropy(logits.flatten(0, 1), part.flatten(), reduction="sum").item()
    return nats / images.numel() / math.log(2)


def generate(model, labels, levels, temperature, seed, length):
    """Images (B, N) of the classes, drawn pixel by pixel with the recurrent form."""
    random = torch.Generator().manual_seed(seed)
    tokens, states, pixels = labels + levels, [], []
    with torch.no_grad():
        for position in range(length):
            logits = model.step(tokens, position, states) / temperature
            tokens = torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=random)[:, 0]
            pixels.append(tokens)
    return torch.stack(pixels, dim=1)


def nearest_neighbour_agreement(samples, classes, images, labels):
    """The share of the samples whose nearest image (Euclid, on the levels) is of the class asked for."""
    nearest = torch.cdist(samples.float(), images.float()).argmin(dim=1)
    return (labels[nearest] == classes).float().mean().item()


def learning_rate(step, steps, peak, warm_up, decay):
    """Rises over `warm_up` steps, stays, and falls to nought over the last `decay` of all steps.

    The level part knows nothing of the total, so that a run may be resumed with more steps than it was begun with.
    """
    falling = (steps - step) / (decay * steps)
    return peak * min(1.0, (step + 1) / warm_up, max(falling, 0.0))


def train(model, data, options, name, augment=None):
    """Trains on data["train"], stops early by data["validation"]; the model is left with the averaged weights that did
    best there. Returns (rows of the curve, seconds, whether the end was reached)."""
    levels = options.levels
    decayed = [w for n, w in model.weights.items() if w.dim() == 2 and n.startswith("layers.")]
    others = [w for n, w in model.weights.items() if not (w.dim() == 2 and n.startswith("layers."))]
    optimiser = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=options.learning_rate, betas=(0.9, 0.98))
    images, labels = data["train"]
    run = {"step": 0, "seconds": 0.0, "rows": [], "best": math.inf, "worse": 0,
           "average": {n: w.detach().clone() for n, w in model.weights.items()}}
    run["best_average"] = run["average"]
    path = os.path.join(options.checkpoints, name + ".pt")
    if options.resume and os.path.exists(path):
        stored = torch.load(path)
        with torch.no_grad():
            for n, w in model.weights.items():
                w.copy_(stored["weights"][n])
        optimiser.load_state_dict(stored["optimiser"])
        torch.set_rng_state(stored["random"])
        run = stored["run"]
        print(f"{name}: resumed at step {run['step']}", flush=True)

    stopped = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.append(True))
    judge = copy.copy(model)  # The same model with the averaged weights.
    begun, before, losses = time.time(), run["seconds"], []
    while run["step"] < options.steps and run["worse"] < options.patience and not stopped:
        step = run["step"]
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, options.steps, options.learning_rate, options.warm_up, options.decay)
        chosen = torch.randint(len(images), (options.batch,))
        batch = images[chosen] if augment is None else augment(images[chosen])
        logits = model.forward(tokens_of(batch, labels[chosen], levels), training=True)
        loss = functional.cross_entropy(logits.flatten(0, 1), batch.flatten())
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        if torch.isfinite(torch.nn.utils.clip_grad_norm_(list(model.weights.values()), 1.0)):
            optimiser.step()
        else:
            print(f"{name}: step {step + 1} left out, its gradient is not finite", flush=True)
        losses.append(loss.item() / math.log(2))
        keep = min(options.average, (step + 1) / (step + 10))
        with torch.no_grad():
            for n, w in model.weights.items():
                run["average"][n].lerp_(w, 1 - keep)
        run["step"] = step + 1
        run["seconds"] = before + time.time() - begun
        minutes = (time.time() - begun) / 60
        if run["step"] % options.every == 0 or run["step"] == options.steps or minutes > options.minutes or stopped:
            judge.weights = run["average"]
            validation = bits_per_pixel(judge, *data["validation"], levels)
            run["seconds"] = before + time.time() - begun
            run["rows"].append((run["step"], run["seconds"], sum(losses) / len(losses), validation))
            run["worse"] += 1
            if validation < run["best"]:
                run["best"], run["worse"] = validation, 0
                run["best_average"] = {n: w.clone() for n, w in run["average"].items()}
            print(f"{name}: step {run['step']} of {options.steps}, {run['seconds']:.0f} s, training "
                  f"{run['rows'][-1][2]:.4f}, validation {validation:.4f} (best {run['best']:.4f})", flush=True)
            losses = []
            common.save_checkpoint(path, {
                "weights": {n: w.detach() for n, w in model.weights.items()}, "optimiser": optimiser.state_dict(),
                "random": torch.get_rng_state(), "run": run})
            if minutes > options.minutes:
                break
    with torch.no_grad():
        for n, w in model.weights.items():
            w.copy_(run["best_average"][n])
    return run["rows"], run["seconds"], run["step"] >= options.steps or run["worse"] >= options.patience


def store(model, data, options, path, dataset):
    """Writes the weights in F16 and says what the rounded ones reach on the held-out images."""
    stored = common.as_stored(model.weights, numpy.float16)
    common.set_weights(model, stored)
    bits = bits_per_pixel(model, *data["held_out"], options.levels)
    metadata = model.architecture.metadata()
    metadata.update({"side": str(options.side), "levels": str(options.levels), "classes": "10",
                     "held_out_bits_per_pixel": f"{bits:.6f}", "dataset": dataset})
    common.save_safetensors(path, stored, metadata)
    return bits


def add_options(parser, **defaults):
    parser.add_argument("--attention", choices=["linear", "softmax", "both"], default="both")
    parser.add_argument("--linear", choices=["elu_plus_one", "elu_plus_one_decay"], default=defaults["linear"],
                        help="which linear attention")
    parser.add_argument("--steps", type=int, default=defaults["steps"])
    parser.add_argument("--batch", type=int, default=defaults["batch"])
    parser.add_argument("--width", type=int, default=defaults["width"])
    parser.add_argument("--layers", type=int, default=defaults["layers"])
    parser.add_argument("--heads", type=int, default=defaults["heads"])
    parser.add_argument("--activation", choices=["gelu", "relu"], default=defaults["activation"])
    parser.add_argument("--dropout", type=float, default=defaults["dropout"])
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=defaults["weight_decay"])
    parser.add_argument("--warm-up", type=int, default=200, help="steps")
    parser.add_argument("--decay", type=float, default=defaults["decay"],
                        help="share of the steps in which the rate falls")
    parser.add_argument("--average", type=float, default=defaults["average"], help="of the weights, a step's memory")
    parser.add_argument("--every", type=int, default=defaults["every"], help="steps from one validation to the next")
    parser.add_argument("--patience", type=int, default=defaults["patience"],
                        help="validations without a new best, after which to stop")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop there, with a checkpoint to resume from")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint, where there is one")
    parser.add_argument("--checkpoints", default="checkpoints", help="folder, made where missing")
    parser.add_argument("--data", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data"),
                        help="folder for the weights and the images")
    parser.add_argument("--curves", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "curves"))


def run(options, data, dataset, prefix, report, augment=None):
    """Trains what was asked for; `report(model, name)` prints what else there is to say of a finished model."""
    torch.set_num_threads(1)
    for folder in (options.checkpoints, options.curves):
        os.makedirs(folder, exist_ok=True)
    for kind in ["linear", "softmax"] if options.attention == "both" else [options.attention]:
        name = f"{prefix}_{kind}"
        torch.manual_seed(options.seed)
        model = common.Transformer(common.Architecture(
            symbols=options.levels + 10, outputs=options.levels, length=options.side**2, width=options.width,
            layers=options.layers, heads=options.heads, feed_forward=4 * options.width,
            attention=options.linear if kind == "linear" else kind,
            activation=options.activation), dropout=options.dropout)
        print(f"{name}: {model.parameters()} parameters", flush=True)
        rows, seconds, finished = train(model, data, options, name, augment)
        common.save_csv(os.path.join(options.curves, name + ".csv"),
                        ["step", "seconds", "training_bits_per_pixel", "validation_bits_per_pixel"], rows)
        plain = bits_per_pixel(model, *data["held_out"], options.levels)
        folder = options.data if finished else options.checkpoints
        bits = store(model, data, options, os.path.join(folder, name + ".safetensors"), dataset)
        print(f"{name}: {'finished' if finished else 'NOT finished'} after {rows[-1][0]} steps, {seconds:.0f} s; "
              f"held out {bits:.6f} bits per pixel as stored in F16, {plain:.6f} before rounding", flush=True)
        report(model, name)
        if not finished:
            break
    curves = [(os.path.join(options.curves, f"{prefix}_{kind}.csv"), kind) for kind in ("linear", "softmax")]
    curves = [(csv, kind) for csv, kind in curves if os.path.exists(csv)]
    panels = [("step", f"{part} bits per pixel", "",
               [(csv, "step", f"{part}_bits_per_pixel", kind) for csv, kind in curves])
              for part in ("training", "validation")]
    common.plot(os.path.join(options.curves, prefix + ".svg"), dataset, panels)
