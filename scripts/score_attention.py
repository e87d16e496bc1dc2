#!/usr/bin/env python3
"""Times the attention operators against PyTorch on the CPU, case by case, each in a process of its own.

    scripts/score_attention.py [block_sparse_attention] [sparse_flash_attention] [--quick] [--jsonl FILE] [--only NAME...]

Of every case of the operators' matrices it prints, for fwd and bwd, the ratio

    score = time of the strongest opponent / time of this library          (above 1: the library is faster)

then the geometric mean and the minimum. No case is left out. Each side runs at its fastest dtype; both are then timed by
turns, and the medians count. Opponents, the fastest of which counts:

    block_sparse_attention    scaled_dot_product_attention with the mask expanded to tokens (without one where the mask
                              keeps everything), two products and a masked softmax, FlexAttention with the block mask
                              (forward, where it compiles). Packed cases: a call per sequence, and one call with the
                              expanded block-diagonal mask
    sparse_flash_attention    a gather of the listed keys, matrix products and a softmax, in slices of the queries; dense
                              products over all keys with log(times listed) added to the scores; the same by
                              scaled_dot_product_attention

Cases are scaled so that all end within half an hour of an idle machine of two cores; the output says how. Block-sparse:
heads are halved (groups of a key head stay), then tokens of both axes, until the dense forward has at most --gflop.
Top-k: queries are halved, lists, keys and heads stay, until the forward has at most --gflop. A process that takes longer
than --limit seconds is ended: what it measured by then counts, and an opponent that has not ended counts with the time
that it was given, as "at least".

The first run makes a virtual environment with PyTorch beside the build (build/torch), or takes the Python that
THALWEG_TORCH names. The library is build/cpu/thalweg/libthalweg.so, called through its pass table. Masks and lists follow
the cases' patterns, from a seed of this script. The machine should be idle. --quick takes few cases.
"""
import argparse
import ctypes
import json
import math
import os
import pathlib
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "build" / "cpu" / "thalweg" / "libthalweg.so"
OPERATORS = {"block_sparse_attention": ("B02", "B03", "B05", "B08", "B10"),
             "sparse_flash_attention": ("S01", "S03", "S06", "S15")}
SETS = {"block_sparse_attention": ("matrix", "long"), "sparse_flash_attention": ("matrix",)}
BAR = 0.6  # for every case
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
    """Sizes and options of a case. Packed ones have "lens" and "lens_k", tokens of each sequence."""
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
        options["lens"] = [int(n) for n in options["varlen"].split("+")]
        options["lens_k"] = [int(n) for n in options.get("varlen_k", options["varlen"]).split("+")]
        sizes["T"], sizes["S"] = sum(options["lens"]), sum(options["lens_k"])
    sizes.setdefault("S", sizes["T"])
    sizes.setdefault("V", sizes["K"])
    sizes.setdefault("HK", sizes["H"])
    return sizes, options


