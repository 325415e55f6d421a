// State of what runs beside the warps on sm_90: products of warpgroups (wgmma) and bulk copies behind mbarriers.
#pragma once

#include <deque>
#include <vector>

#include "types.h"

// A copy of up to 16 bytes into shared memory; they land at a wait.
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
  std::vector<u64> undefined;   // by register: undefined lanes after the product
};
constexpr u32 kPoison = 0x7fedcba9;

// The wgmma products of a warp.
struct Products {
  std::vector<Product> running;
  std::vector<u32> reads;                     // shared addresses of 16 bytes that the open group reads
  std::deque<std::vector<u32>> groups;        // of the committed groups, the oldest first
  u64 committed = 0;
};

// The wgmma calls of a warpgroup; its four warps must issue the same ones.
struct Agreement {
  struct Call {
    u32 pc, scale;
    u64 a, b;
    u32 warp;
  };
  std::deque<Call> calls;
  u64 first = 0, issued[4] = {};  // number of calls[0]; calls by each warp
};

// A barrier in shared memory. A phase is complete after all its arrivals and all its bytes.
struct Mbarrier {
  u32 slot = 0;                   // its index in the clocks, after those of the warps
  u32 expected = 0, pending = 0;  // arrivals of a phase, and those still missing
  u64 phase = 0, bytes = 0;       // bytes that the phase waits for
  bool live = false;
  std::vector<Copy> copies;
  u64 copied = 0;                 // bytes of `copies`
  u32 clock = 0;                  // of the last complete phase
  std::vector<u32> clocks, fenced;  // maxima over the arrived warps
};

constexpr u32 kMbarriers = 16;  // most of a block
