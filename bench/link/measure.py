#!/usr/bin/env python3
"""Measures training steps over loopback: measure.py grid|loss|parity|backward|fill-in. Started by run.sh, which limits nothing
but its own network namespace."""
import json
import math
import os
import pathlib
import subprocess
import sys

import document

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "pretrain"
RESULTS = ROOT / "build" / "link"  # JSON that later parts read

RATES = {"unlimited": None, "10 Gbit/s": 10_000, "1 Gbit/s": 1_000, "200 Mbit/s": 200}  # in Mbit/s
WORLDS = (2, 4)
PHASES = {"compute": "compute", "accumulate": "accumulate", "select": "select", "mask wait": "mask_wait",
          "payload": "payload", "update": "update"}


def limit(mbit):
    subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], stderr=subprocess.DEVNULL)
    if mbit is not None:
        subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", f"{mbit:.3f}mbit", "burst", "256kb",
                        "latency", "50ms"], check=True)


def train(ranks, **options):
    """Runs pretrain, one process a rank; returns the rows of its table and its curves. Options as its own, with _."""
    output = RESULTS / "pretrain"
    command = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(ranks), "--mca", "pml", "ob1", "--mca", "btl",
               "tcp,self", "--mca", "btl_tcp_if_include", "lo", "--mca", "oob_tcp_if_include", "lo"]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    command += [str(BUILD / "pretrain"), "--communicator", "mpi", "--text", str(BUILD / "bible.txt"), "--output",
                str(output), "--quiet", "--interface", "lo"]
    for name, value in options.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        command += ["--" + name.replace("_", "-")] + [str(v) for v in values]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        sys.exit(done.stdout)
    return json.loads((output / "table.json").read_text())["runs"]


def timing(ranks, steps, optimizers, sparsity=(0.99,), coding="automatic", **options):
    """Steady-state steps: no density warm-up, hardly any validation."""
    return train(ranks, **{"steps": steps, "optimizers": optimizers, "sparsity": sparsity, "mask_coding": coding,
                           "density_warmup": 0, "skip_steps": 8, "report_every": 4, "eval_every": steps,
                           "eval_windows": 4, **options})


def method(row, coding="automatic"):
    if row["sparsity"] == 0:
        return {"adamw": "dense AdamW", "adams": "dense AdamS"}[row["optimizer"]]
    return f"SCAPE {100 * row['sparsity']:.0f}%" + (", bitmap" if coding == "bitmap" else "")


def milliseconds(seconds):
    return f"{1000 * seconds:.1f}" if seconds < 0.1 else f"{1000 * seconds:.0f}"


def grid():
    cells = []
    for ranks in WORLDS:
        for rate, mbit in RATES.items():
            limit(mbit)
            rows = [(row, "automatic") for row in timing(ranks, 40, ["adamw", "adams", "clock"], [0.9, 0.99])]
            rows += [(row, "bitmap") for row in timing(ranks, 40, ["clock"], [0.9, 0.99], "bitmap")]
            for row, coding in rows:
                cells.append({"ranks": ranks, "rate": rate, "mbit": mbit, "method": method(row, coding),
                              "coding": coding, **row})
            print(f"{ranks} ranks, {rate}: done", flush=True)
    limit(None)
    (RESULTS / "grid.json").write_text(json.dumps(cells, indent=1))

    rows = [["ranks", "rate", "method", "step, ms", "speed-up", *PHASES, "kB a rank", "interface / computed"]]
    for cell in cells:
        dense = next(c for c in cells if c["method"] == "dense AdamS" and (c["ranks"], c["rate"]) ==
                     (cell["ranks"], cell["rate"]))
        computed = cell["ranks"] * cell["bytes_per_step"]
        rows.append([cell["ranks"], cell["rate"], cell["method"], milliseconds(cell["step_seconds"]),
                     f"{dense['step_seconds'] / cell['step_seconds']:.2f}",
                     *(milliseconds(cell[key + "_seconds"]) for key in PHASES.values()),
                     f"{cell['bytes_per_step'] / 1000:.0f}", f"{cell['interface_bytes_per_step'] / computed:.3f}"])
    document.write("grid", document.table(rows))

    waits = [["ranks", "rate", "compute, ms", "wait for the mask, share of the step"]]
    for cell in cells:
        if cell["method"] == "SCAPE 99%":
            waits.append([cell["ranks"], cell["rate"], milliseconds(cell["compute_seconds"]),
                          f"{cell['mask_wait_seconds'] / cell['step_seconds']:.1%}"])
    document.write("overlap", document.table(waits))


