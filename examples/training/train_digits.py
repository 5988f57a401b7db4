"""Trains the 8 x 8 digits model and its softmax twin.  OMP_NUM_THREADS=1 python3 train_digits.py

The 1,797 images of scikit-learn's load_digits (levels 0 ... 16) are put in the order of
numpy.random.RandomState(8).permutation(1797): the first 1,500 are for training, the last 297 are held out. Of the 1,500
the last 150 choose when to stop and are never trained on. The images are written to examples/data/digits.safetensors
for the C++ program.
"""

import argparse
import os

import numpy
import sklearn.datasets
import torch

import common
import images

TRAIN, VALIDATION, LEVELS, SIDE = 1500, 150, 17, 8


def load(folder):
    digits = sklearn.datasets.load_digits()
    order = numpy.random.RandomState(8).permutation(len(digits.target))
    pixels = digits.data[order].astype(numpy.uint8)
    labels = digits.target[order].astype(numpy.uint8)
    order = order.astype(numpy.uint16)
    common.save_safetensors(os.path.join(folder, "digits.safetensors"), {
        "train.images": pixels[:TRAIN], "train.labels": labels[:TRAIN], "train.index": order[:TRAIN],
        "held_out.images": pixels[TRAIN:], "held_out.labels": labels[TRAIN:], "held_out.index": order[TRAIN:],
    }, {"dataset": "scikit-learn load_digits", "side": str(SIDE), "levels": str(LEVELS), "classes": "10",
        "order": "numpy.random.RandomState(8).permutation(1797); *.index are the places in load_digits",
        "validation": f"the last {VALIDATION} of train"})
    pixels, labels = torch.from_numpy(pixels.astype(numpy.int64)), torch.from_numpy(labels.astype(numpy.int64))
    return {"train": (pixels[:TRAIN - VALIDATION], labels[:TRAIN - VALIDATION]),
            "validation": (pixels[TRAIN - VALIDATION:TRAIN], labels[TRAIN - VALIDATION:TRAIN]),
            "all_train": (pixels[:TRAIN], labels[:TRAIN]),
            "held_out": (pixels[TRAIN:], labels[TRAIN:])}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    images.add_options(parser, linear="elu_plus_one_decay", steps=3600, batch=32, width=64, layers=3, heads=4,
                       activation="gelu", dropout=0.15, weight_decay=0.1, decay=0.5, average=0.998, every=200,
                       patience=4)
    options = parser.parse_args()
    options.side, options.levels = SIDE, LEVELS
    os.makedirs(options.data, exist_ok=True)
    data = load(options.data)

    def report(model, name):
        classes = torch.arange(10).repeat_interleave(50)
        samples = images.generate(model, classes, LEVELS, temperature=0.8, seed=1, length=SIDE**2)
        agreement = images.nearest_neighbour_agreement(samples, classes, *data["all_train"])
        real = images.nearest_neighbour_agreement(*data["held_out"], *data["all_train"])
        print(f"{name}: {100 * agreement:.1f} % of 500 samples at temperature 0.8 are nearest to a training image of "
              f"their class (held-out images: {100 * real:.1f} %)", flush=True)

    images.run(options, data, "scikit-learn load_digits", "digits", report)


if __name__ == "__main__":
    main()
