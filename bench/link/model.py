#!/usr/bin/env python3
"""The time of a training step on paper: from bytes, rate, latency, ranks and compute time. Checked against what
measure.py grid found and against the SCAPE paper's figures, then carried to large clusters."""
import json
import math
import pathlib
import statistics
import subprocess

import document

ROOT = pathlib.Path(__file__).resolve().parents[2]


def elias_fano_bits(density):
    """Of the code of a mask, a parameter."""
    low = math.floor(math.log2(1 / density))
    return density * (low + 1) + 2.0 ** -low


def mask_bytes(density, coding="automatic"):
    """A parameter, of the whole mask."""
    if density >= 1:
        return 0
    bits = 1 if coding == "bitmap" else min(1, elias_fano_bits(density))
    return bits / 8


def payload_bytes(parameters, ranks, density, element=4):
    """That a rank sends: a reduce-scatter and an all-gather."""
    return 2 * (ranks - 1) / ranks * element * density * parameters


def step(parameters, ranks, density, compute, rate, latency, local=0.0, coding="automatic", shared=False, burst=0):
    """Seconds. rate: bytes/s of a rank's link, or of one wire that all share; latency: seconds a collective takes
    besides its bytes; local: what the step computes besides dense AdamS; burst: bytes that pass at once after a pause,
    as a token bucket lets them. The mask travels beside the computation."""
    wires = ranks if shared else 1
    mask = wires * (ranks - 1) / ranks * mask_bytes(density, coding) * parameters / rate
    mask += latency if mask else 0
    saved = min(burst, max(0.0, compute - mask) * rate)
    payload = max(0.0, wires * payload_bytes(parameters, ranks, density) - saved) / rate + latency
    return compute + local + payload + max(0.0, mask - compute)


def check_grid():
    """Every cell from the compute time of its own, one efficiency of the wire and one latency for all."""
    cells = json.loads((ROOT / "build" / "link" / "grid.json").read_text())
    parameters = 515_088
    limited = [c for c in cells if c["mbit"] is not None]

    def predicted(cell, efficiency, latency):
        local = sum(cell[key + "_seconds"] for key in ("accumulate", "select", "update"))
        return step(parameters, cell["ranks"], 1 - cell["sparsity"], cell["compute_seconds"],
                    efficiency * cell["mbit"] * 1e6 / 8, latency, local, cell["coding"], True, 256e3)

    def error(cell, *fitted):
        return predicted(cell, *fitted) / cell["step_seconds"] - 1

    # MPI over TCP has a ceiling of its own, so 10 Gbit/s is not 10 Gbit/s: fitted are the slower rates.
    slow = [c for c in limited if c["mbit"] <= 1000]
    fits = ((e / 100, l / 1e4) for e in range(60, 101, 2) for l in range(0, 101, 5))
    fitted = min(fits, key=lambda fit: sum(error(c, *fit) ** 2 for c in slow))
    rows = [["ranks", "rate", "method", "measured, ms", "predicted, ms", "error"]]
    for cell in limited:
        rows.append([cell["ranks"], cell["rate"], cell["method"], f"{1000 * cell['step_seconds']:.1f}",
                     f"{1000 * predicted(cell, *fitted):.1f}", f"{error(cell, *fitted):+.1%}"])
    errors = [abs(error(c, *fitted)) for c in slow]
    text = (f"The limiter is a token bucket of 256 kB, which a pause fills. Fitted to the cells of at most 1 Gbit/s: {fitted[0]:.0%} of the rate, {1000 * fitted[1]:.1f} ms a "
            f"collective. Their errors: {statistics.mean(errors):.1%} in the mean, {max(errors):.1%} at worst.\n\n")
    document.write("model-grid", text + document.table(rows))


def check_paper():
    """What the paper tells is the share of a dense step that communicates, or can be had from one of its figures."""
    def time(share, density, coding):  # of a dense step of length 1; the mask hides behind the computation
        payload = share * density
        mask = share * mask_bytes(density, coding) / 2 / 4  # dense: twice 4 bytes a parameter; a mask goes once
        return 1 - share + payload + max(0.0, mask - (1 - share))

    # 500M: the share from the figure at 90%, then the one at 99% is a prediction.
    share = min((s / 1000 for s in range(1000)), key=lambda s: abs(time(s, 0.1, "bitmap") - (1 - 0.356)))
    rows = [["figure of the paper", "paper", "model", "how"]]
    rows.append(["500M, 90%: less wall time", "35.6%", f"{1 - time(share, 0.1, 'bitmap'):.1%}",
                 f"fitted: a dense step communicates for {share:.1%}"])
    rows.append(["500M, 99%: less wall time", "43.3%", f"{1 - time(share, 0.01, 'bitmap'):.1%}", "predicted from it"])
    share = 1 - 0.1758
    rows.append(["1.8B on 64 GPUs, 99%: a step", "3.26x", f"{1 / time(share, 0.01, 'bitmap'):.2f}x",
                 "share 1 - 17.58%, its dense strong-scaling efficiency"])
    rows.append(["the same, with Elias-Fano masks", "", f"{1 / time(share, 0.01, 'automatic'):.2f}x", "ours"])
    rows.append(["1.8B on 64 GPUs, 99%: strong-scaling efficiency", "55.0%",
                 f"{0.1758 / time(share, 0.01, 'bitmap'):.1%}",
                 f"{1 / 3.26 - time(share, 0.01, 'bitmap'):.1%} of a dense step are not in the model"])
    document.write("model-paper", document.table(rows))


