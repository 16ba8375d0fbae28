"""What a compiled binary, an ELF file, says about itself."""

from __future__ import annotations

import struct

SYMBOL_TABLE = 2
ENTRY_POINT = 0x10  # the flag of kernels, among all functions, in a symbol's `other` byte
SYMBOL_BYTES = 24


def complete(cubin: bytes) -> bytes:
    """`cubin` up to the end that its header states: CuPy 14.2 cuts the last byte, a zero, as if it ended a string."""
    program_headers, section_headers = struct.unpack_from("<QQ", cubin, 32)
    program_size, program_count, section_size, section_count = struct.unpack_from("<HHHH", cubin, 54)
    end = max(program_headers + program_size * program_count, section_headers + section_size * section_count)
    return cubin.ljust(end, b"\0")


def entry_points(cubin: bytes) -> list[str]:
    """Names of the kernels in a binary, sorted."""
    (table,), (size, count) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<HH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQI", cubin, table + size * i) for i in range(count)]
    names = []
    for _, kind, _, _, start, length, strings in sections:
        if kind == SYMBOL_TABLE:
            for at in range(start, start + length, SYMBOL_BYTES):
                name, _, other = struct.unpack_from("<IBB", cubin, at)
                if other & ENTRY_POINT:
                    first = sections[strings][4] + name
                    names.append(cubin[first : cubin.index(b"\0", first)].decode())
    return sorted(names)
