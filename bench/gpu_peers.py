#!/usr/bin/env python3
"""Others' decode attention on this GPU, at the shapes that bench_gpu has measured in the same run:
PyTorch's scaled_dot_product_attention and FlashInfer's paged decode, each the fastest way it has.

    bench/gpu_peers.py FILE     with what bench_gpu printed

    gpu peer torch bf16 kv=16384 sequences=16 us=301.5 way=FLASH_ATTENTION ours=250.1 of_ours=1.206
        wanted_of_ours=1.00 met=yes             (one line)
    gpu peer flashinfer absent="FlashInfer is not installed"

of_ours: their time by ours; 1 and more is what we want. Only what is installed is used, nothing is
built or downloaded: FlashInfer without a kernel for the shape counts as absent. Medians of rounds,
by CUDA events, each through several sets of keys and values, so that no cache holds what comes.
"""

import contextlib
import importlib
import os
import re
import statistics
import sys

ROUNDS = 9
PAGE = 16
# Between two looks at the same keys: more than the L2 cache of any card.
BETWEEN_BYTES = 1 << 30


class Absent(Exception):
    """Why a peer cannot be measured."""


def median_us(torch, calls):
    """Microseconds of one call, on the device."""
    for call in calls:
        call()
    times = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for call in 2 * calls:
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * start.elapsed_time(end) / (2 * len(calls)))
    return statistics.median(times)


def sets_of(kv_bytes):
    return max(2, -(-BETWEEN_BYTES // kv_bytes))


def random(torch, *shape):
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def ways_of_torch(torch, case):
    """(name, context in which it is used, calls)."""
    attend = torch.nn.functional.scaled_dot_product_attention
    backends = importlib.import_module("torch.nn.attention")
    query = random(torch, case["sequences"], case["query_heads"], 1, case["dim"])
    shape = (case["sequences"], case["kv_heads"], case["kv"], case["dim"])
    pairs = [(random(torch, *shape), random(torch, *shape)) for _ in range(sets_of(case["bytes"]))]
    calls = [lambda k=k, v=v: attend(query, k, v, enable_gqa=True) for k, v in pairs]
    yield "default", contextlib.nullcontext(), calls
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
        backend = getattr(backends.SDPBackend, name, None)
        if backend is not None:
            yield name, backends.sdpa_kernel(backend), calls


def find_flashinfer():
    os.environ["FLASHINFER_DISABLE_JIT"] = "1"  # before it is imported
    try:
        flashinfer = importlib.import_module("flashinfer")
        jit = importlib.import_module("flashinfer.jit")
    except ImportError as error:
        raise Absent("FlashInfer is not installed") from error
    if not hasattr(jit, "MissingJITCacheError"):
        raise Absent("this FlashInfer builds kernels as it runs, and cannot be told not to")
    return flashinfer, jit


def ways_of_flashinfer(torch, case):
    flashinfer, jit = find_flashinfer()
    sequences, pages = case["sequences"], case["kv"] // PAGE
    query = random(torch, sequences, case["query_heads"], case["dim"])
    shape = (sequences * pages, 2, PAGE, case["kv_heads"], case["dim"])
    caches = [random(torch, *shape) for _ in range(sets_of(case["bytes"]))]
    whole = {"dtype": torch.int32, "device": "cuda"}
    starts = torch.arange(0, sequences * pages + 1, pages, **whole)
    indices = torch.arange(0, sequences * pages, **whole)
    last = torch.full((sequences,), PAGE, **whole)
    workspace = torch.zeros(128 << 20, dtype=torch.uint8, device="cuda")
    for name, tensor_cores in (("tensor_cores", True), ("cuda_cores", False)):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD",
                                                                use_tensor_cores=tensor_cores)
        try:
            wrapper.plan(starts, indices, last, case["query_heads"], case["kv_heads"], case["dim"],
                         PAGE, q_data_type=torch.bfloat16, data_type=torch.bfloat16)
        except jit.MissingJITCacheError:
            continue
        yield name, contextlib.nullcontext(), [lambda c=c: wrapper.run(query, c) for c in caches]


def fastest(torch, ways):
    found, reason = [], "it has no kernel for the shape"
    for name, context, calls in ways:
        try:
            with context:
                found.append((median_us(torch, calls), name))
        except (RuntimeError, TypeError) as error:  # this way, or version, does not do it
            reason = str(error).splitlines()[0] if str(error) else repr(error)
    if not found:
        raise Absent(reason)
    return min(found)


def read_cases(lines):
    """What bench_gpu measured of bf16, as dictionaries of numbers."""
    shape, cases = {}, []
    for line in lines:
        numbers = {k: float(v) for k, v in re.findall(r"(\w+)=([\d.]+)(?= |$)", line)}
        if line.startswith("gpu shape "):
            shape = numbers
        elif line.startswith("gpu decode bf16 ") and "us" in numbers:
            cases.append({**{k: int(v) for k, v in {**shape, **numbers}.items() if k != "us"},
                          "us": numbers["us"]})
    return cases


def find_torch():
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise Absent("PyTorch is not installed") from error
    if not torch.cuda.is_available():
        raise Absent("PyTorch sees no GPU")
    return torch


def measure(torch, peer, ways, case):
    name = f"peer {peer} bf16 kv={case['kv']} sequences={case['sequences']}"
    try:
        us, way = fastest(torch, ways(torch, case))
    except Absent as absent:
        reason = str(absent).replace('"', "'")
        print(f'gpu {name} absent="{reason}"', flush=True)
        return
    ratio = us / case["us"]
    print(f"gpu {name} us={us:.1f} way={way} ours={case['us']:.1f} of_ours={ratio:.3f} "
          f"wanted_of_ours=1.00 met={'yes' if ratio >= 1 else 'no'}", flush=True)


def main(path):
    with open(path, encoding="utf-8") as file:
        cases = read_cases(file.read().splitlines())
    if not cases:
        sys.exit(f"{path} has no line of bench_gpu about bf16")
    for peer, find, ways in (("torch", find_torch, ways_of_torch),
                             ("flashinfer", find_flashinfer, ways_of_flashinfer)):
        try:
            torch = find_torch()
            find()
        except Absent as absent:
            print(f'gpu peer {peer} absent="{absent}"', flush=True)
            continue
        for case in cases:
            measure(torch, peer, ways, case)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
