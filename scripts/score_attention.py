#!/usr/bin/env python3
"""Times the attention operators against PyTorch on the CPU, case by case, each in a process of its own.

    scripts/score_attention.py block_sparse_attention [--quick] [--json FILE] [--set matrix] [--threads 2] [--seconds 1]

Of every case of the operator's set it prints the ratio

    score = time of the strongest opponent / time of this library          (above 1: the library is faster)

for fwd and bwd, then the geometric mean and the minimum over all that ran. Packed cases, and lists of blocks of several
keys, have no opponent yet: they are named as left out. Each side runs at its fastest
dtype of float32, bfloat16 and float16. Opponents, the fastest of which counts:

    block_sparse_attention    scaled_dot_product_attention with the mask expanded to tokens (and without one where the
                              mask keeps everything), two products and a masked softmax, FlexAttention with the block
                              mask where it compiles (forward)
    sparse_flash_attention    gather of the listed keys, then matrix products and a softmax; in slices of the queries

The first run makes a virtual environment with PyTorch beside the build (build/torch; some GB are loaded, since the wheels
of PyPI bring CUDA along), or takes the Python that THALWEG_TORCH names. The library is build/cpu/thalweg/libthalweg.so, called through its pass table. The
masks follow the patterns of the cases, from a seed of this script. The machine should be idle. --json writes the
records, e.g. to bench/results/<machine>-block_sparse_attention.json. --quick takes few cases, under five minutes.
"""
import argparse
import ctypes
import json
import math
import os
import pathlib
import platform
import re
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "build" / "cpu" / "thalweg" / "libthalweg.so"
OPERATORS = {"block_sparse_attention": ("B02", "B03", "B05", "B08", "B10"),
             "sparse_flash_attention": ("S01", "S03", "S06", "S15")}
DTYPES = ("f32", "bf16", "f16")
CODES = {"f32": 0x12002, "bf16": 0x11004, "f16": 0x11002, "i32": 0x12000, "u8": 0x10801}


# ---- Cases ----

def read_cases(operator, set_name):
    """(name, tokens) of every line of a set that stands for all passes or for the backward."""
    text = (ROOT / "thalweg" / "ops" / operator / "cases.txt").read_text(encoding="utf-8")
    cases, here = [], None
    for line in text.splitlines():
        code, _, comment = line.partition("#")
        code = code.strip()
        if code.startswith("["):
            here = code[1:code.index("]")]
        elif code and here == set_name and code.split(":")[0] in (operator, operator + ".bwd"):
            cases.append((comment.strip() or code, code.split(":", 1)[1].split(",")))
    if not cases:
        raise SystemExit(f"score: set, got {set_name}, expected one of {operator}/cases.txt that holds cases")
    return cases


def parse(tokens):
    """Sizes and options of a case."""
    sizes, options = {}, {}
    for token in tokens:
        match = re.fullmatch(r"([A-Z]+)(\d+)", token)
        name, _, value = token.partition("=")
        if match:
            sizes[match[1]] = int(match[2])
        elif token in CODES:
            options["dtype"] = token
        else:
            options[name] = value
    sizes.setdefault("B", 1)
    if "varlen" in options:
        raise ValueError("packed")
    sizes.setdefault("S", sizes["T"])
    sizes.setdefault("V", sizes["K"])
    return sizes, options


# ---- The library, by its pass table ----

class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_uint32), ("rank", ctypes.c_int32),
                ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("shape", ctypes.c_int64 * 5), ("stride", ctypes.c_int64 * 5)]


class Field(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("kind", ctypes.c_int), ("role", ctypes.c_int), ("offset", ctypes.c_uint32),
                ("optional", ctypes.c_int32), ("dims", ctypes.c_char_p), ("dtypes", ctypes.c_char_p),
                ("layout", ctypes.c_int), ("choices", ctypes.c_char_p), ("doc", ctypes.c_char_p)]


class Pass(ctypes.Structure):
    _fields_ = [("op", ctypes.c_char_p), ("name", ctypes.c_char_p), ("doc", ctypes.c_char_p),
                ("fields", ctypes.POINTER(Field)), ("num_fields", ctypes.c_int64), ("args_size", ctypes.c_size_t),
                ("call", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p))]