# Parameters; seconds that forward and backward take on one rank, stated: 6 operations a parameter and token at 40% of
# 1 Pflop/s (bf16, one H100-class device), 16,384 tokens a rank, for 70B on 8-way model parallel ranks, 16,384 each.
MODELS = {"0.5B": (0.5e9, 0.5e9 * 6 * 16384 / 0.4e15), "1.8B": (1.8e9, 1.8e9 * 6 * 16384 / 0.4e15),
          "70B / 8": (70e9 / 8, 70e9 / 8 * 6 * 16384 / 0.4e15)}
LINKS = {"100 Gbit/s": 100e9, "10 Gbit/s": 10e9, "1 Gbit/s": 1e9, "100 Mbit/s": 0.1e9}
WORLDS = (64, 1024, 16384)


def local_seconds(parameters):
    """24.6 bytes a parameter moved instead of dense AdamS's 20 (docs/benchmarks.md), at 2.7e12 bytes/s."""
    return 4.6 * parameters / 2.7e12


def latency_of(ranks):
    """Of a collective: 5 microseconds a hop of a tree, and a microsecond for each rank of an exchange of all with all."""
    return 5e-6 * math.log2(ranks) + 1e-6 * ranks


def carry():
    rows = [["parameters", "compute, s", "ranks", "link", "dense, s", "90%", "99%", "99.9%", "99%, bitmap"]]
    lines = []
    for name, (parameters, compute) in MODELS.items():
        for ranks in WORLDS:
            for link, bits in LINKS.items():
                def of(density, coding="automatic"):
                    local = 0 if density == 1 else local_seconds(parameters)
                    return step(parameters, ranks, density, compute, bits / 8, latency_of(ranks), local, coding)
                dense = of(1)
                rows.append([name, f"{compute:.2f}", f"{ranks:,}", link, f"{dense:.3g}",
                             *(f"{dense / of(d):.2f}x" for d in (0.1, 0.01, 0.001)),
                             f"{dense / of(0.01, 'bitmap'):.2f}x"])
        for exponent in range(0, 61):
            bits = 10 ** (7.5 + exponent / 15)
            times = [step(parameters, 1024, d, compute, bits / 8, latency_of(1024),
                          0 if d == 1 else local_seconds(parameters)) for d in (1, 0.1, 0.01, 0.001)]
            lines.append(f"{bits / 1e9:.5g} " + " ".join(f"{times[0] / t:.5g}" for t in times[1:]))
        lines += ["", ""]
    document.write("model-clusters", document.table(rows))
    draw(lines)


def break_even():
    """Where compressing saves less than the local work it costs, and where it saves 5%."""
    rows = [["parameters", "ranks", "99% costs more than it saves above", "saves under 5% of a step above"]]
    for name, (parameters, compute) in MODELS.items():
        ranks = 64
        def gain(bits):
            dense = step(parameters, ranks, 1, compute, bits / 8, latency_of(ranks))
            sparse = step(parameters, ranks, 0.01, compute, bits / 8, latency_of(ranks), local_seconds(parameters))
            return 1 - sparse / dense
        def rate_where(least):
            low, high = 1e6, 1e16
            for _ in range(200):
                middle = math.sqrt(low * high)
                low, high = (middle, high) if gain(middle) > least else (low, middle)
            return low
        def text(bits):
            return f"{bits / 1e12:.2g} Tbit/s" if bits >= 1e12 else f"{bits / 1e9:.3g} Gbit/s"
        rows.append([name, ranks, text(rate_where(0)), text(rate_where(0.05))])
    document.write("model-break-even", document.table(rows))


def draw(lines):
    data = ROOT / "build" / "link" / "model.dat"
    data.parent.mkdir(parents=True, exist_ok=True)
    data.write_text("\n".join(lines) + "\n")
    plots = ", ".join(f"'{data}' index {i} using 1:{column} with lines lw 2 lc {i + 1} dt {dash} title '{name}, {label}'"
                      for i, name in enumerate(MODELS)
                      for column, label, dash in ((2, "90%", 3), (3, "99%", 1)))
    script = f"""
set terminal pngcairo size 900,560 font 'sans,11'
set output '{ROOT / "docs" / "link.png"}'
set logscale xy
set grid
set key top right
set xlabel 'link of a rank, Gbit/s'
set ylabel 'speed-up of a step over dense AdamS'
set title '1,024 ranks: what the model predicts'
plot {plots}
"""
    subprocess.run(["gnuplot"], input=script, text=True, check=True)


if __name__ == "__main__":
    if (ROOT / "build" / "link" / "grid.json").exists():
        check_grid()
    else:
        print("no grid was measured here: its check is left out (bench/link/run.sh grid)")
    check_paper()
    carry()
    break_even()
