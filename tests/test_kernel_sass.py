"""The machine code of the CUDA kernels: what ptxas made of the sources.

A loop that loads one partial result after the other, or a weight that is read after a barrier, is
right and slow; results do not show it, the order of the instructions does.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

import kernel_resources
import kernel_sass
from kernel_sass import Code, Instruction
from tiers import runs_all

GLOBAL_ACCESSES = {"LDG", "STG", "LDGSTS", "ATOMG", "RED", "REDG"}
STREAMS_WEIGHTS = r"skinny_|exit_confidence_softmax_|kv_fill_(?:pairs_|warpgroup_)?kernel"

COMBINE = r"paged_attention_combine_kernel<(\w+), \d+> "
MERGED_AT_ONCE = 16  # results of spans that the combining kernel loads at once
MERGED_IN_LAST_BLOCK = 8  # results of spans that the last block loads at once
ATTENTION = r"paged_attention_kernel<(\w+), (\d+), (?:true|false)> "
INT8 = "signed char"  # the type of a weight's elements, the last argument
PACKED = "Panel"
# Selectors and exponents of the permutations that put int8 below an exponent; a register may hold
# either.
SPREADS = {"0x4140", "0x4342", "0x43434343", "0x64646464"}
SKINNY = rf"skinny_linear_kernel<(\w+), (\d+), (\d+), (?:true|false), (\w+|{INT8})> "
GATED = rf"skinny_gated_linear_kernel<(\w+), (\d+), (?:true|false), (\w+|{INT8})> "
APPEND = rf"skinny_append_kernel<(\w+), (\d+), (\d+), (?:true|false), (\w+|{INT8})> "
WIDE_ATTENTION = r"paged_attention_wide_kernel<(\w+), (\d+), (\w+)> "
COPIES_KEYS = r"paged_attention_(?:float8_|wide_)?kernel<"
STREAMS = rf"{STREAMS_WEIGHTS}|{COPIES_KEYS}"
# Instructions ahead of the first copy, all branches counted; a division is some twenty of them.
MAX_BEFORE_KEYS, MAX_BEFORE_WEIGHTS = 900, 600
BY_WARPGROUPS = (
    rf"(skinny|exit|kv_fill)_(?:confidence_softmax_)?warpgroup_(?:(linear|gated|append)_)?"
    rf"kernel<\w+, \d+, (\w+|{INT8})> sm_90a"
)
OF_MANY_QUERIES = r"paged_attention_prompt_kernel<\w+, (\d+), (\w+)> sm_90a"
FILL = rf"kv_fill_pairs_kernel<(\w+), (\d+), (\d+), (\w+|{INT8})> "
MAKES_ROWS = r"(?:skinny_\w+|exit_confidence_softmax)_kernel<(\w+), (?:\d+, )+true, "


@pytest.fixture(scope="module")
def module() -> Path:
    built = kernel_resources.built_module()
    if built is None:
        pytest.skip("eecore._cuda is not built in this checkout")
    return built


@pytest.fixture(scope="module")
def kernels(module: Path, request: pytest.FixtureRequest) -> dict[str, Code]:
    """The kernels' code by "kernel<arguments> architecture"; the short suite reads fewer."""
    nvdisasm = kernel_sass.find_nvdisasm()
    if nvdisasm is None:
        pytest.skip("no nvdisasm: pip install nvidia-cuda-nvdisasm")
    return kernel_sass.kernels_of(module, nvdisasm, few=not runs_all(request.config))


@pytest.fixture(scope="module")
def is_recorded_compiler(module: Path) -> bool:
    """Whether the compiler is the recorded one; others may unroll loops differently."""
    record = json.loads(kernel_resources.RECORD.read_text())
    return kernel_resources.compiler_of(module) == record["compiler"]


def of(kernels: dict[str, Code], pattern: str) -> list[tuple[re.Match[str], Code]]:
    """The kernels of a pattern, and what it finds in their names."""
    found = [(re.match(pattern, name), code) for name, code in kernels.items()]
    matching = [(match, code) for match, code in found if match is not None]
    assert matching
    return matching


def place_of(code: Code, opcode: str) -> int:
    """The place of the first such instruction."""
    return next(i for i, instruction in enumerate(code.lines) if instruction.opcode == opcode)


def last_of(code: Code, name: str) -> int:
    """The place of the last such instruction, whatever its modifiers."""
    return max(i for i, instruction in enumerate(code.lines) if instruction.name == name)


def waits_early(kernels: dict[str, Code]) -> list[tuple[str, Code]]:
    """Kernels that may start before the one ahead has ended."""
    return [(name, code) for name, code in kernels.items() if "ACQBULK" in names_of(code)]


