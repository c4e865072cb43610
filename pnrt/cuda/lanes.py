"""The words kernels are written in: what one lane of a warp can do.

A kernel is plain Python over five types: u32, i32, u64 (addresses), f32 and bool. Operators mean
what they mean in C, with 32-bit wraparound; `a * b + c` on f32 rounds twice (nobody contracts it)
and `fma(a, b, c)` once. Both sides of an operator have one type; a plain number takes the type of
the other side, and an address (u64) also takes a u32. Plain numbers alone are i32 or f32.

Every word has two meanings: NumPy (standin.py, tests without a GPU) and PTX (intrinsics.py).
"""

from __future__ import annotations

from pnrt.cuda.kernel import Op, device, registers, unroll

__all__ = ["device", "registers", "unroll"]

# types, which are also conversions: u32(x), i32(x), u64(x) keep the low bits, f32(x) rounds to
# nearest even
u32 = Op("u32", "integer or bool -> its low 32 bits")
i32 = Op("i32", "integer or bool -> its low 32 bits")
u64 = Op("u64", "u32 -> 64 bits")
f32 = Op("f32", "i32 or u32 -> nearest float")
truncate = Op("truncate", "f32 -> i32 towards zero; NaN and what does not fit are not defined")
bits_to_float = Op("bits_to_float", "i32 or u32 -> f32 of these bits")
float_to_bits = Op("float_to_bits", "f32 -> i32 of its bits")
half_to_float = Op("half_to_float", "u32 -> f32 of the fp16 in its low half")
float_to_half = Op("float_to_half", "f32 -> u32: its nearest even fp16")

# what operators become; scalars.py calls some by name
add, sub, mul, div = (Op(n, "(a, b), each rounded once") for n in ("add", "sub", "mul", "div"))
neg = Op("neg", "-a")
fma = Op("fma", "(a, b, c) f32 -> a * b + c, rounded once")
sqrt = Op("sqrt", "f32, correctly rounded")
absolute = Op("absolute", "f32 without its sign")
select = Op("select", "(condition, a, b) -> a where it holds, else b")
minimum = Op("minimum", "(a, b) -> a if a < b else b")
maximum = Op("maximum", "(a, b) -> a if a > b else b")
dot_pairs = Op("dot_pairs", "(acc i32, a u32, b u32) -> acc + both products of signed halves")
dot8 = Op("dot8", "(acc, 8 u32 a, 8 u32 b) -> acc + all their products of signed halves")
fma4 = Op("fma4", "(acc, 4 f32 a, 4 f32 b) -> a chain of four fma, the first pair first")
bytes_low = Op("bytes_low", "u32 -> u32: bytes 0 and 1, sign-extended to halves")
bytes_high = Op("bytes_high", "u32 -> u32: bytes 2 and 3, sign-extended to halves")

# where this thread is, all u32
thread = Op("thread", "() -> index in the block")
threads = Op("threads", "() -> threads per block")
block = Op("block", "() -> x index of the block")
block_y = Op("block_y", "() -> y index of the block")
blocks = Op("blocks", "() -> blocks in x")

# global memory at byte addresses; fetch_* is for what nobody writes while the kernel runs
load_f32 = Op("load_f32", "address -> f32")
load_i32 = Op("load_i32", "address -> i32")
load_u32 = Op("load_u32", "address -> u32")
load_u16 = Op("load_u16", "address -> u32")
load_u8 = Op("load_u8", "address -> u32")
load_i8 = Op("load_i8", "address -> i32")
load_half = Op("load_half", "address of fp16 -> f32")
fetch_f32 = Op("fetch_f32", "address -> f32")
fetch_u32 = Op("fetch_u32", "address -> u32")
fetch_u16 = Op("fetch_u16", "address -> u32")
fetch_u8 = Op("fetch_u8", "address -> u32")
fetch_i8 = Op("fetch_i8", "address -> i32")
fetch_half = Op("fetch_half", "address of fp16 -> f32")
fetch_u32x2 = Op("fetch_u32x2", "8-byte aligned address -> 2 u32")
fetch_u32x4 = Op("fetch_u32x4", "16-byte aligned address -> 4 u32")
fetch_f32x4 = Op("fetch_f32x4", "16-byte aligned address -> 4 f32")
store_f32 = Op("store_f32", "(address, f32)")
store_i32 = Op("store_i32", "(address, i32)")
store_u32 = Op("store_u32", "(address, u32)")
store_u16 = Op("store_u16", "(address, u32): its low 16 bits")
store_u8 = Op("store_u8", "(address, u32): its low 8 bits")
store_u32x4 = Op("store_u32x4", "(16-byte aligned address, a, b, c, d)")

# the block's shared memory at u32 byte addresses, 4-byte words
shared = Op("shared", "(bytes, a plain number) -> address of the kernel's one shared array")
shared_load_f32 = Op("shared_load_f32", "address -> f32")
shared_load_u32 = Op("shared_load_u32", "address -> u32")
shared_load_u32x2 = Op("shared_load_u32x2", "8-byte aligned address -> 2 u32")
shared_load_u32x4 = Op("shared_load_u32x4", "16-byte aligned address -> 4 u32")
shared_store_f32 = Op("shared_store_f32", "(address, f32)")
shared_store_u32 = Op("shared_store_u32", "(address, u32)")
shared_store_u32x4 = Op("shared_store_u32x4", "(16-byte aligned address, a, b, c, d)")
syncthreads = Op("syncthreads", "() every thread of the block must arrive")
syncwarp = Op("syncwarp", "() every lane of the warp must arrive")

# between lanes; every lane of the warp must take part
shuffle_xor = Op("shuffle_xor", "(value, plain number m) -> the value of lane ^ m")
shuffle = Op("shuffle", "(value, u32 lane) -> the value of that lane")
any_lane = Op("any_lane", "bool -> whether it holds in any lane of the warp")
all_lanes = Op("all_lanes", "bool -> whether it holds in every lane of the warp")


@device
def lane():
    """This thread's lane in its warp, 0 to 31."""
    return thread() & 31


@device
def warp():
    """This thread's warp in its block."""
    return thread() >> 5


@device
def global_warp():
    """This thread's warp in the grid's x direction."""
    return block() * (threads() >> 5) + (thread() >> 5)


@device
def at(address, index, size):
    """address + index * size, for an index (u32 or i32 >= 0) whose byte offset fits 32 bits."""
    return address + u32(index) * size


@device
def butterfly(v):
    """f32 of 32 lanes -> their sum in the contract's order (NUMERICS 1), in every lane."""
    for s in unroll((16, 8, 4, 2, 1)):
        v = v + shuffle_xor(v, s)
    return v