class Library:
    def __init__(self):
        if not LIBRARY.exists():
            raise SystemExit(f"score: library, got no {LIBRARY}, expected it built (make build)")
        self.lib = ctypes.CDLL(str(LIBRARY))
        self.lib.thalweg_pass_at.restype = ctypes.POINTER(Pass)
        self.lib.thalweg_pass_at.argtypes = [ctypes.c_int64]
        self.lib.thalweg_last_error.restype = ctypes.c_char_p

    def find(self, operator, name):
        i = 0
        while self.lib.thalweg_pass_at(i):
            found = self.lib.thalweg_pass_at(i).contents
            if found.op.decode() == operator and found.name.decode() == name:
                return found
            i += 1
        raise SystemExit(f"score: pass, got none named {operator}.{name} in {LIBRARY}")

    def prepare(self, operator, name, tensors, options):
        """A function that makes the call; `tensors` are PyTorch's, by field name."""
        found = self.find(operator, name)
        args = ctypes.create_string_buffer(found.args_size)
        ctypes.memmove(args, ctypes.byref(ctypes.c_size_t(found.args_size)), 8)
        kinds = {1: ctypes.c_int32, 2: ctypes.c_int64, 3: ctypes.c_double, 4: ctypes.c_int32}
        for i in range(found.num_fields):
            field = found.fields[i]
            key, at = field.name.decode(), ctypes.addressof(args) + field.offset
            if key in tensors:
                t = tensors[key]
                view = Tensor(t.data_ptr(), code_of(t), t.dim(), 1, 0)
                for axis in range(t.dim()):
                    view.shape[axis], view.stride[axis] = t.shape[axis], t.stride(axis)
                ctypes.memmove(at, ctypes.byref(view), ctypes.sizeof(view))
            elif key in options and field.kind in kinds:
                number = kinds[field.kind](options[key])
                ctypes.memmove(at, ctypes.byref(number), ctypes.sizeof(number))

        def call(keep=(args, tensors)):
            if found.call(ctypes.addressof(keep[0]), None) != 0:
                raise RuntimeError(self.lib.thalweg_last_error().decode())
        return call


def code_of(t):
    import torch
    return {torch.float32: CODES["f32"], torch.bfloat16: CODES["bf16"], torch.float16: CODES["f16"],
            torch.int32: CODES["i32"], torch.uint8: CODES["u8"]}[t.dtype]