def names_of(code: Code) -> set[str]:
    return {instruction.name for instruction in code}


def test_no_kernel_touches_local_memory(kernels: dict[str, Code]) -> None:
    assert not [name for name, code in kernels.items() if names_of(code) & {"LDL", "STL"}]


def test_kernels_of_a_new_gpu_wait_for_the_one_ahead(kernels: dict[str, Code]) -> None:
    """All but what a graph's condition is set with, which is launched in order."""
    new = {name for name in kernels if name.endswith(" sm_90a")}
    waiting = {name for name, _ in waits_early(kernels)}
    assert new
    assert new - waiting == {"set_condition_kernel sm_90a"}


def test_a_kernel_waits_before_it_lets_the_next_one_start(kernels: dict[str, Code]) -> None:
    """Otherwise the next would not wait for the kernel two ahead. Products can be told not to."""
    for name, code in waits_early(kernels):
        assert "PREEXIT" in names_of(code), name
        if re.match(
            r"skinny_(?:gated_)?linear_kernel|skinny_(?:append|warpgroup)_|exit_confidence_soft",
            name,
        ):
            continue
        assert not [line for line in code.before("ACQBULK") if line.name == "PREEXIT"], name


def test_nothing_but_weights_and_places_is_read_before_the_wait(
    kernels: dict[str, Code],
) -> None:
    """On no way through a kernel. Rows of a weight that are not aligned come by the element.

    Places are page tables, lengths, keys of earlier positions, slots and positions.
    """
    for name, code in waits_early(kernels):
        weights = set()
        if re.match(STREAMS_WEIGHTS, name):
            element = "LDG.E.U8" if INT8 in name else "LDG.E" if "float" in name else "LDG.E.U16"
            # For packed rows the table is read first, and separate rows are read number by number.
            packed = {"LDG.E.64", "LDG.E", "LDG.E.U16", "LDG.E.U8"}
            weights = {"LDGSTS", *(packed if PACKED in name else [element])}
        if re.match("skinny_(?:warpgroup_)?append_kernel", name):
            weights |= {"LDG.E.64", "LDG.E"}  # a slot is below 2^31: its lower half is enough
        if re.match(COPIES_KEYS, name):
            weights = {"LDG", "LDGSTS"}
        touched = {line for line in code.before("ACQBULK") if line.name in GLOBAL_ACCESSES}
        others = {line for line in touched if not {line.name, line.opcode} & weights}
        assert not others, name


def first_copy(code: Code) -> list[Instruction]:
    """The instructions ahead of a kernel's first copy to shared memory."""
    names = [line.name for line in code]
    return code.lines[: names.index("LDGSTS")]


def test_nothing_is_divided_on_the_way_to_the_first_copy(kernels: dict[str, Code]) -> None:
    """A division by a number that the compiler does not know is a reciprocal, and waits for it."""
    for match, code in of(kernels, STREAMS):
        if "LDGSTS" not in names_of(code):
            continue
        before = first_copy(code)
        slow = [line for line in before if line.opcode == "MUFU.RCP" or line.name == "I2F"]
        assert not slow, match.string
        is_of_keys = re.match(COPIES_KEYS, match.string) is not None
        most = MAX_BEFORE_KEYS if is_of_keys else MAX_BEFORE_WEIGHTS
        assert len(before) <= most, match.string


def test_queries_are_loaded_together(kernels: dict[str, Code]) -> None:
    """Aligned queries: all loads, up to 8 in a row, come before a store."""
    for match, code in of(kernels, ATTENTION) + of(kernels, WIDE_ATTENTION):
        if match[1] == "float":
            continue
        bands = 2 if re.match(WIDE_ATTENTION, match.string) else 1
        turns = bands * 16 * int(match[2]) // 8 // 32
        longest = run = 0
        for line in code:
            run = run + 1 if line.opcode == "LDG.E.128" else 0 if line.name == "STS" else run
            longest = max(longest, run)
        assert longest >= turns // math.ceil(turns / 8), match.string


def test_a_batch_of_partial_results_is_loaded_before_the_first_is_merged(
    kernels: dict[str, Code],
) -> None:
    for match, code in of(kernels, COMBINE):
        loads = [i for i, line in enumerate(code.lines) if line.opcode == "LDG.E.128"]
        assert len(loads) == MERGED_AT_ONCE, match.string
        assert loads[-1] < place_of(code, "MUFU.EX2"), match.string


