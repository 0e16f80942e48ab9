#!/usr/bin/env python3
"""Puts an evaluation's table into a page, between the lines that mark its place.

    evaluation_table.py PAGE TABLE REPORT COMMAND

COMMAND is the make target that measured it, which the line in front of the table names. What was
measured is said above the table, as the report (JSON) has it.
"""
import json
import pathlib
import sys

END = "<!-- end of table -->"


def formats_reach(done):
    reach = (f"{done['model']}, {done['tokens']} tokens of {done['text']} in windows of "
             f"{done['window']}, of which the second half is scored ({done['scored']} tokens)")
    if done["task_contexts"]:
        reach += (f"; {done['task_contexts']} contexts of about {done['task_context_tokens']} "
                  f"tokens with a needle and a list at {len(done['task_depths'])} depths each")
    return reach


def retention_reach(done):
    parts = []
    if done["windows"]:
        windows = "a window" if done["windows"] == 1 else f"{done['windows']} windows"
        parts.append(f"{windows} of {done['window']} tokens of {done['text']}, "
                     f"read {done['chunk']} at a time")
    if done["task_contexts"]:
        lengths = " and ".join(str(length) for length in done["task_context_tokens"])
        parts.append(f"{done['task_contexts']} contexts each of about {lengths} tokens with a "
                     f"needle and a list at {len(done['task_depths'])} depths")
    if done["prompts"]:
        parts.append(f"{done['prompts']} prompts answered with {done['written']} tokens")
    return f"{done['model']}, stored as {done['stored']}: " + "; ".join(parts)


def endless_reach(done):
    ways = {"cache": "their places in the cache", "text": "their places in the text"}
    return (f"{done['model']}, stored as f16: {done['tokens']} tokens of {done['text']}, which "
            f"begins again behind {done['pass_tokens']}, read {done['chunk']} at a time under a "
            f"budget of {done['budget']} with {done['sinks']} sinks, rotated by "
            f"{ways[done['positions']]}; one in {done['score_every']} chunks is scored; "
            f"{done['blocks_returned']} blocks came back, {done['bytes_returned'] / 2**30:.1f} GiB")


def reach_of(done):
    if "stretches" in done:
        return endless_reach(done)
    return retention_reach(done) if "contenders" in done else formats_reach(done)


def main():
    page, table, report = map(pathlib.Path, sys.argv[1:4])
    begin = f"<!-- table: make {sys.argv[4]} -->"
    text = page.read_text(encoding="utf-8")
    if text.count(begin) != 1 or END not in text.split(begin)[1]:
        sys.exit(f"{page} must have one line '{begin}' and, behind it, a line '{END}'")
    done = json.loads(report.read_text(encoding="utf-8"))
    reach = reach_of(done)
    before, rest = text.split(begin)
    after = rest.split(END, 1)[1]
    content = table.read_text(encoding="utf-8").strip()
    page.write_text(f"{before}{begin}\n{reach}.\n\n{content}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