def torch_dtype(name):
    import torch
    return {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[name]


# ---- One case, in a process of its own ----

def seconds_of(call, limit):
    """The median time of a call: one to warm up, then samples until `limit` seconds are over, three at least."""
    call()
    samples, end = [], time.perf_counter() + limit
    while len(samples) < 3 or (time.perf_counter() < end and len(samples) < 50):
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return sorted(samples)[len(samples) // 2]


def fastest(candidates, limit):
    """(name, seconds) of the fastest of {name: function that prepares a call}; what cannot run is left out."""
    best, failures = None, {}
    for name, prepare in candidates.items():
        try:
            taken = seconds_of(prepare(), limit)
        except Exception as error:  # an opponent may lack a dtype, or memory
            failures[name] = str(error).splitlines()[0][:120]
            continue
        if best is None or taken < best[1]:
            best = (name, taken)
    return best, failures


def block_mask(sizes, options, generator):
    import torch
    T, S, bq, bk = sizes["T"], sizes["S"], int(options.get("block_q") or 128), int(options.get("block_k") or 128)
    NQ, NK = -(-T // bq), -(-S // bk)
    heads = sizes.get("HM", sizes["H"])
    r0 = torch.arange(NQ)[:, None] * bq
    r1 = torch.clamp(r0 + bq, max=T) - 1
    c0 = torch.arange(NK)[None, :] * bk
    c1 = torch.clamp(c0 + bk, max=S) - 1
    name, _, number = options.get("mask", "dense").partition(":")
    drawn = torch.rand(sizes["B"], heads, NQ, NK, generator=generator)
    window = {"window": int(number) if name == "window" else 0, "bigbird": bk}.get(name, 0)
    near = (c0 <= r1 + window) & (c1 >= r0 - window)
    kept = {"dense": torch.ones(NQ, NK, dtype=torch.bool), "none": torch.zeros(NQ, NK, dtype=torch.bool),
            "causal": c0 <= r1, "window": near, "bigbird": near}.get(name)
    if kept is None:
        kept = drawn < float(number)
        if name == "diagonal":
            kept = kept | (torch.arange(NK)[None, :] == torch.clamp(r0 // bk, max=NK - 1))
    else:
        kept = kept.expand(sizes["B"], heads, NQ, NK).clone()
    if name == "bigbird":
        kept[:, :, 0, :] = True
        kept[:, :, :, 0] = True
        kept.scatter_(3, torch.randint(NK, (sizes["B"], heads, NQ, 3), generator=generator), True)
    if "holes" in options:
        kept[:, :, 1, :] = False
        kept[:, :, :, 0] = False
    return kept.to(torch.uint8), bq, bk


def run_block_sparse(sizes, options, limit, library):
    import torch
    generator = torch.Generator().manual_seed(42)
    B, T, S, H, K, V = (sizes[name] for name in ("B", "T", "S", "H", "K", "V"))
    HK = sizes.get("HK", H)
    mask, bq, bk = block_mask(sizes, options, generator)
    causal = "causal" in options
    tokens = mask.bool().repeat_interleave(bq, 2)[:, :, :T].repeat_interleave(bk, 3)[:, :, :, :S]
    if causal:
        tokens = tokens & (torch.arange(S)[None, :] <= torch.arange(T)[:, None] + S - T)
    whole = bool(tokens.all())

    def inputs(dtype):
        made = {name: torch.randn(shape, generator=generator).to(torch_dtype(dtype))
                for name, shape in (("q", (B, H, T, K)), ("k", (B, HK, S, K)), ("v", (B, HK, S, V)), ("d_o", (B, H, T, V)))}
        made["o"] = torch.empty(B, H, T, V, dtype=torch_dtype(dtype))
        return made

    def ours(dtype, name):
        def prepare():
            views = {key: t.transpose(1, 2) for key, t in inputs(dtype).items()}  # [B T H K] views of [B H T K] memory
            views.update(block_mask=mask, lse=torch.empty(B, H, T).transpose(1, 2))
            switches = {"block_q": bq, "block_k": bk, "causal": int(causal)}
            forward = library.prepare("block_sparse_attention", "fwd", {k: t for k, t in views.items() if k != "d_o"}, switches)
            if name == "fwd":
                return forward
            forward()
            for key in ("q", "k", "v"):
                views["d_" + key] = torch.empty_like(views[key])
            return library.prepare("block_sparse_attention", "bwd", views, switches)
        return prepare

    def attention(dtype, name, attend):
        def prepare():
            made = inputs(dtype)
            leaves = [made[key].requires_grad_(name == "bwd") for key in ("q", "k", "v")]
            if name == "fwd":
                def call():
                    with torch.no_grad():
                        attend(*leaves)
                return call
            out = attend(*leaves)
            return lambda: torch.autograd.grad(out, leaves, made["d_o"], retain_graph=True)
        return prepare

    def sdpa(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=None if whole else tokens,
                                                                enable_gqa=HK != H)

    def plain(q, k, v):
        k, v = (t.repeat_interleave(H // HK, 1) for t in (k, v))
        scores = torch.matmul(q, k.transpose(2, 3)) * K ** -0.5
        return torch.matmul(torch.softmax(scores if whole else scores.masked_fill(~tokens, -math.inf), 3), v)

    def flex():
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
        table = mask.bool().contiguous()

        def keep(b, h, i, j):
            return table[b, h, i // bq, j // bk]
        blocks = create_block_mask(keep, B, H, T, S, device="cpu", BLOCK_SIZE=(bq, bk))
        compiled = torch.compile(flex_attention)
        return lambda q, k, v: compiled(q, k, v, block_mask=blocks, enable_gqa=HK != H)

    def flex_forward(dtype):
        return lambda: attention(dtype, "fwd", flex())()

    record = {"density": float(tokens.float().mean())}
    for name in ("fwd", "bwd"):
        opponents = {f"sdpa {dtype}": attention(dtype, name, sdpa) for dtype in DTYPES}
        opponents["plain f32"] = attention("f32", name, plain)
        if name == "fwd" and not causal and bq % 16 == 0 and bk % 16 == 0:
            opponents.update({f"flex {dtype}": flex_forward(dtype) for dtype in ("f32", "bf16")})
        record[name] = compare({dtype: ours(dtype, name) for dtype in DTYPES}, opponents, limit)
    return record


def run_sparse_flash(sizes, options, limit, library):
    import torch
    generator = torch.Generator().manual_seed(42)
    B, T, S, H, K, V, E = (sizes[name] for name in ("B", "T", "S", "H", "K", "V", "E"))
    KR, causal, latent = sizes.get("KR", 0), "causal" in options, "v" not in options
    if options.get("sparse_block_size", "1") not in ("", "1"):
        raise ValueError("blocks of keys")
    last = torch.arange(T) + S - T if causal else torch.full((T,), S - 1)  # the last key that a query sees
    lists = torch.rand(B, T, S, generator=generator)
    lists.masked_fill_(torch.arange(S)[None, None, :] > last[None, :, None], -1)
    picked = lists.topk(min(E, S), dim=2)
    indices = torch.where(picked.values >= 0, picked.indices, -1).to(torch.int32)
    if E > S:
        indices = torch.nn.functional.pad(indices, (0, E - S), value=-1)
    del lists, picked

    def inputs(dtype):
        shapes = {"q": (B, T, H, K), "k": (B, S, K), "d_o": (B, T, H, V)}
        if not latent:
            shapes["v"] = (B, S, V)
        if KR:
            shapes.update(q_rope=(B, T, H, KR), k_rope=(B, S, KR))
        return {key: torch.randn(shape, generator=generator).to(torch_dtype(dtype)) for key, shape in shapes.items()}

    scale = (K + KR) ** -0.5

    def ours(dtype, name):
        def prepare():
            made = inputs(dtype)
            made.update(indices=indices, o=torch.empty(B, T, H, V, dtype=torch_dtype(dtype)), lse=torch.empty(B, T, H))
            switches = {"causal": int(causal), "scale": scale}
            forward = library.prepare("sparse_flash_attention", "fwd", {k: t for k, t in made.items() if k != "d_o"}, switches)
            if name == "fwd":
                return forward
            forward()
            for key in [key for key in made if key in ("q", "k", "v", "q_rope", "k_rope")]:
                made["d_" + key] = torch.empty_like(made[key])
            return library.prepare("sparse_flash_attention", "bwd", made, switches)
        return prepare

    rows = max(1, (1 << 26) // max(1, E * (K + KR + (0 if latent else V))))  # queries whose gathered keys take 256 MB in f32

    def slices(made):
        for b in range(B):
            for begin in range(0, T, rows):
                yield b, slice(begin, min(T, begin + rows))

    def attend(made, b, part):
        index = indices[b, part].long()
        keys = torch.cat([made["k"], made["k_rope"]], 2) if KR else made["k"]
        query = torch.cat([made["q"], made["q_rope"]], 3) if KR else made["q"]
        gathered = keys[b][index.clamp(min=0)]
        values = made["k"][b][index.clamp(min=0)] if latent else made["v"][b][index.clamp(min=0)]
        scores = torch.matmul(query[b, part], gathered.transpose(1, 2)) * scale
        scores = scores.masked_fill((index < 0)[:, None, :], -math.inf)
        return torch.matmul(torch.softmax(scores, 2), values)

    def gather(dtype, name):
        def prepare():
            made = inputs(dtype)
            leaves = [t for key, t in made.items() if key != "d_o"]

            def forward():
                with torch.no_grad():
                    for b, part in slices(made):
                        attend(made, b, part)

            def backward():  # recomputes slice by slice, as its memory allows; the forward's time is taken off below
                for leaf in leaves:
                    leaf.grad = None
                for b, part in slices(made):
                    attend(made, b, part).backward(made["d_o"][b, part])
            if name == "fwd":
                return forward
            for leaf in leaves:
                leaf.requires_grad_(True)
            return backward
        return prepare

    record = {"density": min(1.0, E / S)}
    for name in ("fwd", "bwd"):
        record[name] = compare({dtype: ours(dtype, name) for dtype in DTYPES},
                               {f"gather {dtype}": gather(dtype, name) for dtype in ("f32", "bf16")}, limit)
    if record["bwd"]["opponent_s"] and record["fwd"]["opponent_s"]:
        record["bwd"]["opponent_s"] = max(record["bwd"]["opponent_s"] - record["fwd"]["opponent_s"], 1e-9)
        record["bwd"]["score"] = record["bwd"]["opponent_s"] / record["bwd"]["ours_s"]
    return record


def compare(ours, opponents, limit):
    mine, failed = fastest(ours, limit)
    if mine is None:
        raise RuntimeError(f"no kernel ran: {failed}")
    theirs, lacking = fastest(opponents, limit)
    return {"ours": mine[0], "ours_s": mine[1], "opponent": theirs[0] if theirs else None,
            "opponent_s": theirs[1] if theirs else None, "score": theirs[1] / mine[1] if theirs else None,
            "opponents_that_failed": lacking}


def child(operator, index, set_name, threads, limit):
    import torch
    torch.set_num_threads(threads)
    name, tokens = read_cases(operator, set_name)[index]
    record = {"operator": operator, "id": name, "case": ",".join(tokens), "threads": threads, "torch": torch.__version__}
    try:
        sizes, options = parse(tokens)
        run = run_block_sparse if operator == "block_sparse_attention" else run_sparse_flash
        record.update(run(sizes, options, limit, Library()))
    except ValueError as error:  # a shape that neither opponent has
        record["left_out"] = str(error)
    print(json.dumps(record))


# ---- All cases ----

def torch_python():
    """A Python that has PyTorch: the one named, or that of a virtual environment which is made when it is missing."""
    named = os.environ.get("THALWEG_TORCH")
    if named:
        return named
    python = ROOT / "build" / "torch" / "bin" / "python"
    if not python.exists():
        print("score: making build/torch with PyTorch", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(python.parent.parent)], check=True)
    if subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode != 0:
        subprocess.run([python, "-m", "pip", "install", "--quiet", "torch", "numpy", "setuptools"], check=True)
    return str(python)


def cpu_name():
    lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if os.path.exists("/proc/cpuinfo") else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def geometric_mean(values):
    return math.exp(sum(math.log(v) for v in values) / len(values))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operator", choices=sorted(OPERATORS))
    parser.add_argument("--quick", action="store_true", help="few cases, short samples")
    parser.add_argument("--set", default="matrix")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=None, help="time limit of a measurement (default 1, quick 0.2)")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    limit = options.seconds if options.seconds is not None else 0.2 if options.quick else 1.0
    if options.child is not None:
        return child(options.operator, options.child, options.set, options.threads, limit)
    python, records = torch_python(), []
    environment = dict(os.environ, THALWEG_NUM_THREADS=str(options.threads), OMP_NUM_THREADS=str(options.threads))
    for index, (name, _) in enumerate(read_cases(options.operator, options.set)):
        if options.quick and name.split()[0] not in OPERATORS[options.operator]:
            continue
        done = subprocess.run([python, __file__, options.operator, "--child", str(index), "--set", options.set,
                               "--threads", str(options.threads), "--seconds", str(limit)],
                              env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            print(f"{name}: failed\n{done.stderr[-2000:]}")
            records.append({"id": name, "failed": True})
            continue
        record = json.loads(done.stdout.splitlines()[-1])
        record.update(machine={"cpu": cpu_name(), "cores": os.cpu_count()},
                      date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
        records.append(record)
        if "left_out" in record:
            print(f"{name}: no opponent runs it ({record['left_out']})")
            continue
        for which in ("fwd", "bwd"):
            r = record[which]
            rival = f"{r['opponent']} {1e3 * r['opponent_s']:.1f} ms, score {r['score']:.2f}" if r["score"] else "no opponent ran"
            print(f"{name} {which} density {record['density']:.3f}: ours {r['ours']} {1e3 * r['ours_s']:.1f} ms, {rival}", flush=True)
    if options.json:
        options.json.write_text("[\n" + ",\n".join(json.dumps(record) for record in records) + "\n]\n", encoding="utf-8")
    return summary(records)


def summary(records):
    scored = [(r["id"], which, r["density"], r[which]["score"]) for r in records
              for which in ("fwd", "bwd") if which in r and r[which]["score"]]
    failed = [r["id"] for r in records if r.get("failed")]
    if scored:
        least = min(scored, key=lambda s: s[3])
        print(f"{len(scored)} scores: geometric mean {geometric_mean([s[3] for s in scored]):.2f}, "
              f"minimum {least[3]:.2f} ({least[0]} {least[1]})")
        sparse = [s[3] for s in scored if s[2] <= 0.25]
        if sparse:
            print(f"density at most 0.25: {len(sparse)} scores, geometric mean {geometric_mean(sparse):.2f}")
    if failed:
        print("failed: " + ", ".join(failed))
    return 1 if failed or not scored else 0


if __name__ == "__main__":
    sys.exit(main())