def test_states_that_leave_are_loaded_four_pieces_at_a_time(kernels: dict[str, Code]) -> None:
    for match, code in of(kernels, "exit_rows_kernel "):
        first = place_of(code, "STG.E.128")
        loads = [line for line in code.lines[:first] if line.opcode == "LDG.E.128"]
        assert len(loads) == 4, match.string


def all_products(kernels: dict[str, Code]) -> list[tuple[re.Match[str], int, int, Code]]:
    """With the numbers of tiles of 16 rows of the weight and of 8 rows of x."""
    linear = [(m, int(m[2]), int(m[3]), code) for m, code in of(kernels, SKINNY)]
    gated = [(m, 2, int(m[2]), code) for m, code in of(kernels, GATED)]
    append = [(m, int(m[2]), int(m[3]), code) for m, code in of(kernels, APPEND)]
    return linear + gated + append + [(m, int(m[2]), int(m[3]), c) for m, c in of(kernels, FILL)]


def skinny_products(kernels: dict[str, Code]) -> list[tuple[re.Match[str], int, int, Code]]:
    """The products of weights in floats and in int8."""
    return [each for each in all_products(kernels) if each[0][each[0].re.groups] != PACKED]


def packed_products(kernels: dict[str, Code]) -> list[tuple[re.Match[str], int, int, Code]]:
    """The products of packed weights whose x has 16 bits."""
    products = [each for each in all_products(kernels) if each[0][each[0].re.groups] == PACKED]
    assert products
    return [each for each in products if each[0][1] != "float"]


def is_int8(match: re.Match[str]) -> bool:
    """Whether a product's weight is in int8."""
    return match[match.re.groups] == INT8


def test_the_last_block_counts_between_fences_and_loads_in_batches(
    kernels: dict[str, Code],
) -> None:
    for match, code in of(kernels, ATTENTION):
        names = [line.name for line in code]
        if match[1] == "float" and ", true>" in match.string:  # leaves it to a second kernel
            assert "ATOMG" not in names, match.string
            continue
        count = names.index("ATOMG")
        assert "MEMBAR" in names[:count], match.string
        assert "MEMBAR" in names[count:], match.string
        following = code.lines[count:]
        loads = [i for i, line in enumerate(following) if line.opcode == "LDG.E.128"]
        assert len(loads) >= MERGED_IN_LAST_BLOCK, match.string


def test_rows_that_a_block_makes_are_read_as_shared_memory(kernels: dict[str, Code]) -> None:
    """Loads name shared memory: the compiler has seen where the rows are."""
    for match, code in of(kernels, MAKES_ROWS):
        assert not names_of(code) & {"LD", "ST"}, match.string


def check_counts(code: Code, exact: bool, name: str, **expected: int) -> None:
    """Instructions have to be those of whole steps, and of no more steps than the source has."""
    counts = kernel_sass.counts_of(code)
    for instruction, count in expected.items():
        if exact or count == 0:
            assert counts[instruction] == count, f"{name}: {instruction}"
        else:
            assert counts[instruction] >= count, f"{name}: {instruction}"


def test_attention_multiplies_and_copies_as_its_tile_says(
    kernels: dict[str, Code], is_recorded_compiler: bool
) -> None:
    for match, code in of(kernels, ATTENTION):
        size, head_dim = (4 if match[1] == "float" else 2), int(match[2])
        step_keys = (16 if head_dim > 64 else 32) // (1 if size == 2 else 2)
        products = 2 * step_keys * head_dim // 256 if size == 2 else 0  # for a step's keys
        copies = step_keys * head_dim * size // 16 // 32  # by a lane for a step's keys
        check_counts(
            code,
            is_recorded_compiler,
            match.string,
            # Scores; values: those of a whole step, finite ones, and infinities of both signs.
            HMMA=5 * products,
            # Keys and values, all of them or one by one, when a stream begins and as it goes on.
            LDGSTS=2 * 2 * (copies + 1),
        )


def test_two_bands_of_rows_share_the_keys_that_a_warp_loads(
    kernels: dict[str, Code], is_recorded_compiler: bool
) -> None:
    for match, code in of(kernels, WIDE_ATTENTION):
        head_dim = int(match[2])
        loads = (16 if head_dim > 64 else 32) * head_dim // 256  # of a step's keys, or values
        check_counts(
            code,
            is_recorded_compiler,
            match.string,
            # For each band as with one of them; infinities, which are rare, are loaded for each.
            HMMA=5 * 2 * 2 * loads,
            LDSM=3 * loads + 2 * 2 * loads + 2 * head_dim // 16,
        )


