// State of asynchronous operations: copies, and on sm_90 products of warpgroups (wgmma) and mbarriers.
#pragma once

#include <deque>
#include <vector>

#include "types.h"

// A copy of up to 16 bytes into shared memory. The bytes are stored when a warp waits for the copy.
struct Copy {
  u32 to;  // shared address
  u8 size, lane;
  u8 bytes[16];
};

// Accumulators that a wgmma may still be writing. Until the wait their registers hold kPoison and are undefined.
struct Product {
  const u32* registers;         // offsets of the accumulators, from the record's operands
  u32 count;                    // number of accumulators
  u64 group;                    // number of the group with the last wgmma on these accumulators
  std::vector<f32> sums;        // (16, 2 * count): the values to store at the wait
  std::vector<u64> undefined;   // by register: undefined lanes after the product
};
constexpr u32 kPoison = 0x7fedcba9;

// The wgmma products of a warp.
struct Products {
  std::vector<Product> running;
  std::vector<u32> reads;                     // shared addresses of the 16-byte pieces that uncommitted wgmma read
  std::deque<std::vector<u32>> groups;        // `reads` of the groups that may still run, the oldest first
  u64 committed = 0;                          // number of commit_groups so far
};

// The wgmma that a warpgroup issued; its four warps must issue the same ones.
struct Agreement {
  struct Call {
    u32 pc, scale;
    u64 a, b;  // descriptors
    u32 warp;  // the one that issued it first
  };
  std::deque<Call> calls;         // those that not all four warps have issued yet
  u64 first = 0, issued[4] = {};  // first: number of calls[0]; issued: how many each warp has issued
};

// A barrier in shared memory. A phase is complete when all its arrivals and all its bytes have come.
struct Mbarrier {
  u32 slot = 0;                   // index of its entry in Warp::clocks
  u32 expected = 0, pending = 0;  // arrivals of a phase, and how many are still missing
  u64 phase = 0, bytes = 0;       // number of the phase, and bytes that it waits for
  bool live = false;
  std::vector<Copy> copies;
  u64 copied = 0;                 // bytes of `copies`
  u32 clock = 0;                  // of the last complete phase
  std::vector<u32> clocks, fenced;  // maxima of the arrived warps' clocks and fenced
};

constexpr u32 kMbarriers = 16;  // of a block, at most
