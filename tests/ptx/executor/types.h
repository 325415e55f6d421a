// Short names of number types, and the structures shared with Python (tests/ptx/records.py).
#pragma once

#include <cstdint>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef float f32;
typedef double f64;

constexpr u32 kLanes = 32;
constexpr u32 kAll = 0xffffffffu;

struct Record {  // a decoded instruction
  u16 op;         // index in the table of operations
  u8 negated;     // the guard predicate is negated
  u8 size;        // ld and st: bytes of an element; cp.async: bytes of a copy
  u8 width;       // ld and st: bytes of a register for each lane
  u8 elements;    // ld and st: elements of a vector; ldmatrix and stmatrix: matrices; others: see the operation
  u8 flag;        // a variant of the operation, such as a signed load
  u8 count;       // number of operands
  s32 guard;      // offset of the predicate register, or -1
  u32 operands;   // index of the first operand in Program::operands
  s32 target;     // of a branch: index of an instruction
  u32 address;    // bytes of the address register: 4 or 8
  s64 immediate;  // offset of an address, number of a barrier, groups that may stay in flight, or columns of a wgmma
  s64 second;     // offset of the second address, or threads of a barrier
};

// Counters of one instruction (Record) in a launch.
struct Counters {
  u64 runs;      // executions by warps
  u64 lanes;     // lanes that took part, summed over the executions
  u64 requests;  // accesses of warps to global memory; of a bulk copy: boxes copied; of a branch: divergences
  u64 sectors;   // of 32 bytes of global memory
  u64 ideal;     // sectors that the lanes' bytes would fill side by side
  u64 passes;    // over the banks of shared memory
  u64 least;     // passes without bank conflicts
};

// Memory that a kernel may access.
struct Range {
  u64 begin, end;
  u8* read_sectors;     // one byte for each sector of 32 bytes: 1 if it was read; null if not counted
  u8* written_sectors;  // the same for written sectors
};

// The errors of one instruction that have the same format of the message; warp, lane, block and text are those of the
// first such error.
struct Finding {
  u32 pc, warp, lane, kind;  // lane 32: the whole warp; kind: identifies the format
  u32 block[3];
  u32 times;  // number of errors
  char text[228];
};

// A variable in shared memory: its bytes and its name.
struct Variable {
  u32 begin, end;
  char name[56];
};

struct Program {
  const Record* records;
  u32 size;
  const u32* operands;   // offsets in a warp's registers
  const u8* constants;   // copied to the front of each warp's registers
  u32 constant_bytes, register_bytes;
  u32 special[16];       // offsets of the special registers, in the order of decode.py's SPECIAL
  u32 shared_grain;      // bytes of the smallest element of ld.shared and st.shared, at most 4
  u32 global_grain;      // bytes of the smallest element of st.global, at most 4
  u32 parameter_bytes;
  u32 variable_count;    // of Request::variables
};

struct Request {
  u32 grid[3], block[3];
  u32 shared_bytes, seed, range_count, finding_limit;
  u64 step_limit;
  const u8* parameters;
  Range* ranges;
  Counters* counters;
  Finding* findings;
  const Variable* variables;  // there are gaps between them; shared_bytes includes the gaps
  // Results.
  u64 steps, errors, barriers, blocks;  // steps: instructions, counted by warps; barriers: arrivals of warps
  u32 finding_count, reserved;
};