def test_the_skinny_products_multiply_and_copy_as_their_tiles_say(
    kernels: dict[str, Code], is_recorded_compiler: bool
) -> None:
    for match, m_tiles, n_tiles, code in skinny_products(kernels):
        pieces = 2 if is_int8(match) and n_tiles <= 4 else 1  # unrolled pieces of x to one of W
        check_counts(
            code,
            is_recorded_compiler,
            match.string,
            HMMA=0 if match[1] == "float" else 4 * pieces * m_tiles * n_tiles,  # for a chunk
            LDGSTS=2 * 4 * m_tiles,  # at the start of the stream and as it goes on
        )


def products_of_warpgroups(
    kernels: dict[str, Code],
) -> list[tuple[re.Match[str], int, str, Code]]:
    """With the number of tiles of 16 rows of the weight, and the type of its elements."""
    return [
        (match, 2 if match[1] == "exit" or match[2] == "gated" else 1, match[3], code)
        for match, code in of(kernels, BY_WARPGROUPS)
    ]


def test_products_of_warpgroups_are_asynchronous(kernels: dict[str, Code]) -> None:
    """One fence and one wait for each group of them: ptxas adds more where it serialises them."""
    for match, m_tiles, weight, code in products_of_warpgroups(kernels):
        counts = kernel_sass.counts_of(code)
        # Of a packed weight a group for each 16 rows of a block, and for each half of one, for the
        # two formats that the compiler knows, for others, and for those with halves.
        groups, products = (5 * m_tiles, 2) if weight == PACKED else (1, 4 * m_tiles)
        assert counts["HGMMA"] == groups * products, match.string
        assert counts["HMMA"] == 0, match.string
        assert counts["WARPGROUP"] == 2 * groups, match.string  # ARRIVE and DEPBAR
        assert counts["FENCE"] == (4 if weight == PACKED else 1), match.string  # async proxy
        copies = 7 if weight == PACKED else 4
        assert counts["LDGSTS"] == 2 * copies * m_tiles, match.string


