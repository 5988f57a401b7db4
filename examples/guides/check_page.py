#!/usr/bin/env python3
"""Compares a page with programs: every ```cpp block must stand in a source, every ```text block in what they print.

  check_page.py page.md --sources a.cpp b.cpp --programs build/a build/b

Indentation and blank lines do not count, nor a first line "// name.cpp", which says where a reader may save a block.
"""
import argparse
import pathlib
import re
import subprocess
import sys


def normal(text):
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return "\n" + "\n".join(line for line in lines if line) + "\n"


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=pathlib.Path)
    parser.add_argument("--sources", nargs="+", type=pathlib.Path, required=True)
    parser.add_argument("--programs", nargs="+", required=True)
    arguments = parser.parse_args()

    sources = "".join(normal(source.read_text()) for source in arguments.sources)
    printed = ""
    for program in arguments.programs:
        run = subprocess.run([program], stdout=subprocess.PIPE, text=True)
        printed += normal(run.stdout)
        if run.returncode:
            sys.exit(f"{run.stdout}{program} ended with exit code {run.returncode}")

    page = arguments.page.read_text()
    shown = [(re.sub(r"\A// \w+\.cpp\n", "", block), sources, "the sources") for block in blocks(page, "cpp")]
    shown += [(block, printed, "what is printed") for block in blocks(page, "text")]
    if not shown:
        sys.exit(f"{arguments.page}: no block to compare")
    for block, whole, what in shown:
        if normal(block) not in whole:
            sys.exit(f"{arguments.page}: not in {what}:\n\n{block}")
    print(f"{arguments.page.name}: {len(shown)} blocks compared")


if __name__ == "__main__":
    main()