def loss(budget=15):
    """Equal wall time: steps from the grid's step times, schedules scaled to them."""
    cells = json.loads((RESULTS / "grid.json").read_text())
    ranks = 4
    rows = [["rate", "method", "steps", "seconds", "validation loss", "against dense AdamS"]]
    for rate in ("1 Gbit/s", "200 Mbit/s"):
        limit(RATES[rate])
        step = {c["method"]: c["step_seconds"] for c in cells if (c["ranks"], c["rate"]) == (ranks, rate)}
        found = {}
        for name, optimizer, sparsity in (("dense AdamW", "adamw", 0), ("dense AdamS", "adams", 0),
                                          ("SCAPE 90%", "clock", 0.9), ("SCAPE 99%", "clock", 0.99)):
            seconds = step[name]
            if sparsity:  # the density falls geometrically in the first 30% of the steps: mean (1 - d) / ln(1 / d)
                density = 1 - sparsity
                mean = ((1 - density) / math.log(1 / density) - density) / (1 - density)
                seconds += 0.3 * mean * (step["dense AdamS"] - seconds)
            steps = max(20, round(budget / seconds))
            row = train(ranks, steps=steps, optimizers=optimizer, sparsity=sparsity, eval_every=steps, eval_windows=512,
                        report_every=steps, lr_warmup=steps // 20)[0]
            found[name] = (steps, steps * row["step_seconds"], row["validation_loss"])
            print(f"{rate}, {name}: done", flush=True)
        for name, (steps, seconds, value) in found.items():
            rows.append([rate, name, steps, f"{seconds:.0f}", f"{value:.3f}", f"{value - found['dense AdamS'][2]:+.3f}"])
    limit(None)
    document.write("loss", document.table(rows))


def parity(share=0.8242, ranks=2):
    """At the rate where dense AdamS communicates for `share` of its step."""
    options = {"batch": 16}

    def dense_step(steps):
        row = timing(ranks, steps, ["adams"], **{**options, "report_every": 1})[0]
        return row, row["payload_seconds"] / row["step_seconds"]

    limit(None)
    dense, found = dense_step(24)
    mbit = 8e-6 * ranks * dense["bytes_per_step"] / (dense["compute_seconds"] * share / (1 - share))
    for _ in range(6):
        limit(mbit)
        dense, found = dense_step(32)
        print(f"{mbit:.1f} Mbit/s: {found:.1%}", flush=True)
        if abs(found - share) < 0.005:
            break
        mbit *= (found / (1 - found)) / (share / (1 - share))
    sparse = timing(ranks, 80, ["clock", "scape"], [0.9, 0.99], **options)
    limit(None)
    rows = [["", "step, ms", "speed-up", "limit", *PHASES]]
    for row in [dense] + sparse:
        name = "dense AdamS" if row is dense else f"rule {row['optimizer']}, {100 * row['sparsity']:.0f}%"
        rows.append([name, milliseconds(row["step_seconds"]), f"{dense['step_seconds'] / row['step_seconds']:.2f}",
                     f"{1 / (1 - found):.2f}", *(milliseconds(row[key + "_seconds"]) for key in PHASES.values())])
    text = (f"{ranks} ranks at {mbit:.1f} Mbit/s, 16 sequences a rank: dense AdamS communicates for {found:.1%} of its "
            "step.\n\n")
    document.write("parity", text + document.table(rows))


def backward(ranks=2):
    """Steps whose payload leaves while backward runs, beside whole ones."""
    rows = [["rate", "method", "whole, ms", "overlapped, ms", "gain", "waits for the payload, ms", "overlapped, ms"]]
    for rate in ("1 Gbit/s", "200 Mbit/s"):
        limit(RATES[rate])
        runs = [timing(ranks, 48, ["adams", "clock"], [0.9, 0.99], batch=16, **extra) for extra in ({}, {"overlap": []})]
        for whole, overlapped in zip(*runs):
            rows.append([rate, method(whole), milliseconds(whole["step_seconds"]),
                         milliseconds(overlapped["step_seconds"]),
                         f"{whole['step_seconds'] / overlapped['step_seconds']:.2f}",
                         milliseconds(whole["payload_seconds"]), milliseconds(overlapped["payload_seconds"])])
    limit(None)
    document.write("backward", document.table(rows))


def fill_in():
    lines = subprocess.run([str(ROOT / "build" / "link" / "fill_in"), str(BUILD / "bible.txt")], check=True, text=True,
                           stdout=subprocess.PIPE).stdout.splitlines()
    document.write("fill-in", document.table([line.split("\t") for line in lines]))


if __name__ == "__main__":
    RESULTS.mkdir(parents=True, exist_ok=True)
    {"grid": grid, "loss": loss, "parity": parity, "backward": backward, "fill-in": fill_in}[sys.argv[1]]()
