#!/usr/bin/env python3
"""Prints the prose of a book in HTML: headings and paragraphs, a line each, in reading order.

    html_prose.py FIRST_PAGE

Pages follow each other by their <link rel="next">. What is no prose (listings, tables of contents,
navigation) is left out, and so are tags; runs of white space become one space.
"""
import html.parser
import pathlib
import sys

BLOCKS = {"h1", "h2", "h3", "h4", "p"}
LEFT_OUT = {"pre", "table", "script", "style", "ul.docnav", "div.toc", "p#title", "div.figure"}
VOID = {"area", "base", "br", "col", "hr", "img", "input", "link", "meta"}


class Page(html.parser.HTMLParser):
    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.next = None
        self.lines = []
        self.open = []  # (tag, is a block, is left out) of each open element
        self.text = ""

    def end_line(self):
        line = " ".join(self.text.split())
        if line:
            self.lines.append(line)
        self.text = ""

    def handle_starttag(self, tag, pairs):
        attributes = dict(pairs)
        if tag == "link" and attributes.get("rel") == "next":
            self.next = attributes["href"]
        if tag in VOID:
            return
        names = (attributes.get("class") or "").split()
        is_block = tag in BLOCKS or (tag == "div" and "para" in names)
        left_out = (tag in LEFT_OUT or tag + "#" + attributes.get("id", "") in LEFT_OUT
                    or any(tag + "." + name in LEFT_OUT for name in names))
        if is_block or left_out:
            self.end_line()
        self.open.append((tag, is_block, left_out))

    def handle_endtag(self, tag):
        while any(entry[0] == tag for entry in self.open):
            name, is_block, left_out = self.open.pop()
            if is_block or left_out:
                self.end_line()
            if name == tag:
                break

    def handle_data(self, data):
        in_block = any(entry[1] for entry in self.open)
        if in_block and not any(entry[2] for entry in self.open):
            self.text += data


def main():
    path = pathlib.Path(sys.argv[1])
    seen = set()
    while path not in seen:
        seen.add(path)
        page = Page()
        page.feed(path.read_text(encoding="utf-8"))
        page.end_line()
        for line in page.lines:
            print(line)
        if page.next is None:
            break
        path = path.parent / page.next


if __name__ == "__main__":
    main()
