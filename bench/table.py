#!/usr/bin/env python3
"""Prints one table of the JSON that host_bench or cuda_bench writes: table.py FILE. The fastest repetition counts."""
import json
import re
import sys

# What an operation's time is divided by: the peer's at the same density, or at none.
PEERS = {"copy": "memcpy", "select": "nth_element", "step": "dense_adams"}

with open(sys.argv[1]) as file:
    data = json.load(file)

best = {}
for run in data["benchmarks"]:
    name = re.sub(r"/(iterations|repeats|manual_time).*", "", run["name"])
    if run["run_type"] == "iteration":
        best[name] = min(run, best.get(name, run), key=lambda run: run["seconds"])


def time_per_element(run):
    return run["bytes_per_element"] / run["bandwidth"]


rows = [("operation", "density", "bytes/element", "GB/s", "share of copy", "of read", "time / peer's")]
for name, run in best.items():
    operation, density = re.fullmatch(r"(.*?)(?:/([\d.]+(?:e-\d+)?))?", name).groups()
    peer_name = "bus" if operation.endswith("/offloaded") else PEERS.get(operation.split("/")[0])
    peer = best.get(f"{peer_name}/{density}") or best.get(peer_name)
    rows.append((
        operation,
        density or "",
        f"{run['bytes_per_element']:.3f}",
        f"{run['bandwidth'] / 1e9:.{1 if run['bandwidth'] > 1e10 else 3}f}",
        f"{run['bandwidth'] / best['copy']['bandwidth']:.0%}" if "copy" in best else "",
        f"{run['bandwidth'] / best['read']['bandwidth']:.0%}" if "read" in best else "",
        f"{time_per_element(run) / time_per_element(peer):.2f} {peer_name}" if peer else "",
    ))
rows.insert(1, ("---",) + ("---:",) * 6)

context = data["context"]
title = [context["machine"], f"{int(context['elements']):,} elements", f"load {context['load_avg'][0]:.1f} at first"]
if "copy" in best:
    title.append(f"copy {best['copy']['bandwidth'] / 1e9:.1f} GB/s")
print("; ".join(title) + "\n")
widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
for row in rows:
    cells = [cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))]
    print("| " + " | ".join(cells) + " |")
