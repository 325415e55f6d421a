// State of what runs beside the warps on sm_90: products of warpgroups (wgmma) and bulk copies behind mbarriers.
#pragma once

#include <deque>
#include <vector>

#include "types.h"

// A copy of up to 16 bytes into shared memory: they land when somebody waits.
struct Copy {
  u32 to;
  u8 size, lane;
  u8 bytes[16];
};

// Accumulators that a wgmma may still be writing. Until the wait their registers hold kPoison and are undefined.
struct Product {
  const u32* registers;         // operands of the records
  u32 count;
  u64 group;                    // of the last wgmma on them
  std::vector<f32> sums;        // (16, 2 count)
  std::vector<u64> undefined;   // of each register: what it will be once the product is done
};
constexpr u32 kPoison = 0x7fedcba9;

// What a warp has issued to the tensor cores.
struct Products {
  std::vector<Product> running;
  std::vector<u32> reads;                     // shared addresses of 16 bytes that the open group reads
  std::deque<std::vector<u32>> groups;        // of the committed groups, the oldest first
  u64 committed = 0;
};

// The wgmma that a warpgroup issued: its four warps have to agree.
struct Agreement {
  struct Call {
    u32 pc, scale;
    u64 a, b;
    u32 warp;
  };
  std::deque<Call> calls;
  u64 first = 0, issued[4] = {};  // number of calls[0]; calls by each warp
};

// Barriers of shared memory. A phase is complete when all arrivals and all bytes are there.
struct Mbarrier {
  u32 slot = 0;                   // its place in the clocks, behind the warps
  u32 expected = 0, pending = 0;  // arrivals of a phase, and those that are missing
  u64 phase = 0, bytes = 0;       // bytes that the phase waits for
  bool live = false;
  std::vector<Copy> copies;
  u64 copied = 0;                 // their bytes
  u32 clock = 0;                  // of the last phase that is complete
  std::vector<u32> clocks, fenced;  // what the arrivals knew
};

constexpr u32 kMbarriers = 16;  // of a block at the most