def test_warpgroups_weigh_keys_while_they_multiply_values(
    kernels: dict[str, Code], is_recorded_compiler: bool
) -> None:
    """Between the wait for a step's scores and that for the previous step's values.

    Waits and fences are those of the source: ptxas adds more where it serialises products.
    """
    for match, code in of(kernels, OF_MANY_QUERIES):
        boxes, is_float8 = int(match[1]) // 64, match[2] == "Float8"
        # The first step's keys; keys and values of a step; the last step's values.
        counts = kernel_sass.counts_of(code)
        assert counts["HGMMA"] == 2 * 4 * boxes + 2 * 8, match.string
        assert counts["HMMA"] == 0, match.string
        assert counts["WARPGROUP"] == 4 + 4, match.string  # ARRIVE and DEPBAR
        assert counts["USETMAXREG"] == 2, match.string
        copies = 2 if is_float8 else 2 * boxes
        check_counts(code, is_recorded_compiler, match.string, UTMALDG=copies)
        # Four times 8 numbers are widened at a time, two by an instruction.
        widened = sum(line.opcode.startswith("F2FP.F16.E4M3") for line in code.lines)
        assert widened == (4 * 8 // 2 if is_float8 else 0), match.string
        waits = [i for i, line in enumerate(code.lines) if line.opcode == "WARPGROUP.DEPBAR.LE"]
        pending = [code.lines[i].operands for i in waits]
        assert pending == [f"gsb0, {left}" for left in ("0x0", "0x1", "0x0", "0x0")], match.string
        overlapped = code.lines[waits[1] : waits[2]]
        assert sum(line.opcode == "MUFU.EX2" for line in overlapped) >= 64, match.string


def test_warpgroups_widen_numbers_two_at_a_time(kernels: dict[str, Code]) -> None:
    """As the other products do, and while earlier ones are under way."""
    for match, m_tiles, weight, code in products_of_warpgroups(kernels):
        if weight not in (INT8, PACKED):
            continue
        pairs = 4 * 4 if weight == INT8 else 8 * 5  # of four products, of a group's
        loop = code.lines[: last_of(code, "HGMMA")]
        operands = [line.operands.split(", ") for line in loop if line.name == "PRMT"]
        spread = sum(bool(SPREADS & set(those)) for those in operands)
        assert spread >= pairs * m_tiles, match.string


def test_int8_becomes_floats_two_at_a_time(kernels: dict[str, Code]) -> None:
    """By a permutation of bytes and one subtraction; conversions take four times as long."""
    found = 0
    for match, m_tiles, n_tiles, code in skinny_products(kernels):
        if not is_int8(match) or match[1] == "float":
            continue
        found += 1
        wait = next(i for i, line in enumerate(code.lines) if line.name == "DEPBAR")
        loop = code.lines[wait : last_of(code, "HMMA")]
        pieces = 2 if n_tiles <= 4 else 1  # unrolled pieces of a row
        pairs = 2 * m_tiles * pieces * 16 // 2
        operands = [line.operands.split(", ") for line in loop if line.name == "PRMT"]
        assert sum(bool(SPREADS & set(those)) for those in operands) == pairs, match.string
        # Conversions that round up belong to a division of whole numbers at the end of a tile.
        bytes_to_floats = [x for x in loop if x.name == "I2F" and not x.opcode.endswith(".RP")]
        assert not bytes_to_floats, match.string
    assert found > 0


def test_packed_products_multiply_and_copy_as_their_tiles_say(
    kernels: dict[str, Code], is_recorded_compiler: bool
) -> None:
    for match, m_tiles, n_tiles, code in packed_products(kernels):
        # For a block of any format: its numbers, those of its half, and sums of x; for Q4_0 and
        # Q4_1, which the compiler knows, only the instructions that they need.
        block = 2 * m_tiles * n_tiles
        products = 2 * block + 2 * n_tiles
        if n_tiles <= 2 * m_tiles:
            products += 2 * block + 2 * n_tiles
        check_counts(
            code,
            is_recorded_compiler,
            match.string,
            HMMA=products,
            # When the stream begins and as it goes on: of quants of 8 bits four, and of the others.
            LDGSTS=2 * 7 * m_tiles,
        )


def test_packed_numbers_become_elements_two_at_a_time(kernels: dict[str, Code]) -> None:
    """By a permutation of bytes, as for int8: only the scales of scales are converted."""
    for match, m_tiles, _, code in packed_products(kernels):
        wait = next(i for i, line in enumerate(code.lines) if line.name == "DEPBAR")
        loop = code.lines[wait : last_of(code, "HMMA")]
        rows = 2 * m_tiles
        operands = [line.operands.split(", ") for line in loop if line.name == "PRMT"]
        assert sum(bool(SPREADS & set(those)) for those in operands) >= 4 * rows, match.string
        assert sum(line.name == "I2F" for line in loop) <= 4 * rows, match.string


def test_rows_of_x_are_on_their_way_before_a_weight_is_waited_for(
    kernels: dict[str, Code],
) -> None:
    """With few rows all that a chunk needs of them; those that a block makes are there."""
    found = 0
    for match, _, n_tiles, code in skinny_products(kernels):
        if match[1] == "float" or n_tiles > 2 or re.match(MAKES_ROWS, match.string):
            continue
        found += 1
        first = place_of(code, "LDG.E.128")
        wait = next(i for i in range(first, len(code.lines)) if code.lines[i].name == "DEPBAR")
        loads = [line for line in code.lines[first:wait] if line.opcode == "LDG.E.128"]
        assert len(loads) == (4 if is_int8(match) else 2) * n_tiles, match.string
    assert found > 0


def test_instructions_are_read_with_and_without_a_predicate() -> None:
    lines = {
        "   /*0180*/      LDG.E.128 R8, desc[UR6][R10.64] ;": Instruction(
            "LDG.E.128", "R8, desc[UR6][R10.64]", False
        ),
        "   /*0220*/  @P0 BRA `(.L_x_1) ;": Instruction("BRA", "`(.L_x_1)", True),
        "   /*00c0*/ @!UP0 ACQBULK ;": Instruction("ACQBULK", "", True),
        ".L_x_1:": None,
    }
    for line, instruction in lines.items():
        assert kernel_sass.instruction_of(line) == instruction


def code_of(text: str) -> Code:
    """One line each; labels end in a colon."""
    code = Code([], {})
    for line in text.split("\n"):
        if line.endswith(":"):
            code.labels[line[:-1]] = len(code.lines)
        elif instruction := kernel_sass.instruction_of(f"  /*0000*/  {line} ;"):
            code.lines.append(instruction)
    return code


def test_what_comes_before_a_wait_is_found_on_every_way() -> None:
    code = code_of(
        "@P0 BRA `(.L_x_1)\nBSSY B0, `(.L_x_2)\nLDG.E R0\nBSYNC B0\nSTG.E R1\n.L_x_2:\n"
        "LDG.E R2\n.L_x_1:\nACQBULK\nLDG.E R3\nEXIT"
    )
    assert [line.operands for line in code.before("ACQBULK") if line.name in GLOBAL_ACCESSES] == [
        "R0",
        "R2",
    ]
