#!/usr/bin/env python3
"""Puts an evaluation's table into a page, between the lines that mark its place.

    formats_table.py PAGE TABLE REPORT

What was measured is said above the table, as the report (JSON) has it.
"""
import json
import pathlib
import sys

BEGIN = "<!-- table: make eval-formats -->"
END = "<!-- end of table -->"


def main():
    page, table, report = map(pathlib.Path, sys.argv[1:])
    text = page.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(END) < text.index(BEGIN):
        sys.exit(f"{page} must have one line '{BEGIN}' and, behind it, one line '{END}'")
    done = json.loads(report.read_text(encoding="utf-8"))
    reach = (f"{done['model']}, {done['tokens']} tokens of {done['text']} in windows of "
             f"{done['window']}, of which the second half is scored ({done['scored']} tokens)")
    if done["task_contexts"]:
        reach += (f"; {done['task_contexts']} contexts of about {done['task_context_tokens']} "
                  f"tokens with a needle and a list at {len(done['task_depths'])} depths each")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    content = table.read_text(encoding="utf-8").strip()
    page.write_text(f"{before}{BEGIN}\n{reach}.\n\n{content}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
