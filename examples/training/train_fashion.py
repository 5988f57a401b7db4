"""Trains the class-conditional Fashion-MNIST model and its softmax twin.  OMP_NUM_THREADS=1 python3 train_fashion.py

Images of 28 x 28 (784 tokens) in 16 grey levels: a pixel's level is its byte divided by 16; --side 14 first takes the
mean of 2 x 2 pixels. The last 200 of the 60,000 training images choose which weights are kept and are never trained on;
the first 1,000 test images are held out and written to examples/data/fashion_held_out.safetensors, two levels a byte.
Expect hours; --minutes, Ctrl-C and --resume cut the run into pieces.
"""

import argparse
import gzip
import os

import numpy
import torch

import common
import images

VALIDATION, HELD_OUT, LEVELS = 200, 1000, 16


def read_idx(path):
    with gzip.open(path) as file:
        content = file.read()
    rank = content[3]  # Then the sizes, big-endian; the data are bytes.
    shape = numpy.frombuffer(content, ">i4", rank, offset=4)
    return numpy.frombuffer(content, numpy.uint8, offset=4 + 4 * rank).reshape(shape)


def levels_of(pictures, side):
    shrink = 28 // side
    pictures = pictures.reshape(len(pictures), side, shrink, side, shrink).mean(axis=(2, 4))
    return (pictures // 16).astype(numpy.uint8).reshape(len(pictures), side * side)


def load(folder, side, data_folder):
    def pair(part):
        return (levels_of(read_idx(os.path.join(folder, f"{part}-images-idx3-ubyte.gz")), side),
                read_idx(os.path.join(folder, f"{part}-labels-idx1-ubyte.gz")))

    pixels, labels = pair("train")
    held_out, held_out_labels = (array[:HELD_OUT] for array in pair("t10k"))
    common.save_safetensors(os.path.join(data_folder, "fashion_held_out.safetensors"), {
        "held_out.images": held_out[:, 0::2] | held_out[:, 1::2] << 4, "held_out.labels": held_out_labels,
    }, {"dataset": "Fashion-MNIST", "side": str(side), "levels": str(LEVELS), "classes": "10",
        "packing": "two pixels a byte: pixel 2 j in the low four bits of byte j, pixel 2 j + 1 in the high four",
        "part": f"the first {HELD_OUT} test images"})

    def tensors(p, l):
        return torch.from_numpy(p.astype(numpy.int64)), torch.from_numpy(l.astype(numpy.int64))

    return {"train": tensors(pixels[:-VALIDATION], labels[:-VALIDATION]),
            "validation": tensors(pixels[-VALIDATION:], labels[-VALIDATION:]),
            "held_out": tensors(held_out, held_out_labels)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    images.add_options(parser, linear="elu_plus_one", steps=12000, batch=8, width=96, layers=3, heads=3,
                       activation="relu", dropout=0.0, weight_decay=0.01, decay=0.3, average=0.998, every=200,
                       patience=100)
    parser.add_argument("--side", type=int, choices=[28, 14], default=28)
    parser.add_argument("--dataset", default="/usr/share/datasets/fashion-mnist", help="folder of the four .gz files")
    options = parser.parse_args()
    options.levels = LEVELS
    os.makedirs(options.data, exist_ok=True)
    data = load(options.dataset, options.side, options.data)

    def report(model, name):
        classes = torch.arange(10).repeat_interleave(20)
        samples = images.generate(model, classes, LEVELS, temperature=0.9, seed=1, length=options.side**2)
        agreement = images.nearest_neighbour_agreement(samples, classes, *data["train"])
        real = images.nearest_neighbour_agreement(*data["held_out"], *data["train"])
        print(f"{name}: {100 * agreement:.1f} % of 200 samples at temperature 0.9 are nearest to a training image of "
              f"their class (held-out images: {100 * real:.1f} %)", flush=True)

    images.run(options, data, "Fashion-MNIST", "fashion" if options.side == 28 else "fashion_14", report)


if __name__ == "__main__":
    main()
