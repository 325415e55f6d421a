"""Layouts of the structures in executor/types.h, which Python and the executor share."""

from __future__ import annotations

import ctypes

import numpy as np

RECORD = np.dtype(
    [
        ("op", "u2"),
        ("negated", "u1"),
        ("size", "u1"),
        ("width", "u1"),
        ("elements", "u1"),
        ("flag", "u1"),
        ("count", "u1"),
        ("guard", "i4"),
        ("operands", "u4"),
        ("target", "i4"),
        ("address", "u4"),
        ("immediate", "i8"),
        ("second", "i8"),
    ],
    align=True,
)
COUNTERS = np.dtype([(name, "u8") for name in ("runs", "lanes", "requests", "sectors", "ideal", "passes", "least")])

_u32, _u64, _at = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p


class Range(ctypes.Structure):
    _fields_ = [("begin", _u64), ("end", _u64), ("read_sectors", _at), ("written_sectors", _at)]


class Finding(ctypes.Structure):
    _fields_ = [
        *((name, _u32) for name in ("pc", "warp", "lane", "kind")),
        ("block", _u32 * 3),
        ("times", _u32),
        ("text", ctypes.c_char * 228),
    ]


class Variable(ctypes.Structure):
    _fields_ = [("begin", _u32), ("end", _u32), ("name", ctypes.c_char * 56)]


class Program(ctypes.Structure):
    _fields_ = [
        ("records", _at),
        ("size", _u32),
        ("operands", _at),
        ("constants", _at),
        ("constant_bytes", _u32),
        ("register_bytes", _u32),
        ("special", _u32 * 16),
        ("shared_grain", _u32),
        ("global_grain", _u32),
        ("parameter_bytes", _u32),
        ("variable_count", _u32),
    ]


class Request(ctypes.Structure):
    _fields_ = [
        ("grid", _u32 * 3),
        ("block", _u32 * 3),
        *((name, _u32) for name in ("shared_bytes", "seed", "range_count", "finding_limit")),
        ("step_limit", _u64),
        *((name, _at) for name in ("parameters", "ranges", "counters", "findings", "variables")),
        *((name, _u64) for name in ("steps", "errors", "barriers", "blocks")),
        *((name, _u32) for name in ("finding_count", "reserved")),
    ]


SIZES = (
    RECORD.itemsize,
    COUNTERS.itemsize,
    *(ctypes.sizeof(each) for each in (Range, Finding, Variable, Program, Request)),
)
