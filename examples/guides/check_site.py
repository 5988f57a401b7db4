#!/usr/bin/env python3
"""Judges a site made by doxygen: its warnings are errors, and so is a link within it that leads nowhere.

  check_site.py build/docs        with warnings.txt and html in it

One kind of warning is none: members of classes without a comment of their own. They are the overloads below a
documented one, and members whose name says it all. A class, a function or a concept without a comment is an error.
"""
import html
import html.parser
import pathlib
import re
import sys
import urllib.parse

TOLERATED = re.compile(r"warning: Member .* of (class|struct) .+ is not documented\.$")


class Page(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.links, self.anchors = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.links += [attributes[name] for name in ("href", "src") if attributes.get(name)]
        self.anchors |= {attributes[name] for name in ("id", "name") if attributes.get(name)}


def dead_links(root):
    pages = {path: Page(path.read_text()) for path in root.rglob("*.html")}
    for path, page in pages.items():
        for link in page.links:
            target = urllib.parse.urlsplit(link)
            if target.scheme or target.netloc:
                continue
            file = (path.parent / urllib.parse.unquote(target.path)).resolve() if target.path else path
            if not file.exists():
                yield f"{path.name}: {link}"
            elif target.fragment == "nested-classes":  # doxygen links to this section where all of it is private
                continue
            elif target.fragment and file in pages and target.fragment not in pages[file].anchors:
                yield f"{path.name}: {link} (no such place)"


def main():
    directory = pathlib.Path(sys.argv[1]).resolve()
    warnings = [line for line in (directory / "warnings.txt").read_text().splitlines() if not TOLERATED.search(line)]
    dead = sorted(set(dead_links(directory / "html")))
    print(f"{len(warnings)} warnings, {len(dead)} dead links, {len(list((directory / 'html').glob('*.html')))} pages")
    if warnings or dead:
        sys.exit("\n".join(warnings + [f"dead link: {link}" for link in dead]))


if __name__ == "__main__":
    main()