def scale_down(operator, sizes, options, gflop):
    """Smaller sizes of the same kind, in place; what was done, in words."""
    before = dict(sizes)
    if operator == "block_sparse_attention":
        def cost():
            return 2e-9 * sizes["B"] * sizes["H"] * sizes["T"] * sizes["S"] * (sizes["K"] + sizes["V"])
        while cost() > gflop and sizes["HK"] % 2 == 0:
            sizes["H"] //= 2
            sizes["HK"] //= 2
        while cost() > gflop and sizes["B"] > 1:
            sizes["B"] //= 2
        while cost() > gflop and "lens" not in options:
            sizes["T"] //= 2
            sizes["S"] //= 2
    else:
        width = sizes["K"] + sizes.get("KR", 0) + sizes["V"]
        entries = sizes["E"] * int(options.get("sparse_block_size") or 1)
        while 2e-9 * sizes["B"] * sizes["T"] * entries * sizes["H"] * width > gflop and sizes["T"] > 8:
            if "lens" in options:
                options["lens"] = [max(1, n // 2) for n in options["lens"]]
            sizes["T"] = sum(options["lens"]) if "lens" in options else sizes["T"] // 2
    return ", ".join(f"{name} {before[name]} to {sizes[name]}" for name in before if before[name] != sizes[name]) or "full size"


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

def timed(call):
    """Seconds of a call, or those that it counted itself."""
    start = time.perf_counter()
    counted = call()
    return counted if isinstance(counted, float) else time.perf_counter() - start


def fastest(candidates, found):
    """(name, seconds, call) of the fastest of {name: function that prepares a call}, and what could not run. The first call
    warms up; a candidate far behind gets no second one. found(name, seconds) is told of every new best."""
    best, failures = None, {}
    for name, prepare in candidates.items():
        try:
            call = prepare()
            seconds = timed(call)
            if best is None or seconds < 4 * best[1]:
                seconds = min(seconds, timed(call))
        except Exception as error:  # an opponent may lack a dtype, or memory
            failures[name] = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
            continue
        if best is None or seconds < best[1]:
            best = (name, seconds, call)
            found(name, seconds)
    return best, failures


def duel(which, ours, opponents, seconds, say):
    """Medians of both sides by turns, three rounds at least. say() gets what is known so far."""
    record = {"pass": which, "ours": None, "ours_s": None, "opponent": None, "opponent_s": None}

    def found(side):
        def tell(name, taken):
            record[side], record[side + "_s"] = name, taken
            say(record)
        return tell
    mine, failed = fastest(ours, found("ours"))
    if mine is None:
        raise RuntimeError(f"no kernel ran: {failed}")
    theirs, lacking = fastest(opponents, found("opponent"))
    if theirs is None:
        raise RuntimeError(f"no opponent ran: {lacking}")
    samples, end = ([], []), time.perf_counter() + seconds
    while len(samples[0]) < 3 or (time.perf_counter() < end and len(samples[0]) < 25):
        samples[0].append(timed(mine[2]))
        samples[1].append(timed(theirs[2]))
    middle = len(samples[0]) // 2
    record.update(ours_s=sorted(samples[0])[middle], opponent_s=sorted(samples[1])[middle], rounds=len(samples[0]), done=True)
    if lacking:
        record["opponents_that_failed"] = lacking
    say(record)


def borders(lengths):
    import torch
    return torch.tensor([0] + lengths, dtype=torch.int32).cumsum(0).to(torch.int32)


def slices(lengths):
    ends = borders(lengths).tolist()
    return [slice(begin, end) for begin, end in zip(ends, ends[1:])]


def block_mask(sizes, options, generator):
    import torch
    packed = "lens" in options
    N = len(options["lens"]) if packed else sizes["B"]
    T, S = (max(options["lens"]), max(options["lens_k"])) if packed else (sizes["T"], sizes["S"])
    bq, bk = int(options.get("block_q") or 128), int(options.get("block_k") or 128)
    NQ, NK = -(-T // bq), -(-S // bk)
    heads = sizes.get("HM", sizes["H"])
    r0 = torch.arange(NQ)[:, None] * bq
    r1 = torch.clamp(r0 + bq, max=T) - 1
    c0 = torch.arange(NK)[None, :] * bk
    c1 = torch.clamp(c0 + bk, max=S) - 1
    name, _, number = options.get("mask", "dense").partition(":")
    drawn = torch.rand(N, heads, NQ, NK, generator=generator)
    window = {"window": int(number) if name == "window" else 0, "bigbird": bk}.get(name, 0)
    near = (c0 <= r1 + window) & (c1 >= r0 - window)
    kept = {"dense": torch.ones(NQ, NK, dtype=torch.bool), "none": torch.zeros(NQ, NK, dtype=torch.bool),
            "causal": c0 <= r1, "window": near, "bigbird": near}.get(name)
    if kept is None:
        kept = drawn < float(number)
        if name == "diagonal":
            kept = kept | (torch.arange(NK)[None, :] == torch.clamp(r0 // bk, max=NK - 1))
    else:
        kept = kept.expand(N, heads, NQ, NK).clone()
    if name == "bigbird":
        kept[:, :, 0, :] = True
        kept[:, :, :, 0] = True
        kept.scatter_(3, torch.randint(NK, (N, heads, NQ, 3), generator=generator), True)
    if "holes" in options:
        kept[:, :, 1, :] = False
        kept[:, :, :, 0] = False
    return kept.to(torch.uint8), bq, bk


def run_block_sparse(sizes, options, seconds, library, say):
    import torch
    generator = torch.Generator().manual_seed(42)
    B, T, S, H, HK, K, V = (sizes[name] for name in ("B", "T", "S", "H", "HK", "K", "V"))
    mask, bq, bk = block_mask(sizes, options, generator)
    causal, packed = "causal" in options, "lens" in options

    def tokens(part, queries, keys):  # [.. queries keys]: who sees whom
        seen = part.bool().repeat_interleave(bq, -2)[..., :queries, :].repeat_interleave(bk, -1)[..., :keys]
        if causal:
            seen = seen & (torch.arange(keys)[None, :] <= torch.arange(queries)[:, None] + keys - queries)
        return seen

    if packed:
        ranges = list(zip(slices(options["lens"]), slices(options["lens_k"])))
        pieces = [(q, k, tokens(mask[n:n + 1], q.stop - q.start, k.stop - k.start)) for n, (q, k) in enumerate(ranges)]
        whole_mask = torch.zeros(1, H, T, S, dtype=torch.bool)
        for q, k, seen in pieces:
            whole_mask[:, :, q, k] = seen
        layouts = {" by sequence": pieces, "": [(slice(0, T), slice(0, S), whole_mask)]}
    else:
        pieces = [(slice(0, T), slice(0, S), tokens(mask, T, S))]
        layouts = {"": pieces}
    density = float(sum(seen.sum() for _, _, seen in pieces) / sum(seen.numel() for _, _, seen in pieces))
    say({"density": density})
    layouts = {name: [(q, k, None if bool(seen.all()) else seen) for q, k, seen in parts] for name, parts in layouts.items()}

    def inputs(dtype):
        made = {name: torch.randn(shape, generator=generator).to(torch_dtype(dtype))
                for name, shape in (("q", (B, H, T, K)), ("k", (B, HK, S, K)), ("v", (B, HK, S, V)), ("d_o", (B, H, T, V)))}
        made["o"] = torch.empty(B, H, T, V, dtype=torch_dtype(dtype))
        return made

    def ours(dtype, name):
        def prepare():
            views = {key: t.transpose(1, 2) for key, t in inputs(dtype).items()}  # [B T H K] views of [B H T K] memory
            views.update(block_mask=mask, lse=torch.empty(B, H, T).transpose(1, 2))
            if packed:
                views.update(cu_seqlens=borders(options["lens"]), cu_seqlens_k=borders(options["lens_k"]))
            switches = {"block_q": bq, "block_k": bk, "causal": int(causal)}
            forward = library.prepare("block_sparse_attention", "fwd", {k: t for k, t in views.items() if k != "d_o"}, switches)
            if name == "fwd":
                return forward
            forward()
            for key in ("q", "k", "v"):
                views["d_" + key] = torch.empty_like(views[key])
            return library.prepare("block_sparse_attention", "bwd", views, switches)
        return prepare

    def attention(dtype, name, attend, parts):
        def prepare():
            made = inputs(dtype)
            leaves = [made[key].requires_grad_(name == "bwd") for key in ("q", "k", "v")]

            def forward():
                q, k, v = leaves
                return [attend(q[:, :, i], k[:, :, j], v[:, :, j], seen) for i, j, seen in parts]
            if name == "fwd":
                def call():
                    with torch.no_grad():
                        forward()
                return call
            out, d_out = forward(), [made["d_o"][:, :, i] for i, _, _ in parts]
            return lambda: None if torch.autograd.grad(out, leaves, d_out, retain_graph=True) else None
        return prepare

    def sdpa(q, k, v, seen):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=HK != H)

    def plain(q, k, v, seen):
        k, v = (t.repeat_interleave(H // HK, 1) for t in (k, v))
        scores = torch.matmul(q, k.transpose(2, 3)) * K ** -0.5
        return torch.matmul(torch.softmax(scores if seen is None else scores.masked_fill(~seen, -math.inf), 3), v)

    def flex():
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
        table = mask.bool().contiguous()

        def keep(b, h, i, j):
            return table[b, h, i // bq, j // bk]
        blocks = create_block_mask(keep, B, H, T, S, device="cpu", BLOCK_SIZE=(bq, bk))
        compiled = torch.compile(flex_attention)
        call = attention("f32", "fwd", lambda q, k, v, seen: compiled(q, k, v, block_mask=blocks, enable_gqa=HK != H),
                         [(slice(0, T), slice(0, S), None)])()
        call()  # compiles
        return call

    for name in ("fwd", "bwd"):
        opponents = {}
        for suffix, parts in layouts.items():
            opponents["sdpa f32" + suffix] = attention("f32", name, sdpa, parts)
            opponents["plain f32" + suffix] = attention("f32", name, plain, parts)
        opponents.update({f"sdpa {dtype}": attention(dtype, name, sdpa, next(iter(layouts.values()))) for dtype in ("bf16", "f16")})
        if name == "fwd" and not causal and not packed and bq % 16 == 0 and bk % 16 == 0:
            opponents["flex f32"] = flex
        duel(name, {dtype: ours(dtype, name) for dtype in DTYPES}, opponents, seconds, say)


def key_lists(sizes, options, generator):
    """indices [B T E] as the operator takes them; positions [B T E'] of the batch row's keys, -1 for nothing; and by row the
    first key and the last one that it sees."""
    import torch
    B, T, S, E = (sizes[name] for name in ("B", "T", "S", "E"))
    lens, lens_k = options.get("lens", [T]), options.get("lens_k", [S])
    first, last, longest = torch.empty(T, dtype=torch.int64), torch.empty(T, dtype=torch.int64), max(lens_k)
    for rows, keys in zip(slices(lens), slices(lens_k)):
        queries, n = rows.stop - rows.start, keys.stop - keys.start
        first[rows] = keys.start
        last[rows] = torch.arange(queries) + n - queries if "causal" in options else n - 1
    width = int(options.get("sparse_block_size") or 1)
    blocks, last_block = -(-longest // width), torch.div(last, width, rounding_mode="floor")
    kind = options.get("lists", "unique")
    if kind == "unique":
        drawn = torch.rand(B, T, blocks, generator=generator)
        drawn.masked_fill_(torch.arange(blocks)[None, None, :] > last_block[None, :, None], -1)
        picked = drawn.topk(min(E, blocks), dim=2)
        indices = torch.where(picked.values >= 0, picked.indices, -1)
        if E > blocks:
            indices = torch.nn.functional.pad(indices, (0, E - blocks), value=-1)
    else:
        indices = torch.randint(blocks, (B, T, E), generator=generator)
        if kind == "clamped":
            indices = torch.minimum(indices, last_block[None, :, None])
        if "repeat" in options:
            indices[:, :, :int(options["repeat"])] = indices[:, :, :1]
        if "holes" in options:
            indices.masked_fill_(torch.rand(B, T, E, generator=generator) < float(options["holes"]), -1)
    positions = (indices[..., None] * width + torch.arange(width)).reshape(B, T, E * width)
    seen = (positions >= 0) & (positions <= last[None, :, None])
    return indices.to(torch.int32), torch.where(seen, positions + first[None, :, None], -1)


def run_sparse_flash(sizes, options, seconds, library, say):
    import torch
    generator = torch.Generator().manual_seed(42)
    B, T, S, H, K, V = (sizes[name] for name in ("B", "T", "S", "H", "K", "V"))
    KR, causal, latent, sink = sizes.get("KR", 0), "causal" in options, "v" not in options, "sink" in options
    KR = KR if "q_rope" in options else 0
    indices, positions = key_lists(sizes, options, generator)
    lens, lens_k = options.get("lens", [T]), options.get("lens_k", [S])
    pairs = sum(a * b for a, b in zip(lens, lens_k)) * B
    say({"density": float((positions >= 0).sum()) / pairs})

    def inputs(dtype):
        shapes = {"q": (B, T, H, K), "k": (B, S, K), "d_o": (B, T, H, V)}
        if not latent:
            shapes["v"] = (B, S, V)
        if KR:
            shapes.update(q_rope=(B, T, H, KR), k_rope=(B, S, KR))
        made = {key: torch.randn(shape, generator=generator).to(torch_dtype(dtype)) for key, shape in shapes.items()}
        if sink:
            made["sink"] = torch.randn(H, generator=generator)
        return made

    scale = (K + KR) ** -0.5

    def ours(dtype, name):
        def prepare():
            made = inputs(dtype)
            leaves = [key for key in made if key != "d_o"]
            made.update(indices=indices, o=torch.empty(B, T, H, V, dtype=torch_dtype(dtype)), lse=torch.empty(B, T, H))
            if "lens" in options:
                made.update(cu_seqlens=borders(lens), cu_seqlens_k=borders(lens_k))
            switches = {"causal": int(causal), "scale": scale, "sparse_block_size": int(options.get("sparse_block_size") or 1)}
            forward = library.prepare("sparse_flash_attention", "fwd", {k: t for k, t in made.items() if k != "d_o"}, switches)
            if name == "fwd":
                return forward
            forward()
            made.update({"d_" + key: torch.empty_like(made[key]) for key in leaves})
            return library.prepare("sparse_flash_attention", "bwd", made, switches)
        return prepare

    def parts_of(made):
        keys = torch.cat([made["k"], made["k_rope"]], 2) if KR else made["k"]
        query = torch.cat([made["q"], made["q_rope"]], 3) if KR else made["q"]
        return query, keys, made["k"][:, :, :V] if latent else made["v"]

    def weights(made, scores):
        """Softmax over the last axis of [.. H keys], with the sink as one more score."""
        if not sink:
            return torch.softmax(scores, -1)
        z = made["sink"].to(scores.dtype)[:, None].expand(*scores.shape[:-1], 1)
        return torch.softmax(torch.cat([scores, z], -1), -1)[..., :-1]

    rows = max(1, (1 << 26) // max(1, positions.shape[2] * (K + KR + (0 if latent else V))))  # 256 MB of gathered keys in f32

    def gathered(made):
        """(out, rows) by slices of the queries."""
        query, keys, values = parts_of(made)
        for b in range(B):
            for begin in range(0, T, rows):
                part = slice(begin, min(T, begin + rows))
                index = positions[b, part]
                at = index.clamp(min=0)
                scores = torch.matmul(query[b, part], keys[b][at].transpose(1, 2)) * scale
                scores = scores.masked_fill((index < 0)[:, None, :], -math.inf)
                yield torch.matmul(weights(made, scores), values[b][at]), made["d_o"][b, part]

    def times_listed(dtype):
        """log of how often each query lists each key, [B T S]."""
        counts = torch.zeros(B, T, S + 1).scatter_add_(2, torch.where(positions < 0, S, positions), torch.ones(positions.shape))
        return counts[:, :, :S].log().to(torch_dtype(dtype))

    def dense(made, bias):
        query, keys, values = parts_of(made)
        for b in range(B):
            for i, j in zip(slices(lens), slices(lens_k)):
                q = query[b, i].reshape(-1, K + KR)
                scores = torch.matmul(q, keys[b, j].t()).view(-1, H, j.stop - j.start) * scale + bias[b, i, None, j]
                yield torch.matmul(weights(made, scores).view(q.shape[0], -1), values[b, j]).view(-1, H, V), made["d_o"][b, i]

    def sdpa(made, bias):
        query, keys, values = parts_of(made)
        out = torch.nn.functional.scaled_dot_product_attention(query.transpose(1, 2), keys[:, None], values[:, None],
                                                               attn_mask=bias[:, None], scale=scale, enable_gqa=True)
        yield out, made["d_o"].transpose(1, 2)

    def opponent(dtype, name, attend, biased):
        def prepare():
            made, extra = inputs(dtype), [times_listed(dtype)] if biased else []
            leaves = [t for key, t in made.items() if key != "d_o"]

            def forward():
                with torch.no_grad():
                    for _ in attend(made, *extra):
                        pass

            def backward():  # slice by slice, as memory allows; the forward's time does not count
                counted = 0.0
                for leaf in leaves:
                    leaf.grad = None
                for out, d_out in attend(made, *extra):
                    start = time.perf_counter()
                    out.backward(d_out, retain_graph=KR > 0)
                    counted += time.perf_counter() - start
                return counted
            if name == "fwd":
                return forward
            for leaf in leaves:
                leaf.requires_grad_(True)
            return backward
        return prepare

    for name in ("fwd", "bwd"):
        opponents = {"dense f32": opponent("f32", name, dense, True), "gather f32": opponent("f32", name, gathered, False),
                     "dense bf16": opponent("bf16", name, dense, True), "gather bf16": opponent("bf16", name, gathered, False)}
        if not sink and "lens" not in options:
            opponents["sdpa f32"] = opponent("f32", name, sdpa, True)
        duel(name, {dtype: ours(dtype, name) for dtype in DTYPES}, opponents, seconds, say)


def child(operator, index, set_name, threads, seconds, gflop):
    import torch
    torch.set_num_threads(threads)

    def say(record):
        print(json.dumps(record), flush=True)
    sizes, options = parse(read_cases(operator, set_name)[index][1])
    say({"scaled": scale_down(operator, sizes, options, gflop), "torch": torch.__version__})
    run = run_block_sparse if operator == "block_sparse_attention" else run_sparse_flash
    run(sizes, options, seconds, Library(), say)


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


def commit():
    done = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty=+changes"], capture_output=True,
                          text=True, check=False)
    return done.stdout.strip() or None


def geometric_mean(values):
    return math.exp(sum(math.log(v) for v in values) / len(values))


def run_case(command, environment, limit):
    """What the case's process said, as one record; {"failed": why} when it has no score for a pass."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=errors, text=True, start_new_session=True)
        start = time.monotonic()
        try:
            code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
        spent = time.monotonic() - start
        out.seek(0)
        errors.seek(0)
        lines, text = out.read().splitlines(), errors.read()
    record = {}
    for line in lines:
        try:
            said = json.loads(line)
        except ValueError:
            continue
        record.update({said.pop("pass"): said} if "pass" in said else said)
    if code is None:
        record["ended_after_s"] = round(spent, 1)
    elif code != 0:
        record["failed"] = text.strip().splitlines()[-1][:300] if text.strip() else f"exit code {code}"
    for name in ("fwd", "bwd"):
        r = record.get(name)
        if not r or not r["ours_s"]:
            record.setdefault("failed", f"no time of {name} within {spent:.0f} s")
            continue
        if not r["opponent_s"]:  # still running when its time was up
            r["opponent"], r["opponent_s"], r["at_least"] = "none ended", spent, True
        r["score"] = r["opponent_s"] / r["ours_s"]
    return record


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*", metavar="operator", help=" or ".join(OPERATORS) + "; both by default")
    parser.add_argument("--quick", action="store_true", help="few cases")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cases of these names")
    parser.add_argument("--set", dest="sets", action="append", help="sets of cases (default matrix and long)")
    parser.add_argument("--jsonl", type=pathlib.Path, help="a file to add a line per case to (bench/results/<machine>-score.ndjson)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2, help="time of the rounds by turns of a pass")
    parser.add_argument("--gflop", type=float, default=9, help="size that cases are scaled to")
    parser.add_argument("--limit", type=float, default=120, help="seconds after which a case is ended")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    operators = options.operators or list(OPERATORS)
    for operator in operators:
        if operator not in OPERATORS:
            parser.error(f"operator, got {operator}, expected one of {', '.join(OPERATORS)}")
    if options.child is not None:
        return child(operators[0], options.child, options.sets[0], options.threads, options.seconds, options.gflop)
    python, records, start = torch_python(), [], time.monotonic()
    environment = dict(os.environ, THALWEG_NUM_THREADS=str(options.threads), OMP_NUM_THREADS=str(options.threads))
    for operator in operators:
        for set_name in options.sets or SETS[operator]:
            for index, (name, tokens) in enumerate(read_cases(operator, set_name)):
                short = name.split()[0]
                if (options.quick and short not in OPERATORS[operator]) or (options.only and short not in options.only):
                    continue
                record = {"operator": operator, "id": name, "case": ",".join(tokens), "threads": options.threads,
                          "commit": commit(), "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "load": os.getloadavg()[0]},
                          "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
                record.update(run_case([python, __file__, operator, "--child", str(index), "--set", set_name, "--threads",
                                        str(options.threads), "--seconds", str(options.seconds), "--gflop", str(options.gflop)],
                                       environment, options.limit))
                records.append(record)
                show(record)
                if options.jsonl:
                    with options.jsonl.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(record) + "\n")
    print(f"{time.monotonic() - start:.0f} s")
    return summary(records)


def show(record):
    for which in ("fwd", "bwd"):
        r = record.get(which)
        if r and "score" in r:
            print(f"{record['id']} {which} ({record['scaled']}, density {record['density']:.3f}): ours {r['ours']} "
                  f"{1e3 * r['ours_s']:.1f} ms, {r['opponent']} {'at least ' if r.get('at_least') else ''}"
                  f"{1e3 * r['opponent_s']:.1f} ms, score {r['score']:.2f}", flush=True)
    if "failed" in record:
        print(f"{record['id']}: failed: {record['failed']}", flush=True)


def summary(records):
    failed = [r["id"] for r in records if "failed" in r]
    scored = [(r["id"], which, r["density"], r[which]["score"]) for r in records for which in ("fwd", "bwd")
              if "score" in r.get(which, {})]
    for operator in OPERATORS:
        mine = [(r[which]["score"], r["id"], which, r["density"]) for r in records if r["operator"] == operator
                for which in ("fwd", "bwd") if "score" in r.get(which, {})]
        if not mine:
            continue
        least, below = min(mine), [s for s in mine if s[0] < BAR]
        print(f"{operator}: {len(mine)} scores, geometric mean {geometric_mean([s[0] for s in mine]):.2f}, minimum {least[0]:.2f} "
              f"({least[1]} {least[2]}), below {BAR}: {', '.join(f'{s[1]} {s[2]}' for s in below) or 'none'}")
        sparse = [s[0] for s in mine if s[3] <= 0.25]
        if sparse:
            print(f"  density at most 0.25: {len(sparse)} scores, geometric mean {geometric_mean(sparse):.2f}")
    if failed:
        print("failed: " + ", ".join(failed))
    return 1 if failed or not scored else 0


if __name__ == "__main__":
    sys.exit(main())
