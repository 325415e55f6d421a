"""The hot loop of machine code, found in listings with known loops."""

from __future__ import annotations

from tests.helpers import sass


def listing(*lines: str) -> list[sass.Instruction]:
    return sass.instructions(
        "\n".join(f"        /*{16 * k:04x}*/    {line} ;   /* 0x00 */" for k, line in enumerate(lines))
    )


NESTED = (
    "MOV R1, c[0x0][0x28]",
    "IADD3 R2, R2, 0x1, RZ",  # 0x10: outer loop
    "FADD R3, R3, R2",  # 0x20: inner loop of 3 instructions
    "ISETP.NE.AND P0, PT, R3, RZ, PT",
    "@P0 BRA 0x20",
    "FMUL R4, R4, R4",  # 0x50: inner loop of 4 instructions
    "FMUL R5, R5, R5",
    "BRA.DIV ~URZ, 0xb0",
    "@!P1 BRA P2, 0x50",
    "@P1 BRA 0x10",
    "EXIT",
    "WARPSYNC 0xffffffff",  # 0xb0: behind the kernel's end, but part of the loop at 0x50
    "BRA 0x80",
    "BRA 0xd0",  # padding
)


def test_the_longest_innermost_loop():
    assert len(sass.hot_loop(listing(*NESTED[:6], "EXIT"))) == 3
    assert len(sass.hot_loop(listing(*NESTED))) == 6  # with the two instructions behind the end


def test_code_without_loops():
    assert (
        len(sass.hot_loop(listing("@P0 EXIT", "BRA.DIV ~URZ, 0x40", "STG.E [R2], R1", "EXIT", "BRA 0x20", "BRA 0x50")))
        == 0
    )


def test_every_block_of_a_loop_counts():
    branches = ("NOP", "@P0 BRA 0x40", "FADD R1, R1, R1", "BRA 0x50", "FMUL R1, R1, R1", "@P1 BRA 0x10", "EXIT")
    assert len(sass.hot_loop(listing(*branches))) == 5
    twice = ("NOP", *["FADD R1, R1, R1"] * 8, "@P1 BRA 0x10", "EXIT")
    assert len(sass.hot_loop(listing(*twice))) == 9


def products(steps: int) -> list[sass.Instruction]:
    """A kernel of products as Hopper's: a loop that waits for a copy, in the loop of products, and then a long one that
    stores. The loop of products has 4 + steps instructions."""
    spin = ["SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2", "@!P0 BRA 0x10"]  # at 0x10
    loop = ["HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24", *["IADD3 R3, R3, 0x1, RZ"] * steps, "@P1 BRA 0x10"]
    first = 16 * (1 + len(spin) + len(loop))
    return listing("MOV R1, RZ", *spin, *loop, *["STG.E [R2], R1"] * 40, f"@P2 BRA 0x{first:x}", "EXIT")


def test_the_loop_of_products_is_the_hot_one():
    assert len(sass.hot_loop(products(3))) == 2 + 2 + 3
    assert (
        len(sass.hot_loop(products(30))) == 2 + 2 + 30
    )  # a longer loop of products is seen, although that of stores has 41


def test_a_wait_before_the_products_is_not_the_hot_loop():
    code = listing(
        "MOV R1, RZ",
        "IADD3 R2, R2, 0x1, RZ",  # 0x10: the loop of products
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2",  # 0x20: waits for a copy
        "@!P0 BRA 0x20",
        *["HMMA.16816.F32.BF16 R4, R8, R12, R4"] * 6,
        "@P1 BRA 0x10",
        *["STG.E [R2], R1"] * 20,  # 0xb0: stores
        "@P2 BRA 0xb0",
        "EXIT",
    )
    assert len(sass.hot_loop(code)) == 10
